"""Writes `finetune/models/network_list.json`: the networks of torchvision and timm that a fit can train.

`make networks` runs it, in some minutes; tests/models/test_network_list.py compares the list with both libraries.
"""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import timm
import torch
import torchvision
from torchvision import models

from finetune.models.backbones import SMALL_NETWORKS, build, check_name, vit_size
from finetune.models.network_list import FILE
from finetune.models.timm_backbones import describe
from finetune.system.messages import WrongUsage

_TORCHVISION_LICENCE = "BSD-3-Clause code; ImageNet's terms"
_SWAG = "https://github.com/facebookresearch/SWAG/blob/main/LICENSE"  # CC BY-NC 4.0
_CLASSES = 1000


@contextmanager
def uninitialized() -> Iterator[None]:
    """Skip the initialization of weights, which takes most of the time of building a network."""
    names = [name for name in vars(torch.nn.init) if name.endswith("_") and name[0] != "_"]
    before = {name: getattr(torch.nn.init, name) for name in names}
    trunc = timm.layers.weight_init._trunc_normal_
    try:
        for name in names:
            setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
        timm.layers.weight_init._trunc_normal_ = lambda tensor, *_, **__: tensor
        yield
    finally:
        for name, function in before.items():
            setattr(torch.nn.init, name, function)
        timm.layers.weight_init._trunc_normal_ = trunc


def own_rows() -> Iterator[list[Any]]:
    for name in SMALL_NETWORKS:
        yield [name, num_parameters(name), None, 28, "", ""]


def torchvision_rows() -> Iterator[list[Any]]:
    for name in sorted(models.list_models(module=models)):
        try:
            check_name(name)
        except WrongUsage:
            continue
        weights = models.get_model_weights(name).DEFAULT
        own_size = vit_size(name, None) and weights.meta["min_size"][0]
        licence = weights.meta.get("license", _TORCHVISION_LICENCE)
        yield [
            name,
            weights.meta["num_params"],
            round(weights.meta["_file_size"], 1),
            own_size or weights.transforms().crop_size[0],
            "CC-BY-NC-4.0" if licence == _SWAG else licence,
            weights.url.rpartition("/")[2],
        ]


def timm_rows() -> Iterator[list[Any]]:
    parameters: dict[str, int | None] = {}
    for full in timm.list_pretrained():
        name = f"timm/{full}"
        architecture = full.partition(".")[0]
        try:
            about = describe(name)
        except ValueError:  # also WrongUsage
            continue
        if architecture not in parameters:
            parameters[architecture] = supported_parameters(f"timm/{architecture}")
        num = parameters[architecture]
        config = timm.get_pretrained_cfg(full)
        if num is not None and config.hf_hub_id:
            repository = config.hf_hub_id
            if repository == "timm/":
                repository = f"timm/{full}"
            yield [
                name,
                num,
                round(4e-6 * num, 1),
                about.image_size,
                about.licence or "",
                repository,
            ]


def num_parameters(name: str) -> int:
    return sum(parameter.numel() for parameter in build(name, _CLASSES).parameters())


def supported_parameters(name: str) -> int | None:
    """Return the number of parameters; None for a network that a fit refuses."""
    try:
        return num_parameters(name)
    except Exception as error:  # timm's networks raise many types
        logging.info("%s: %s", name, error)
        return None


def generated() -> dict[str, Any]:
    with uninitialized():
        rows = [*own_rows(), *torchvision_rows(), *timm_rows()]
    version = re.compile(r"\+.*")
    versions = {
        "torchvision": version.sub("", torchvision.__version__),
        "timm": version.sub("", timm.__version__),
    }
    return {"versions": versions, "networks": rows}


def text(content: dict[str, Any]) -> str:
    """Return the content as JSON, a line for each network."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in content["networks"])
    return f'{{\n "versions": {json.dumps(content["versions"])},\n "networks": [\n{rows}\n ]\n}}\n'


if __name__ == "__main__":
    FILE.write_text(text(generated()), "utf-8")
