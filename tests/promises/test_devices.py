"""A run on two processes has the weights, the metrics and the calibration of one; on three: nightly/."""

import csv
from pathlib import Path

import pytest
from colours import QUICKEST
from device_scenarios import NUM_EVALUATED
from processes import finetune, launch
from promise import control, promise
from scenario_results import distance, draw_scenarios, is_close, load


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Results of the same trainings and evaluations on one and on two processes."""
    root = tmp_path_factory.mktemp("promises")
    data = draw_scenarios(root / "data", NUM_EVALUATED)
    scenarios = [
        "small_float64",
        "weighted",
        "calibrated",
        "labels",
        "labels_measured",
        f"evaluated_{NUM_EVALUATED[-1]}",
        "evaluated_groups",
    ]
    controls = [
        "control_order",
        "control_padding",
        "control_own_temperature",
        "control_own_labels",
        "control_own_groups",
    ]
    names = {1: scenarios, 2: [*scenarios, *controls]}
    return {
        k: launch("device_scenarios.py", root / f"world{k}", k, data, *each)
        for k, each in names.items()
    }


@promise("any-number-of-devices")
@promise("batch-norm")
@promise("image-weights")
@pytest.mark.parametrize("scenario", ["small_float64", "weighted", "labels"])
def test_two_processes_train_the_weights_of_one(worlds, scenario):
    """`weighted` has batch norm, balanced classes, mixing and two batches a step. In full: test_three_devices.py."""
    alone = load(worlds[1], scenario)
    assert alone["moved"] > 1e-4  # else networks that never train would agree, too
    for rank in range(2):
        # float64: rounding over 10 steps
        assert distance(alone["weights"], load(worlds[2], scenario, rank)["weights"]) <= 1e-10


@control("any-number-of-devices")
def test_control_an_order_of_each_rank_is_caught(worlds):
    right, wrong = load(worlds[1], "small_float64"), load(worlds[2], "control_order")
    assert distance(right["weights"], wrong["weights"]) > 1e-4


@promise("each-image-once")
def test_thirteen_images_count_once_on_two_processes(worlds):
    """In full, for other numbers and three processes: test_three_devices.py."""
    num = NUM_EVALUATED[-1]
    alone = load(worlds[1], f"evaluated_{num}")
    rows_alone = list(csv.reader((worlds[1] / f"evaluated_{num}.csv").read_text().splitlines()))
    assert sum(map(sum, alone["confusion_matrix"])) == num == len(rows_alone) - 1
    for rank in range(2):
        shared = load(worlds[2], f"evaluated_{num}", rank)
        assert shared["confusion_matrix"] == alone["confusion_matrix"]
        assert shared["metrics"] == pytest.approx(alone["metrics"], abs=1e-6)
    rows = list(csv.reader((worlds[2] / f"evaluated_{num}.csv").read_text().splitlines()))
    # path and class, in the order of the input
    assert [row[:2] for row in rows] == [row[:2] for row in rows_alone]
    # the control: Lightning's own sampler repeats one
    assert load(worlds[2], "control_padding") == num + 1


@promise("exact-metrics")
@promise("prediction-sets")
@control("exact-metrics")
def test_the_temperature_is_fitted_on_the_images_of_both_processes(worlds):
    """In full: test_three_devices.py."""
    (alone,) = load(worlds[1], "calibrated")["scale"]
    (own,) = load(worlds[2], "control_own_temperature")["scale"]
    for rank in range(2):
        assert is_close(load(worlds[2], "calibrated", rank), load(worlds[1], "calibrated"))
        assert load(worlds[2], "calibrated", rank)["scale"] == pytest.approx([alone], rel=1e-10)
    assert abs(own / alone - 1) > 1e-4  # the control: each process by itself


@promise("exact-metrics")
@control("exact-metrics")
def test_several_labels_are_measured_on_the_images_of_both_processes(worlds):
    """In full, for three processes: test_three_devices.py."""
    alone, own = load(worlds[1], "labels_measured"), load(worlds[2], "control_own_labels")
    for rank in range(2):
        shared = load(worlds[2], "labels_measured", rank)
        assert is_close(shared["counts"], alone["counts"])
        assert is_close(shared["calibration"], alone["calibration"])
        assert shared["metrics"] == pytest.approx(alone["metrics"], abs=1e-6, nan_ok=True)
    assert not is_close(own["calibration"], alone["calibration"])  # the control: its own share


@promise("group-answers")
def test_a_group_on_two_processes_has_the_answer_of_one(worlds):
    """The 5 images of the second of 3 groups are on both."""
    alone = load(worlds[1], "evaluated_groups")["groups"]
    assert sum(map(sum, alone["confusion_matrix"])) == 3
    for rank in range(2):
        shared = load(worlds[2], "evaluated_groups", rank)["groups"]
        assert shared["confusion_matrix"] == alone["confusion_matrix"]
        # float32: the rounding differs with the number of images in a batch
        assert shared["test/loss"] == pytest.approx(alone["test/loss"], abs=1e-6)
    files = [(worlds[k] / "group_evaluated_groups.csv").read_text() for k in (1, 2)]
    (header, *rows), (_, *others) = (list(csv.reader(file.splitlines())) for file in files)
    first = header.index("class")
    assert [row[: first + 1] for row in rows] == [row[: first + 1] for row in others]
    assert [row[:2] for row in rows] == [["blue", "5"], ["green", "5"], ["red", "3"]]
    for row, other in zip(rows, others, strict=True):
        p, expected = ([*map(float, of[first + 1 : -1])] for of in (other, row))
        assert p == pytest.approx(expected, abs=1e-6)


@control("group-answers")
def test_control_the_groups_of_a_rank_alone_are_other_ones(worlds):
    alone = load(worlds[1], "evaluated_groups")["groups"]
    own = load(worlds[2], "control_own_groups")["groups"]
    assert abs(own["test/loss"] - alone["test/loss"]) > 1e-5


@pytest.mark.slow
def test_patience_ends_two_processes_where_it_ends_one(colours, tmp_path):
    """One process: test_fits.py."""
    fit = ["fit", "--data.root", colours, *QUICKEST, "--trainer.max_epochs", 9]
    fit += ["--data.val_fraction", 0.3]
    fit += ["--patience", "2", "--lr", "1e-12"]  # the first accuracy stays the highest
    result = finetune(*fit, "--devices", 2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    reported = "stopped after epoch 3: val/accuracy did not improve in --patience 2 validations"
    assert result.stderr.count(reported) == 1 and result.stdout.count("test/accuracy") == 1
