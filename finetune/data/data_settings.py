"""What the data module makes of its settings: new names of classes, the folder, and what is missing."""

from collections.abc import Sequence

from finetune.data.image_files import normal_path
from finetune.data.tables.table_file import is_table
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage


def parse_merge(merge: Sequence[str] | str | None) -> dict[str, str]:
    """Return the new name of each class that is merged.

    Args:
        merge: `a,b:c` for each new class c, which takes the images of a and b.

    Raises:
        WrongUsage: A text has another form, or a class is merged twice.
    """
    texts = [merge] if isinstance(merge, str) else merge or []
    new_names: dict[str, str] = {}
    for text in texts:
        listed, colon, target = text.rpartition(":")
        names = [composed(name.strip()) for name in listed.split(",")]
        if not colon or not target.strip() or not all(names):
            raise WrongUsage(
                f"--data.merge {text!r}: write 'a,b:c' to merge the classes a and b as c"
            )
        for name in names:
            if name in new_names:
                raise WrongUsage(f"--data.merge merges the class {name!r} twice")
            new_names[name] = composed(target.strip())
    for name, target in new_names.items():
        if new_names.get(target, target) != target:
            raise WrongUsage(
                f"--data.merge: {name!r} becomes {target!r}, which is merged itself; name the last class directly"
            )
    return new_names


def required_folder(root: str | None) -> str:
    """Return the folder of a data set.

    Raises:
        WrongUsage: `root` is None.
    """
    if root is None:
        raise WrongUsage(
            "no data: pass the folder of images, or --data.root FOLDER, or a table of images"
        )
    return normal_path(root)


def missing_split_message(root: str | None, split: str) -> str:
    """Return the error message for a folder without the split that a command needs."""
    if root is not None and is_table(root) and split != "predict":
        return f"{root} has no rows of the split '{split}'"
    if split == "train":
        return f"{root} has no 'train'; put the training images in {root}/train/CLASS"
    if split == "predict":
        return "no images to predict: finetune predict CKPT IMAGES (--data.predict)"
    command = "validate" if split == "val" else "test"
    hint = f"measure all of a folder of class folders: finetune {command} CKPT FOLDER (--data.root)"
    return f"{root} has no {split} split: put images in {root}/{split}/CLASS, or {hint}"
