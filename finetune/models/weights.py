"""Pretrained weights: finding them by name or file, and loading them into a network, with or without the head."""

import hashlib
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision import models

from finetune.models.backbones import SMALL_NETWORKS, grey_levels, vit_size
from finetune.models.hub import download_model, is_hub, name_with_commit
from finetune.models.image_classifier import ImageClassifier
from finetune.models.stages import head_name
from finetune.models.timm_backbones import backbone_of, is_timm
from finetune.models.timm_weights import check_timm_weights, read_timm
from finetune.models.weight_files import Pretrained, check_single_network, current_names, read_file
from finetune.system.files import one_at_a_time
from finetune.system.messages import NotFound, WrongUsage

_MOST_NAMED = 3  # parameters that a message names for each problem
# Usual suffixes of files of weights.
_SUFFIXES = (".bin", ".ckpt", ".pkl", ".pt", ".pth", ".safetensors", ".tar")

# Auxiliary classifiers of Inception and GoogLeNet. They only help to train from scratch, so networks are built without.
_AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")


def read_weights(weights: str, backbone: str, image_size: int | None = None) -> Pretrained:
    """Read pretrained weights to CPU memory. Only tensors and plain values are unpickled.

    Args:
        weights: A torchvision weights name of this backbone, a state dict, a safetensors file or a checkpoint. For a
            network of timm: `DEFAULT`, a file, a folder that timm has written, or hf://OWNER/NAME[@REVISION].
        backbone: The name of the network.
        image_size: Side of the images in pixels, for networks with position embeddings.

    Raises:
        WrongUsage: There are no such weights, or the published ones are for another image size.
        OSError: There is no such file, or the weights can't be downloaded.
        ValueError: The file is damaged, or holds no weights.
    """
    if is_hub(weights):
        return _read_hub(weights, backbone, image_size)
    check_weights(weights, backbone)
    if is_timm(backbone):
        return read_timm(weights, backbone, image_size)
    published = _published(backbone)
    if weights in published:
        entry = published[weights]
        side = vit_size(backbone, image_size)
        if side and (own := entry.meta["min_size"][0]) != side:
            sizes = f"images of {own}x{own} pixels, not {side}x{side}"
            raise WrongUsage(f"{entry} is for {sizes}: image_size must be {own}")
        return _read_published(entry)
    return read_file(Path(weights))


def check_weights(weights: str, backbone: str) -> None:
    """Check that weights are published, on the hub or a file, without reading or downloading them.

    Args:
        weights: As `read_weights` takes it.
        backbone: The name of the network.

    Raises:
        WrongUsage: It is neither a file nor a name of weights.
        NotFound: There is no such file.
    """
    if is_hub(weights):  # the download finds out
        return
    if is_timm(backbone):
        check_timm_weights(weights, backbone)
        return
    published = _published(backbone)
    path = Path(weights)
    if weights in published:
        return
    if path.suffix == ".onnx":
        raise WrongUsage(
            f"training cannot start from {weights}: an .onnx file only predicts; pass the checkpoint"
        )
    if path.is_file():
        return
    if path.is_dir():
        hint = "only networks of timm's (--model.backbone timm/NAME) take one; pass a file"
        raise WrongUsage(f"the weights {weights} of {backbone} are a folder, and {hint}")
    if path.suffix.lower() in _SUFFIXES or len(path.parts) > 1:
        raise NotFound(f"there is no weights file {weights}")
    valid = ", ".join(name for name in published if "." not in name)
    hint = (
        f"valid are: {valid}, a file, and null"
        if valid
        else "none are published: pass a file, or --model.weights null"
    )
    raise WrongUsage(f"{weights!r} is neither a file nor weights of {backbone}; {hint}")


def _read_hub(weights: str, backbone: str, image_size: int | None) -> Pretrained:
    folder = download_model(weights)
    if not is_timm(backbone):
        hint = "pass it as --model.backbone"
        raise WrongUsage(f"{weights} is of {backbone_of(folder)}, not of {backbone}: {hint}")
    pretrained = read_timm(str(folder), backbone, image_size)
    return replace(pretrained, origin=name_with_commit(weights, folder))


