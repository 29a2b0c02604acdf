"""A cache of decoded images on disk, shared by workers, ranks and later runs. `finetune cache` lists the caches.

The file name of a cache contains a hash of everything that determines the pixels: the relative path, size and change
times of every file, the path of the folder, the settings, and the versions of finetune, Pillow and other decoders. See
`files_digest` for changes of files that it cannot notice.
"""

# Shapes: N images in a cache.

import hashlib
import json
import logging
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import simplejpeg
import torch
from rich.progress import track

import finetune
from finetune.data.addresses import real_place
from finetune.data.decode import DecodeError, decode
from finetune.data.file_facts import sizes_of_some
from finetune.data.heif import heic_version
from finetune.data.image_files import concatenate_stats, files_digest, normal_path
from finetune.data.memmap import MemmapImages, TooLarge, open_or_none, write_memmap
from finetune.data.mirror import map_files
from finetune.data.samples import CachedImages, Samples
from finetune.distributed.signals import is_rank_zero
from finetune.system.cache_dir import IMAGES, available_bytes, cache_dir, mark_used
from finetune.system.files import one_at_a_time
from finetune.system.machine import num_cores
from finetune.system.messages import bytes_text, reason
from finetune.system.progress import console

log = logging.getLogger(__name__)

_MIN_SAVED = 1000  # images that need not be decoded again: about a second of one core


def is_worthwhile(num_reads: float, num_images: int) -> bool:
    """Return whether a cache saves time: images are read at least twice, and it saves about a second."""
    return num_reads - num_images >= max(num_images, _MIN_SAVED)


def read_from_cache(
    splits: Mapping[str, Samples], root: str | os.PathLike[str], limit_gb: float, build: bool
) -> dict[str, Samples]:
    """Return train and val with their images in a cache; {} if there is no cache, or they are already cached.

    One process on a machine builds the cache; the others wait. If it cannot be built, a log line says why: a full disk,
    a folder without write permission, or a data set above the limit.

    Args:
        splits: Splits by name.
        root: Folder of the data set.
        limit_gb: Largest size of the cache in gigabytes (10^9 bytes); 0 for no cache. It never takes more than half of
            the free disk.
        build: Build the cache if there is none.
    """
    splits = {
        split: samples
        for split, samples in splits.items()
        if split in ("train", "val") and samples.cached is None
    }
    if limit_gb <= 0 or not splits:
        return {}
    paths = [path for samples in splits.values() for path in samples.paths]
    # sorted, so that all ways to split a folder share one cache
    order = sorted(range(len(paths)), key=paths.__getitem__)
    positions = np.empty(len(paths), np.int64)
    positions[order] = np.arange(len(paths))
    paths = [paths[i] for i in order]
    stats = concatenate_stats([samples.load_stats() for samples in splits.values()])
    digest = files_digest(paths, stats.take(np.array(order, np.int64)), root)
    decoder = f"finetune {finetune.__version__}, Pillow {PIL.__version__}, simplejpeg {simplejpeg.__version__}"
    decoder += f", torch {torch.__version__}{heic_version()}"
    about: dict[str, Any] = {"root": real_place(normal_path(root)), "decoder": decoder}
    key = hashlib.sha256((json.dumps(about) + digest).encode()).hexdigest()[:16]
    path = cache_dir() / f"{os.path.basename(about['root'])}-{key}{IMAGES}"
    images = open_or_none(path)
    if images is None and build:
        images = _build(path, paths, about, limit_gb)
    if images is None:
        return {}
    mark_used(path)
    parts = np.split(positions, np.cumsum([len(samples) for samples in splits.values()])[:-1])
    return {
        split: replace(samples, cached=CachedImages(images, rows))
        for (split, samples), rows in zip(splits.items(), parts, strict=True)
    }


def _build(
    path: Path, paths: Sequence[str], about: dict[str, Any], limit_gb: float
) -> MemmapImages | None:
    """Build a cache and return it; None if this fails, with a log line that says why.

    This process waits if another one builds the same cache, and returns that cache, or builds it if the other failed.
    """
    is_logged = is_rank_zero()
    failure = f"the images of {about['root']} are decoded again in every epoch: "
    try:
        # an estimate by the headers of some images
        num_bytes = 3 * len(paths) * float(sizes_of_some(paths).prod(axis=1).mean())
        max_bytes = min(limit_gb * 1e9, available_bytes(path.parent))
        if num_bytes > max_bytes:
            limit = f"half the free disk of {path.parent}"
            if max_bytes == limit_gb * 1e9:
                limit = "--data.cache_limit_gb"
            above = f"a cache of {num_bytes / 1e9:.2g} GB would be above {limit}, {max_bytes / 1e9:.2g} GB"
            if is_logged:
                log.info("%s%s", failure, above)
            return None
        with one_at_a_time(path):
            images = open_or_none(path)
            if images is None:
                if path.exists():
                    log.warning("the cache %s is damaged: it is rebuilt", path)
                began = time.perf_counter()
                with closing(_decode_all(paths)) as decoded:
                    write_memmap(path, decoded, about, max_bytes)
                size = bytes_text(path.stat().st_size)
                what = f"decoded {len(paths)} images once, in {time.perf_counter() - began:.1f} s"
                log.info("%s: %s in %s", what, size, path)
                images = MemmapImages(path)
            return images
    # a full disk, no write permission, or no locks on this disk
    except (OSError, TooLarge, NotImplementedError) as error:
        if is_logged:
            log.warning("%sno cache, %s", failure, reason(error, cache_dir()))
        return None


def _decode_all(paths: Sequence[str]) -> Generator[np.ndarray | None, None, None]:
    """Yield the decoded images in order, with a progress bar on a terminal. A few images are decoded ahead."""

    def load(path: str) -> np.ndarray | None:
        try:
            return decode(path)
        except DecodeError:
            return None

    screen = console()
    shown_paths = track(
        paths, "decoding images", console=screen, transient=True, disable=not screen.is_terminal
    )
    return map_files(load, shown_paths, num_cores())
