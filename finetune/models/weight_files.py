"""Files of weights, read safely: state dicts of torch, safetensors, and checkpoints, ours and of other trainers."""

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
from finetune.models.safe_load import load_weights_file, named_object
from finetune.system.files import check_no_lfs_pointer
from finetune.system.messages import WrongUsage, fault_of_names

# Published files older than the modules they belong to (torchvision: densenet.py `_load_state_dict`,
# vision_transformer.py `MLPBlock._load_from_state_dict`).
_RENAMED = {
    r"(denselayer\d+\.(?:norm|conv))\.([12])\.": r"\1\2.",
    r"\.mlp\.linear_1\.": ".mlp.0.",
    r"\.mlp\.linear_2\.": ".mlp.3.",
}


@dataclass(frozen=True)
class Pretrained:
    """Weights as read, before they are put into a network."""

    state: dict[str, Tensor]
    class_names: list[str] | None  # one for each row of the source classifier's head
    origin: str  # for messages
    mean: Tensor | None = None  # (3, 1, 1) in grey levels: the normalisation that they state
    std: Tensor | None = None
    # what a fit of ours, from which they come, has said of the weights that it began with
    licence: str | None = None
    averaged: str | None = None  # the entry of the file from which averaged weights were taken

    def write_normalization(self, mean: Tensor, std: Tensor) -> None:
        """Write the normalisation, where these weights state one, to buffers (3, 1, 1) in grey levels."""
        for buffer, values in ((mean, self.mean), (std, self.std)):
            if values is not None:
                buffer.copy_(values)


# Where trainers keep the state dict, the preferred one first. Averaged weights (EMA) are the better ones as a rule, and
# timm's own loader prefers them, too.
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict")
_STATES = (*_AVERAGED, "state_dict", "model_state_dict", "model")
_MOST_NESTED = 3
_SAVE = "Save the weights alone: torch.save(model.state_dict(), FILE)"

EXPORTED = "finetune"  # in the metadata of what `finetune export` writes


def check_one(pretrained: Pretrained) -> None:
    """Make sure that weights are of one network.

    Raises:
        WrongUsage: They are of several that learned in one fit.
    """
    if any(key.startswith("members.0.") for key in pretrained.state):
        raise WrongUsage(
            f"{pretrained.origin} holds several networks, where one is wanted: take what a fit with "
            "--members 1 has written"
        )


def read_file(path: Path) -> Pretrained:
    """Read a file by its ending, to CPU memory; nothing but tensors and plain values is ever unpickled.

    Raises:
        ValueError: It is broken, or holds something else than weights.
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
        raise ValueError(f"{path} can't be read as safetensors: {error}") from error
    if EXPORTED not in about:
        return Pretrained(tidy(state), None, str(path))
    try:  # of `finetune export`: which pixels it has learned with
        known = json.loads(about[EXPORTED])
        mean, std = (
            torch.tensor(known[name], dtype=torch.float32).view(3, 1, 1) for name in ("mean", "std")
        )
        names, terms = (
            [str(name) for name in known["model"]["class_names"]],
            known.get("licence_of_the_weights"),
        )
        if not are_class_names(names):
            raise ValueError(fault_of_names(names))
        return Pretrained(tidy(state), names, str(path), mean, std, terms and str(terms))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: what it says of itself can't be read") from error


def _read_torch(path: Path) -> Pretrained:
    try:
        content = load_weights_file(path)
    except Exception as error:  # arbitrary bytes make the unpickler raise anything
        reason = "is broken, or no file of torch"
        if name := named_object(error):
            reason = f"holds {name}, which is neither a tensor nor a plain value; refusing to unpickle it. {_SAVE}"
        elif isinstance(error, pickle.UnpicklingError) and "Unsupported operand" not in str(error):
            reason = f"is not a plain state dict (it contains Python objects); refusing to unpickle. {_SAVE}"
        raise ValueError(f"{path} {reason}") from error
    if isinstance(content, dict) and content.keys() >= REQUIRED_SECTIONS:
        check_checkpoint(content, path)
    state, averaged = _state_dict(content)
    are_named = isinstance(state, dict) and state and all(isinstance(name, str) for name in state)
    if not are_named or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"{path} is not a state dict: it holds something else than named tensors. {_SAVE}"
        )
    if not _is_own(content, state):
        # the module may hold more, such as a loss with weights
        if "pytorch-lightning_version" in content:
            state = {
                key: value for key, value in state.items() if key.startswith("model.")
            } or state
        return Pretrained(tidy(state), None, str(path), averaged=averaged)
    settings, own = content["hyper_parameters"], content.get("finetune")
    mean, std = state.get("mean"), state.get("std")
    for name, value in (("mean", mean), ("std", std)):
        if value is not None and value.shape != (3, 1, 1):
            raise ValueError(
                f"{path} is no checkpoint of ours: its {name} has the shape {tuple(value.shape)}"
            )
    terms = own.get("licence_of_the_weights") if isinstance(own, dict) else None
    names = settings.get("class_names")
    return Pretrained(
        tidy(state),
        names if are_class_names(names) else None,
        str(path),
        mean,
        std,
        terms and str(terms),
    )


def _state_dict(content: Any) -> tuple[Any, str | None]:
    """Return the state dict in what a trainer has saved, and the entry's name where that holds averaged weights."""
    averaged = None
    for _ in range(_MOST_NESTED):
        entries = content if isinstance(content, dict) else {}
        name = next((n for n in _STATES if isinstance(entries.get(n), dict) and entries[n]), None)
        if name is None:
            break
        averaged = name if name in _AVERAGED else averaged
        content = content[name]
    # torch.optim.swa_utils.AveragedModel counts its updates there
    if averaged and isinstance(content, dict):
        content = {key: value for key, value in content.items() if key != "n_averaged"}
    return content, averaged


def _is_own(content: dict[str, Any], state: dict[str, Tensor]) -> bool:
    """Return whether this is a checkpoint of `finetune fit`, not of another program that uses Lightning."""
    settings = content.get("hyper_parameters")
    return isinstance(settings, dict) and (
        "finetune" in content or any(key.startswith("network.") for key in state)
    )


def tidy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Bring names to those of today's torchvision modules and half precision to float32."""
    state = {k: v for k, v in state.items() if k.startswith("network.")} or state
    # twice: they are nested in any order
    for prefix in ("network.", "module.", "model.", "_orig_mod.") * 2:
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    for pattern, replacement in _RENAMED.items():
        state = {re.sub(pattern, replacement, key): value for key, value in state.items()}
    return {
        k: v.float() if v.dtype in (torch.float16, torch.bfloat16) else v for k, v in state.items()
    }
