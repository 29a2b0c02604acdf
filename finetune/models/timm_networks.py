"""Networks of timm and their weights: published ones, folders of timm, and files; see `library.Library`."""

import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import nn

from finetune.models.hub import CONFIG_FILE, quiet_hub
from finetune.models.library import (
    DEFAULT,
    Description,
    ListedNetwork,
    Pretrained,
    Published,
    grey_levels,
)
from finetune.models.network_names import PREFIX
from finetune.models.stages import head, head_name
from finetune.models.weight_files import check_single_network, read_file
from finetune.system.messages import WrongUsage, did_you_mean, reason

# Names of timm's files of weights, in folders and on the hub, the preferred one first.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_MAX_CONFIG = 50_000_000  # bytes; that of ImageNet-21k's names has 3 MB
# Arguments with which the network of a folder may have been built, next to those of timm's own network.
_ALLOWED_ARGS = {"num_classes", "img_size"}
_MOST_CHARACTERS = 200  # of a library's error message
_MISSING = re.compile(r"Missing keys \((.+?)\)")

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class _Preparation(msgspec.Struct):
    """The description of weights, in timm's words. Other values than these are not supported."""

    input_size: tuple[Literal[3], int, int]
    interpolation: Literal["bilinear", "bicubic"]
    crop_pct: Annotated[float, msgspec.Meta(gt=0, le=1)]
    mean: tuple[float, float, float]
    std: tuple[_Positive, _Positive, _Positive]
    crop_mode: Literal["center", "squash"] = "center"
    license: str | None = None

    def __post_init__(self) -> None:
        if self.input_size[1] != self.input_size[2]:
            raise ValueError("only square images are supported")


class _Config(msgspec.Struct):
    """The config of a folder, as `timm.models.save_for_hf` writes it."""

    architecture: str
    pretrained_cfg: dict[str, Any]
    model_args: dict[str, Any] | None = None


def has_timm() -> bool:
    """Return whether timm is installed."""
    return importlib.util.find_spec("timm") is not None


def timm_name(backbone: str) -> str:
    """Return timm's name of a network: `convnext_nano.in12k_ft_in1k` for `timm/convnext_nano.in12k_ft_in1k`.

    timm also accepts addresses on the hub and folders as names. They are errors here, since the name may come from an
    untrusted checkpoint.

    Raises:
        WrongUsage: timm has no such network or weights.
    """
    import timm

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


def pretrained_cfg(backbone: str) -> Any:
    """Return timm's own description of the published weights of a network."""
    name = timm_name(backbone)
    import timm

    return timm.get_pretrained_cfg(name)


def check_name(backbone: str) -> None:
    timm_name(backbone)


def describe(backbone: str, weights: str = DEFAULT) -> Description:
    name = timm_name(backbone)
    config = pretrained_cfg(backbone).to_dict()
    if weights != DEFAULT:
        name = weights
        config = _config_of(backbone, weights).pretrained_cfg
    try:
        about = msgspec.convert(config, _Preparation)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name} needs an unsupported preparation of images: {error}") from error
    is_whole = about.crop_mode == "squash" and about.crop_pct == 1
    resize = {"center": "shorter_side", "squash": "squash"}[about.crop_mode]
    preparation = {
        "image_size": about.input_size[1],
        "resize": "whole" if is_whole else resize,
        "interpolation": about.interpolation,
        "crop_share": about.crop_pct,
    }
    return Description(name, about.mean, about.std, about.input_size[1], preparation, about.license)


def _config_of(backbone: str, folder: str) -> _Config:
    """Return the config of a folder, after a check that it is of this network."""
    path = Path(folder, CONFIG_FILE)
    config = _load_config(path)
    expected = timm_name(backbone).partition(".")[0]
    if config.architecture != expected:
        hint = f": pass --model.backbone {PREFIX}{config.architecture}"
        raise WrongUsage(f"{path} is of {config.architecture}, not of {expected}{hint}")
    args = config.model_args or {}
    own: dict[str, Any] = {"in_chans": 3}
    if "global_pool" in args:
        own["global_pool"] = _pool(backbone) or args["global_pool"]
    others = {
        key: value
        for key, value in args.items()
        if key not in _ALLOWED_ARGS and (key not in own or value != own[key])
    }
    if others:
        raise WrongUsage(
            f"{path} is of a {expected} with other arguments ({others}): only timm's own networks are supported"
        )
    return config


def _pool(backbone: str) -> str | None:
    """Return the global pooling of a network; None if the network does not state it."""
    with torch.device("meta"):
        network = create(backbone, 2)
    for module in (network, getattr(network, "head", None)):
        pool: Any = getattr(module, "global_pool", None)
        pool = getattr(pool, "pool_type", pool)
        if isinstance(pool, str):
            return pool
    return None


def backbone_of(folder: str) -> str:
    """Return the name of the network in a folder of weights, with `PREFIX`.

    Raises:
        WrongUsage: The folder was not written by timm, or timm has no such network.
        ValueError: Its config is damaged.
    """
    backbone = PREFIX + _load_config(Path(folder, CONFIG_FILE)).architecture
    timm_name(backbone)
    return backbone


