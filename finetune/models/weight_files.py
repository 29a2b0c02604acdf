"""Reads files of weights safely: state dicts of torch, safetensors, and checkpoints of this project and others."""

import json
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.models.checkpoint_sections import REQUIRED_SECTIONS, check_checkpoint
from finetune.models.checkpoint_values import are_class_names
from finetune.models.safe_load import COMPRESSED, is_compressed, load_weights_file, named_object
from finetune.system.files import check_no_lfs_pointer
from finetune.system.messages import WrongUsage, fault_of_names

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

EXPORTED = "finetune"  # key in the metadata of files of `finetune export`


@dataclass(frozen=True)
class Pretrained:
    """Weights as read, before they are loaded into a network.

    Attributes:
        state: The state dict.
        class_names: A name for each row of the source classifier's head, if they are known.
        origin: The file or the name of the weights, for messages.
        mean: Mean of the pixels of each channel (3, 1, 1) in grey levels, if the weights state a normalization.
        std: Standard deviation of the same pixels (3, 1, 1).
        licence: For weights of an earlier fit: the licence of the weights from which that fit started.
        has_wide_head: Whether the head takes the features of several stages, for weights of an earlier fit.
    """

    state: dict[str, Tensor]
    class_names: list[str] | None
    origin: str
    mean: Tensor | None = None
    std: Tensor | None = None
    licence: str | None = None
    has_wide_head: bool = False

    def write_normalization(self, mean: Tensor, std: Tensor) -> None:
        """Write the normalization to buffers (3, 1, 1) in grey levels, if these weights state one."""
        for buffer, values in ((mean, self.mean), (std, self.std)):
            if values is not None:
                buffer.copy_(values)


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
        with safe_open(str(path), "pt") as file:
            names = file.keys()
            state = {name: file.get_tensor(name) for name in names}
            about = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not readable as safetensors: {error}") from error
    if EXPORTED not in about:
        return Pretrained(current_names(state), None, str(path))
    try:  # a file of `finetune export` states its normalization and classes
        description = json.loads(about[EXPORTED])
        mean, std = (
            torch.tensor(description[name], dtype=torch.float32).view(3, 1, 1)
            for name in ("mean", "std")
        )
        names = [str(name) for name in description["model"]["class_names"]]
        licence = description.get("licence_of_the_weights")
        if not are_class_names(names):
            raise ValueError(fault_of_names(names))
        return Pretrained(
            state=current_names(state),
            class_names=names,
            origin=str(path),
            mean=mean,
            std=std,
            licence=licence and str(licence),
            has_wide_head=description["model"].get("head_stages", 1) != 1,
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: its metadata is unreadable") from error


def _read_torch(path: Path) -> Pretrained:
    if is_compressed(path):
        raise ValueError(f"{path} {COMPRESSED}")
    try:
        content = load_weights_file(path)
    except Exception as error:  # arbitrary bytes make the unpickler raise anything
        reason = "is damaged, or not a file of torch"
        if name := named_object(error):
            reason = f"holds {name}, which is neither a tensor nor a plain value; refusing to unpickle it. {_SAVE}"
        elif isinstance(error, pickle.UnpicklingError) and "Unsupported operand" not in str(error):
            reason = f"is not a plain state dict (it contains Python objects); refusing to unpickle. {_SAVE}"
        raise ValueError(f"{path} {reason}") from error
    if isinstance(content, dict) and content.keys() >= REQUIRED_SECTIONS:
        check_checkpoint(content, path)
    state = _state_dict(content)
    if not _is_state_dict(state):
        raise ValueError(
            f"{path} is not a state dict: it contains other objects than named tensors. {_SAVE}"
        )
    if not _is_own(content, state):
        # a LightningModule may have other weights too, for example in its loss
        if "pytorch-lightning_version" in content:
            state = {
                key: value for key, value in state.items() if key.startswith("model.")
            } or state
        return Pretrained(current_names(state), None, str(path))
    return _own_weights(content, state, path)


def _own_weights(content: dict[str, Any], state: dict[str, Tensor], path: Path) -> Pretrained:
    """Return the weights of a checkpoint of `finetune fit`, with its classes and its normalization."""
    settings = content["hyper_parameters"]
    own = content.get("finetune")
    mean = state.get("mean")
    std = state.get("std")
    for name, value in (("mean", mean), ("std", std)):
        if value is not None and value.shape != (3, 1, 1):
            raise ValueError(
                f"{path} is not a checkpoint of finetune: its {name} has the shape {tuple(value.shape)}"
            )
    licence = own.get("licence_of_the_weights") if isinstance(own, dict) else None
    names = settings.get("class_names")
    return Pretrained(
        state=current_names(state),
        class_names=names if are_class_names(names) else None,
        origin=str(path),
        mean=mean,
        std=std,
        licence=licence and str(licence),
        has_wide_head=settings.get("head_stages", 1) != 1,
    )


def _state_dict(content: Any) -> Any:
    """Return the state dict in the content of a file; the content itself if it has no entry for one."""
    for _ in range(_MAX_NESTED):
        entries = content if isinstance(content, dict) else {}
        name = next((n for n in _STATES if isinstance(entries.get(n), dict) and entries[n]), None)
        if name is None:
            break
        content = content[name]
    return content


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) > 0
        and all(isinstance(name, str) and isinstance(one, Tensor) for name, one in value.items())
    )


def _is_own(content: dict[str, Any], state: dict[str, Tensor]) -> bool:
    """Return whether a checkpoint was written by `finetune fit`, and not by another program that uses Lightning."""
    settings = content.get("hyper_parameters")
    return isinstance(settings, dict) and (
        "finetune" in content or any(key.startswith("network.") for key in state)
    )


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
