"""Networks of timm: what is known of one without its weights, and building it."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn
from torchvision import models

from finetune.models.stages import head_name
from finetune.system.messages import WrongUsage, did_you_mean, install

PREFIX = "timm/"
_CONFIG = "config.json"  # in a folder as timm writes it
# what a network may have been built with; `read_timm` looks at more
_ARGS = {"num_classes", "img_size", "global_pool"}
# beside the description, and before it
_ABOVE = ("num_classes", "label_names", "label_descriptions")
_NUM_IMAGENET = 1000
_IMAGENET = re.compile(r"(^|_)in1k(_|$)")  # in the tag of weights whose head is of ImageNet-1k
_OWN_ARGS = {"in_chans": 3}
_RESIZE: Mapping[str, Literal["shorter_side", "squash"]] = {
    "center": "shorter_side",
    "squash": "squash",
}


class Description(NamedTuple):
    """What weights say of themselves: the pictures that they were learned with, and whose they are.

    Attributes:
        name: Of whom this is said, for messages.
        mean: Of the pixels, in [0, 1].
        std: Their standard deviation.
        image_size: Side in pixels of what the network saw.
        interpolation: How pictures were brought to size.
        crop_share: Which share of the resized side the middle square has.
        resize: As `data.resize` has it.
        licence: Its short name, None where none is stated.
        num_classes: Of the source classifier; 0 for none.
        class_names: What each row of its head is called, where that is stated.
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


def is_timm(backbone: str) -> bool:
    """Return whether a network's name says that it is timm's."""
    return backbone.startswith(PREFIX)


def timm_name(backbone: str) -> str:
    """Return what timm calls a network: `convnext_nano.in12k_ft_in1k` of `timm/convnext_nano.in12k_ft_in1k`.

    Raises:
        WrongUsage: timm is missing, or it has no such network. What timm would fetch from the hub or read from a folder
            is no name here: a checkpoint may be a stranger's.
    """
    try:
        import timm
    except ImportError as error:
        raise WrongUsage(f"{backbone} needs timm: {install('timm')}") from error
    name = backbone.removeprefix(PREFIX)
    architecture, dot, tag = name.partition(".")
    known = timm.list_models()
    if architecture not in known:
        near = did_you_mean(architecture, known)
        raise WrongUsage(f"timm {timm.__version__} has no network {architecture!r}{near}")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{architecture}.*")]
    if dot and tag not in tags:
        raise WrongUsage(
            f"timm {timm.__version__} has no weights {tag!r} of {architecture}{did_you_mean(tag, tags)}"
        )
    return name


def describe(backbone: str, folder: str | Path | None = None) -> Description:
    """Return what weights of timm say of themselves: those of a folder, else those that the name means.

    Raises:
        WrongUsage: There is no such network, or the folder is of another.
        ValueError: The folder's description can't be read, or pictures can't be prepared so.
    """
    if folder is None:
        return _described(timm_name(backbone), pretrained_cfg(backbone).to_dict())
    told = read_config(backbone, folder)
    above: dict[str, Any] = {key: told[key] for key in _ABOVE if key in told}
    about = told.get("pretrained_cfg", told)
    if not isinstance(about, dict):
        raise _damaged(Path(folder, _CONFIG), "its pretrained_cfg is no mapping")
    return _described(str(folder), {**about, **above})


def pretrained_cfg(backbone: str) -> Any:
    """Return what timm itself knows of the weights that a network's name means."""
    name = timm_name(backbone)
    import timm

    return timm.get_pretrained_cfg(name)


def read_config(backbone: str, folder: str | Path) -> dict[str, Any]:
    """Return what the folder that `timm.models.save_for_hf` has written says of the network in it.

    Raises:
        WrongUsage: It holds another network.
        ValueError: It is no such folder.
    """
    path = Path(folder, _CONFIG)
    told = _told(path)
    there = told["architecture"]
    own = timm_name(backbone).partition(".")[0]
    if there != own:
        raise WrongUsage(
            f"{path} is of {there}, not of {own}: take --model.backbone {PREFIX}{there}"
        )
    args = told.get("model_args") or {}
    if not isinstance(args, dict):
        raise _damaged(path, "its model_args are no mapping")
    others = {
        key: value
        for key, value in args.items()
        if key not in _ARGS and value != _OWN_ARGS.get(key, not value)
    }
    if others:
        raise WrongUsage(
            f"{path} is of a {there} that was built otherwise ({others}): only timm's own can be had"
        )
    return told


def backbone_of(folder: str | Path) -> str:
    """Return the name of the network whose weights a folder holds, with `PREFIX`.

    Raises:
        WrongUsage: The folder does not come from timm, or timm has no such network.
        ValueError: Its description is damaged.
    """
    backbone = f"{PREFIX}{_told(Path(folder, _CONFIG))['architecture']}"
    timm_name(backbone)
    return backbone


