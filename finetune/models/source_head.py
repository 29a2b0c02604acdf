"""Initializes a head with the rows of a source classifier's head, for classes that it has too."""

import logging
import re
import unicodedata
from collections.abc import Mapping

import torch
from torch import nn

from finetune.models.stages import head, head_name
from finetune.models.weight_files import Pretrained
from finetune.system.file_names import composed
from finetune.system.messages import did_you_mean, shown

log = logging.getLogger(__name__)


def source_head(
    network: nn.Module,
    pretrained: Pretrained | None,
    class_names: list[str],
    mapping: dict[str, str | list[str]] | None = None,
    source_classes: list[str] | None = None,
) -> dict[str, list[str]]:
    """Initialize the head, in place, with the rows of the source classifier's head for the same classes.

    Rows of classes that the source classifier does not have do not change.

    Args:
        network: A network whose head has a row for each of `class_names`.
        pretrained: Weights with the source classifier's head.
        class_names: The classes in the order of the rows.
        mapping: From a class to the source categories to use instead of those with its name. The mean of several rows
            is used.
        source_classes: Names of the rows of the source head, instead of those in the weights.

    Returns:
        For each class the categories whose rows were copied.

    Raises:
        ValueError: The source head is missing or does not fit, or a name in the mapping is unknown.
    """
    if pretrained is None:
        raise ValueError(
            "head_init: source copies rows of a source classifier: pass its file as --weights"
        )
    categories = _source_categories(network, pretrained, source_classes)
    target = head(network)
    weight = pretrained.state[f"{head_name(network)}.weight"]
    # MaxViT's head has no bias
    bias = pretrained.state.get(f"{head_name(network)}.bias", torch.zeros(len(weight)))
    rows_of = _matching_rows(class_names, categories, mapping or {})
    for k, name in enumerate(class_names):
        rows = rows_of[name]
        if rows:
            with torch.no_grad():
                target.weight[k] = weight[rows].double().mean(0)
                target.bias[k] = bias[rows].double().mean()
    matched = {name: [categories[row] for row in rows] for name, rows in rows_of.items()}
    lines = (
        f"{name} from {' + '.join(sources) or 'nothing: random'}"
        for name, sources in matched.items()
    )
    log.info("rows of the head: %s", shown("; ".join(lines)))
    return matched


def _source_categories(
    network: nn.Module, pretrained: Pretrained, source_classes: list[str] | None
) -> list[str]:
    """Return the name of each row of the source head. For the arguments and errors see `source_head`."""
    categories = source_classes or pretrained.class_names
    if not categories:
        hint = "pass a text file with a name for each row, --model.source_classes FILE"
        raise ValueError(f"{pretrained.origin} does not name its classes: {hint}")
    num_features = head(network).in_features
    weight = pretrained.state.get(f"{head_name(network)}.weight")
    if weight is None or weight.shape[1:] != (num_features,):
        there = "none" if weight is None else f"one of shape {tuple(weight.shape)}"
        raise ValueError(
            f"head_init: source copies a head of {num_features} features, and {pretrained.origin} has {there}: pass "
            "weights of the same network with their head, or another head_init"
        )
    if len(categories) != len(weight):
        raise ValueError(
            f"the head of {pretrained.origin} has {len(weight)} classes, and there are {len(categories)} names for "
            "them: --model.source_classes takes a file with a name for each row"
        )
    return categories


def _matching_rows(
    class_names: list[str], categories: list[str], mapping: Mapping[str, str | list[str]]
) -> dict[str, list[int]]:
    """Return the rows of the source head for each class, sorted; [] if it has none. For errors see `source_head`."""
    mapping = {composed(name): category for name, category in mapping.items()}
    if unknown := mapping.keys() - set(map(composed, class_names)):
        name = next(iter(unknown))
        raise ValueError(
            f"the mapping names an unknown class {name!r}{did_you_mean(name, class_names)}"
        )
    matching: dict[str, list[int]] = {}
    for name in class_names:
        sources = mapping.get(composed(name), name)
        matches: set[int] = set()
        for category in [sources] if isinstance(sources, str) else sources:
            rows = _rows(category, categories)
            if not rows and composed(name) in mapping:
                raise ValueError(
                    f"no source category is called {category!r}{did_you_mean(category, categories)}"
                )
            matches.update(rows)
        matching[name] = sorted(matches)
    return matching


def _rows(name: str, categories: list[str]) -> list[int]:
    """Return the indices of the categories with this name; if there is none, ignore case and separators."""
    # exact names first: ImageNet has both Cardigan and cardigan
    exact = [index for index, category in enumerate(categories) if category == name]
    folded = [
        re.sub(r"[\s_-]", "", unicodedata.normalize("NFKC", n).casefold())
        for n in [name, *categories]
    ]
    return exact or [index for index, category in enumerate(folded[1:]) if category == folded[0]]
