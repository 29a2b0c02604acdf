"""Training on features that were computed once ends with the weights of training on pictures."""

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest
import pytorch_lightning as pl
import small_fits
import timm
import torch
from colours import draw_colours
from ddp_scenarios import calibrated_network, sgd, small_normalised

from finetune import Classifier, ImageFolderData
from finetune.data.dataset import FeatureDataset
from finetune.features import feature_cache
from finetune.system.cache_dir import FEATURES, HEADER_BYTES, MARK, cache_dir

FROZEN = {"backbone": "resnet18", "weights": None, "optimizer": sgd, "scheduler": None, "freeze_batch_norm": True}


@pytest.fixture(autouse=True)
def own_caches_and_seed(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "caches"))
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # which `fit` sets: so that it is put back


def data(root: Path, **options) -> ImageFolderData:
    options = {"image_size": 32, "batch_size": 16, "num_workers": 0, "num_views": 2, "augmentations": None, **options}
    return ImageFolderData(str(root), **options)


def fit(
    pictures: ImageFolderData, ckpt_path: Path | None = None, max_epochs: int = 4, network=small_normalised, **options
):
    """Train a network that is always the same at the start."""
    pl.seed_everything(1, verbose=False)
    with patch("finetune.training.classifier.build", network):
        model = Classifier(pictures.class_names, **{**FROZEN, "freeze": "4", **options})
    trainer = small_fits.fit(model, pictures, ckpt_path, max_epochs=max_epochs)
    model.result = float(trainer.callback_metrics["val/loss"]) if "val" in pictures.splits else None
    return model


@pytest.fixture(scope="module")
def usual(colours, tmp_path_factory) -> Classifier:
    """What comes of the usual fit, with a cache of its own."""
    with pytest.MonkeyPatch.context() as context:
        context.setenv("FINETUNE_CACHE", str(tmp_path_factory.mktemp("usual")))
        context.setenv("PL_GLOBAL_SEED", "0")
        return fit(data(colours))


def distance(a: Classifier, b: Classifier) -> float:
    ours, theirs = a.network.state_dict(), b.network.state_dict()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def caches() -> list[Path]:
    return sorted(cache_dir().glob(f"*{FEATURES}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"freeze": "4"},
        {"freeze": "backbone"},
        {"freeze": "1", "freeze_batch_norm": False},
        {"freeze": "backbone", "head_init": "probe"},
        {"freeze": "4", "class_weights": "balanced", "label_smoothing": 0.1},
        pytest.param({"freeze": "layer3", "network": calibrated_network}, marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_training_on_pictures(colours, options):
    pictures = data(colours)
    with_activations = fit(pictures, **options)
    assert set(pictures.features) == {"train", "val"}
    without = data(colours, cache_limit_gb=0)
    on_pictures = fit(without, **options)
    assert not without.features
    assert distance(with_activations, on_pictures) < 1e-6
    assert with_activations.result == pytest.approx(on_pictures.result, abs=1e-5)


def test_views_take_turns(colours, usual):
    """Control: with the first view in every epoch the weights are others."""
    original = FeatureDataset.__getitems__

    def first_view(self, keys):
        return original(self, [(0, key[1]) if isinstance(key, tuple) else key for key in keys])

    with patch.object(FeatureDataset, "__getitems__", first_view):
        wrong = fit(data(colours))
    assert distance(usual, wrong) > 1e-4


@pytest.mark.slow
def test_pictures_that_are_prepared_as_in_evaluation_need_no_views(colours):
    plain = {"num_views": None, "crop_and_flip": False}
    pictures = data(colours, **plain)
    assert distance(fit(pictures), fit(data(colours, **plain, cache_limit_gb=0))) < 1e-6
    assert pictures.features
    drawn_anew = data(colours, num_views=None)
    fit(drawn_anew)
    assert not drawn_anew.features


@pytest.mark.slow
def test_nothing_is_computed_where_it_would_not_be_read_again(colours):
    for pictures, options in ((data(colours), {"freeze": None}), (data(colours), {"max_epochs": 2})):
        fit(pictures, **options)
        assert not pictures.features
    assert not caches()


@pytest.mark.slow
def test_a_later_run_finds_them_and_only_the_same_one(colours):
    first = fit(data(colours))
    assert len(caches()) == 2
    with patch.object(feature_cache, "_fill", side_effect=AssertionError):
        assert distance(first, fit(data(colours))) == 0
    fit(data(colours, image_size=40))
    assert len(caches()) == 4
    fit(data(colours), freeze="1")
    assert len(caches()) == 6
    fit(data(colours, augmentations=[{"class_path": "albumentations.ColorJitter"}]))
    assert len(caches()) == 7  # val has no augmentation


def other_network(backbone: str, num_classes: int, image_size: int | None = None):
    network = small_normalised(backbone, num_classes)
    network[0].weight.data[0, 0, 0, 0] += 1e-3
    return network


@pytest.mark.slow
def test_other_weights_are_other_activations(colours):
    fit(data(colours))
    fit(data(colours), network=other_network)
    assert len(caches()) == 4


def test_another_timm_may_make_others_of_its_own_networks(monkeypatch):
    trainer = SimpleNamespace(precision="32-true", strategy=SimpleNamespace(root_device=torch.device("cpu")))
    pictures = SimpleNamespace(identity=str)

    def keys() -> list[str]:
        parts = [feature_cache.Part(name, torch.clone, ()) for name in ("timm/resnet18", "resnet18")]
        return [feature_cache._key(trainer, part, pictures, "train") for part in parts]

    before = keys()
    monkeypatch.setattr(timm, "__version__", "0")
    assert [old == new for old, new in zip(before, keys(), strict=True)] == [False, True]


def test_a_resumed_run_goes_on_with_them(colours, usual, tmp_path):
    half = fit(data(colours), max_epochs=3)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    pictures = data(colours)
    assert distance(fit(pictures, ckpt_path=tmp_path / "half.ckpt"), usual) == 0
    assert pictures.features


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("patched", "reason"),
    [
        (patch.object(os, "posix_fallocate", full), "No space left on device"),
        (
            patch.object(feature_cache, "room", lambda folder: 1000.0),
            "above --data.cache_limit_gb or half the free disk",
        ),
    ],
)
def test_where_they_can_not_be_kept_a_line_says_so_and_the_run_is_the_same(colours, usual, caplog, patched, reason):
    pictures = data(colours)
    with patched:
        model = fit(pictures)
    assert reason in caplog.text and caplog.text.count("computed anew in every epoch") == 1
    assert not pictures.features and not list(cache_dir().glob(f"*{FEATURES}*"))
    assert distance(model, usual) < 1e-6


@pytest.mark.slow
def test_of_several_networks_none_is_kept_and_a_line_says_so(colours, caplog):
    pictures, members = data(colours), {"freeze": "1", "members": 2}
    model = fit(pictures, **members)
    (told,) = [text for text in caplog.messages if "computed anew in every epoch" in text]
    assert told.endswith("it is kept for one network, not for several (model.members)")
    assert not pictures.features and not caches()
    assert distance(model, fit(data(colours, cache_limit_gb=0), **members)) == 0
    assert distance(model, fit(data(colours), max_epochs=1, **members)) > 1e-3  # it did learn in the others
    single = {**members, "members": 1}
    fit(data(colours), **single)
    assert len(caches()) == 2  # the control


def test_a_picture_that_can_not_be_decoded_is_skipped_as_before(colours, tmp_path, caplog):
    root = draw_colours(tmp_path / "broken", train=6)
    broken = root / "train/blue/00.png"
    broken.write_bytes(broken.read_bytes()[:50])
    pictures = data(root, on_bad_image="skip", val_fraction=0)
    model = fit(pictures)
    assert not pictures.features and "blue/00.png" in caplog.text
    assert distance(model, fit(data(root, on_bad_image="skip", val_fraction=0, cache_limit_gb=0))) == 0


def test_a_batch_is_what_the_keys_say():
    rows = torch.arange(6.0)[:, None].expand(6, 4)  # two views of three pictures
    held = FeatureDataset(rows, np.array([5, 6, 7]))
    batch = held.__getitems__([(0, 2), (1, 0), (2, 1), (3, 1)])
    assert batch["image"][:, 0].tolist() == [2, 3, 1, 4]
    assert batch["label"].tolist() == [7, 5, 6, 6] and batch["index"].tolist() == [2, 0, 1, 1]
    assert held.__getitems__([0, 3, 5])["index"].tolist() == [0, 0, 2]
    maps = FeatureDataset(torch.zeros(6, 2, 2, 8), np.array([5, 6, 7])).__getitems__([0, 1])["image"]
    assert maps.shape == (2, 8, 2, 2) and maps.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_a_file_of_the_right_size_is_needed_and_only_read(colours, monkeypatch):
    first = fit(data(colours))
    for path in caches():
        path.chmod(0o444)
    opened = []
    original = torch.from_file

    def from_file(path, shared, **options):
        opened.append(shared)
        return original(path, shared=shared, **options)

    monkeypatch.setattr(torch, "from_file", from_file)
    assert distance(first, fit(data(colours))) == 0
    assert opened == [False, False]  # a map to write to would make a missing file, of zeros
    for path in caches():
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-1])
    assert distance(first, fit(data(colours))) == 0
    assert opened == [False, False, True, False, True, False]


