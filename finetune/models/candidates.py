"""Candidate networks of `--backbone auto` and of lists of names, and whether their weights are available."""

import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import torch
from torchvision import models

from finetune.models.backbones import SMALL_NETWORKS
from finetune.models.timm_backbones import TIMM_WEIGHT_FILES, has_timm, is_timm, pretrained_cfg

AUTO = "auto"
DEFAULT = "DEFAULT"
# Small to medium networks whose code and weights have permissive licences, sorted by the size of their weights.
# tests/unit/test_networks.py checks licences and sizes against torchvision and timm.
BUILT_IN = {
    "efficientnet_b0": 20,  # MB
    "timm/mobilenetv4_conv_medium.e500_r256_in1k": 39,
    "resnet18": 45,
    "timm/convnext_nano.in12k_ft_in1k": 62,
    "timm/vit_small_patch16_224.augreg_in21k_ft_in1k": 88,
    "resnet50": 98,
    "convnext_tiny": 109,
}
_TIMEOUT = 5.0  # seconds to reach a server


class Candidate(NamedTuple):
    """A network and its initial weights, as values of `model.backbone` and `model.weights`."""

    backbone: str
    weights: str = DEFAULT


def is_choice(backbone: object) -> bool:
    """Return whether a value of `model.backbone` is `auto` or a list of names, so that a fit has to choose one."""
    return isinstance(backbone, str) and (backbone == AUTO or "," in backbone)


def built_in_candidates() -> list[Candidate]:
    """Return the candidates of `auto`. Those of timm are included only if it is installed."""
    return [Candidate(name) for name in BUILT_IN if has_timm() or not is_timm(name)]


def candidate_names(candidates: Sequence[Candidate]) -> list[str]:
    """Return a name for each candidate: its network, and its weights too if several candidates have that network."""
    backbones = [candidate.backbone for candidate in candidates]
    return [
        c.backbone if backbones.count(c.backbone) == 1 else f"{c.backbone}={c.weights}"
        for c in candidates
    ]


def cached_file(candidate: Candidate) -> Path | None:
    """Return the cached file of published weights; None if it is not on this machine."""
    if is_timm(candidate.backbone):
        from huggingface_hub import try_to_load_from_cache  # a dependency of timm

        hub_id = pretrained_cfg(candidate.backbone).hf_hub_id
        names = TIMM_WEIGHT_FILES if hub_id else ()
        files = [try_to_load_from_cache(hub_id, name) for name in names]
        return next((Path(file) for file in files if isinstance(file, str)), None)
    path = Path(torch.hub.get_dir(), "checkpoints", _url(candidate).rpartition("/")[2])
    return path if path.is_file() else None


def is_published(candidate: Candidate) -> bool:
    """Return whether the weights are a published name, such as DEFAULT, and not a path."""
    if is_timm(candidate.backbone):
        return candidate.weights == DEFAULT
    return bool(_url(candidate))


def weights_server(candidate: Candidate) -> str:
    """Return the address of the server of published weights; "" if the hub is set to offline."""
    if is_timm(candidate.backbone):
        from huggingface_hub import constants

        return "" if constants.HF_HUB_OFFLINE else constants.ENDPOINT
    parts = urlsplit(_url(candidate))
    return f"{parts.scheme}://{parts.netloc}"


def is_reachable(address: str) -> bool:
    """Return whether a server answers within a few seconds. The hub's client would retry for a minute."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, method="HEAD"), timeout=_TIMEOUT
        ):
            return True
    except urllib.error.HTTPError:  # also an answer
        return True
    except (OSError, ValueError):
        return False


def _url(candidate: Candidate) -> str:
    """Return the URL of published weights of torchvision; "" if they are a file."""
    if candidate.backbone in SMALL_NETWORKS or candidate.backbone not in models.list_models(
        module=models
    ):
        return ""
    published = models.get_model_weights(candidate.backbone).__members__
    weights = published.get(candidate.weights.rpartition(".")[2])
    return weights.url if weights else ""