def _load_config(path: Path) -> _Config:
    if not path.is_file():
        raise WrongUsage(
            f"the folder {str(path.parent)!r} has no {CONFIG_FILE}, as timm's `save_for_hf` writes it"
        )
    try:
        if path.stat().st_size > _MAX_CONFIG:
            raise ValueError(f"it has more than {_MAX_CONFIG:,} bytes")
        return msgspec.json.decode(path.read_bytes(), type=_Config)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or not written by timm: {error}") from error


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
    try:
        return timm.create_model(name, num_classes=num_classes, img_size=image_size, **options)
    # no argument img_size, windows that do not fit, or position embeddings that timm does not resample
    except (TypeError, AssertionError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "size mismatch" not in str(error):
            raise
        raise WrongUsage(
            f"{backbone} does not support images of {image_size}x{image_size} pixels with these weights: "
            f"those that timm publishes are for image_size {own_size}"
        ) from error


def build(backbone: str, num_classes: int, image_size: int | None) -> nn.Module:
    network = create(backbone, num_classes, image_size, pretrained=False)
    name = pretrained_cfg(backbone).classifier
    is_linear = isinstance(name, str) and isinstance(network.get_submodule(name), nn.Linear)
    if not is_linear or name != head_name(network):
        raise WrongUsage(
            f"{backbone} is not supported: it does not end in one linear head, but in {name or 'none'}"
        )
    # A shared weight would belong to several stages.
    if len([*network.named_parameters(remove_duplicate=False)]) != len([*network.parameters()]):
        raise WrongUsage(f"{backbone} is not supported: several of its modules share weights")
    return network


def published(backbone: str, weights: str) -> Published | None:
    if weights != DEFAULT:
        return None
    from huggingface_hub import constants, try_to_load_from_cache  # a dependency of timm

    hub_id = pretrained_cfg(backbone).hf_hub_id
    files = [try_to_load_from_cache(hub_id, name) for name in WEIGHT_FILES] if hub_id else []
    file = next((Path(file) for file in files if isinstance(file, str)), None)
    return Published(file, "" if constants.HF_HUB_OFFLINE else constants.ENDPOINT)


def read_published(backbone: str, weights: str, image_size: int | None) -> Pretrained:
    about = describe(backbone)
    cached = published(backbone, weights)
    if cached is not None and cached.file is not None:  # timm would ask the hub for a newer one
        read = replace(read_file(cached.file), origin=about.name)
        return _described(convert(read, backbone, image_size), about)
    num_classes = pretrained_cfg(backbone).num_classes
    try:
        with quiet_hub():
            source = create(backbone, num_classes, image_size, pretrained=True)
    except WrongUsage:
        raise
    except Exception as error:  # the hub's client raises errors of many types
        hint = "pass a file or a folder of timm's with --model.weights, or null for none"
        raise OSError(f"cannot get the weights of {backbone} ({reason(error)}); {hint}") from error
    return _described(Pretrained(source.state_dict(), about.name), about)


def _described(pretrained: Pretrained, about: Description) -> Pretrained:
    return replace(pretrained, mean=grey_levels(about.mean), std=grey_levels(about.std))


def convert(pretrained: Pretrained, backbone: str, image_size: int | None) -> Pretrained:
    check_single_network(pretrained)
    with torch.device("meta"):
        in_features = head(create(backbone, 2)).in_features
    name = f"{pretrained_cfg(backbone).classifier}."
    state = pretrained.state
    rows = state.get(f"{name}weight")
    if rows is None or rows.shape[1:] != (in_features,):  # none, or one over several stages
        state = {key: value for key, value in state.items() if not key.startswith(name)}
    num = len(rows) if rows is not None and f"{name}weight" in state else 0
    # Without an offset timm keeps all rows of the head.
    overlay = {"state_dict": state, "num_classes": num, "label_offset": None}
    try:
        with _missing_keys() as missing:
            source = create(
                backbone, num, image_size, pretrained=True, pretrained_cfg_overlay=overlay
            )
    except WrongUsage:
        raise
    except Exception as error:  # timm's converters raise errors of many types
        # without the heading of `load_state_dict`
        message = re.sub(
            r"^Error\(s\) in loading state_dict for \w+: (.*?)\.?$", r"\1", reason(error)
        )
        raise ValueError(
            f"{pretrained.origin} does not fit {backbone}: {message[:_MOST_CHARACTERS]}"
        ) from error
    # Published weights of ConvNeXt (FCMAE) and DaViT (Florence-2) end before the head's norm.
    missing = [key for key in missing if not key.startswith((name, "head.norm."))]
    if missing:
        lacking = ", ".join(missing)[:_MOST_CHARACTERS]
        raise ValueError(f"{pretrained.origin} does not fit {backbone}: it lacks {lacking}")
    return replace(pretrained, state=source.state_dict())


@contextmanager
def _missing_keys() -> Iterator[list[str]]:
    """Collect the names of parameters without weights. For some networks timm reports them only in its log."""
    logger = logging.getLogger("timm.models._builder")
    missing = list[str]()
    level = logger.level
    shown_from = logger.getEffectiveLevel()

    def collect(record: logging.LogRecord) -> bool:
        match = _MISSING.match(record.getMessage())
        if match:
            missing.extend(match[1].split(", "))
        return record.levelno >= shown_from

    logger.addFilter(collect)
    logger.setLevel(logging.INFO)
    try:
        yield missing
    finally:
        logger.setLevel(level)
        logger.removeFilter(collect)


def listed() -> Iterator[ListedNetwork]:
    if not has_timm():
        return
    import timm

    for name in timm.list_pretrained():
        config = timm.get_pretrained_cfg(name)
        if config.hf_hub_id:
            yield ListedNetwork(PREFIX + name, config.input_size[1], config.license or "")


def num_parameters(backbone: str) -> int | None:
    try:
        with torch.device("meta"):
            network = build(backbone, 1000, None)
    except WrongUsage:
        return None
    return sum(parameter.numel() for parameter in network.parameters())
