"""Fused batch norm computes the same, and is used only without training and where bf16 rounds anyway."""

import csv
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from colours import QUICK
from networks import few_blocks
from torch import nn

from finetune import Classifier
from finetune.distributed.sync_batch_norm import SharedBatchNorm, share_statistics
from finetune.models.backbones import build
from finetune.models.fx import fuse_batch_norm
from finetune.models.stages import head
from finetune.training.compile import FuseBatchNorm, in_bf16

CLASSES = ("blue", "green", "red")
# One of each way to be built: blocks with shortcuts, batch norm before, inverted residuals, branches, tokens.
SIZES = {
    "resnet18": 64,
    "densenet121": 64,
    "mobilenet_v2": 64,
    "googlenet": 64,
    "swin_t": 64,
    "vit": 32,  # one with few blocks
}


def learned(backbone: str) -> nn.Module:
    """A network with non-trivial batch norm, as after training."""
    torch.manual_seed(0)
    network = (few_blocks("vit") if backbone == "vit" else build(backbone, 4)).eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                nn.init.uniform_(tensor, 0.5, 1.5)
    return network


@pytest.mark.slow
@pytest.mark.parametrize(
    "backbone", [b if b == "resnet18" else pytest.param(b, marks=pytest.mark.slow) for b in SIZES]
)
@torch.no_grad()
def test_folded_batch_norm_computes_the_same(backbone):
    network = learned(backbone).double()
    images = torch.rand(2, 3, SIZES[backbone], SIZES[backbone], dtype=torch.float64)
    expected, before = network(images), [p.clone() for p in network.parameters()]
    few = fuse_batch_norm(network)
    num = sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    calls = sum(
        isinstance(few.get_submodule(n.target), nn.BatchNorm2d)
        for n in few.graph.nodes
        if n.op == "call_module"
    )
    assert calls < 0.6 * num or num == 0  # densenet's stand before, not after
    torch.testing.assert_close(few(images), expected, rtol=1e-10, atol=1e-10)
    # it is a copy
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.bias.sub_(0.1)
    # and so a difference would be seen
    assert num == 0 or not torch.allclose(few(images), network(images))


def test_a_part_that_can_not_be_followed_comes_back_as_it_is():
    class Bends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    part = Bends().eval()
    assert fuse_batch_norm(part) is part


@pytest.mark.parametrize("backbone", ["timm/nest_tiny", "timm/hiera_tiny_224"])
def test_batch_norm_is_not_fused_where_a_network_can_not_be_followed(backbone):
    part = build(backbone, 2).eval()
    assert fuse_batch_norm(part) is part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "precision", "is_folded"),
    [
        ("predict", "bf16-mixed", True),
        ("test", "bf16-mixed", True),
        ("predict", "32-true", False),
        ("fit", "bf16-mixed", False),
    ],
)
@torch.no_grad()
def test_only_what_evaluates_in_bf16_is_folded(fn, precision, is_folded):
    model = Classifier(["cat", "dog"], "resnet18_small", weights=None).eval()
    names = [*model.state_dict()]
    trainer = pl.Trainer(
        precision=precision, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.state.fn = fn
    fold = FuseBatchNorm()
    fold.on_predict_start(trainer, model)
    assert (model.image_classifier.eval_forward is not None) == is_folded
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    with trainer.precision_plugin.forward_context():
        logits = model(images)
        assert [*model.state_dict()] == names  # a checkpoint is what it was
        nn.init.constant_(model.network.fc.bias, 9.0)
        assert torch.equal(model(images), logits) == is_folded  # it is the copy that computes
        fold.on_exception(trainer, model, KeyboardInterrupt())  # the same as at its end
        assert model.image_classifier.eval_forward is None and not torch.equal(
            model(images), logits
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "backbone",
    [
        "resnet18_small",
        *(pytest.param(b, marks=pytest.mark.slow) for b in ("vit_b_16", "convnext_tiny")),
    ],
)
@torch.no_grad()
def test_weights_rounded_beforehand_are_those_that_autocast_rounds(backbone):
    """To the last digit: the one after the other, and not both."""
    side = 224 if backbone == "vit_b_16" else 32
    model = Classifier(["cat", "dog"], backbone, weights=None).eval()
    nn.init.normal_(head(model.network).weight)  # torchvision's own is zero for ViT
    images = torch.randint(256, (2, 3, side, side), dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):
        model.image_classifier.eval_forward = fuse_batch_norm(model.network).forward
        expected = model(images)
        model.image_classifier.eval_forward = in_bf16(model.network).forward
        assert torch.equal(model(images), expected)
    assert head(model.network).weight.dtype == torch.float32 and expected.abs().max() > 1e-5


# Batch norm with hardly any statistics gives all images the same probabilities, in bf16 to the last digit.
STEADY = ("--model.freeze_batch_norm", "true", "--model.optimizer.lr", "1e-4")


@pytest.mark.slow
def test_predictions_are_those_of_the_network_up_to_bf16(cli, colours, monkeypatch):
    cli("fit", "--data.root", colours, *QUICK, "--model.backbone", "resnet18", *STEADY)

    def predict(output: str) -> torch.Tensor:
        checkpoint = "runs/fit/version_0/checkpoints/last.ckpt"
        arguments = (
            "--data.predict",
            colours / "test",
            "--data.num_workers",
            0,
            "--trainer.precision",
            "bf16-mixed",
        )
        cli("predict", "--ckpt_path", checkpoint, *arguments, "--output", output)
        with Path(output).open() as file:
            return torch.tensor(
                [[float(row[f"p_{name}"]) for name in CLASSES] for row in csv.DictReader(file)]
            )

    rows = predict("folded.csv")
    for name in ("on_validation_start", "on_test_start", "on_predict_start"):
        monkeypatch.setattr(FuseBatchNorm, name, lambda *_: None)
    expected = predict("whole.csv")
    assert not torch.equal(rows, expected)  # something was folded
    # bf16 has 8 bits: logits of 4 are off by 1/64
    torch.testing.assert_close(rows, expected, rtol=0, atol=0.02)


@torch.no_grad()
def test_what_was_shared_by_devices_is_folded_as_on_one():
    model = Classifier(["cat", "dog"], "resnet18_small", weights=None).eval()
    model.image_classifier.network = learned("resnet18")
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):
        model.image_classifier.eval_forward = in_bf16(model.network).forward
        expected = model(images)
        share_statistics(model.network)
        model.image_classifier.eval_forward = in_bf16(model.network).forward
        assert torch.equal(model(images), expected)
        # it was a copy
        assert any(type(module) is SharedBatchNorm for module in model.network.modules())
        model.image_classifier.eval_forward = fuse_batch_norm(
            model.network
        ).forward  # control: that folds nothing
        assert not torch.equal(model(images), expected)
