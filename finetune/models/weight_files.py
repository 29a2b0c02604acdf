"""Reads files of weights and checkpoints safely: those of torch and safetensors, of this project and of others."""

import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from finetune.models.checkpoint import REQUIRED_SECTIONS, check_checkpoint
from finetune.models.library import Pretrained
from finetune.system.files import check_no_lfs_pointer
from finetune.system.messages import WrongUsage, shown

EXPORTED = "finetune"  # key in the metadata of files of `finetune export`

# Names in published files that are older than the modules they belong to, and their current names (torchvision:
# densenet.py `_load_state_dict`, vision_transformer.py `MLPBlock._load_from_state_dict`).
_RENAMED = {
    r"(denselayer\d+\.(?:norm|conv))\.([12])\.": r"\1\2.",
    r"\.mlp\.linear_1\.": ".mlp.0.",
    r"\.mlp\.linear_2\.": ".mlp.3.",
}
# Entries in which trainers store the state dict.
_STATES = ("state_dict", "model_state_dict", "model")
_MAX_NESTED = 3
_SAVE = "Save the weights alone: torch.save(model.state_dict(), FILE)"
_OBJECT = re.compile(r"GLOBAL (\S+)")  # in torch's error message
_LONGEST_NAME = 100


class _Ignored:
    """Replaces a harmless object next to the weights. It accepts all arguments and stores none."""

    def __new__(cls, *args: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# What the training scripts of timm and torchvision save next to the weights: their arguments, and scores of NumPy. The
# real classes and functions are never imported or called.
_STAND_INS: list[Any] = [
    (_Ignored, name)
    for name in (
        "argparse.Namespace",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "numpy.dtype",
    )
]


class _Exported(msgspec.Struct):
    """What starts another fit, in the metadata of a file of `finetune export`."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    licence_of_the_weights: str | None = None


def check_single_network(pretrained: Pretrained) -> None:
    """Check that weights belong to one network.

    Raises:
        WrongUsage: They belong to the members of an ensemble.
    """
    if any(key.startswith("members.0.") for key in pretrained.state):
        raise WrongUsage(
            f"{pretrained.origin} holds the networks of an ensemble, and one network is needed: pass the "
            "checkpoint of a member"
        )


def load_safely(path: str | Path) -> Any:
    """Return the tensors and plain values of a file of torch, on the CPU. No code from it runs.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file does not come from torch, is damaged or compressed, or holds other objects.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    with open(path, "rb") as file:
        beginning = file.read(8)
    if _is_compressed(path):
        raise ValueError(
            f"{str(path)!r} is a compressed archive, or one whose entries overlap, unlike those of torch: "
            "save it again with torch.save"
        )
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location="cpu", weights_only=True)
    # the unpickler raises errors of many types, also for arbitrary bytes
    except Exception as error:
        what = f"it begins with {repr(beginning)[1:]}" if beginning else "it is empty"
        problem = f"is damaged, or not a file of torch: {what}"
        named = _OBJECT.search(str(error))
        # torch's own message advises the user to run the code in the file
        if isinstance(error, pickle.UnpicklingError) and "Unsupported operand" not in str(error):
            what = shown(named[1])[:_LONGEST_NAME] if named else "objects"
            problem = f"holds {what}, neither a tensor nor a plain value, and cannot be loaded safely. {_SAVE}"
        raise ValueError(f"{str(path)!r} {problem}") from error


def _is_compressed(path: str | Path) -> bool:
    """Return whether a file is an archive that is compressed or has overlapping entries.

    Unpacked, a small one could take all memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > os.path.getsize(path):
            return True
        return any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError):
        return False  # another kind of file, or damaged: its reader says so


def read_file(path: Path) -> Pretrained:
    """Read a file to CPU memory; its suffix decides how. Only tensors and plain values are unpickled.

    Raises:
        ValueError: The file is damaged, or holds no weights.
    """
    check_no_lfs_pointer(path)
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)


def _read_safetensors(path: Path) -> Pretrained:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
            about = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not readable as safetensors: {error}") from error
    pretrained = Pretrained(current_names(state), str(path))
    if EXPORTED not in about:
        return pretrained
    try:
        exported = msgspec.json.decode(about[EXPORTED], type=_Exported)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its metadata is unreadable") from error
    return Pretrained(
        state=pretrained.state,
        origin=pretrained.origin,
        mean=torch.tensor(exported.mean).view(3, 1, 1),
        std=torch.tensor(exported.std).view(3, 1, 1),
        licence=exported.licence_of_the_weights,
    )


def _read_torch(path: Path) -> Pretrained:
    content = load_safely(path)
    if isinstance(content, dict) and content.keys() >= REQUIRED_SECTIONS:
        check_checkpoint(content, path)
        state = content["state_dict"]
        return Pretrained(
            state=current_names(state),
            origin=str(path),
            mean=state.get("mean"),
            std=state.get("std"),
            licence=content["finetune"].get("licence_of_the_weights"),
        )
    state = _state_dict(content)
    is_state = isinstance(state, dict) and len(state) > 0
    if not is_state or not all(
        isinstance(name, str) and isinstance(one, Tensor) for name, one in state.items()
    ):
        raise ValueError(
            f"{path} is not a state dict: it contains other objects than named tensors. {_SAVE}"
        )
    if "pytorch-lightning_version" in content:
        # a LightningModule may have other weights too, for example in its loss
        of_model = {key: value for key, value in state.items() if key.startswith("model.")}
        state = of_model or state
    return Pretrained(current_names(state), str(path))


def _state_dict(content: Any) -> Any:
    """Return the state dict in the content of a file; the content itself if it has no entry for one."""
    for _ in range(_MAX_NESTED):
        entries = content if isinstance(content, dict) else {}
        name = next((n for n in _STATES if isinstance(entries.get(n), dict) and entries[n]), None)
        if name is None:
            break
        content = content[name]
    return content


def current_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict to the names of current torchvision modules and from half precision to float32.

    Prefixes of wrappers are removed, such as `module.` of DDP. Of a checkpoint of `finetune fit` only the network's
    weights remain.
    """
    state = {k: v for k, v in state.items() if k.startswith("network.")} or state
    # twice, since prefixes may be nested in any order
    for prefix in ("network.", "module.", "model.", "_orig_mod.") * 2:
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    for pattern, replacement in _RENAMED.items():
        state = {re.sub(pattern, replacement, key): value for key, value in state.items()}
    return {
        k: v.float() if v.dtype in (torch.float16, torch.bfloat16) else v for k, v in state.items()
    }
