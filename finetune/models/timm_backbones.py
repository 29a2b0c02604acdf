"""Networks of timm: building them, and the description of their weights."""

import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn
from torchvision import models

from finetune.models.hub import CONFIG_FILE, cached_model, download_model, is_hub
from finetune.models.network_names import PREFIX
from finetune.models.stages import head_name
from finetune.system.messages import WrongUsage, did_you_mean, install

# Names of timm's files of weights, in folders and on the hub, the preferred one first.
TIMM_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_MAX_CONFIG = 50_000_000  # bytes; that of ImageNet-21k's names has 3 MB
# Arguments with which a network may have been built. `read_timm` checks global_pool.
_ALLOWED_ARGS = {"num_classes", "img_size", "global_pool"}
# Top-level keys that take precedence over those in pretrained_cfg.
_TOP_LEVEL_KEYS = ("num_classes", "label_names", "label_descriptions")
_NUM_IMAGENET = 1000
_IMAGENET = re.compile(r"(^|_)in1k(_|$)")  # in the tag of weights with a head for ImageNet-1k
_DEFAULT_ARGS = {"in_chans": 3}
_RESIZE: Mapping[str, Literal["shorter_side", "squash"]] = {
    "center": "shorter_side",
    "squash": "squash",
}


class Description(NamedTuple):
    """The description of pretrained weights: how images were prepared, the licence and the classes.

    Attributes:
        name: Name of the weights, for messages.
        mean: Mean of the pixels of each channel, in [0, 1].
        std: Standard deviation of the same pixels.
        image_size: Side in pixels of the images that the network was trained on.
        interpolation: How images were resized.
        crop_share: Side of the centre crop, as a share of the side of the resized image.
        resize: The value of `data.resize`.
        licence: The short name of the licence; None if it is not stated.
        num_classes: Classes of the source classifier; 0 for weights without a head.
        class_names: The name of each row of the head; None if they are unknown.
    """

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    interpolation: Literal["bilinear", "bicubic"]
    crop_share: float
    resize: Literal["shorter_side", "squash", "whole"]
    licence: str | None
    num_classes: int
    class_names: list[str] | None


def has_timm() -> bool:
    """Return whether timm is installed."""
    return importlib.util.find_spec("timm") is not None


def is_timm(backbone: str) -> bool:
    """Return whether a name is that of a network of timm."""
    return backbone.startswith(PREFIX)


def timm_name(backbone: str) -> str:
    """Return timm's name of a network: `convnext_nano.in12k_ft_in1k` for `timm/convnext_nano.in12k_ft_in1k`.

    timm also accepts addresses on the hub and folders as names. They are errors here, since the name may come from an
    untrusted checkpoint.

    Raises:
        WrongUsage: timm is not installed, or it has no such network or weights.
    """
    try:
        import timm
    except ImportError as error:
        raise WrongUsage(f"{backbone} needs timm: {install('timm')}") from error
    name = backbone.removeprefix(PREFIX)
    architecture, dot, tag = name.partition(".")
    # To list all networks takes 5 ms, and a fit asks some twenty times.
    if architecture not in timm.list_models(architecture):
        near = did_you_mean(architecture, timm.list_models())
        raise WrongUsage(f"timm {timm.__version__} has no network {architecture!r}{near}")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{architecture}.*")]
    if dot and tag not in tags:
        raise WrongUsage(
            f"timm {timm.__version__} has no weights {tag!r} of {architecture}{did_you_mean(tag, tags)}"
        )
    return name


def describe(backbone: str, folder: str | Path | None = None) -> Description:
    """Return the description of the weights in a folder of timm; without a folder, of the published weights.

    Raises:
        WrongUsage: The network does not exist, or the folder holds another network.
        ValueError: The folder's description can't be read, or describes an unsupported preparation of images.
    """
    if folder is None:
        return _parse_description(timm_name(backbone), pretrained_cfg(backbone).to_dict())
    config = read_config(backbone, folder)
    top_level: dict[str, Any] = {key: config[key] for key in _TOP_LEVEL_KEYS if key in config}
    about = config.get("pretrained_cfg", config)
    if not isinstance(about, dict):
        raise _damaged(Path(folder, CONFIG_FILE), "its pretrained_cfg is not a mapping")
    return _parse_description(str(folder), {**about, **top_level})


