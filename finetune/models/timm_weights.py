"""Weights of timm: from its hub, from a folder as timm writes it, or from a file that any version of it has written."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.models.misfits import advice
from finetune.models.timm_backbones import (
    Description,
    create,
    describe,
    pretrained_cfg,
    read_config,
)
from finetune.models.weight_files import Pretrained, check_one, read_file
from finetune.system.messages import WrongUsage, reason

_FILES = ("model.safetensors", "pytorch_model.bin")  # as `save_for_hf` names them
_MISSING = re.compile(r"Missing keys \((.+?)\)")


def read_timm(weights: str, backbone: str, image_size: int | None = None) -> Pretrained:
    """Read weights for a network of timm, as its own code brings them to today's names and the network's size.

    Args:
        weights: `DEFAULT`, those that the name means, which are fetched; a folder; a file.
        backbone: The network.
        image_size: Side of the pictures in pixels, where the network holds positions; None for that of the weights.

    Raises:
        OSError: They can't be fetched.
        ValueError: They are not of this network, or none.
    """
    path = Path(weights)
    if weights == "DEFAULT":
        return _published(backbone, image_size)
    if path.is_dir():
        about = describe(backbone, path)
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if file is None:
            raise FileNotFoundError(f"there is neither {' nor '.join(_FILES)} in {weights}")
        pool = (read_config(backbone, path).get("model_args") or {}).get("global_pool")
        return _arranged(read_file(file), backbone, image_size, about, pool)
    if path.is_file():
        return _arranged(read_file(path), backbone, image_size)
    if path.suffix or len(path.parts) > 1:
        raise FileNotFoundError(f"there is no weights file or folder {weights}")
    hint = f"timm's others are named in the backbone, as {backbone.partition('.')[0]}.TAG"
    raise WrongUsage(f"{weights!r} is neither DEFAULT nor a file or folder; {hint}")


def _published(backbone: str, image_size: int | None) -> Pretrained:
    about = describe(backbone)
    try:
        with _quiet_hub():
            source = create(backbone, about.num_classes, image_size, pretrained=True)
    except WrongUsage:
        raise
    except Exception as error:  # the hub's clients have errors of many kinds
        hint = "give a file or a folder of timm's with --model.weights, or null for none"
        raise OSError(f"can't get the weights of {backbone} ({reason(error)}); {hint}") from error
    return _pretrained(source, about, str(about.name), about.class_names)


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Leave out what the hub's client says of each of its tries, two dozen lines: what came of them is told."""
    from huggingface_hub.utils import logging  # which timm brings

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _arranged(
    given: Pretrained,
    backbone: str,
    image_size: int | None,
    about: Description | None = None,
    pool: str | None = None,
) -> Pretrained:
    """Return weights of a file with the names and shapes that the network has now."""
    check_one(given)
    rows = given.state.get(f"{pretrained_cfg(backbone).classifier}.weight")
    num = 0 if rows is None else len(rows)
    # the rows are what they are
    told = {"state_dict": given.state, "num_classes": num, "label_offset": None}
    try:
        with _missing_keys() as missing:
            source = create(backbone, num, image_size, pretrained=True, pretrained_cfg_overlay=told)
    except WrongUsage:
        raise
    except (
        Exception
    ) as error:  # torch's for names and shapes; timm's own, of what it arranges, are of many kinds
        to_do = f". {advice(given.state, backbone)}" if isinstance(error, RuntimeError) else ""
        raise ValueError(
            f"{given.origin} does not fit {backbone}: {_short(reason(error))}{to_do}"
        ) from error
    # Published weights of ConvNeXt (FCMAE) and DaViT (Florence-2) end before the head's norm.
    expected = (f"{pretrained_cfg(backbone).classifier}.", "head.norm.")
    if lacking := [key for key in missing if not key.startswith(expected)]:
        to_do = f". {advice(given.state, backbone)}"
        raise ValueError(
            f"{given.origin} does not fit {backbone}: it lacks {_short(', '.join(lacking))}{to_do}"
        )
    if pool is not None and (own := _pool(source)) not in (None, pool):
        raise WrongUsage(
            f"{given.origin} is of a network that pools by {pool}, {backbone} by {own}"
        )
    if about is not None:
        return _pretrained(source, about, given.origin, about.class_names)
    return replace(given, state=source.state_dict())


@contextmanager
def _missing_keys() -> Iterator[list[str]]:
    """Collect what timm finds no weights for: where a network may lack some, it says so in its log alone."""
    logger, missing = logging.getLogger("timm.models._builder"), list[str]()
    level, shown_from = logger.level, logger.getEffectiveLevel()

    def look(record: logging.LogRecord) -> bool:
        if told := _MISSING.match(record.getMessage()):
            missing.extend(told[1].split(", "))
        return record.levelno >= shown_from

    logger.addFilter(look)
    logger.setLevel(logging.INFO)
    try:
        yield missing
    finally:
        logger.setLevel(level)
        logger.removeFilter(look)


def _pretrained(
    source: nn.Module, about: Description, origin: str, class_names: list[str] | None
) -> Pretrained:
    mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in (about.mean, about.std))
    return Pretrained(source.state_dict(), class_names, origin, mean, std)


def _pool(network: nn.Module) -> str | None:
    """Return how a network pools, where it says so."""
    for module in (network, getattr(network, "head", None)):
        pool: Any = getattr(module, "global_pool", None)
        if isinstance(pool, str) or hasattr(pool, "pool_type"):
            return pool if isinstance(pool, str) else pool.pool_type
    return None


def _short(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]} …"