@pytest.mark.parametrize("position", [0, 20, HEADER_BYTES + 5, -1])
def test_a_file_that_was_changed_is_named_and_made_anew(colours, usual, caplog, position):
    assert distance(fit(data(colours)), usual) == 0
    path = caches()[0]
    written = path.read_bytes()
    content = bytearray(written)
    content[position] ^= 0x40
    path.write_bytes(content)  # as many bytes as before
    assert distance(fit(data(colours)), usual) == 0
    assert caplog.text.count(f"the features in {path} are damaged: they are computed anew") == 1
    assert path.read_bytes() == written
    caplog.clear()
    with patch.object(feature_cache, "_fill", side_effect=AssertionError):  # the control
        fit(data(colours))
    assert "damaged" not in caplog.text


def test_one_that_is_removed_meanwhile_is_told_and_not_made_of_zeros(colours, usual, caplog):
    pictures = data(colours)
    with patch.object(feature_cache, "mark_used", lambda path: path.unlink()):
        model = fit(pictures)
    assert "computed anew in every epoch" in caplog.text and not pictures.features
    assert distance(model, usual) < 1e-6


def test_what_a_killed_run_left_is_removed_after_a_day(colours):
    cache_dir().mkdir()
    old, new = (cache_dir() / f".x{i}{FEATURES}.aa-0.tmp" for i in range(2))
    for path, age in ((old, 90_000), (new, 80_000)):
        path.write_bytes(MARK + b"x")
        os.utime(path, (time.time() - age,) * 2)
    fit(data(colours))
    assert new.exists() and not old.exists()


def test_another_trainer_s_pictures_are_pictures_again(colours):
    pictures = data(colours)
    model = fit(pictures)
    value = float(model.trainer.callback_metrics["val/loss"])
    model.trainer.validate(model, datamodule=pictures, verbose=False)
    assert not pictures.features
    assert float(model.trainer.callback_metrics["val/loss"]) == pytest.approx(value, abs=1e-5)


def test_a_fit_without_our_data_is_left_alone():
    assert not feature_cache.pays(Mock(), None)
