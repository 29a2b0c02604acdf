"""The LightningModule: normalization, loss, freezing, head, groups, and what its checkpoints hold."""

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from colours import QUICKEST, draw_colours
from promise import control, promise
from small_fits import SMALL, data, fit
from torch import nn
from torchvision.transforms.v2 import functional as reference

from finetune import Classifier, ImageFolderData
from finetune.data.samplers import train_order
from finetune.demo.drawing import SOURCE_CLASSES, write_sample
from finetune.distributed import global_loss
from finetune.models.stages import batch_norms, head
from finetune.runs.metrics_csv import read_metrics
from finetune.training.lr_schedulers import WarmupCosine

# Where the network does not matter.
TINY = {"backbone": "small_cnn", "weights": None}
TINY_SIZE = {"image_size": 28}


def copy(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_normalisation_is_inside():
    model = Classifier(["a", "b"], **SMALL).eval()
    images = torch.randint(0, 256, (2, 3, 40, 40), dtype=torch.uint8)
    scaled = reference.to_dtype(images, torch.float32, scale=True)
    normalised = reference.normalize(scaled, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    with torch.no_grad():
        torch.testing.assert_close(model(images), model.network(normalised), rtol=1e-4, atol=1e-5)


def first_step(
    images: ImageFolderData, **options: Any
) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor, Classifier]:
    """Return what was logged of a step that changes nothing, its batch, the logits, and the classifier."""
    batch = next(iter(images.loader("train", train=True)))
    torch.manual_seed(0)
    model = Classifier(
        images.class_names, **TINY, **options, optimizer=partial(torch.optim.SGD, lr=0.0)
    )
    trainer = fit(model, images, max_steps=1)
    with torch.no_grad():
        return trainer.callback_metrics, batch, model(batch["image"]), model


def test_loss_is_that_of_torch(colours):
    images = data(colours, val_fraction=0, **TINY_SIZE)
    images.splits["train"].targets.labels[:15] = 2  # uneven: the weights are not all 1
    logged, batch, logits, model = first_step(images, label_smoothing=0.2, class_weights="balanced")
    expected = F.cross_entropy(logits, batch["label"], model.class_weight, label_smoothing=0.2)
    torch.testing.assert_close(logged["train/loss"], expected)
    plain = F.cross_entropy(logits, batch["label"])
    assert abs(expected - plain) > 1e-3  # the control


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_mixed_images_have_the_loss_of_mixed_targets_and_count_as_their_larger_part(
    colours, smoothing
):
    images = data(colours, val_fraction=0, **TINY_SIZE, mixup=0.4, cutmix=1.0)
    logged, batch, logits, _ = first_step(images, label_smoothing=smoothing)
    own, partner = (F.one_hot(batch[name], 3).float() for name in ("label", "partner_label"))
    target = partner + batch["share"][:, None] * (own - partner)
    expected = F.cross_entropy(logits, target, label_smoothing=smoothing)
    torch.testing.assert_close(logged["train/loss"], expected)
    assert torch.all(batch["share"] >= 0.5)
    accuracy = (logits.argmax(1) == batch["label"]).float().mean()
    assert logged["train/accuracy"] == pytest.approx(accuracy.item())
    plain = F.cross_entropy(logits, batch["label"], label_smoothing=smoothing)
    assert abs(expected - plain) > 1e-3  # the control


def test_balanced_weights_make_the_classes_equal(tmp_path):
    root = draw_colours(tmp_path / "uneven", train=12)
    for path in sorted((root / "train/blue").iterdir())[3:]:
        path.unlink()
    images = data(root, val_fraction=0, **TINY_SIZE)
    model = Classifier(images.class_names, **TINY, class_weights="balanced")
    fit(model, images, max_steps=1)
    counts = torch.tensor([3.0, 12.0, 12.0])
    torch.testing.assert_close(model.class_weight * counts, torch.full((3,), counts.sum() / 3))


@promise("class-weights")
@control("class-weights")
@pytest.mark.parametrize("members", [1, 2])
def test_weights_as_text_are_those_of_balanced_bit_for_bit(tmp_path, members):
    root = draw_colours(tmp_path / "uneven", train=12)
    for path in sorted((root / "train/blue").iterdir())[5:]:
        path.unlink()

    def fitted(weights: str) -> Classifier:
        images = data(root, val_fraction=0, **TINY_SIZE)
        torch.manual_seed(0)
        model = Classifier(images.class_names, **TINY, members=members, class_weights=weights)
        fit(model, images, max_steps=2)
        return model

    balanced = fitted("balanced")
    pairs = zip(balanced.class_names, balanced.class_weight.tolist(), strict=True)
    text = ",".join(f"{name}:{weight!r}" for name, weight in pairs)
    assert moved(fitted(text), copy(balanced.network)) == set()
    assert moved(fitted("blue:2"), copy(balanced.network))  # the control


def moved(model: Classifier, before: dict[str, torch.Tensor]) -> set[str]:
    """The names of all weights and statistics that are not what they were, bit for bit."""
    return {
        name
        for name, value in model.network.state_dict().items()
        if not torch.equal(value, before[name])
    }


def of_stages(model: Classifier, *names: str) -> set[str]:
    return {name for name in model.network.state_dict() if name.startswith(names)}


FROZEN = {"layer2": ("conv1", "bn1", "layer1", "layer2"), "backbone": ("conv1", "bn1", "layer")}


@promise("frozen")
@pytest.mark.parametrize("freeze", list(FROZEN))
def test_what_is_frozen_does_not_move(colours, freeze):
    images = data(colours, val_fraction=0)
    model = Classifier(images.class_names, "resnet18", weights=None, freeze=freeze)
    before = copy(model.network)
    trainer = fit(model, images, max_steps=2)
    still = of_stages(model, *FROZEN[freeze])
    assert len(still) > 50 and moved(model, before) == before.keys() - still  # all else did move
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
    images = data(colours, val_fraction=0)
    model = Classifier(images.class_names, "resnet18", weights=None, freeze="layer2")
    if wrong == "train":
        model.always_eval = []
    else:
        model.network.layer2.requires_grad_(True)
    before = copy(model.network)
    fit(model, images, max_steps=2)
    wrongly = moved(model, before) & of_stages(model, *FROZEN["layer2"])
    assert wrongly and all(
        ("running_" in name or "num_batches" in name) == (wrong == "train") for name in wrongly
    )


@promise("frozen")
def test_frozen_batch_norm_keeps_its_statistics_and_trains_its_scale(colours):
    images = data(colours)
    moved = {}
    for frozen in (True, False):
        pl.seed_everything(0, verbose=False)
        adam = partial(torch.optim.Adam, lr=1e-3)  # moves whatever has a gradient, however small
        model = Classifier(images.class_names, **SMALL, freeze_batch_norm=frozen, optimizer=adam)
        norms = batch_norms(model.network)
        before = [copy(norm) for norm in norms]
        fit(model, images)  # with validation, after which modes are restored
        moved[frozen] = {
            name: any(
                not torch.equal(b[name], norm.state_dict()[name])
                for b, norm in zip(before, norms, strict=True)
            )
            for name in ("running_mean", "running_var", "weight", "bias")
        }
    assert moved[True] == {
        "running_mean": False,
        "running_var": False,
        "weight": True,
        "bias": True,
    }
    assert all(moved[False].values())


def test_groups_have_names_and_their_rates(colours):
    images = data(colours, **TINY_SIZE)
    model = Classifier(
        images.class_names,
        **TINY,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1),
        scheduler=None,
        head_lr_multiplier=20,
        decay_norm_and_bias=False,
    )
    (optimizer,) = fit(model, images, max_steps=1).optimizers
    groups = {
        group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups
    }
    assert groups == {
        "backbone": (1e-4, 0.1),
        "backbone_no_decay": (1e-4, 0),
        "head": (pytest.approx(2e-3), 0.1),
        "head_no_decay": (pytest.approx(2e-3), 0),
    }