def pretrained_cfg(backbone: str) -> Any:
    """Return timm's own description of the published weights of a network."""
    name = timm_name(backbone)
    import timm

    return timm.get_pretrained_cfg(name)


def read_config(backbone: str, folder: str | Path) -> dict[str, Any]:
    """Return the config of the network in a folder that `timm.models.save_for_hf` has written.

    Raises:
        WrongUsage: The folder has no config, or holds another network.
        ValueError: The config is damaged.
    """
    path = Path(folder, CONFIG_FILE)
    config = _load_config(path)
    architecture = config["architecture"]
    expected = timm_name(backbone).partition(".")[0]
    if architecture != expected:
        hint = f": pass --model.backbone {PREFIX}{architecture}"
        raise WrongUsage(f"{path} is of {architecture}, not of {expected}{hint}")
    args = config.get("model_args") or {}
    if not isinstance(args, dict):
        raise _damaged(path, "its model_args are not a mapping")
    others = {
        key: value
        for key, value in args.items()
        if key not in _ALLOWED_ARGS and (key not in _DEFAULT_ARGS or value != _DEFAULT_ARGS[key])
    }
    if others:
        raise WrongUsage(
            f"{path} is of a {architecture} with other arguments ({others}): only timm's own networks are supported"
        )
    return config


def folder_of(weights: str | None, may_download: bool = True) -> str | None:
    """Return the folder of weights in timm's layout: a local one, or one that is downloaded from the hub.

    Args:
        weights: As `model.weights`.
        may_download: Whether a model on the hub may be downloaded; otherwise it must be in the cache.

    Returns:
        The folder; None if the weights are no folder.
    """
    if weights is None or weights == "DEFAULT":
        return None
    if is_hub(weights):
        folder = download_model(weights) if may_download else cached_model(weights)
        return None if folder is None else str(folder)
    return weights if os.path.isdir(weights) else None


def backbone_of(folder: str | Path) -> str:
    """Return the name of the network in a folder of weights, with `PREFIX`.

    Raises:
        WrongUsage: The folder was not written by timm, or timm has no such network.
        ValueError: Its config is damaged.
    """
    backbone = f"{PREFIX}{_load_config(Path(folder, CONFIG_FILE))['architecture']}"
    timm_name(backbone)
    return backbone


def _load_config(path: Path) -> dict[str, Any]:
    """Return the content of a folder's config, after a check that it names an architecture."""
    if not path.is_file():
        raise WrongUsage(
            f"the folder {str(path.parent)!r} has no {CONFIG_FILE}, as timm's `save_for_hf` writes it"
        )
    if path.stat().st_size > _MAX_CONFIG:
        raise _damaged(path, f"it has more than {_MAX_CONFIG:,} bytes")
    try:
        config: dict[str, Any] = json.loads(path.read_text("utf-8"))
        is_text = isinstance(config["architecture"], str)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, "it has no architecture") from error
    if not is_text:
        raise _damaged(path, "its architecture is not a name")
    return config


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged, or not written by timm: {why}")


def _parse_description(name: str, config: Mapping[str, Any]) -> Description:
    try:
        size = tuple(config["input_size"])
        interpolation = config["interpolation"]
        crop_share = float(config["crop_pct"])
        mode = config.get("crop_mode", "center")
        mean, std = (tuple(float(value) for value in config[key]) for key in ("mean", "std"))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} does not define how images are prepared: {error!r}") from error
    if (
        len(mean) != 3
        or len(std) != 3
        or not all(map(math.isfinite, mean))
        or not all(0 < v < math.inf for v in std)
    ):
        raise ValueError(
            f"{name} wants pixels of mean {mean} and standard deviation {std}, which is not supported"
        )
    if len(size) != 3 or size[0] != 3 or size[1] != size[2] or type(size[1]) is not int:
        raise ValueError(f"{name} takes images of {size}; only square RGB images are supported")
    if (
        interpolation not in ("bilinear", "bicubic")
        or not isinstance(mode, str)
        or mode not in _RESIZE
        or not 0 < crop_share <= 1
    ):
        asked = f"interpolation {interpolation}, crop {mode} of {crop_share}"
        raise ValueError(f"{name} needs an unsupported preparation of images: {asked}")
    resize = "whole" if mode == "squash" and crop_share == 1 else _RESIZE[mode]
    num_classes = config.get("num_classes", 1000)
    licence = config.get("license")
    return Description(
        name=name,
        mean=mean,
        std=std,
        image_size=size[1],
        interpolation=interpolation,
        crop_share=crop_share,
        resize=resize,
        licence=licence if isinstance(licence, str) else None,
        num_classes=num_classes,
        class_names=_class_names(config, num_classes),
    )


