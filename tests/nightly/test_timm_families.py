"""Each family of timm's networks: the same on two processes as on one, resumed, with a probe, partly frozen."""

import csv
import socket
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import timm
import torch
from colours import QUICK
from device_scenarios import TIMM
from probabilities import probabilities
from processes import launch
from promise import promise
from pytorch_lightning.callbacks import LambdaCallback
from scenario_results import distance, draw_scenarios, load
from small_fits import data, fit
from small_timm import FAMILIES

from finetune import Classifier
from finetune.data.decode import decode
from finetune.features import linear_probe
from finetune.models.stages import head, head_name
from finetune.models.timm_networks import timm_name

# the others are like that of test_timm_networks.py and like the network of test_resume.py
OF_ANOTHER_KIND = ("mobilenetv4", "vit", "dinov2", "focalnet")
of_each_other_kind = pytest.mark.parametrize(
    ("backbone", "size"), [FAMILIES[name] for name in OF_ANOTHER_KIND], ids=OF_ANOTHER_KIND
)
of_each_family = pytest.mark.parametrize(("backbone", "size"), FAMILIES.values(), ids=FAMILIES)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with what the scenarios left for each number of processes."""
    root = tmp_path_factory.mktemp("timm")
    data = draw_scenarios(root / "data", ())
    names = {1: [*TIMM], 2: [*TIMM, "control_timm_statistics", "control_timm_draws"]}
    return {
        k: launch("device_scenarios.py", root / f"world{k}", k, data, *each)
        for k, each in names.items()
    }


@promise("any-number-of-devices")
@pytest.mark.parametrize("scenario", TIMM)
def test_two_processes_train_as_one_does(results, scenario):
    alone = load(results[1], scenario)["weights"]
    for rank in range(2):
        # float64: rounding over a few steps; without the layers below it is 1e-3 and more
        assert distance(alone, load(results[2], scenario, rank)["weights"]) <= 1e-10


@pytest.mark.parametrize(
    ("control", "scenario"),
    [
        ("control_timm_statistics", "timm_mobilenetv4"),
        ("control_timm_draws", "timm_focalnet"),
    ],
)
def test_forgotten_statistics_or_draws_are_seen(results, control, scenario):
    right, wrong = load(results[1], scenario), load(results[2], control)
    assert distance(right["weights"], wrong["weights"]) > 1e-6


def network_of(images, backbone, **options):
    torch.manual_seed(0)
    optimizer = {
        "optimizer": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
        "scheduler": None,
    }
    return Classifier(
        images.class_names,
        backbone,
        None,
        network_size=images.image_size,
        **(optimizer | options),
    )


@of_each_family
def test_a_probe_sees_what_timm_gives_its_classifier_and_changes_that_alone(
    colours, backbone, size, monkeypatch
):
    sample_images = data(colours, image_size=size)
    model, seen = network_of(sample_images, backbone, head_init="probe"), []
    fit_probe = linear_probe.fit_probe
    monkeypatch.setattr(
        linear_probe,
        "fit_probe",
        lambda x, *args, **kw: seen.append(x) or fit_probe(x, *args, **kw),
    )
    fit(model, sample_images, max_steps=0)
    fixed = {"img_size": size} if "vit" in backbone else {}
    theirs = timm.create_model(timm_name(backbone), num_classes=3, **fixed)
    theirs.load_state_dict(model.network.state_dict())
    images = torch.cat([batch["image"] for batch in sample_images.loader("train")])
    with torch.no_grad():
        x = model.image_classifier.normalized(images)
        features = theirs.eval().forward_head(theirs.forward_features(x), pre_logits=True)
    # float32; the head of mobilenetv4 has a layer before its classifier, which pre_logits has too
    torch.testing.assert_close(torch.from_numpy(seen[0]).float(), features, rtol=1e-4, atol=1e-4)
    before, after = (
        network_of(sample_images, backbone).network.state_dict(),
        model.network.state_dict(),
    )
    changed = {name for name, value in before.items() if not value.equal(after[name])}
    assert changed == {f"{head_name(model.network)}.{name}" for name in ("weight", "bias")}
    assert head(model.network).weight.isfinite().all()


@of_each_other_kind
def test_a_stopped_fit_of_each_family_ends_where_one_does_that_was_not(
    colours, backbone, size, tmp_path
):
    images, limits = (
        {"image_size": size, "batch_size": 6},
        {"limit_train_batches": 1, "limit_val_batches": 0},
    )

    def trained(epochs: int, **more) -> tuple[Classifier, pl.Trainer]:
        model = network_of(data(colours, **images), backbone)
        return model, fit(model, data(colours, **images), **limits, max_epochs=epochs, **more)

    path = tmp_path / "stopped.ckpt"

    def save(trainer: pl.Trainer, _: Classifier) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(path)

    full, _ = trained(3, callbacks=[LambdaCallback(on_train_epoch_end=save)])
    second, _ = trained(3, ckpt_path=path)
    for name, value in full.network.state_dict().items():
        assert value.equal(second.network.state_dict()[name]), name
    first = torch.load(path, weights_only=True)["state_dict"]
    first = {name: first[f"network.{name}"] for name in full.network.state_dict()}
    # what the last step moves
    assert distance(full.network.state_dict(), first) > 1e-6


@of_each_other_kind
def test_a_checkpoint_of_each_family_predicts_without_the_hub(
    colours, cli, monkeypatch, backbone, size
):
    """Those of a fixed size and with a class token too: what the network is made of is in the checkpoint."""

    def refuse(*_, **__):
        pytest.fail("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    options = ["--backbone", backbone, "--size", size, "--batch", 4, "--trainer.max_steps", 1]
    cli("fit", colours, *QUICK, *options, "--test_after_fit", "false")
    folder = Path("runs/fit/version_0")
    cli("predict", folder, colours / "test", "--output", "out.csv", "--data.num_workers", "0")
    with open("out.csv") as file:
        rows = list(csv.DictReader(file))[:3]
    expected = probabilities(
        folder / "checkpoints/best.ckpt", [decode(row["path"]) for row in rows]
    )
    reported = [
        [float(value) for name, value in row.items() if name.startswith("p_")] for row in rows
    ]
    # alone or among others, folded batch norm or not
    np.testing.assert_allclose(reported, expected, rtol=0, atol=1e-4)
