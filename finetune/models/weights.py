"""Pretrained weights: finding them by name or file, and putting them into a network, head or no head."""

import hashlib
import logging
import re
import unicodedata
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision import models

from finetune.models.backbones import OWN, vit_size
from finetune.models.image_classifier import ImageClassifier
from finetune.models.misfits import advice
from finetune.models.stages import head, head_name
from finetune.models.timm_backbones import is_timm
from finetune.models.timm_weights import read_timm
from finetune.models.weight_files import Pretrained, check_one, read_file, tidy
from finetune.system.file_names import composed
from finetune.system.files import one_at_a_time
from finetune.system.messages import WrongUsage, did_you_mean, shown

log = logging.getLogger(__name__)

# of files, as trainers name them
_SUFFIXES = (".bin", ".ckpt", ".pkl", ".pt", ".pth", ".safetensors", ".tar")

# Auxiliary classifiers of Inception and GoogLeNet, which only help to train from scratch: we build without them.
_AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")


def read_weights(weights: str, backbone: str, image_size: int | None = None) -> Pretrained:
    """Read a torchvision weights name of this backbone, a state dict, a safetensors file or a checkpoint of ours.

    All is read to CPU memory, and nothing but tensors and plain values is ever unpickled.

    Args:
        weights: Of a network of timm's `DEFAULT`, a file, or a folder as timm writes it.
        backbone: The network.
        image_size: Side of the pictures in pixels, where the network holds a position of each patch.

    Raises:
        WrongUsage: There are none such, or published ones are for pictures of another size.
    """
    if is_timm(backbone):
        return read_timm(weights, backbone, image_size)
    published: dict[str, Any] = {}
    if backbone not in OWN:
        enum = models.get_model_weights(backbone)
        published = {
            name: weight
            for key, weight in enum.__members__.items()
            for name in (key, f"{enum.__name__}.{key}")
        }
    if found := published.get(weights):
        side = vit_size(backbone, image_size)
        if side and (own := found.meta["min_size"][0]) != side:
            sizes = f"pictures of {own}x{own} pixels, not {side}x{side}"
            raise WrongUsage(f"{found} is for {sizes}: image_size must be {own}")
        return _read_published(found)
    path = Path(weights)
    if path.suffix == ".onnx":
        raise WrongUsage(
            f"training can't begin with {weights}: an .onnx gives answers alone; take the checkpoint"
        )
    if path.is_file():
        return read_file(path)
    if path.is_dir():
        hint = "only networks of timm's (--model.backbone timm/NAME) take one; give a file"
        raise WrongUsage(f"the weights {weights} of {backbone} are a folder, and {hint}")
    if path.suffix.lower() in _SUFFIXES or len(path.parts) > 1:
        raise FileNotFoundError(f"there is no weights file {weights}")
    valid = ", ".join(name for name in published if "." not in name)
    hint = (
        f"valid are: {valid}"
        if valid
        else "none are published: give a file, or --model.weights null"
    )
    raise WrongUsage(f"{weights!r} is neither a file nor weights of {backbone}; {hint}")


def _read_published(weights: Any) -> Pretrained:
    path = Path(torch.hub.get_dir(), "checkpoints", weights.url.rsplit("/", 1)[-1])
    published = re.search(r"-([0-9a-f]{8,})\.", path.name)
    # torchvision checks the hash of what it downloads, not of what is there already
    if path.is_file() and published:
        with path.open("rb") as file:
            if not hashlib.file_digest(file, "sha256").hexdigest().startswith(published[1]):
                raise ValueError(
                    f"{path} is broken: its sha256 does not begin with {published[1]}; delete it"
                )
    try:
        with nullcontext() if path.exists() else one_at_a_time(path):
            state = weights.get_state_dict(check_hash=True, map_location="cpu", weights_only=True)
    except (
        OSError,
        RuntimeError,
    ) as error:  # RuntimeError is what torch.hub raises for a wrong hash
        hint = f"give other weights with --model.weights FILE, null for none, or: put {weights.url} at {path} by hand"
        raise OSError(f"can't download {weights} ({error}); {hint}") from error
    preset = weights.transforms()
    mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in (preset.mean, preset.std))
    return Pretrained(tidy(state), weights.meta["categories"], str(weights), mean, std)


