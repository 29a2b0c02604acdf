"""What a checkpoint may contain: every setting has a row in the tables, and nothing else is accepted."""

import copy
import inspect
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from colours import QUICKEST

import finetune
from finetune.commands.lightning_cli import run_lightning
from finetune.data.datamodule import ImageDataModule
from finetune.data.transforms import Interpolation, ResizeMode
from finetune.models import checkpoint_sections as sections
from finetune.models.checkpoint_sections import check_checkpoint
from finetune.models.checkpoint_values import DATA_CLASSES, is_plain
from finetune.runs import run_lock
from finetune.training.checkpoint_settings import model_settings
from finetune.training.classifier import Classifier

NOT_IN_CHECKPOINTS = {
    "optimizer",
    "scheduler",
    "compile",
    "num_workers",
    "cache_limit_gb",
    "predict",
}


@pytest.fixture(scope="module")
def written(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The checkpoint of a short fit."""
    with pytest.MonkeyPatch.context() as context:
        context.chdir(tmp_path_factory.mktemp("written"))
        run_lightning(["fit", "--data.root", str(colours), *QUICKEST, "--test_after_fit", "false"])
        run_lock.release()
        return torch.load("runs/fit/version_0/checkpoints/last.ckpt", weights_only=True)


def test_a_checkpoint_of_a_fit_is_accepted(written):
    check_checkpoint(written, "last.ckpt")


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        (Classifier, sections.HYPER_PARAMETERS),
        (ImageDataModule, sections.DATAMODULE_HYPER_PARAMETERS),
    ],
)
def test_each_saved_argument_has_a_row_that_accepts_its_default(kind, rules):
    parameters = inspect.signature(kind).parameters
    saved = (
        parameters.keys() - NOT_IN_CHECKPOINTS - (set() if kind is Classifier else {"class_names"})
    )
    assert rules.keys() == saved
    for name in saved:
        default = parameters[name].default
        assert default is inspect.Parameter.empty or rules[name].accepts(default), name


def test_the_tables_restate_what_the_signatures_say():
    for name, values in (
        ("resize", get_args(ResizeMode)),
        ("interpolation", get_args(Interpolation)),
    ):
        assert set(sections.DATAMODULE_HYPER_PARAMETERS[name].expected.split(" or ")) == set(values)
    for name in ("head_init", "scheduler_interval"):
        annotation = inspect.signature(Classifier).parameters[name].annotation
        assert set(sections.HYPER_PARAMETERS[name].expected.split(" or ")) == set(
            get_args(annotation)
        )
    found = {
        f"finetune.{name}" for name in finetune.__all__ if _is_data_class(getattr(finetune, name))
    }
    assert set(DATA_CLASSES) == found


def _is_data_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ImageDataModule)


MODEL = "hyper_parameters"
DATA = "datamodule_hyper_parameters"
OURS = "finetune"
NAMES, SIZES = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
META = torch.zeros(3, 1, 1, device="meta")
FLIPS = [{"class_path": "albumentations.HorizontalFlip"}] * 101
MANY = [str(i) for i in range(1_000_001)]
LOOPS = {"fit_loop": {"epoch_progress": {"current": {"processed": -1}}}}
BOMB: list[Any] = ["x"]
for _ in range(40):
    BOMB = [BOMB, BOMB]
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]

# place: values that none of our checkpoints has
INVALID: dict[tuple[str, ...], list[Any]] = {
    (MODEL,): [None, [], "x"],
    (MODEL, "class_names"): [
        None,
        "ab",
        [],
        ["a"],
        ["a", "a"],
        ["a", ""],
        ["a", 1],
        ["a", "b\x1b[2J"],
        ["a", "b\nc"],
        MANY,
    ],
    (MODEL, "backbone"): [None, 3, ["x"], "x" * 5000],
    (MODEL, "weights"): [3, {"a": 1}],
    (MODEL, "head_init"): ["other", None, ["xavier"]],
    (MODEL, "class_mapping"): ["x", {"a": 1}, {"a": [1]}, {1: "a"}, {"a": MANY}],
    (MODEL, "freeze_batch_norm"): ["yes", 1],
    (MODEL, "head_lr_multiplier"): [0, -1.0, math.inf, math.nan, "10", True],
    (MODEL, "layer_decay"): [0, 1.5, "1"],
    (MODEL, "label_smoothing"): [1, -0.1, math.nan, "0"],
    (MODEL, "class_weights"): ["other", [], {"a": -1.0}, {"a": math.nan}, {"a": "2"}, {1: 2.0}],
    (MODEL, "network_size"): ["64", 0, 10**9, 64.0],
    (MODEL, "members"): ["3", 0, 33, 10**9, True, None],
    (MODEL, "head_stages"): ["3", 0, 5, True, None],
    (MODEL, "compile"): [True],
    (MODEL, "optimizer"): [None],
    (MODEL, "_instantiator"): ["some.function"],
    (DATA,): [None, [1]],
    (DATA, "root"): [3, {"class_path": "x"}, "a\0b"],
    (DATA, "batch_size"): [0, -1, "64", 10**9, 8.0, True],
    (DATA, "image_size"): ["64", 0, -1, 10**6, 28.0, None],
    (DATA, "eval_image_size"): ["48", -1, 10**6],
    (DATA, "resize"): ["other", None],
    (DATA, "interpolation"): ["other", 1],
    (DATA, "crop_share"): [1e-9, 0, 1.1, "0.8", math.nan],
    (DATA, "min_crop"): [0, 2.0, "x"],
    (DATA, "augmentations"): [
        "[]",
        [1],
        [["x"]],
        [{"class_path": BOMB}],
        [{"init_args": DEEP}],
        {"a": 1},
        FLIPS,
    ],
    (DATA, "exclude"): [3, [1], {"a": 1}, MANY],
    (DATA, "mixup"): [-1.0, math.inf, "0"],
    (DATA, "val_fraction"): [1.0, -0.1, "x"],
    (DATA, "split_seed"): ["0", None, 10**40],
    (DATA, "cache_size"): ["64", 10**9],
    (DATA, "on_bad_image"): ["other"],
    (DATA, "num_workers"): [0, 5000, "auto"],
    (DATA, "cache_limit_gb"): [1.0],
    (DATA, "predict"): ["/etc"],
    (DATA, "devices"): [8],
    (OURS,): [None, []],
    (OURS, "version"): [None, 1],
    (OURS, "precision"): [3, "8-bit"],
    (OURS, "data_class"): [
        *(
            "finetune.ImageDataModule",
            "finetune.Classifier",
            "finetune.load",
            "finetune.data.datamodule.ImageDataModule",
        ),
        *(["finetune.SampleData"], 3),
    ],
    (OURS, "seen"): [
        *(
            3,
            {"names": NAMES, "num_train": 3},
            {"names": NAMES, "sizes": SIZES[:2], "num_train": 2},
        ),
        *(
            {"names": NAMES.double(), "sizes": SIZES, "num_train": 3},
            {"names": NAMES, "sizes": SIZES, "num_train": 4},
        ),
        {"names": NAMES, "sizes": SIZES, "num_train": -1},
        {"names": NAMES.to_sparse(), "sizes": SIZES, "num_train": 0},
        {"names": NAMES, "sizes": SIZES, "num_train": 0, "digests": NAMES[:2]},
        {"names": NAMES, "sizes": SIZES, "num_train": 0, "other": NAMES},
        {"names": NAMES.to("meta"), "sizes": SIZES, "num_train": 0},
    ],
    (OURS, "train_metrics"): [
        3,
        {"restore": {}},
        {"train_loss": {"forward": torch.zeros(())}, "train_accuracy": {}},
    ],
    (OURS, "calibration"): [3, []],
    (OURS, "exported"): ["/some/other.onnx"],
    ("callbacks",): [3, {"Checkpoints": 3}, {1: {}}],
    ("callbacks", "Checkpoints"): [
        {"highest": "1"},
        {"highest": 2.0},
        {"highest": None, "run": "x"},
        {"limits": 3},
    ],
    ("callbacks", "EarlyStopping{'monitor': 'x'}"): [{}, {"wait_count": "3", "patience": 1}],
    ("loops",): [3, {}, {"fit_loop": 3}, LOOPS],
    ("epoch",): [-1, "0", None],
    ("global_step",): [-1, 1.5],
    ("pytorch-lightning_version",): [3, "x", "2.6\n"],
    ("optimizer_states",): [
        *(3, [3], [{}], [{"param_groups": []}], [{"param_groups": [3]}]),
        [{"param_groups": [{}], "state": {0: {"momentum_buffer": META}}}],
    ],
    ("lr_schedulers",): [3, [3], [{1: 2}]],
    ("state_dict",): [
        3,
        [],
        {"x": 3},
        {"x": META},
        {"mean": META},
        {"std": torch.ones(3, 1, 1).to_sparse()},
    ],
    ("state_dict", "mean"): [torch.zeros(3), torch.full((3, 1, 1), math.nan)],
    ("state_dict", "std"): [torch.zeros(3, 1, 1), torch.ones(3, 1, 1, dtype=torch.int64)],
    ("state_dict", "class_weight"): [torch.ones(5)],
}


def with_value(checkpoint: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy of a checkpoint with another value at a place."""
    changed = {
        name: dict(part) if isinstance(part, dict) else part for name, part in checkpoint.items()
    }
    inside = changed
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    return changed


@pytest.mark.parametrize("place", INVALID, ids=".".join)
def test_a_value_that_no_fit_writes_is_refused_in_one_line(written, place):
    for value in INVALID[place]:
        with pytest.raises(
            ValueError, match=r"^'some\.ckpt' is not a valid checkpoint: "
        ) as caught:
            check_checkpoint(with_value(written, place, value), "some.ckpt")
        line = str(caught.value)
        assert place[0] in line or value in ({}, None), line
        assert place[-1] in line and len(line) < 400 and "\n" not in line and "\x1b" not in line


@pytest.mark.parametrize("part", [MODEL, DATA, OURS])
def test_a_required_key_that_is_missing_is_named(written, part):
    tables = {
        MODEL: sections.HYPER_PARAMETERS,
        DATA: sections.DATAMODULE_HYPER_PARAMETERS,
        OURS: sections.FINETUNE,
    }
    required = [name for name, rule in tables[part].items() if rule.is_required]
    assert required
    for name in required:
        known = copy.copy(written)
        known[part] = {key: value for key, value in known[part].items() if key != name}
        with pytest.raises(ValueError, match=rf"{part}\.{name} is missing"):
            check_checkpoint(known, "some.ckpt")


def test_a_checkpoint_without_the_version_of_lightning_is_refused(written):
    known = {name: part for name, part in written.items() if name != "pytorch-lightning_version"}
    # Lightning has a KeyError for it
    with pytest.raises(ValueError, match=r"pytorch-lightning_version is missing"):
        check_checkpoint(known, "some.ckpt")


def test_a_data_class_of_another_module_may_have_arguments_of_its_own(written):
    known = with_value(written, (DATA, "magnification"), 40)
    with pytest.raises(
        ValueError, match=r"datamodule_hyper_parameters\.magnification is an unknown key"
    ):
        check_checkpoint(known, "some.ckpt")
    known = with_value(known, (OURS, "data_class"), "mine.Slides")
    check_checkpoint(known, "some.ckpt")
    for value in (BOMB, DEEP, META):
        with pytest.raises(ValueError, match="datamodule_hyper_parameters has too many values"):
            check_checkpoint(with_value(known, (DATA, "magnification"), value), "some.ckpt")
    with pytest.raises(ValueError, match="batch_size is 0"):  # ours stay bounded
        check_checkpoint(with_value(known, (DATA, "batch_size"), 0), "some.ckpt")


def test_images_are_never_resized_beyond_all_bounds(written):
    known = with_value(written, (DATA, "image_size"), 8000)
    check_checkpoint(with_value(known, (DATA, "crop_share"), 0.875), "some.ckpt")
    with pytest.raises(ValueError, match=r"crop_share is 0\.1 of 8000 pixels"):
        check_checkpoint(with_value(known, (DATA, "crop_share"), 0.1), "some.ckpt")


def test_what_other_callbacks_keep_is_theirs(written):
    states = {
        **written["callbacks"],
        "Mine": {"anything": torch.zeros(2)},
        "Rates": {"last": {"lr": 0.1}},
    }
    check_checkpoint({**written, "callbacks": states, "of_a_callback": 3}, "some.ckpt")


def test_plain_values_are_counted_where_they_appear_again():
    assert is_plain({"a": [1, 2.0, "x", None, True, ("y",)]})
    assert not is_plain(BOMB) and not is_plain(DEEP)
    assert not is_plain([np.zeros(1)]) and not is_plain({1: 2}) and not is_plain(torch.zeros(1))


def test_control_the_settings_alone_were_accepted(written):
    """Without the tables a number out of range reaches the model."""
    assert (
        model_settings(with_value(written, (MODEL, "label_smoothing"), 7.0))["label_smoothing"]
        == 7.0
    )
