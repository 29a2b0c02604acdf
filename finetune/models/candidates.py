"""Networks to choose from: `--backbone auto` and lists of names, and whether their weights can be had."""

import importlib.util
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import torch
from torchvision import models

from finetune.models.backbones import OWN
from finetune.models.timm_backbones import is_timm, pretrained_cfg

AUTO = "auto"
DEFAULT = "DEFAULT"
# Small to medium networks whose code and weights have permissive licences, with the size of their weights, in the order
# of that. tests/models/test_candidates.py holds licences and sizes against torchvision and timm.
BUILT_IN = {
    "efficientnet_b0": 20,  # MB
    "timm/mobilenetv4_conv_medium.e500_r256_in1k": 39,
    "resnet18": 45,
    "timm/convnext_nano.in12k_ft_in1k": 62,
    "timm/vit_small_patch16_224.augreg_in21k_ft_in1k": 88,
    "resnet50": 98,
    "convnext_tiny": 109,
}
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # as timm names them on the hub
_PATIENCE = 5.0  # seconds to reach a server


class Candidate(NamedTuple):
    """A network and the weights that it would start from, as `model.backbone` and `model.weights` take them."""

    backbone: str
    weights: str = DEFAULT


def is_choice(backbone: object) -> bool:
    """Return whether a value of `model.backbone` leaves the choice among several networks to the data."""
    return isinstance(backbone, str) and (backbone == AUTO or "," in backbone)


def built_in() -> list[Candidate]:
    """Return the candidates of `auto`: those of timm only if it is installed."""
    has_timm = importlib.util.find_spec("timm") is not None
    return [Candidate(name) for name in BUILT_IN if has_timm or not is_timm(name)]


def names(candidates: Sequence[Candidate]) -> list[str]:
    """Return a name for each candidate: its network, with the weights if several have the same network."""
    backbones = [candidate.backbone for candidate in candidates]
    return [
        c.backbone if backbones.count(c.backbone) == 1 else f"{c.backbone}={c.weights}"
        for c in candidates
    ]


def cached_file(candidate: Candidate) -> Path | None:
    """Return the file of published weights on this machine; None if there is none."""
    if is_timm(candidate.backbone):
        from huggingface_hub import try_to_load_from_cache  # timm brings it

        hub_id = pretrained_cfg(candidate.backbone).hf_hub_id
        files = [try_to_load_from_cache(hub_id, name) for name in _HUB_FILES] if hub_id else []
        return next((Path(file) for file in files if isinstance(file, str)), None)
    path = Path(torch.hub.get_dir(), "checkpoints", _url(candidate).rpartition("/")[2])
    return path if path.is_file() else None


def is_published(candidate: Candidate) -> bool:
    """Return whether the weights are a name, such as DEFAULT, not a path."""
    if is_timm(candidate.backbone):
        return candidate.weights == DEFAULT
    return bool(_url(candidate))


def server(candidate: Candidate) -> str:
    """Return the address of the server that published weights are downloaded from; "" if downloads are turned off."""
    if is_timm(candidate.backbone):
        from huggingface_hub import constants

        return "" if constants.HF_HUB_OFFLINE else constants.ENDPOINT
    parts = urlsplit(_url(candidate))
    return f"{parts.scheme}://{parts.netloc}"


def is_reachable(address: str) -> bool:
    """Return whether a server answers, as quickly as that can be found out: the hub's client would try for a minute."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, method="HEAD"), timeout=_PATIENCE
        ):
            return True
    except urllib.error.HTTPError:  # an answer all the same
        return True
    except (OSError, ValueError):
        return False


def _url(candidate: Candidate) -> str:
    """Return where torchvision's weights are published; "" for a file."""
    if candidate.backbone in OWN or candidate.backbone not in models.list_models(module=models):
        return ""
    members = models.get_model_weights(candidate.backbone).__members__
    found = members.get(candidate.weights.rpartition(".")[2])
    return found.url if found else ""
