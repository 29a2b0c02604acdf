"""The networks that a fit can train, with size and licence, and whether their weights are on this machine.

`network_list.json` next to this module has the networks of torchvision and timm. `make networks` writes it, since
importing these libraries takes seconds and building their networks minutes. This module imports neither them nor torch.
"""

import importlib.util
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
# Names of timm's files of weights, in folders and on the hub, the preferred one first.
TIMM_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class ListedNetwork:
    """A network with its default weights.

    Attributes:
        name: Value of `model.backbone`. Those of timm begin with `timm/` and name their weights.
        parameters: Number of parameters, with a head of 1,000 classes.
        megabytes: Size of the published weights in MB; None if none are published.
        image_size: Side in pixels of the images that the weights were trained on.
        licence: Licence of the weights; "" if it is not stated.
        location: File name in torch's cache, or repository on the Hugging Face hub; "" if none are published.
    """

    name: str
    parameters: int
    megabytes: float | None
    image_size: int
    licence: str
    location: str

    @property
    def is_of_timm(self) -> bool:
        return self.name.startswith("timm/")

    def is_local(self) -> bool:
        """Return whether the published weights are in the cache of torch or of the Hugging Face hub."""
        if not self.location:
            return False
        if not self.is_of_timm:
            return (torch_cache() / self.location).is_file()
        return _is_in_hub_cache(hub_cache(), self.location)

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "name": self.name,
            "parameters": self.parameters,
            "megabytes": self.megabytes,
            "image_size": self.image_size,
            "licence": self.licence,
            "is_local": self.is_local(),
        }


def torch_cache() -> Path:
    """Return the folder in which torch caches weights. As `torch.hub.get_dir`."""
    home = os.environ.get("TORCH_HOME") or f"{_cache_home()}/torch"
    return Path(home).expanduser() / "hub" / "checkpoints"


def hub_cache() -> Path:
    """Return the folder in which the client of the Hugging Face hub caches files. As `huggingface_hub.constants`."""
    home = os.environ.get("HF_HOME") or f"{_cache_home()}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    folder = named or f"{home}/hub"
    return Path(os.path.expandvars(folder)).expanduser()


def _cache_home() -> str:
    return os.environ.get("XDG_CACHE_HOME") or "~/.cache"


def _is_in_hub_cache(folder: Path, repository: str) -> bool:
    repo = folder / f"models--{repository.replace('/', '--')}"
    try:
        commit = (repo / "refs/main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return False
    return any((repo / "snapshots" / commit / name).is_file() for name in TIMM_WEIGHT_FILES)


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return content


def versions() -> dict[str, str]:
    """Return the versions of torchvision and timm that the list was made with."""
    return dict(_content()["versions"])


def has_timm() -> bool:
    """Return whether timm is installed."""
    return importlib.util.find_spec("timm") is not None


def listed_networks() -> list[ListedNetwork]:
    """Return all networks of the list: finetune's own, those of torchvision, those of timm."""
    return [ListedNetwork(*row) for row in _content()["networks"]]
