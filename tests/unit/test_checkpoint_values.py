"""What a checkpoint may contain: a setting has a row in a table, and nothing else is accepted."""

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from colours import QUICKEST
from hypothesis import given
from hypothesis import strategies as st

import finetune
from finetune import Classifier
from finetune.cli import run as run_command
from finetune.data.datamodule import ImageDataModule
from finetune.models import checkpoint as sections
from finetune.models.checkpoint import check_checkpoint
from finetune.runs import run_lock
from finetune.settings.fields import class_paths, settings_of
from finetune.settings.schema import DATA_CLASSES, DataSettings, ModelSettings

MODEL = "hyper_parameters"
DATA = "datamodule_hyper_parameters"
OURS = "finetune"
TABLES = {
    MODEL: sections.HYPER_PARAMETERS,
    DATA: sections.DATAMODULE_HYPER_PARAMETERS,
    OURS: sections.FINETUNE,
}


@pytest.fixture(scope="module")
def written(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The checkpoint of a short fit."""
    with pytest.MonkeyPatch.context() as context:
        context.chdir(tmp_path_factory.mktemp("written"))
        run_command(["fit", "--data.root", str(colours), *QUICKEST, "--test_after_fit", "false"])
        run_lock.release()
        return torch.load("runs/fit/version_0/checkpoints/last.ckpt", weights_only=True)


@pytest.mark.parametrize(("kind", "part"), [(ModelSettings, MODEL), (DataSettings, DATA)])
def test_each_saved_setting_has_a_row_that_accepts_its_default(written, kind, part):
    settings = settings_of(kind)
    saved = written[part].keys() & settings.keys()
    assert TABLES[part].keys() & settings.keys() == saved and len(saved) > 10
    for name in saved:
        assert TABLES[part][name].accepts(settings[name].default), name


def test_the_data_classes_of_checkpoints_are_those_of_the_package():
    classes = {name: getattr(finetune, name) for name in finetune.__all__}
    assert set(DATA_CLASSES) == {
        f"finetune.{name}"
        for name, kind in classes.items()
        if isinstance(kind, type) and issubclass(kind, ImageDataModule)
    }


NAMES = torch.zeros(3, dtype=torch.int64)
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
SEEN = {"train": NAMES, "val": NAMES}
VIEW = torch.ones(1).expand(1000)  # more values than the file has

# place: values out of range, which none of our checkpoints has
INVALID: dict[tuple[str, ...], list[Any]] = {
    (MODEL, "class_names"): [[], ["a"], ["a", "a"], ["a", ""], ["a", "b\x1b[2J"], MANY],
    (MODEL, "head_lr_multiplier"): [0, -1.0, math.inf, math.nan],
    (MODEL, "label_smoothing"): [1, -0.1, math.nan],
    (MODEL, "class_weights"): ["other", {"a": -1.0}, {"a": math.nan}, {"a": "2"}, {1: 2.0}],
    (MODEL, "members"): [0, 33, True],
    (MODEL, "compile"): [True],
    (MODEL, "_instantiator"): ["some.function"],
    (DATA, "root"): ["a\0b", {"class_path": "x"}],
    (DATA, "batch_size"): [0, -1, 10**9, 8.0, True],
    (DATA, "image_size"): [0, -1, 10**6, 28.0],
    (DATA, "crop_share"): [1e-9, 0, 1.1, math.nan],
    (DATA, "augmentations"): ["[]", [{"class_path": BOMB}], [{"init_args": DEEP}], FLIPS],
    (DATA, "val_fraction"): [1.0, -0.1],
    (DATA, "split_seed"): [10**40],
    (DATA, "predict"): ["/etc"],
    (OURS, "data_class"): ["finetune.ImageDataModule", "finetune.load", ["finetune.SampleData"]],
    (OURS, "seen"): [
        {"train": NAMES},
        {**SEEN, "val": 3},
        {**SEEN, "train": NAMES.double()},
        {**SEEN, "train": NAMES.to_sparse()},
        {**SEEN, "train": NAMES.to("meta")},
        {**SEEN, "val": NAMES[None]},
        {**SEEN, "other": NAMES},
        {**SEEN, "val": NAMES[:1].expand(1000)},
    ],
    (OURS, "familiarity"): [
        3,
        {"means": torch.ones(2, 3)},
        {"means": torch.ones(2, 3), "cosines": 3},
        {"means": torch.ones(2, 3), "cosines": torch.tensor(1.0)},
        {"means": torch.ones(2, 3), "cosines": torch.empty(0)},
        {"means": torch.ones(2, 3).to_sparse(), "cosines": torch.ones(1)},
        {"means": torch.ones(2, 3, 1), "cosines": torch.ones(1)},
        {"means": torch.ones(2, 3), "cosines": VIEW},
        {"means": VIEW.expand(2, 1000), "cosines": torch.ones(1)},
    ],
    (OURS, "train_metrics"): [{}, torch.zeros(4), torch.zeros(5, dtype=torch.float64)],
    (OURS, "exported"): ["/some/other.onnx"],
    ("callbacks", "Checkpoints"): [
        {"highest": 2.0},
        {"highest": None, "run": "x"},
        {"num_waited": -1},
    ],
    ("loops",): [{}, LOOPS],
    ("global_step",): [-1, 1.5],
    ("pytorch-lightning_version",): ["x", "2.6\n"],
    ("optimizer_states",): [[{"param_groups": []}], [{"param_groups": [{}], "state": {0: META}}]],
    ("state_dict",): [{"x": META}, {"x": VIEW}, {"std": torch.ones(3, 1, 1).to_sparse()}],
    ("state_dict", "mean"): [torch.zeros(3), torch.full((3, 1, 1), math.nan)],
    ("state_dict", "std"): [torch.zeros(3, 1, 1), torch.ones(3, 1, 1, dtype=torch.int64)],
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


def refusal(checkpoint: dict[str, Any]) -> str:
    """The line by which a checkpoint is refused; "" if it is accepted."""
    try:
        check_checkpoint(checkpoint, "some.ckpt")
    except ValueError as error:
        line = str(error)
        assert line.startswith("'some.ckpt' ") and len(line) < 400
        assert "\n" not in line and "\x1b" not in line
        return line
    return ""


@pytest.mark.parametrize("place", INVALID, ids=".".join)
def test_a_value_out_of_range_in_a_checkpoint_is_refused(written, place):
    assert refusal(written) == ""
    for value in INVALID[place]:
        line = refusal(with_value(written, place, value))
        assert place[0] in line and place[-1] in line, value


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
TENSORS = st.sampled_from([torch.zeros(1), META, NAMES.to_sparse()])
ANYTHING = st.recursive(
    SCALARS | TENSORS,
    lambda values: (
        st.lists(values, max_size=3)
        | st.tuples(values)
        | st.dictionaries(SCALARS, values, max_size=3)
        | st.dictionaries(st.text(), values, max_size=3)
    ),
    max_leaves=8,
)


@given(draw=st.data(), value=ANYTHING)
def test_any_value_in_a_checkpoint_is_refused_in_a_line_or_has_its_type(written, draw, value):
    part = draw.draw(st.sampled_from([*written]))
    names = [*written[part]] if isinstance(written[part], dict) else []
    name = draw.draw(st.sampled_from([None, *names]))
    place = (part,) if name is None or not isinstance(name, str) else (part, name)
    line = refusal(with_value(written, place, value))
    rule = TABLES.get(part, {}).get(place[-1]) if len(place) == 2 else None
    if rule is not None:
        assert bool(line) == (not rule.accepts(value))


@pytest.mark.parametrize("part", TABLES)
def test_a_setting_that_a_checkpoint_needs_is_named(written, part):
    required = [name for name, rule in TABLES[part].items() if rule.is_required]
    assert required
    for name in required:
        known = copy.copy(written)
        known[part] = {key: value for key, value in known[part].items() if key != name}
        assert f"{part}.{name} is missing" in refusal(known)
    known = {name: part for name, part in written.items() if name != "pytorch-lightning_version"}
    assert "pytorch-lightning_version is missing" in refusal(known)  # Lightning has a KeyError


def test_a_data_class_of_another_module_may_have_settings_of_its_own(written):
    known = with_value(written, (DATA, "magnification"), 40)
    assert "magnification" in refusal(known)
    known = with_value(known, (OURS, "data_class"), "mine.Slides")
    assert refusal(known) == ""
    for value in (BOMB, DEEP, META):
        assert "too many values" in refusal(with_value(known, (DATA, "magnification"), value))
    # ours stay bounded
    assert "batch_size" in refusal(with_value(known, (DATA, "batch_size"), 0))


def test_images_of_a_checkpoint_are_never_resized_beyond_all_bounds(written):
    known = with_value(written, (DATA, "image_size"), 8000)
    assert refusal(with_value(known, (DATA, "crop_share"), 0.875)) == ""
    assert "crop_share" in refusal(with_value(known, (DATA, "crop_share"), 0.1))


NAMED = {"class_path": "somebody.Thing"}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (NAMED, ["somebody.Thing"]),
        ([1, {"deep": [NAMED, {"class_path": ["no text"]}]}], ["somebody.Thing", ["no text"]]),
        ({"class_path": "Outer", "init_args": {"x": [NAMED]}}, ["Outer", "somebody.Thing"]),
        ({"freeze": "layer2", "note": "class_path", "broken": "{", "num": 3, "none": None}, []),
    ],
)
def test_every_class_path_of_a_checkpoint_is_found(value, found):
    assert list(class_paths(value)) == found


def saved(state: Any) -> Any:
    """The state dict as a checkpoint returns it."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def classifier(backbone: str) -> Classifier:
    return Classifier(["a", "b", "c"], backbone, weights=None)


def test_the_state_of_a_checkpoint_is_loaded_and_not_changed():
    backbone = "mnasnet0_5"
    """torchvision's MNASNet does not load without the versions of its modules."""
    one, other = classifier(backbone), classifier(backbone)
    one.class_weight += 1
    state = saved(one.state_dict())
    keys = list(state)
    assert any(not torch.equal(value, state[key]) for key, value in other.state_dict().items())
    other.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    alone = classifier(backbone).image_classifier.eval()
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    alone.load_checkpoint_state(state)
    with torch.no_grad():
        assert torch.equal(alone(images), one.eval()(images))
    assert list(state) == keys
