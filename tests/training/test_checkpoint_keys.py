"""The keys of a classifier's state dict do not depend on where the classifier holds its network."""

import io
from typing import Any

import pytest
import torch

from finetune import Classifier
from finetune.models.image_classifier import ImageClassifier


def classifier(backbone: str = "small_cnn") -> Classifier:
    return Classifier(["a", "b", "c"], backbone, weights=None)


def saved(state: Any) -> Any:
    """The state dict as a checkpoint returns it."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_keys_are_those_of_the_network_and_of_the_buffers():
    model = classifier()
    state = model.state_dict()
    expected = {f"network.{name}" for name in model.network.state_dict()}
    assert set(state) == {*expected, "mean", "std", "class_weight"}
    assert state["network.head.weight"].data_ptr() == model.network.head.weight.data_ptr()


@pytest.mark.parametrize("backbone", ["small_cnn", "mnasnet0_5"])
def test_a_state_dict_is_loaded_and_not_changed(backbone):
    """torchvision's MNASNet does not load without the versions of its modules."""
    one, other = classifier(backbone), classifier(backbone)
    one.class_weight += 1
    state = saved(one.state_dict())
    keys = list(state)
    assert any(not torch.equal(value, state[key]) for key, value in other.state_dict().items())
    other.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    assert list(state) == keys


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_a_state_dict_of_another_network_is_refused(change):
    state = classifier().state_dict()
    if change == "missing":
        del state["network.head.bias"]
    elif change == "unexpected":
        state["network.tail.bias"] = torch.zeros(3)
    else:
        state["network.head.bias"] = torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"network\.(head|tail)\.bias"):
        classifier().load_state_dict(state)


def test_an_image_classifier_loads_the_state_of_a_checkpoint():
    for backbone, side in (("small_cnn", 28), ("mnasnet0_5", 32)):
        model = classifier(backbone).eval()
        state = saved(model.state_dict())
        alone: ImageClassifier = classifier(backbone).image_classifier.eval()
        images = torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8)
        with torch.no_grad():
            assert not torch.equal(alone(images), model(images))
            alone.load_checkpoint_state(state)
            assert torch.equal(alone(images), model(images))
        assert "class_weight" in state  # nothing is taken from the checkpoint
    other = classifier().image_classifier
    with pytest.raises(RuntimeError, match=r"network\.head\.bias"):
        other.load_checkpoint_state({"class_weight": torch.ones(3)})
