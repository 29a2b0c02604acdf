"""Weights for networks of timm: from the hub, from a folder that timm has written, or from a file of any version."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from finetune.models.backbones import grey_levels
from finetune.models.hub import quiet_hub
from finetune.models.timm_backbones import (
    TIMM_WEIGHT_FILES,
    Description,
    create,
    describe,
    pretrained_cfg,
    read_config,
)
from finetune.models.weight_files import Pretrained, check_single_network, read_file
from finetune.system.messages import NotFound, WrongUsage, reason

_MOST_CHARACTERS = 200  # of a library's error message
_MISSING = re.compile(r"Missing keys \((.+?)\)")


def read_timm(weights: str, backbone: str, image_size: int | None = None) -> Pretrained:
    """Read weights for a network of timm. timm's own code converts them to current names and to the image size.

    Args:
        weights: `DEFAULT` to download the published weights; else a folder or a file.
        backbone: The name of the network.
        image_size: Side of the images in pixels, for networks with position embeddings; None for that of the weights.

    Raises:
        OSError: The weights can't be downloaded, or there is no such file.
        WrongUsage: `weights` is none of the three, or belongs to a network with other arguments than timm's.
        ValueError: The file holds no weights, or not those of this network.
    """
    path = Path(weights)
    if weights == "DEFAULT":
        return _download(backbone, image_size)
    if path.is_dir():
        about = describe(backbone, path)
        file = next((path / name for name in TIMM_WEIGHT_FILES if (path / name).is_file()), None)
        if file is None:
            raise FileNotFoundError(
                f"there is neither {' nor '.join(TIMM_WEIGHT_FILES)} in {weights}"
            )
        pool = (read_config(backbone, path).get("model_args") or {}).get("global_pool")
        return _convert(read_file(file), backbone, image_size, about, pool)
    check_timm_weights(weights, backbone)
    return _convert(read_file(path), backbone, image_size)


def check_timm_weights(weights: str, backbone: str) -> None:
    """Check that weights are `DEFAULT`, a folder or a file, without reading them.

    Args:
        weights: As `read_timm` takes it.
        backbone: The name of the network.

    Raises:
        NotFound: There is no such file or folder.
        WrongUsage: `weights` is none of the three.
    """
    path = Path(weights)
    if weights == "DEFAULT" or path.exists():
        return
    if path.suffix or len(path.parts) > 1:
        raise NotFound(f"there is no weights file or folder {weights}")
    hint = f"select other weights of timm in the backbone, as {backbone.partition('.')[0]}.TAG"
    raise WrongUsage(f"{weights!r} is neither DEFAULT nor a file or folder; {hint}")


def _download(backbone: str, image_size: int | None) -> Pretrained:
    about = describe(backbone)
    try:
        with quiet_hub():
            source = create(backbone, about.num_classes, image_size, pretrained=True)
    except WrongUsage:
        raise
    except Exception as error:  # the hub's client raises errors of many types
        hint = "pass a file or a folder of timm's with --model.weights, or null for none"
        raise OSError(f"cannot get the weights of {backbone} ({reason(error)}); {hint}") from error
    return _pretrained(source, about, about.name)


def _convert(
    pretrained: Pretrained,
    backbone: str,
    image_size: int | None,
    about: Description | None = None,
    pool: str | None = None,
) -> Pretrained:
    """Return weights of a file with the names and shapes of the current network.

    Args:
        pretrained: The weights as read.
        backbone: The name of the network.
        image_size: See `read_timm`.
        about: The description of the weights, if the folder of the file has one.
        pool: The global pooling of the network that the weights belong to; None if it is unknown.
    """
    check_single_network(pretrained)
    head = f"{pretrained_cfg(backbone).classifier}."
    state = pretrained.state
    if pretrained.has_wide_head:  # timm's network has another one
        state = {name: value for name, value in state.items() if not name.startswith(head)}
    rows = state.get(f"{head}weight")
    num = 0 if rows is None else len(rows)
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
        raise ValueError(
            f"{pretrained.origin} does not fit {backbone}: {_short(_without_heading(reason(error)))}"
        ) from error
    # Published weights of ConvNeXt (FCMAE) and DaViT (Florence-2) end before the head's norm.
    may_miss = (head, "head.norm.")
    if missing := [key for key in missing if not key.startswith(may_miss)]:
        raise ValueError(
            f"{pretrained.origin} does not fit {backbone}: it lacks {_short(', '.join(missing))}"
        )
    if pool is not None and (own := _pool(source)) not in (None, pool):
        raise WrongUsage(
            f"{pretrained.origin} is of a network that pools by {pool}, {backbone} by {own}"
        )
    if about is not None:
        described = _pretrained(source, about, pretrained.origin)
        return replace(described, licence=pretrained.licence)
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


def _pretrained(source: nn.Module, about: Description, origin: str) -> Pretrained:
    return Pretrained(
        state=source.state_dict(),
        class_names=about.class_names,
        origin=origin,
        mean=grey_levels(about.mean),
        std=grey_levels(about.std),
    )


def _pool(network: nn.Module) -> str | None:
    """Return the global pooling of a network; None if the network does not state it."""
    for module in (network, getattr(network, "head", None)):
        pool: Any = getattr(module, "global_pool", None)
        if isinstance(pool, str) or hasattr(pool, "pool_type"):
            return pool if isinstance(pool, str) else pool.pool_type
    return None


def _without_heading(text: str) -> str:
    """Return a message of `load_state_dict` without its heading and its last full stop; others unchanged."""
    return re.sub(r"^Error\(s\) in loading state_dict for \w+: (.*?)\.?$", r"\1", text)


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} …"
