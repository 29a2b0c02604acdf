"""What a checkpoint holds, and how it is written and read: whole or not at all, and never running what it holds."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO
from torch import nn

import finetune
from finetune.models.checkpoint_sections import REQUIRED_SECTIONS, check_checkpoint
from finetune.models.safe_load import load_safely
from finetune.runs.exported_files import READABLE, read_exported
from finetune.runs.model_checkpoint import Checkpoints
from finetune.system.files import check_no_lfs_pointer, replacing, unfinished

_MODEL = ("backbone", "class_names", "members")
_SINCE = {"members": 1}  # what checkpoints of earlier versions do not say, as it was then


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target, syncs it and renames it: a kill leaves the previous one whole.

    Lightning's own goes through the system's temporary folder; from another file system that ends in a plain copy.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in unfinished(target):
            leftover.unlink(missing_ok=True)
        try:
            with replacing(target) as temporary, open(temporary, "wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            told = str(error)
            # how torch's writer says that the disk took no more; a GPU's are others
            if "inline_container" in told:
                free = shutil.disk_usage(target.parent).free / 1e6
                told = f"its disk took no more, with {free:.0f} MB free now that the part is removed ({told})"
            raise OSError(f"the checkpoint {target} could not be written: {told}") from error

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        return _load(path)


def origin(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what a checkpoint says of the run that it comes from."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    seen = getattr(data, "seen", None)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    run = next((callback.run for callback in callbacks if isinstance(callback, Checkpoints)), None)
    return {
        "version": finetune.__version__,
        "torch": str(torch.__version__),
        "precision": trainer.precision,
        "data_fingerprint": getattr(data, "fingerprint", ""),
        "seen": seen.packed() if seen else None,
        "data_class": _class_path(type(data)),
        "began_from": run and run.began_from,
        "licence_of_the_weights": run and run.licence,
    }


def _class_path(kind: type) -> str:
    """Return what a class is called in checkpoints: by its public name if it is ours, so that its module may move."""
    is_public = getattr(finetune, kind.__name__, None) is kind
    return f"finetune.{kind.__name__}" if is_public else f"{kind.__module__}.{kind.__qualname__}"


def check_model(checkpoint: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Make sure that a checkpoint is of a model with these hyperparameters.

    Raises:
        ValueError: It is of another.
    """
    for name in _MODEL:
        own = model[name]
        given = {**_SINCE, **checkpoint["hyper_parameters"]}[name]
        if own != given:
            raise ValueError(f"the checkpoint is of a run with {name} {given}, this one has {own}")


def check_size(checkpoint: Mapping[str, Any], size: int | None, network: nn.Module) -> None:
    """Make sure that a checkpoint's weights are for pictures of the size that a network was made for.

    Args:
        checkpoint: Of a network of the same kind.
        size: Side in pixels of what the network sees.
        network: Which has other shapes at another size if it holds a position of each patch.

    Raises:
        ValueError: They are for another.
    """
    given, own = checkpoint["hyper_parameters"].get("network_size"), network.state_dict()
    weights = {
        name.removeprefix("network."): value for name, value in checkpoint["state_dict"].items()
    }
    if given != size and any(
        weights[name].shape != own[name].shape for name in weights.keys() & own.keys()
    ):
        raise ValueError(
            f"the checkpoint's network is made for pictures of {given} pixels, this one for {size}: give "
            f"--data.image_size {given}, or begin a new run with --model.weights and that checkpoint"
        )


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load one of our checkpoints, or of the files that `finetune export` makes of them, without running code from it.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no checkpoint of ours, or holds what none of ours does.
    """
    checkpoint = _load(path)
    if not _is_ours(checkpoint):
        raise ValueError(
            f"{str(path)!r} is not a checkpoint of `finetune fit`; plain weights go to --model.weights"
        )
    return checkpoint


def _load(path: str | Path) -> Any:
    if Path(path).suffix == ".pt2":
        raise ValueError(
            f"{str(path)!r} may run what it holds when it is read: give a .ckpt, .onnx or .safetensors"
        )
    if Path(path).is_file():
        check_no_lfs_pointer(path)
    checkpoint = read_exported(path) if Path(path).suffix in READABLE else load_safely(path)
    if _is_ours(checkpoint):
        check_checkpoint(checkpoint, path)
    return checkpoint


def _is_ours(checkpoint: Any) -> bool:
    return isinstance(checkpoint, dict) and checkpoint.keys() >= REQUIRED_SECTIONS