def _class_names(config: Mapping[str, Any], num: int) -> list[str] | None:
    listed = config.get("label_names")
    names = [*listed] if isinstance(listed, list | tuple) else []
    descriptions = config.get("label_descriptions") or {}
    are_names = names and all(isinstance(name, str) for name in names)
    if are_names and len(names) == num and isinstance(descriptions, dict):
        return [str(descriptions.get(name, name)) for name in names]
    if num == _NUM_IMAGENET and _IMAGENET.search(str(config.get("tag") or "")):
        # timm has the same order of classes
        return list(models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"])
    return None


def create(
    backbone: str, num_classes: int, image_size: int | None = None, **options: Any
) -> nn.Module:
    """Create a network with timm, with a head of K classes.

    Args:
        backbone: The name of the network, with `PREFIX`.
        num_classes: K; 0 for no head.
        image_size: Side of the images in pixels, for networks with position embeddings; None for that of the weights.
        options: Further arguments of `timm.create_model`.

    Raises:
        WrongUsage: The network does not exist, or does not support images of this size.
    """
    name = timm_name(backbone)
    config = pretrained_cfg(backbone)
    import timm

    own_size = config.input_size[1]
    if not config.fixed_input_size or image_size in (None, own_size):
        return timm.create_model(name, num_classes=num_classes, **options)
    create_resized = partial(timm.create_model, name, num_classes=num_classes, img_size=image_size)
    asked = f"images of {image_size}x{image_size} pixels"
    message = f"{backbone} does not support {asked}: its weights are for image_size {own_size}"
    try:
        network = create_resized(**{**options, "pretrained": False})
    except (TypeError, AssertionError) as error:  # no argument img_size, or windows do not fit
        raise WrongUsage(message) from error
    if not options.get("pretrained"):
        return network
    try:
        return create_resized(**options)
    except RuntimeError as error:
        # If the weights fit at their own size, timm does not resample the position embeddings of this network.
        # If they do not, they are weights of another network.
        create_at_own_size = partial(timm.create_model, name, num_classes=num_classes, **options)
        if "size mismatch" in str(error) and _succeeds(create_at_own_size):
            raise WrongUsage(message) from error
        raise


def _succeeds(create_network: Callable[[], nn.Module]) -> bool:
    try:
        create_network()
    except RuntimeError:
        return False
    return True


def build_timm(backbone: str, num_classes: int, image_size: int | None = None) -> nn.Module:
    """Build an untrained network whose head is its last linear layer, without a download. See `create`.

    Raises:
        WrongUsage: The network does not exist, does not support this size, does not end in one linear head, or shares
            weights between modules.
    """
    network = create(backbone, num_classes, image_size, pretrained=False)
    _check_parts(network, backbone)
    return network


def _check_parts(network: nn.Module, backbone: str) -> None:
    name = pretrained_cfg(backbone).classifier
    if not isinstance(name, str):
        what = f"it has {len(name)} heads ({', '.join(name)})" if name else "it has no head"
        raise WrongUsage(f"{backbone} is not supported: {what}, not one")
    classifier = network.get_submodule(name)
    if not isinstance(classifier, nn.Linear):
        raise WrongUsage(
            f"{backbone} is not supported: it ends in a {type(classifier).__name__}, not in a linear head"
        )
    if name != head_name(network):
        raise WrongUsage(
            f"{backbone} is not supported: its head {name} is not the last of its linear layers"
        )
    # A shared weight would belong to several stages.
    if len([*network.named_parameters(remove_duplicate=False)]) != len([*network.parameters()]):
        raise WrongUsage(f"{backbone} is not supported: several of its modules share weights")
