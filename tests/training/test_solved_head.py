"""`--freeze backbone`: the head is solved exactly, once, and the rest is like any other run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from colours import QUICKEST
from jsonargparse import Namespace
from promise import promise
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from small_fits import data, fit

from finetune import Classifier
from finetune.commands.dependent_defaults import settle_head_stages
from finetune.commands.explicit_settings import read_explicit_settings
from finetune.data.decode import decode
from finetune.features import linear_probe
from finetune.inference.predictor import Predictor
from finetune.models.stages import head
from finetune.runs.folder import versions
from finetune.system.messages import WrongUsage

SOLVED = ("--model.freeze", "backbone", "--trainer.precision", "64-true")


def state(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return torch.load(run / f"checkpoints/{name}.ckpt", weights_only=True)["state_dict"]


@promise("solved-head")
def test_the_head_is_the_optimum_on_the_training_images(colours, monkeypatch):
    calls = []
    fit_probe = linear_probe.fit_probe

    def spy(*arguments, **options):
        calls.append((arguments, fit_probe(*arguments, **options)))
        return calls[-1][1]

    monkeypatch.setattr(linear_probe, "fit_probe", spy)
    images = data(colours, image_size=28)
    model = Classifier(images.class_names, "small_cnn", weights=None, freeze="backbone")
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    trainer = fit(model, images, max_epochs=5, precision="64-true")
    assert trainer.current_epoch == 1 and trainer.optimizers == []
    (((x, y, _), probe),) = calls
    assert len(y) == len(images.splits["train"])  # no validation image is among them
    assert probe.out_of_fold.shape == (len(y), 3)
    solved = head(model.network)
    weight = solved.weight.detach().numpy()
    residual = softmax(x @ weight.T + solved.bias.detach().numpy(), axis=1) - np.eye(3)[y]
    variance = ((x - x.mean(axis=0)) ** 2).sum(axis=1).mean()  # what the strength is relative to
    gradient = residual.T @ x / len(y) + probe.strength * variance * weight
    assert abs(gradient).max() < 1e-13 and abs(residual.mean(axis=0)).max() < 1e-12
    # the control: another strength
    assert abs(gradient + probe.strength * variance * weight).max() > 1e-8
    moved = {
        name
        for name, value in model.network.state_dict().items()
        if not value.equal(before[name].to(value))
    }
    assert {name.rpartition(".")[2] for name in moved} == {"weight", "bias"} and len(moved) == 2
    assert float(trainer.callback_metrics["train/accuracy"]) > 0.9


@promise("solved-head")
def test_a_head_over_stages_is_the_optimum_of_scikit_learn(colours, monkeypatch):
    probes = []
    fit_probe = linear_probe.fit_probe

    def spy(*arguments, **options):
        probes.append(fit_probe(*arguments, **options))
        return probes[-1]

    monkeypatch.setattr(linear_probe, "fit_probe", spy)
    images = data(colours, image_size=32)
    model = Classifier(
        images.class_names, "timm/test_resnet", None, freeze="backbone", head_stages=3
    )
    fit(model, images, precision="64-true")
    parts: dict[str, list] = {"layer2": [], "layer3": [], "layer4": []}
    for name, means in parts.items():
        model.network.get_submodule(name).register_forward_hook(
            lambda _, given, out, means=means: means.append(out.mean(dim=(2, 3)))
        )
    labels = []
    with torch.no_grad():
        for batch in images.loader("train"):
            model.eval()(batch["image"])
            labels.append(batch["label"])
    x = torch.cat([torch.cat(means) for means in parts.values()], dim=1).numpy()
    y = torch.cat(labels).numpy()
    solved = head(model.network)

    def optimum(features: np.ndarray) -> np.ndarray:
        variance = ((x - x.mean(axis=0)) ** 2).sum(axis=1).mean()
        c = 1 / (len(y) * probes[0].strength * variance)
        kind = LogisticRegression(C=c, solver="newton-cg", tol=1e-10, max_iter=1000)
        return kind.fit(features, y).coef_

    weight = solved.weight.detach().numpy()
    # scikit-learn stops earlier: at a gradient of 1e-10 of the mean
    np.testing.assert_allclose(weight, optimum(x), rtol=0, atol=1e-5 * abs(weight).max())
    width = parts["layer4"][0].shape[1]
    last = np.where(np.arange(x.shape[1]) < x.shape[1] - width, 0, x)  # the control: one stage
    assert abs(weight - optimum(last)).max() > 1e-2 * abs(weight).max()


def test_a_fit_takes_three_stages_where_the_network_has_them():
    def settled(*arguments, backbone="timm/test_resnet", freeze="backbone"):
        model = Namespace(backbone=backbone, freeze=freeze, head_stages=1)
        message = settle_head_stages(model, read_explicit_settings(["fit", *arguments]))
        return model.head_stages, message

    assert settled() == (3, "")
    assert settled("--model.head_stages", "1") == (1, "")
    assert settled(freeze="layer2") == (1, "")
    num_stages, message = settled(backbone="vgg11")
    assert num_stages == 1 and "of the last stage only" in message and "vgg11" in message


@pytest.mark.slow
def test_a_head_over_stages_is_saved_exported_and_read_again(cli, colours, caplog):
    cli(
        *("fit", colours, *QUICKEST, *SOLVED, "--test_after_fit", "false"),
        *("--model.backbone", "timm/test_resnet", "--data.image_size", "32"),
    )
    (run,) = versions(Path("runs"), "fit")
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["head_stages"] == 3
    best = run / "checkpoints/best.ckpt"
    images = [decode(str(path)) for path in sorted((colours / "test").rglob("*.png"))[::10]]
    own = Predictor(best)(images)
    assert own.std(axis=0).max() > 0.1
    for kind in ("onnx", "safetensors"):
        cli("export", best, "--output", f"some.{kind}", "--format", kind)
        np.testing.assert_allclose(Predictor(f"some.{kind}")(images), own, rtol=0, atol=2e-6)
    # A fit with the network's own head starts from these weights, and the other way round.
    plain = ("--model.weights", best, "--model.head_stages", "1")
    cli("fit", colours, *QUICKEST, *SOLVED, "--model.backbone", "timm/test_resnet", *plain)
    first, second = versions(Path("runs"), "fit")
    assert state(second)["network.fc.weight"].shape == (3, 96)
    assert state(first)["network.fc.weight"].shape == (3, 48 + 192 + 96)
    wide = torch.load(best, weights_only=True)
    wide["hyper_parameters"]["head_stages"] = 1  # the control: the setting counts
    torch.save(wide, "wide.ckpt")
    with pytest.raises(ValueError, match="does not hold the weights"):
        Predictor("wide.ckpt")


@pytest.mark.slow
def test_length_rate_and_augmentation_have_no_effect_and_a_line_says_so(cli, colours, caplog):
    others = (
        *(
            "--trainer.max_epochs",
            "3",
            "--model.optimizer.lr",
            "1",
            "--data.crop_and_flip",
            "false",
        ),
        *("--trainer.accumulate_grad_batches", "2", "--trainer.gradient_clip_val", "1"),
        *("--trainer.val_check_interval", "2", "--trainer.check_val_every_n_epoch", "2"),
    )
    with caplog.at_level("INFO", logger="finetune"):
        cli("fit", colours, *QUICKEST, *SOLVED)
    assert re.search(
        r"the head is solved exactly.*: \d+ images, [\d.]+ s, strength \S+, cross-valid",
        caplog.text,
    )
    assert "Epochs, learning rate and augmentation have no effect" in caplog.text
    cli("fit", colours, *QUICKEST, *SOLVED, *others)
    first, second = versions(Path("runs"), "fit")
    for name, value in state(first).items():
        assert value.equal(state(second)[name]), name
    rows = (second / "metrics.csv").read_text().splitlines()
    assert len(rows) == 2  # one epoch
    assert json.loads((second / "test.json").read_text())["test/accuracy"] > 0.9


@pytest.mark.slow
def test_a_finished_run_is_resumed_to_nothing_and_exported_as_it_is(cli, colours, caplog):
    options = (*QUICKEST, *SOLVED, "--test_after_fit", "false")
    cli("fit", colours, *options)
    (run,) = versions(Path("runs"), "fit")
    before = (run / "checkpoints/last.ckpt").read_bytes()
    with caplog.at_level("INFO", logger="finetune"):
        cli("fit", colours, *options, "--resume", "--trainer.max_epochs", "7")
    assert "is finished, with trainer.max_epochs 1. More epochs would not change" in caplog.text
    assert (
        versions(Path("runs"), "fit") == [run]
        and (run / "checkpoints/last.ckpt").read_bytes() == before
    )
    cli("export", run, "--output", "some.safetensors", "--format", "safetensors")
    images = [decode(str(path)) for path in sorted((colours / "test").rglob("*.png"))[::10]]
    own = Predictor(run / "checkpoints/best.ckpt")(images)
    np.testing.assert_allclose(Predictor("some.safetensors")(images), own, rtol=0, atol=2e-6)
    assert own.std(axis=0).max() > 0.1


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (("--model.members", "2"), r"--members \(--model.members\) would all be alike"),
        (("--model.head_init", "source"), "model.head_init source has no effect"),
        (("--ckpt_path", "some.ckpt"), "pass it as --weights"),
    ],
)
def test_what_a_solved_head_cannot_do_is_refused(cli, colours, options, reported):
    Path("some.ckpt").touch()
    with pytest.raises(WrongUsage, match=reported):
        cli("fit", colours, *QUICKEST, *SOLVED, *options)
    assert not Path("runs/fit").exists()


def test_no_steps_can_be_measured(cli, colours):
    with pytest.raises(WrongUsage, match="--model.freeze backbone has none"):
        cli("benchmark", colours, *QUICKEST, *SOLVED)
