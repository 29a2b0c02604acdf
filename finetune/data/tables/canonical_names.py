"""Names of the images of a table that are those of the same images in class folders, and their order.

The name of an image decides its split, and tests recognise training images by it. So it must not depend on the order of
the rows, on other rows, or on where the data set lies.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from finetune.system.file_names import composed


def name_starts(paths: Sequence[str], labels: Sequence[tuple[str, ...]], root: str) -> np.ndarray:
    """Return the index at which the name of each image begins in its path, (N,) int64.

    A folder is a tree of class folders if at least half of the images in it lie in the folder of a label of theirs. A
    name is relative to the tree, as that of the same images in `FolderSource`. An image outside of a tree has a name
    relative to `root`, or else its complete path. Where two images would have the same name, both get the longer one.

    Args:
        paths: Path of each image, N. They are different.
        labels: Labels of each image, N.
        root: Folder of the table's paths, "" for the working directory.
    """
    top = os.path.join(root, "")
    num_images: Counter[tuple[str, tuple[str, ...]]] = Counter()
    folders: list[str] = []
    for path, of_image in zip(paths, labels, strict=True):
        folder = path[: path.rfind("/") + 1]
        folders.append(folder)
        num_images[folder, of_image] += 1
    num_in_class: Counter[str] = Counter()
    for (folder, of_image), num in num_images.items():
        for tree, class_name in _ancestors(folder, top):
            if class_name in of_image:
                num_in_class[tree] += num
    num_in_tree: Counter[str] = Counter()
    for (folder, _), num in num_images.items():
        for tree, _ in _ancestors(folder, top):
            if tree in num_in_class:
                num_in_tree[tree] += num
    trees = {tree: num for tree, num in num_in_class.items() if 2 * num >= num_in_tree[tree]}
    start_of = {
        folder: _start(folder, top, trees) for folder in {folder for folder, _ in num_images}
    }
    starts = np.array([start_of[folder] for folder in folders], np.int64)
    same: defaultdict[str, list[int]] = defaultdict(list)
    for i, (path, start) in enumerate(zip(paths, starts.tolist(), strict=True)):
        same[path[start:]].append(i)
    for rows in same.values():
        if len(rows) > 1:
            starts[rows] = [_start(folders[i], top, {}) for i in rows]
    return starts


def sorted_rows(names: Sequence[str]) -> list[int]:
    """Return the indices of names in the order in which `walk.find_images` lists them: by their parts, composed."""
    if all(map(str.isascii, names)):
        # the same, but much faster: no part of a path has a zero byte
        keys: list[Any] = [name.replace("/", "\0") for name in names]
    else:
        keys = [tuple((composed(part), part) for part in name.split("/")) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)


def _ancestors(folder: str, top: str) -> Iterator[tuple[str, str]]:
    """Yield each folder above a folder that ends in "/", and the next part of the path, from the outermost.

    Inside of `top` only folders below it count: a name must not depend on where the data set lies.
    """
    start = len(top) if folder.startswith(top) else 0
    while (end := folder.find("/", start)) >= 0:
        yield folder[:start], composed(folder[start:end])
        start = end + 1


def _start(folder: str, top: str, trees: dict[str, int]) -> int:
    """Return where the names in a folder begin: after the tree with the most images, or else after `top`."""
    above = [tree for tree, _ in _ancestors(folder, top) if tree in trees]
    if above:
        return len(max(above, key=lambda tree: trees[tree]))  # the outermost of equals
    return len(top) if folder.startswith(top) else 0