def _told(path: Path) -> dict[str, Any]:
    """Return the content of a folder's description, which names an architecture."""
    if not path.is_file():
        raise WrongUsage(
            f"the folder {str(path.parent)!r} has no {_CONFIG}, as timm's `save_for_hf` writes it"
        )
    try:
        told = json.loads(path.read_text("utf-8"))
        told["architecture"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "it names no architecture") from error
    return told


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged, or none of timm's: {why}")


def _described(name: str, told: Mapping[str, Any]) -> Description:
    try:
        size, interpolation = tuple(told["input_size"]), told["interpolation"]
        crop_share, mode = float(told["crop_pct"]), told.get("crop_mode", "center")
        mean, std = (tuple(float(value) for value in told[key]) for key in ("mean", "std"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name} does not say how pictures are prepared: {error!r}") from error
    if (
        len(mean) != 3
        or len(std) != 3
        or not all(map(math.isfinite, mean))
        or not all(0 < v < math.inf for v in std)
    ):
        raise ValueError(
            f"{name} wants pixels of mean {mean} and standard deviation {std}, which can't be had"
        )
    if len(size) != 3 or size[0] != 3 or size[1] != size[2] or type(size[1]) is not int:
        raise ValueError(f"{name} takes pictures of {size}, not of three colours and equal sides")
    if (
        interpolation not in ("bilinear", "bicubic")
        or mode not in _RESIZE
        or not 0 < crop_share <= 1
    ):
        asked = f"interpolation {interpolation}, crop {mode} of {crop_share}"
        raise ValueError(f"{name} wants pictures prepared in a way that is not known here: {asked}")
    resize = "whole" if mode == "squash" and crop_share == 1 else _RESIZE[mode]
    num = told.get("num_classes", 1000)
    return Description(
        *(name, mean, std, size[1], interpolation, crop_share, resize),
        *(told.get("license"), num, _class_names(told, num)),
    )


def _class_names(told: Mapping[str, Any], num: int) -> list[str] | None:
    names, descriptions = told.get("label_names"), told.get("label_descriptions") or {}
    if isinstance(names, list | tuple) and len(names) == num and isinstance(descriptions, dict):
        return [str(descriptions.get(name, name)) for name in names]
    if num == _NUM_IMAGENET and _IMAGENET.search(str(told.get("tag") or "")):
        # timm's rows are in the same order
        return list(models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"])
    return None


def create(
    backbone: str, num_classes: int, image_size: int | None = None, **options: Any
) -> nn.Module:
    """Make timm's network with a head of K classes.

    Args:
        backbone: Its name, with `PREFIX`.
        num_classes: K; 0 for no head.
        image_size: Side of the pictures in pixels, for networks that hold a position of each patch; None for that of
            the weights.
        options: What else `timm.create_model` takes.

    Raises:
        WrongUsage: It is unknown, or can't be had for pictures of this size.
    """
    name, told = timm_name(backbone), pretrained_cfg(backbone)
    import timm

    own = told.input_size[1]
    if not told.fixed_input_size or image_size in (None, own):
        return timm.create_model(name, num_classes=num_classes, **options)
    sized = partial(timm.create_model, name, num_classes=num_classes, img_size=image_size)
    asked = f"pictures of {image_size}x{image_size} pixels"
    told = f"{backbone} can't be had for {asked}: that of its weights is image_size {own}"
    try:
        network = sized(**{**options, "pretrained": False})
    except (
        TypeError,
        AssertionError,
    ) as error:  # it has no such argument, or its windows don't fit
        raise WrongUsage(told) from error
    if not options.get("pretrained"):
        return network
    try:
        return sized(**options)
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        with suppress(RuntimeError):  # weights of another network
            timm.create_model(name, num_classes=num_classes, **options)
            raise WrongUsage(told) from error  # whose positions timm does not resample
        raise


def build_timm(backbone: str, num_classes: int, image_size: int | None = None) -> nn.Module:
    """Make an untrained network, whose head is its last linear layer; nothing is fetched. See `create`.

    Raises:
        WrongUsage: It is unknown, can't be had for this size, doesn't end in one linear head, or shares weights among
            its modules.
    """
    network = create(backbone, num_classes, image_size, pretrained=False)
    _check_parts(network, backbone)
    return network


def _check_parts(network: nn.Module, backbone: str) -> None:
    name = pretrained_cfg(backbone).classifier
    if not isinstance(name, str):
        what = f"it has {len(name)} heads ({', '.join(name)})" if name else "it has no head"
        raise WrongUsage(f"{backbone} is not supported: {what}, not one")
    found = network.get_submodule(name)
    if not isinstance(found, nn.Linear):
        raise WrongUsage(
            f"{backbone} is not supported: it ends in a {type(found).__name__}, not in a linear head"
        )
    if name != head_name(network):
        raise WrongUsage(
            f"{backbone} is not supported: its head {name} is not the last of its linear layers"
        )
    if len([*network.named_parameters(remove_duplicate=False)]) != len([*network.parameters()]):
        raise WrongUsage(
            f"{backbone} is not supported: several of its modules share weights"
        )  # whose stage are they of?
