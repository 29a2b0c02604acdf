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
    mapping: Mapping[str, str | list[str]] | None = None,
    source_classes: list[str] | None = None,
) -> dict[str, list[str]]:
    """Initialize the rows of the head, in place, whose classes the source classifier of `pretrained` has too.

    Args:
        mapping: From a class to the source categories to use instead of those with its name, as the mean of their rows.
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
    categories = source_classes or pretrained.class_names or []
    target = head(network)
    weight = pretrained.state.get(f"{head_name(network)}.weight", torch.empty(0))
    if weight.shape != (len(categories), target.in_features):
        raise ValueError(
            f"head_init: source copies a head of {target.in_features} features with a name for each row, and "
            f"{pretrained.origin} has one of shape {tuple(weight.shape)} and {len(categories)} names: pass weights of "
            "the same network with their head, and --model.source_classes FILE if they do not name their classes"
        )
    # MaxViT's head has no bias
    bias = pretrained.state.get(f"{head_name(network)}.bias", torch.zeros(len(weight)))
    mapping = {composed(name): sources for name, sources in (mapping or {}).items()}
    if unknown := mapping.keys() - set(map(composed, class_names)):
        name = next(iter(unknown))
        raise ValueError(
            f"the mapping names an unknown class {name!r}{did_you_mean(name, class_names)}"
        )
    matched: dict[str, list[str]] = {}
    for k, name in enumerate(class_names):
        rows = _rows(name, categories)
        if composed(name) in mapping:
            rows = _mapped_rows(mapping[composed(name)], categories)
        matched[name] = [categories[row] for row in rows]
        if rows:
            with torch.no_grad():
                target.weight[k] = weight[rows].double().mean(0)
                target.bias[k] = bias[rows].double().mean()
    lines = (
        f"{name} from {' + '.join(rows) or 'nothing: random'}" for name, rows in matched.items()
    )
    log.info("rows of the head: %s", shown("; ".join(lines)))
    return matched


def _mapped_rows(sources: str | list[str], categories: list[str]) -> list[int]:
    """Return the sorted indices of all categories that a mapping names. An unknown one is a ValueError."""
    rows = set[int]()
    for source in [sources] if isinstance(sources, str) else sources:
        found = _rows(source, categories)
        if not found:
            raise ValueError(
                f"no source category is called {source!r}{did_you_mean(source, categories)}"
            )
        rows.update(found)
    return sorted(rows)


def _rows(name: str, categories: list[str]) -> list[int]:
    """Return the indices of the categories with this name; if there is none, ignore case and separators."""
    # exact names first: ImageNet has both Cardigan and cardigan
    exact = [index for index, category in enumerate(categories) if category == name]
    return exact or [
        i for i, category in enumerate(categories) if _folded(category) == _folded(name)
    ]


def _folded(name: str) -> str:
    return re.sub(r"[\s_-]", "", unicodedata.normalize("NFKC", name).casefold())
