"""Pretrained weights: find them by name or file, read them, and load them into a network, except its head."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from finetune.models.backbones import library_of
from finetune.models.hub import cached_model, download_model, is_hub, name_with_commit
from finetune.models.image_classifier import ImageClassifier
from finetune.models.library import DEFAULT, Description, Pretrained, grey_levels
from finetune.models.network_names import is_timm
from finetune.models.stages import head_name
from finetune.models.timm_networks import WEIGHT_FILES, backbone_of
from finetune.models.weight_files import check_single_network, read_file
from finetune.system.messages import NotFound, WrongUsage

_MOST_NAMED = 3  # parameters that a message names for each problem
# Usual suffixes of files of weights.
_SUFFIXES = (".bin", ".ckpt", ".pkl", ".pt", ".pth", ".safetensors", ".tar")

# Auxiliary classifiers of Inception and GoogLeNet. They only help to train from scratch, so networks are built without.
_AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")


class Source(NamedTuple):
    """Where pretrained weights are.

    Attributes:
        name: What they are called in messages.
        file: Their file; None for weights that a library publishes.
        folder: The folder of the file if it is in timm's layout, with a description; else None.
    """

    name: str
    file: Path | None = None
    folder: str | None = None


def folder_of(weights: str | None, may_download: bool = True) -> str | None:
    """Return the folder of weights in timm's layout: a local one, or one that is downloaded from the hub.

    Args:
        weights: As `model.weights`.
        may_download: Whether a model on the hub may be downloaded; otherwise it must be in the cache.

    Returns:
        The folder; None if the weights are no folder.
    """
    if weights is None or weights == DEFAULT:
        return None
    if is_hub(weights):
        cached = download_model(weights) if may_download else cached_model(weights)
        return None if cached is None else str(cached)
    return weights if Path(weights).is_dir() else None


def describe_weights(weights: str | None, backbone: str) -> Description:
    """Return the description of weights; of a file, which has none, that of the published weights.

    Args:
        weights: As `model.weights`. A model on the hub is downloaded.
        backbone: The name of the network.

    Raises:
        WrongUsage: The network does not exist, or the folder is of another one.
        ValueError: The weights need a preparation of images that is not supported.
    """
    return library_of(backbone).describe(backbone, folder_of(weights) or DEFAULT)


def find_weights(weights: str, backbone: str) -> Source:
    """Find weights without reading them. A model on the hub is downloaded; published weights are not.

    Args:
        weights: A published name, such as `DEFAULT`, a file, or for a network of timm a folder or
            hf://OWNER/NAME[@REVISION].
        backbone: The name of the network.

    Raises:
        WrongUsage: They are none of these, or belong to another network.
        NotFound: There is no such file.
        OSError: They cannot be downloaded.
    """
    library = library_of(backbone)
    library.check_name(backbone)
    if not is_hub(weights) and library.published(backbone, weights) is not None:
        return Source(weights)
    folder = folder_of(weights)
    if folder is not None:
        return _in_folder(weights, folder, backbone)
    path = Path(weights)
    if path.suffix == ".onnx":
        raise WrongUsage(
            f"training cannot start from {weights}: an .onnx file only predicts; pass the checkpoint"
        )
    if path.is_file():
        return Source(weights, path)
    if path.suffix.lower() in _SUFFIXES or len(path.parts) > 1:
        raise NotFound(f"there is no weights file or folder {weights}")
    raise WrongUsage(
        f"{weights!r} is neither a file nor weights of {backbone}: pass {DEFAULT}, a file, or null for none"
    )


def _in_folder(weights: str, folder: str, backbone: str) -> Source:
    name = name_with_commit(weights, Path(folder)) if is_hub(weights) else weights
    if not is_timm(backbone) and is_hub(weights):
        hint = "pass it as --model.backbone"
        raise WrongUsage(f"{weights} is of {backbone_of(folder)}, not of {backbone}: {hint}")
    if not is_timm(backbone):
        hint = "only networks of timm's (--model.backbone timm/NAME) take one; pass a file"
        raise WrongUsage(f"the weights {weights} of {backbone} are a folder, and {hint}")
    files = [Path(folder, one) for one in WEIGHT_FILES if Path(folder, one).is_file()]
    if not files:
        raise NotFound(f"there is neither {' nor '.join(WEIGHT_FILES)} in {weights}")
    return Source(name, files[0], folder)


def read_weights(weights: str, backbone: str, image_size: int | None = None) -> Pretrained:
    """Read pretrained weights to CPU memory. Only tensors and plain values are unpickled.

    Args:
        weights: See `find_weights`.
        backbone: The name of the network.
        image_size: Side of the images in pixels, for networks with position embeddings; None for that of the weights.

    Raises:
        WrongUsage: There are no such weights, or the published ones are for another image size.
        OSError: There is no such file, or the weights can't be downloaded.
        ValueError: The file is damaged, or holds no weights, or not those of this network.
    """
    library = library_of(backbone)
    source = find_weights(weights, backbone)
    if source.file is None:
        return library.read_published(backbone, weights, image_size)
    about = None if source.folder is None else library.describe(backbone, source.folder)
    pretrained = library.convert(read_file(source.file), backbone, image_size)
    if about is None:
        return pretrained
    return replace(
        pretrained,
        origin=source.name,
        mean=grey_levels(about.mean),
        std=grey_levels(about.std),
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
) -> None:
    """Load pretrained weights into the network of an image classifier, and their normalization if they state one.

    Args:
        model: The image classifier. Its head does not change.
        weights: See `find_weights`.
        backbone: The name of the network.
        image_size: Side of the images in pixels, for networks with position embeddings.
    """
    pretrained = read_weights(weights, backbone, image_size)
    load_weights(model.network, pretrained)
    for buffer, values in ((model.mean, pretrained.mean), (model.std, pretrained.std)):
        if values is not None:
            buffer.copy_(values)


def _some(items: list[str]) -> str:
    num_others = len(items) - _MOST_NAMED
    return ", ".join(items[:_MOST_NAMED]) + (f" and {num_others} more" if num_others > 0 else "")
