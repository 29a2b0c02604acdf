"""A Classifier in Lightning's own Trainer: what trains at which rate, what its checkpoint holds, what it refuses."""

import os
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from colours import QUICKEST, draw_colours
from promise import control, promise
from scenario_results import distance
from small_fits import SMALL, data, fit
from torch import Tensor, nn

from finetune import Classifier, ImageFolderData
from finetune.data.samplers import train_order
from finetune.models.stages import batch_norms
from finetune.runs.metrics_csv import read_metrics
from finetune.training.first_pass import check_fit
from finetune.training.lr_schedulers import WarmupCosine

# Where the network does not matter.
TINY = {"backbone": "small_cnn", "weights": None}
TINY_SIZE = {"image_size": 28}
NAMES = ["blue", "green", "red"]


def copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def moved(model: Classifier, before: dict[str, Tensor]) -> set[str]:
    """The names of all weights and statistics that are not what they were, bit for bit."""
    after = model.network.state_dict()
    return {name for name, value in after.items() if not torch.equal(value, before[name])}


FROZEN = {"layer2": ("conv1", "bn1", "layer1", "layer2"), "backbone": ("conv1", "bn1", "layer")}


def residual(freeze: str) -> Classifier:
    return Classifier(NAMES, "timm/test_resnet", None, freeze=freeze)


def of_stages(model: Classifier, freeze: str) -> set[str]:
    """The names of all weights and statistics that are frozen."""
    return {name for name in model.network.state_dict() if name.startswith(FROZEN[freeze])}


@promise("frozen")
@pytest.mark.parametrize("freeze", ["layer2", "backbone"])
def test_freeze_keeps_layers_as_they_are(colours, freeze):
    model = residual(freeze)
    before = copy(model.network)
    trainer = fit(model, data(colours, val_fraction=0), max_steps=2)
    still = of_stages(model, freeze)
    assert len(still) > 30 and moved(model, before) == before.keys() - still  # all else did move
    if freeze == "backbone":  # the head is solved
        assert trainer.optimizers == []
        return
    (optimizer,) = trainer.optimizers
    trained = {id(p) for name, p in model.network.named_parameters() if name not in still}
    assert {id(parameter) for parameter in optimizer.state} == trained


@control("frozen")
@pytest.mark.parametrize("wrong", ["train", "requires_grad"])
def test_control_half_a_freeze_is_seen_to_move(colours, wrong):
    """Without eval mode the frozen stages' statistics move, with gradients their weights do."""
    model = residual("layer2")
    if wrong == "train":
        model.always_eval = []
    else:
        model.network.layer2.requires_grad_(True)
    before = copy(model.network)
    fit(model, data(colours, val_fraction=0), max_steps=2)
    wrongly = moved(model, before) & of_stages(model, "layer2")
    is_statistic = {"running_" in name or "num_batches" in name for name in wrongly}
    assert is_statistic == {wrong == "train"}


@promise("frozen")
def test_frozen_batch_norm_keeps_its_statistics_and_trains_its_scale(colours):
    images = data(colours)
    names = ("running_mean", "running_var", "weight", "bias")
    changed = {}
    for frozen in (True, False):
        pl.seed_everything(0, verbose=False)
        adam = partial(torch.optim.Adam, lr=1e-3)  # moves whatever has a gradient, however small
        model = Classifier(NAMES, **SMALL, freeze_batch_norm=frozen, optimizer=adam)
        norms = batch_norms(model.network)
        before = [copy(norm) for norm in norms]
        fit(model, images)  # with validation, after which modes are restored
        pairs = [(b, norm.state_dict()) for b, norm in zip(before, norms, strict=True)]
        changed[frozen] = [any(not b[n].equal(after[n]) for b, after in pairs) for n in names]
    assert changed == {True: [False, False, True, True], False: [True] * 4}


class Rates(pl.Callback):
    """Notes the rate of each step, and what is left after the last one."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("options", "num_batches"),
    [
        ({"max_epochs": 2}, 10),  # 53 images in batches of 12
        ({"max_epochs": -1, "max_steps": 6}, 6),
        ({"max_epochs": 2, "accumulate_grad_batches": 2}, 10),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 4),
        ({"max_epochs": 2, "interval": "epoch"}, 10),
    ],
)
def test_the_rate_falls_to_0_at_the_end_of_the_run_and_not_before(colours, options, num_batches):
    options = dict(options)
    interval = options.pop("interval", "step")
    images = data(colours, **TINY_SIZE)
    model = Classifier(NAMES, **TINY, scheduler=WarmupCosine, scheduler_interval=interval)
    fit(model, images, callbacks=[rates := Rates()], limit_val_batches=0, **options)
    assert len(rates.seen) == num_batches + 1
    assert min(rates.seen[:-1]) > 0 and rates.seen[-1] == 0


class Functional(nn.Module):
    """Dropout that no module shows."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(F.dropout(x, 0.5, self.training))