@pytest.mark.parametrize(
    ("scheduler", "options", "steps"),
    [
        (partial(WarmupCosine, warmup=0.5), {"max_epochs": 2}, 10),  # 53 images in batches of 12
        (partial(WarmupCosine), {"max_epochs": 2, "max_steps": 7}, 7),
        (partial(WarmupCosine, total_steps=20), {"max_epochs": 2}, 20),
        (partial(WarmupCosine), {"max_epochs": 2, "accumulate_grad_batches": 2}, 6),
        (partial(WarmupCosine), {"max_epochs": 2, "limit_train_batches": 2}, 4),
        (partial(WarmupCosine), {"max_epochs": 3, "each": "epoch"}, 3),
        # begun, the third
        (partial(WarmupCosine), {"max_epochs": 9, "max_steps": 11, "each": "epoch"}, 3),
    ],
)
def test_schedulers_get_the_length_of_the_run(colours, scheduler, options, steps):
    interval = {"scheduler_interval": options.pop("each", "step")}
    images = data(colours, **TINY_SIZE)
    seen = []

    def spy(optimizer: Any, **given: Any) -> Any:
        seen.append(given.get("total_steps", scheduler.keywords.get("total_steps")))
        return scheduler(optimizer, **given)

    spied = partial(spy, **scheduler.keywords)
    spied.func.__signature__ = __import__("inspect").signature(scheduler.func)  # type: ignore[attr-defined]
    model = Classifier(images.class_names, **TINY, scheduler=spied, **interval)
    fit(model, images, **options)
    assert seen == [steps]