def _published(backbone: str) -> dict[str, Any]:
    """Return the weights that torchvision publishes for a network, by each of their names."""
    if backbone in SMALL_NETWORKS:
        return {}
    enum = models.get_model_weights(backbone)
    return {
        name: weight
        for key, weight in enum.__members__.items()
        for name in (key, f"{enum.__name__}.{key}")
    }


def _read_published(weights: Any) -> Pretrained:
    path = Path(torch.hub.get_dir(), "checkpoints", weights.url.rsplit("/", 1)[-1])
    digest = re.search(r"-([0-9a-f]{8,})\.", path.name)  # the beginning of the file's sha256
    # torchvision checks the hash of a file that it downloads, but not of a cached one
    if path.is_file() and digest:
        with path.open("rb") as file:
            if not hashlib.file_digest(file, "sha256").hexdigest().startswith(digest[1]):
                raise ValueError(
                    f"{path} is broken: its sha256 does not begin with {digest[1]}; delete it"
                )
    try:
        with nullcontext() if path.exists() else one_at_a_time(path):
            state = weights.get_state_dict(check_hash=True, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError) as error:  # torch.hub raises RuntimeError for a wrong hash
        other = "pass other weights with --model.weights FILE, null for none"
        hint = f"{other}, or: put {weights.url} at {path} by hand"
        raise OSError(f"cannot download {weights} ({error}); {hint}") from error
    preset = weights.transforms()
    return Pretrained(
        state=current_names(state),
        class_names=weights.meta["categories"],
        origin=str(weights),
        mean=grey_levels(preset.mean),
        std=grey_levels(preset.std),
    )


def load_weights(network: nn.Module, pretrained: Pretrained) -> None:
    """Copy all weights except the head into a network, in place. If any does not fit, none is copied.

    Args:
        network: The network to change.
        pretrained: The weights.

    Raises:
        WrongUsage: The weights belong to an ensemble.
        ValueError: Names or shapes differ, or values are not finite. The message names the first of them.
    """
    check_single_network(pretrained)
    skipped = (head_name(network) + ".", *_AUXILIARY)
    own = network.state_dict()
    loaded = {key: value for key, value in pretrained.state.items() if not key.startswith(skipped)}
    expected = [key for key in own if not key.startswith(skipped)]
    shapes = {k: (tuple(loaded[k].shape), tuple(own[k].shape)) for k in loaded if k in expected}
    problems = {
        # Files written before torch 0.4.1 have no `num_batches_tracked`. Only a momentum of None needs it.
        "missing": [
            k for k in expected if k not in loaded and not k.endswith("num_batches_tracked")
        ],
        "unexpected": [k for k in loaded if k not in expected],
        "of another shape": [
            f"{k} {actual} instead of {needed}"
            for k, (actual, needed) in shapes.items()
            if actual != needed
        ],
    }
    lines = [f"{kind}: {_some(keys)}" for kind, keys in problems.items() if keys]
    if lines:
        raise ValueError(f"{pretrained.origin} does not fit this network; {'; '.join(lines)}")
    # for example in VGG-16's weights "features"
    not_finite = [k for k, value in loaded.items() if not value.isfinite().all()]
    if not_finite:
        raise ValueError(
            f"{pretrained.origin} has values that are NaN or infinite, in {_some(not_finite)}: pass other weights"
        )
    own.update(loaded)
    # The network's own state dict has version numbers of modules. torchvision's MNASNet does not load without them.
    network.load_state_dict(own)


def load_pretrained(
    model: ImageClassifier, weights: str, backbone: str, image_size: int | None = None
) -> Pretrained:
    """Load pretrained weights into the network of an image classifier, and their normalization if they state one.

    Args:
        model: The image classifier. Its head does not change.
        weights: See `read_weights`.
        backbone: The name of the network.
        image_size: Side of the images in pixels, for networks with position embeddings.
    """
    pretrained = read_weights(weights, backbone, image_size)
    load_weights(model.network, pretrained)
    pretrained.write_normalization(model.mean, model.std)
    return pretrained


def _some(items: list[str]) -> str:
    num_others = len(items) - _MOST_NAMED
    return ", ".join(items[:_MOST_NAMED]) + (f" and {num_others} more" if num_others > 0 else "")