def load_weights(network: nn.Module, pretrained: Pretrained, backbone: str | None = None) -> None:
    """Copy everything but the head, in place; what does not fit is named in the error, and nothing is copied then.

    Args:
        network: To which the weights are copied.
        pretrained: The weights.
        backbone: The network's name, for advice in the error.
    """
    check_one(pretrained)
    skipped = (head_name(network) + ".", *_AUXILIARY)
    own = network.state_dict()
    given = {key: value for key, value in pretrained.state.items() if not key.startswith(skipped)}
    wanted = [key for key in own if not key.startswith(skipped)]
    shapes = {k: (tuple(given[k].shape), tuple(own[k].shape)) for k in given if k in wanted}
    problems = {
        # Files written before torch 0.4.1 have no `num_batches_tracked`; nothing but a momentum of None reads it.
        "missing": [k for k in wanted if k not in given and not k.endswith("num_batches_tracked")],
        "unexpected": [k for k in given if k not in wanted],
        "of another shape": [
            f"{k} {there} instead of {here}" for k, (there, here) in shapes.items() if there != here
        ],
        # so in VGG-16's "features"
        "not finite": [k for k, value in given.items() if not value.isfinite().all()],
    }
    if found := [f"{kind}: {_some(keys)}" for kind, keys in problems.items() if keys]:
        is_other = any(keys for kind, keys in problems.items() if kind != "not finite")
        to_do = f". {advice(pretrained.state, backbone)}" if backbone and is_other else ""
        raise ValueError(
            f"{pretrained.origin} does not fit this network; {'; '.join(found)}{to_do}"
        )
    own.update(given)
    # Updating the network's own state keeps its version numbers, without which torchvision's MNASNet refuses to load.
    network.load_state_dict(own)


def load_pretrained(
    model: ImageClassifier, weights: str, backbone: str, image_size: int | None = None
) -> Pretrained:
    """Load pretrained weights into each network of an image classifier, and their normalization if they state one.

    Args:
        model: Its heads stay as they are.
        weights: As for `read_weights`; so are the next two.
        backbone: The name of the network.
        image_size: Side of the images in pixels, for networks that hold a position of each patch.
    """
    pretrained = read_weights(weights, backbone, image_size)
    if pretrained.averaged:
        log.info("%s: taking the averaged weights, %s", pretrained.origin, pretrained.averaged)
    for network in model.members:
        load_weights(network, pretrained, backbone)
    pretrained.write_normalization(model.mean, model.std)
    return pretrained


def source_head(
    network: nn.Module,
    pretrained: Pretrained | None,
    class_names: list[str],
    mapping: dict[str, str | list[str]] | None = None,
    source_classes: list[str] | None = None,
) -> dict[str, list[str]]:
    """Copy rows of the source classifier's head for the classes that it knows, in place; leave the others.

    Args:
        network: Its head has a row for each of `class_names`.
        pretrained: Weights with the source classifier's head.
        class_names: In the order of the rows.
        mapping: Categories of the source for a class, instead of those of its name; of several, the mean is taken.
        source_classes: Names of the source head's rows, instead of those that came with the weights.

    Returns:
        For each class the categories whose rows it got.
    """
    if pretrained is None:
        raise ValueError(
            "head_init: source copies rows of a source classifier; give its file with weights"
        )
    categories = source_classes or pretrained.class_names
    if not categories:
        hint = "give a text file with a name for each row, --model.source_classes FILE"
        raise ValueError(f"{pretrained.origin} does not name its classes: {hint}")
    target = head(network)
    weight = pretrained.state.get(f"{head_name(network)}.weight")
    if weight is None or weight.shape[1:] != target.weight.shape[1:]:
        there = "none" if weight is None else f"one of shape {tuple(weight.shape)}"
        raise ValueError(
            f"{pretrained.origin} needs a head on {target.in_features} features to copy, it has {there}"
        )
    # MaxViT's head has none
    bias = pretrained.state.get(f"{head_name(network)}.bias", torch.zeros(len(weight)))
    if len(categories) != len(weight):
        raise ValueError(
            f"{pretrained.origin} has {len(weight)} classes, but {len(categories)} names were given"
        )
    mapping = {composed(name): category for name, category in (mapping or {}).items()}
    for name in mapping.keys() - set(map(composed, class_names)):
        raise ValueError(
            f"the mapping names an unknown class {name!r}{did_you_mean(name, class_names)}"
        )
    matched = {}
    for row, name in enumerate(class_names):
        wanted = mapping.get(composed(name), name)
        wanted = [wanted] if isinstance(wanted, str) else wanted
        found = {category: _rows(category, categories) for category in wanted}
        for category in [c for c in found if composed(name) in mapping and not found[c]]:
            raise ValueError(
                f"no source category is called {category!r}{did_you_mean(category, categories)}"
            )
        rows = sorted({index for indices in found.values() for index in indices})
        matched[name] = [categories[index] for index in rows]
        if rows:
            with torch.no_grad():
                target.weight[row] = weight[rows].double().mean(0)
                target.bias[row] = bias[rows].double().mean()
    told = (
        f"{name} from {' + '.join(found) or 'nothing: random'}" for name, found in matched.items()
    )
    log.info("rows of the head: %s", shown("; ".join(told)))
    return matched


def _rows(name: str, categories: list[str]) -> list[int]:
    """Indices of the categories of this name: as it is written or, where none is, with case and separators folded."""
    # ImageNet: Cardigan and cardigan
    exact = [index for index, category in enumerate(categories) if category == name]
    folded = [
        re.sub(r"[\s_-]", "", unicodedata.normalize("NFKC", n).casefold())
        for n in [name, *categories]
    ]
    return exact or [index for index, category in enumerate(folded[1:]) if category == folded[0]]


def _some(items: list[str], limit: int = 3) -> str:
    return ", ".join(items[:limit]) + (
        f" and {len(items) - limit} more" if len(items) > limit else ""
    )