class Draws(pl.Callback):
    """Draws between the steps, as another callback may."""

    def on_train_batch_end(self, *_: Any) -> None:
        torch.rand(7)


def test_what_torch_draws_in_a_step_depends_on_the_step_alone(colours):
    ends = []
    for seed, callbacks in ((0, []), (1, [Draws()])):
        torch.manual_seed(0)
        model = Classifier(NAMES, **TINY, scheduler=None)
        model.image_classifier.network = Functional(model.network)  # type: ignore[assignment]
        torch.manual_seed(seed)
        images = data(colours, val_fraction=0, **TINY_SIZE)
        fit(model, images, max_steps=3, callbacks=callbacks)
        ends.append(copy(model.network))
    assert distance(*ends) == 0


SKIP = ("--data.on_bad_image", "skip")


def test_images_that_cannot_be_read_end_a_fit_or_are_skipped_and_listed(tmp_path, cli, capsys):
    root = draw_colours(tmp_path / "some", train=6, test=1)
    names = sorted([b"caf\xe9.png", "größe.png".encode(), b"new\nline.png"])
    for name in names:
        (root / "train/blue" / os.fsdecode(name)).write_bytes(b"broken")
    (root / "train/blue/link.png").symlink_to("nowhere.png")
    os.mkfifo(root / "train/blue/pipe.png")
    names = sorted([*names, b"link.png", b"pipe.png"])
    with pytest.raises((ValueError, OSError), match=r"train.blue"):
        fit(Classifier(NAMES, **TINY), data(root, val_fraction=0, **TINY_SIZE))
    cli("fit", "--data.root", root, *QUICKEST, "--trainer.max_epochs", 2, *SKIP)
    run = tmp_path / "runs/fit/version_0"
    lines = (run / "skipped.txt").read_bytes().splitlines()
    found = sorted(line.partition(b": ")[0].rpartition(b"/")[2] for line in lines)
    assert found == [name.replace(b"\n", b"\\n") for name in names]
    assert "3 images could not be" in capsys.readouterr().out


@pytest.mark.parametrize(("split", "epochs"), [("train", 1), ("test", 1)])
def test_a_split_of_bad_images_alone_is_reported(tmp_path, cli, split, epochs):
    root = draw_colours(tmp_path / "some", train=4, val=2, test=2)
    for path in root.glob(f"{split}/*/*"):
        path.write_bytes(b"broken")
    with pytest.raises(ValueError, match=f"no image of {split} .*skipped.txt"):
        cli("fit", "--data.root", root, *QUICKEST, "--trainer.max_epochs", epochs, *SKIP)
    listed = (tmp_path / "runs/fit/version_0/skipped.txt").read_text().splitlines()
    expected = sorted(map(str, root.glob(f"{split}/*/*")))
    assert [line.partition(":")[0] for line in listed] == expected


def test_a_last_batch_of_bad_images_alone_is_no_divergence(tmp_path, cli):
    root = draw_colours(tmp_path / "some", train=5, val=2)
    paths = sorted(map(str, root.glob("train/*/*")))
    for i in train_order(15, 0, 0)[12:]:
        Path(paths[i]).write_bytes(b"broken")
    options = ["--data.root", root, *QUICKEST, *SKIP, "--data.batch_size", 4]
    cli("fit", *options, "--trainer.log_every_n_steps", 1)
    rows = read_metrics(tmp_path / "runs/fit/version_0/steps.csv")
    losses = [row["train/loss"] for row in rows if row.get("train/loss")]
    assert len(losses) == 4 and losses[3] == losses[2]  # Lightning repeats the last one


known = cache(partial(Classifier, NAMES, weights=None))


def trainer(**options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "max_epochs": 5}
    return pl.Trainer(accelerator="cpu", **{**quiet, **options})


def images_of(colours: Path, num: int, **options: Any) -> ImageFolderData:
    images = data(colours, val_fraction=0, **options)
    in_turn = np.arange(60).reshape(3, 20).T.ravel()  # an image of each class after the other
    images.splits["train"] = images.splits["train"].take(in_turn[:num])
    return images


@pytest.mark.parametrize(
    ("num", "batch_size", "limits", "refused"),
    [
        (36, 35, {}, True),
        (56, 11, {}, True),
        # the last batch is never seen
        (56, 11, {"limit_train_batches": 5}, False),
        (56, 11, {"limit_train_batches": 0.9}, False),
        (56, 11, {"max_steps": 3, "accumulate_grad_batches": 2}, True),
        (57, 11, {}, False),
    ],
)
def test_a_batch_of_one_image_on_which_batch_norm_can_not_train_is_found_before(
    colours, num, batch_size, limits, refused
):
    model = known("mobilenet_v3_small")
    images = images_of(colours, num, batch_size=batch_size)
    advice = "--data.batch_size.*--model.freeze_batch_norm true"
    with pytest.raises(ValueError, match=advice) if refused else nullcontext():
        check_fit(trainer(**limits), model, images)
    check_fit(trainer(**limits), model, images, "test")  # which takes no statistics