@pytest.mark.slow
def test_source_head_is_the_source_classifier_restricted(tmp_path):
    write_sample(tmp_path, "source", counts={"train": 2, "val": 2, "test": 4})
    source_data = data(tmp_path / "source", **TINY_SIZE)
    source = Classifier(source_data.class_names, **TINY)
    trainer = fit(source, source_data, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "source.ckpt")
    wanted = [SOURCE_CLASSES[i] for i in (5, 0, 3)]
    for split in ("train", "val", "test"):
        for name in wanted:
            # matched all the same
            folder = tmp_path / "some" / split / name.replace("_", " ").title()
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.symlink_to(tmp_path / "source" / split / name)
    images = data(tmp_path / "some", **TINY_SIZE)
    model = Classifier(
        images.class_names,
        "small_cnn",
        str(tmp_path / "source.ckpt"),
        head_init="source",
        scheduler=None,
    )
    fit(model, images, max_steps=0)
    (batch,) = images.loader("test")
    rows = [
        source_data.class_names.index(name.replace(" ", "_").lower()) for name in images.class_names
    ]
    with torch.no_grad():
        restricted = source.eval()(batch["image"])[:, rows]
        own = model.eval()(batch["image"])
    torch.testing.assert_close(own, restricted)
    accuracy = (own.argmax(1) == batch["label"]).float().mean()
    assert accuracy == (restricted.argmax(1) == batch["label"]).float().mean()
    control = Classifier(
        images.class_names, "small_cnn", str(tmp_path / "source.ckpt"), scheduler=None
    )
    fit(control, images, max_steps=0)
    assert not torch.allclose(head(control.network).weight, head(model.network).weight)


def test_a_checkpoint_is_complete_and_plain(colours, tmp_path):
    images = data(
        colours,
        augmentations=[{"class_path": "albumentations.RandomRotate90", "init_args": {"p": 0.5}}],
    )
    model = Classifier(images.class_names, **{**SMALL, "scheduler": WarmupCosine})
    trainer = fit(model, images)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    checkpoint = torch.load(tmp_path / "some.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["class_names"] == ["blue", "green", "red"]
    assert checkpoint["hyper_parameters"]["backbone"] == "mobilenet_v3_small"
    assert checkpoint["datamodule_hyper_parameters"]["image_size"] == 32
    assert checkpoint["finetune"]["data_fingerprint"] == images.fingerprint
    assert checkpoint["finetune"]["data_class"] == "finetune.ImageFolderData"
    loaded = Classifier.load_from_checkpoint(tmp_path / "some.ckpt")
    (batch, *_) = images.loader("val")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(batch["image"]), model.eval()(batch["image"]))


@pytest.mark.slow
def test_a_few_images_are_memorised(colours):
    images = data(colours, val_fraction=0.1, batch_size=27, **TINY_SIZE)
    pl.seed_everything(0, verbose=False)
    model = Classifier(images.class_names, **TINY, optimizer=partial(torch.optim.Adam, lr=1e-3))
    trainer = fit(model, images, max_epochs=16)
    assert trainer.callback_metrics["train/accuracy"] > 0.95  # of seeds 0 to 5 all give 1


