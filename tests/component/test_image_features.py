"""Features of files are those that the network has before its head, for the same pixels."""

import numpy as np
import pytest
import torch
from drawings import drawing

from finetune.data.decode import decode
from finetune.data.transforms import eval_transform
from finetune.features.image_features import Features, image_features
from finetune.models.backbones import build, normalization
from finetune.models.stages import head_name


@pytest.fixture
def paths(tmp_path):
    for i in range(7):
        drawing(i, 90 + 10 * i, 80).save(tmp_path / f"{i}.png")
    return [str(tmp_path / f"{i}.png") for i in range(7)]


def test_they_are_what_the_head_is_given(paths, tmp_path):
    backbone = "small_cnn"
    size = 28
    torch.manual_seed(0)
    network = build(backbone, 5)
    with torch.no_grad():  # statistics as after training, which batch norm has to be fused with
        for _ in range(30):
            network.train()(torch.randn(8, 3, size, size))
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    seen = []
    network.eval().get_submodule(head_name(network)).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    mean, std = (255 * torch.tensor(value).view(3, 1, 1) for value in normalization(backbone))
    preparation = {"image_size": size, "resize": "whole"}
    transform = eval_transform(**preparation)
    with torch.no_grad():
        for path in paths:
            pixels = transform(image=decode(path, shorter_side=2 * size))["image"]
            network(((torch.from_numpy(pixels).permute(2, 0, 1) - mean) / std)[None])
    found = np.stack(
        [*image_features(Features(backbone, str(tmp_path / "weights.pt")), paths, preparation)]
    )
    wanted = torch.cat(seen).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max())
    # the control: images differ
    assert np.abs(found[0] - found[1]).max() > 1e-3 * np.abs(wanted).max()
