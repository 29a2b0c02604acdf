"""`--freeze backbone`: the head is solved exactly, once, and the rest is like any other run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from colours import QUICKEST
from labelled_files import LabelledFiles, draw_labelled
from probabilities import probabilities
from promise import control, promise
from scipy.special import expit, softmax
from sklearn.linear_model import LogisticRegression
from small_fits import data, fit

from finetune import Classifier, ImageFolderData
from finetune.data.decode import decode
from finetune.inference.predictor import Predictor
from finetune.models.stages import head, without_head
from finetune.runs.folder import versions

SOLVED = ("--model.freeze", "backbone", "--trainer.precision", "64-true")


def state(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return torch.load(run / f"checkpoints/{name}.ckpt", weights_only=True)["state_dict"]


@torch.no_grad()
def features(model: Classifier, images: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the head takes of each training image that can be read, and its row in the split."""
    backbone = without_head(model.network).eval()
    batches = list(images.loader("train"))
    x = [backbone(model.image_classifier.normalized(batch["image"])) for batch in batches]
    return torch.cat(x).numpy(), torch.cat([batch["index"] for batch in batches]).numpy()


def weighted_table(folder: Path, root: Path) -> str:
    """A table of the images below a folder: weights from 0 to 3, one image damaged, each seventh label wrong.

    The wrong labels keep the losses far from zero, so that the weights move the optimum on any machine.
    """
    paths = sorted((root / "train").rglob("*.png"))
    labels = [path.parent.name for path in paths]
    rows = [
        f"{path},{labels[(i + len(paths) // 2) % len(paths)] if i % 7 == 0 else labels[i]},{i % 4}"
        for i, path in enumerate(paths)
    ]
    (folder / "torn.png").write_bytes(b"torn")
    rows[2] = f"{folder / 'torn.png'},blue,3"
    (folder / "weighted.csv").write_text("\n".join(["path,label,weight", *rows]))
    return str(folder / "weighted.csv")


@promise("solved-head")
@pytest.mark.parametrize("kind", ["single", "several", "weighted"])
def test_the_head_is_the_optimum_on_the_training_images(colours, tmp_path, kind):
    quick = {"image_size": 28, "batch_size": 12, "num_workers": 0, "augmentations": None}
    if kind == "single":
        images = data(colours, image_size=28)
    elif kind == "several":
        images = LabelledFiles(str(draw_labelled(tmp_path / "x", train=64)), **quick)
    else:
        table = weighted_table(tmp_path, colours)
        images = ImageFolderData(table=table, on_bad_image="skip", **quick)
    model = Classifier(
        images.class_names,
        "small_cnn",
        weights=None,
        freeze="backbone",
        label_kind=images.label_kind,
    )
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    trainer = fit(model, images, max_epochs=5, precision="64-true")
    assert trainer.current_epoch == 1 and trainer.optimizers == []
    after = model.network.state_dict()
    moved = {name for name, value in after.items() if not value.equal(before[name].to(value))}
    assert moved == {"head.weight", "head.bias"}
    x, rows = features(model, images)
    split = images.splits["train"]
    labels = split.targets.labels[rows]
    weights = np.ones(len(rows)) if split.weights is None else split.weights[rows]
    assert (kind == "weighted") == (weights.max() > weights.min())
    weight, bias = (p.detach().numpy() for p in head(model.network).parameters())
    logits = x @ weight.T + bias
    if kind == "several":
        residual = (expit(logits) - labels) * weights[:, None]
        losses = np.logaddexp(0, logits) - labels * logits
        mean = losses.mean()
    else:
        residual = (softmax(logits, axis=1) - np.eye(3)[labels]) * weights[:, None]
        losses = -np.log(softmax(logits, axis=1)[np.arange(len(x)), labels])
        mean = np.average(losses, weights=weights)
    # At the optimum of loss and ridge the gradient is a negative multiple of the weights, and zero of the bias.
    gradient = residual.T @ x / len(x)
    strength = -(gradient * weight).sum() / (weight**2).sum()
    assert strength > 0 and abs(gradient + strength * weight).max() < 1e-11
    assert abs(residual.mean(axis=0)).max() < 1e-11
    assert abs(gradient).max() > 1e-8  # the control: without the ridge it is no optimum
    assert float(trainer.callback_metrics["train/loss_epoch"]) == pytest.approx(mean, rel=1e-3)
    if kind == "weighted":
        assert len(x) == len(split) - 1
        unweighted = softmax(logits, axis=1) - np.eye(3)[labels]
        # The control: the weights move the optimum.
        assert abs(unweighted.mean(axis=0)).max() > 1e-3
    monitored = trainer.callback_metrics[model.task.monitor]
    assert monitored > 0.5 and model.calibration.num_images == len(images.splits["val"])