@pytest.mark.slow
def test_images_that_cannot_be_read(tmp_path, cli, capsys):
    root = draw_colours(tmp_path / "some", train=8, test=2)
    (root / "train/red/03.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"red/03\.png: cannot be decoded"):
        fit(Classifier(["blue", "green", "red"], **TINY), data(root, val_fraction=0, **TINY_SIZE))
    options = ["--data.root", root, *QUICKEST, "--data.batch_size", 5, "--data.val_fraction", 0]
    cli("fit", *options, "--trainer.max_epochs", 2, "--data.on_bad_image", "skip")
    (line,) = (tmp_path / "runs/fit/version_0/skipped.txt").read_text().splitlines()
    assert line.startswith(f"{root}/train/red/03.png: cannot be decoded")
    assert "1 image could not be decoded and was skipped" in capsys.readouterr().out


def test_bad_files_of_any_name_are_listed_by_it(tmp_path, cli):
    root = draw_colours(tmp_path / "some", train=6, test=1)
    names = sorted([b"caf\xe9.png", "größe.png".encode(), b"new\nline.png"])
    for name in names:
        (root / "train/blue" / os.fsdecode(name)).write_bytes(b"broken")
    (root / "train/blue/link.png").symlink_to("nowhere.png")
    os.mkfifo(root / "train/blue/pipe.png")
    names = sorted([*names, b"link.png", b"pipe.png"])
    cli(
        "fit",
        "--data.root",
        root,
        *QUICKEST,
        "--trainer.max_epochs",
        2,
        "--data.on_bad_image",
        "skip",
    )
    assert (tmp_path / "runs/fit/version_0/checkpoints/last.ckpt").exists()
    lines = (tmp_path / "runs/fit/version_0/skipped.txt").read_bytes().splitlines()
    found = sorted(line.partition(b": ")[0].rpartition(b"/")[2] for line in lines)
    assert found == [name.replace(b"\n", b"\\n") for name in names]


@pytest.mark.parametrize(("spoilt", "epochs"), [("train/*/*", 1), ("val/*/*", 2), ("test/*/*", 1)])
def test_a_split_of_bad_images_alone_is_reported_as_that(tmp_path, cli, capsys, spoilt, epochs):
    root = draw_colours(tmp_path / "some", train=4, val=2, test=2)
    for path in root.glob(spoilt):
        path.write_bytes(b"broken")
    options = [
        "--data.root",
        root,
        *QUICKEST,
        "--trainer.max_epochs",
        epochs,
        "--data.on_bad_image",
        "skip",
    ]
    split = spoilt[: spoilt.index("/")]
    with pytest.raises(
        ValueError,
        match=f"^no image of {split} could be decoded: skipped.txt of this run has the reasons$",
    ):
        cli("fit", *options)
    listed = (tmp_path / "runs/fit/version_0/skipped.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in listed] == sorted(map(str, root.glob(spoilt)))


def test_a_last_batch_of_bad_images_alone_is_no_divergence(tmp_path, cli, monkeypatch):
    root = draw_colours(tmp_path / "some", train=5, val=2)
    order = train_order(15, 0, 0)
    paths = sorted(map(str, root.glob("train/*/*")))
    for i in order[12:]:
        Path(paths[i]).write_bytes(b"broken")
    options = [
        "--data.root",
        root,
        *QUICKEST,
        "--data.on_bad_image",
        "skip",
        "--data.batch_size",
        4,
    ]
    fit = ["fit", *options, "--trainer.log_every_n_steps", 1]
    cli(*fit)
    rows = read_metrics(tmp_path / "runs/fit/version_0/steps.csv")
    losses = [row["train/loss"] for row in rows if row.get("train/loss")]
    assert len(losses) == 4 and losses[3] == losses[2]  # Lightning repeats the last one
    zero = global_loss.zero_loss
    monkeypatch.setattr(
        "finetune.training.classifier.zero_loss", lambda model: zero(model) * math.nan
    )
    with pytest.raises(ValueError, match="training has diverged"):  # the control
        cli(*fit)
