"""A checkpoint fits the network that loads it, or the error says in one line why not."""

import pytest
import torch

from finetune.models.backbones import build
from finetune.runs.checkpoint_facts import check_fits, check_size

MODEL = {"backbone": "small_cnn", "class_names": ["a", "b"], "members": 1, "network_size": None}
MODEL |= {"label_kind": "single", "head_stages": 1}


def test_a_checkpoint_of_another_network_or_of_other_classes_is_refused():
    network = build("small_cnn", 2)
    state = {f"network.{name}": value for name, value in network.state_dict().items()}
    for name, other in (
        ("backbone", "lenet"),
        ("class_names", ["a", "c"]),
        ("members", 2),
        ("head_stages", 3),
    ):
        known = {"hyper_parameters": {**MODEL, name: other}, "state_dict": state}
        with pytest.raises(ValueError, match=f"with {name} ") as error:
            check_fits(known, MODEL, network)
        assert "\n" not in str(error.value)
    check_fits({"hyper_parameters": MODEL, "state_dict": state}, MODEL, network)


def test_a_network_of_another_size_is_reported_in_a_line_where_it_has_other_shapes():
    def checkpoint(backbone: str, size: int | None) -> dict:
        weights = {
            f"network.{name}": value
            for name, value in build(backbone, 2, size).state_dict().items()
        }
        return {
            "hyper_parameters": {"network_size": size},
            "state_dict": {"mean": torch.zeros(3, 1, 1), **weights},
        }

    vit, resnet = "timm/test_vit", "timm/test_resnet"
    with pytest.raises(ValueError, match="--data.image_size 64") as reported:
        check_size(checkpoint(vit, 64), 48, build(vit, 2, 48))
    assert "\n" not in str(reported.value)
    check_size(checkpoint(vit, 64), 64, build(vit, 2, 64))
    check_size(checkpoint(resnet, 64), 48, build(resnet, 2, 48))
    # of before there was such a size
    check_size(checkpoint(resnet, None), 48, build(resnet, 2, 48))