@promise("solved-head")
@control("solved-head")
def test_a_head_over_stages_is_the_optimum_of_scikit_learn(colours):
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
    _, rows = features(model, images)
    with torch.no_grad():
        for batch in images.loader("train"):
            model.eval()(batch["image"])
    x = torch.cat([torch.cat(means[-len(means) // 2 :]) for means in parts.values()], 1).numpy()
    y = images.splits["train"].targets.labels[rows]
    weight, bias = (p.detach().numpy() for p in head(model.network).parameters())
    residual = softmax(x @ weight.T + bias, axis=1) - np.eye(3)[y]
    strength = -((residual.T @ x) * weight).sum() / (weight**2).sum()

    def optimum(features: np.ndarray) -> np.ndarray:
        kind = LogisticRegression(C=1 / strength, solver="newton-cg", tol=1e-10, max_iter=1000)
        return kind.fit(features, y).coef_

    # scikit-learn stops earlier: at a gradient of 1e-10 of the mean
    np.testing.assert_allclose(weight, optimum(x), rtol=0, atol=1e-5 * abs(weight).max())
    width = parts["layer4"][0].shape[1]
    last = np.where(np.arange(x.shape[1]) < x.shape[1] - width, 0, x)  # the control: one stage
    assert abs(weight - optimum(last)).max() > 1e-2 * abs(weight).max()


@pytest.mark.slow
def test_length_rate_and_augmentation_have_no_effect_and_a_line_says_so(cli, colours, caplog):
    others = ["--trainer.max_epochs", "3", "--model.optimizer.lr", "1"]
    others += ["--data.crop_and_flip", "false", "--trainer.accumulate_grad_batches", "2"]
    others += ["--trainer.gradient_clip_val", "1", "--trainer.val_check_interval", "2"]
    with caplog.at_level("INFO", logger="finetune"):
        cli("fit", colours, *QUICKEST, *SOLVED)
        cli("fit", colours, *QUICKEST, *SOLVED, *others)
    assert "Epochs, learning rate and augmentation have no effect" in caplog.text
    first, second = versions(Path("runs"), "fit")
    for name, value in state(first).items():
        assert value.equal(state(second)[name]), name
    assert len((second / "metrics.csv").read_text().splitlines()) == 2  # one epoch
    assert json.loads((second / "test.json").read_text())["test/accuracy"] > 0.9
    # nothing is left to resume
    before = (first / "checkpoints/last.ckpt").read_bytes()
    with caplog.at_level("INFO", logger="finetune"):
        cli("fit", "--resume", first, "--trainer.max_epochs", "7", "--test_after_fit", "false")
    assert "is finished" in caplog.text
    assert (first / "checkpoints/last.ckpt").read_bytes() == before


@pytest.mark.slow
def test_a_head_over_stages_is_saved_exported_and_read_again(cli, colours):
    network = ("--model.backbone", "timm/test_resnet", "--data.image_size", "32")
    options = (*QUICKEST, *SOLVED, *network, "--test_after_fit", "false")
    cli("fit", colours, *options)
    (run,) = versions(Path("runs"), "fit")
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["head_stages"] == 3
    best = run / "checkpoints/best.ckpt"
    images = [decode(str(path)) for path in sorted((colours / "test").rglob("*.png"))[::10]]
    own = probabilities(best, images)
    assert own.std(axis=0).max() > 0.1
    for kind in ("onnx", "safetensors"):
        cli("export", best, "--output", f"some.{kind}", "--format", kind)
        np.testing.assert_allclose(probabilities(f"some.{kind}", images), own, rtol=0, atol=2e-6)
    # A fit with the network's own head starts from these weights, and the other way round.
    cli("fit", colours, *options, "--model.weights", best, "--model.head_stages", "1")
    first, second = versions(Path("runs"), "fit")
    assert state(second)["network.fc.weight"].shape == (3, 96)
    assert state(first)["network.fc.weight"].shape == (3, 48 + 192 + 96)
    wide = torch.load(best, weights_only=True)
    wide["hyper_parameters"]["head_stages"] = 1  # the control: the setting counts
    torch.save(wide, "wide.ckpt")
    with pytest.raises(ValueError, match="does not hold the weights"):
        Predictor("wide.ckpt")
