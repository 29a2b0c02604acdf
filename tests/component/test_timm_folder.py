"""Which checkpoints become a folder for timm. tests/promises/test_timm_networks.py has the folder itself."""

import pytest
import timm
import torch
from promise import promise
from torchvision import models

from finetune.inference.timm_folder import OF_TORCHVISION
from finetune.models.stages import batch_norms


def logits_of_both(name, images):
    """Return the logits of torchvision's network and of timm's with its weights, each (N, 3)."""
    torch.manual_seed(0)
    network = models.get_model(name, weights=None, num_classes=3).eval()
    for norm in batch_norms(network):
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.5, 2)
    other = timm.create_model(f"{name}.tv_in1k", num_classes=3).eval()
    other.load_state_dict(network.state_dict())
    with torch.no_grad():
        return network(images), other(images)


LARGE = sorted(set(OF_TORCHVISION) - {"resnet18"})


@promise("timm")
@pytest.mark.parametrize(
    "name", ["resnet18", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)]
)
def test_networks_of_torchvision_have_the_same_logits_in_timm(name):
    images = torch.rand(2, 3, 64, 64)
    ours, theirs = logits_of_both(name, images)
    # float32, the same operations in another order
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # control: other images have other logits
        others = logits_of_both(name, 1 - images)[1]
    assert not torch.allclose(others, ours, rtol=1e-4, atol=1e-5)
