"""Quick tests of the promises that involve several processes or modules; `make test-all` has them in full.

docs/promises.md lists all promises with their tests, also those that the tests of one module check.
"""

import csv
import http.client
import json
import re
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import dom_after, needs_browser
from colours import QUICKEST, draw_colours
from ddp_scenarios import NUM_EVALUATED
from labelled_files import LABELS, draw_labelled
from labelled_runs import fit_labels
from processes import finetune, launch, left_after, start
from promise import control, promise
from scenario_results import distance, draw_scenarios, load

from finetune import load as load_model
from finetune.data.tables.table_rows import TableOptions, read_content
from finetune.runs.metrics_csv import read_metrics

STEPS_PER_EPOCH = 7  # of kill_scenarios.py
NAMES = ("blue", "green", "red")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Results of the same trainings and evaluations on one and on two processes."""
    root = tmp_path_factory.mktemp("promises")
    data = draw_scenarios(root / "data", NUM_EVALUATED)
    scenarios = [
        "small_float64",
        "batch_norm_uneven",
        "balanced",
        "weighted",
        "calibrated",
        "labels",
        "labels_measured",
        f"evaluated_{NUM_EVALUATED[-1]}",
    ]
    controls = [
        "control_order",
        "control_padding",
        "control_own_temperature",
        "control_own_labels",
    ]
    return {
        k: launch("ddp_scenarios.py", root / f"world{k}", k, data, *scenarios, *controls)
        for k in (1, 2)
    }


@promise("any-number-of-devices")
@promise("batch-norm")
@promise("image-weights")
@pytest.mark.parametrize(
    "scenario", ["small_float64", "batch_norm_uneven", "balanced", "weighted", "labels"]
)
def test_two_processes_train_the_weights_of_one(worlds, scenario):
    """In full, with float32, ResNet-18, three processes and resuming on others: test_ddp.py, test_elastic.py."""
    alone = load(worlds[1], scenario)
    # else networks that never train would agree, too
    assert load(worlds[1], f"{scenario}_moved") > 1e-4
    for rank in range(2):
        # float64: rounding over 20 steps
        assert distance(alone, load(worlds[2], scenario, rank)) <= 1e-10


@control("any-number-of-devices")
def test_control_an_order_of_each_rank_is_caught(worlds):
    assert distance(load(worlds[1], "small_float64"), load(worlds[2], "control_order")) > 1e-4


@promise("each-image-once")
def test_thirteen_images_count_once_on_two_processes(worlds):
    """In full, for other numbers and three processes: test_ddp.py."""
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
@control("exact-metrics")
def test_the_temperature_is_fitted_on_the_images_of_both_processes(worlds):
    """In full: test_ddp.py."""
    alone, own = (
        load(worlds[1], "calibrated")["temperature"],
        load(worlds[2], "control_own_temperature")["temperature"],
    )
    assert all(
        load(worlds[2], "calibrated", k)["temperature"] == pytest.approx(alone, rel=1e-10)
        for k in range(2)
    )
    assert abs(own / alone - 1) > 1e-4  # the control: each process by itself


@promise("exact-metrics")
@control("exact-metrics")
def test_several_labels_are_measured_on_the_images_of_both_processes(worlds):
    """In full, for three processes: test_ddp.py."""
    alone, own = load(worlds[1], "labels_measured"), load(worlds[2], "control_own_labels")
    for rank in range(2):
        shared = load(worlds[2], "labels_measured", rank)
        assert shared["counts"] == alone["counts"] and shared["calibration"] == alone["calibration"]
        assert shared["metrics"] == pytest.approx(alone["metrics"], abs=1e-6, nan_ok=True)
    assert own["calibration"] != alone["calibration"]  # the control: each process by itself


@promise("resume")
@control("resume")
@promise("kills")
@control("kills")
def test_killed_and_resumed_a_run_ends_bit_for_bit_as_an_uninterrupted_one(tmp_path):
    """In full, for many moments, two processes, signals and half-written files: test_resume.py, test_interrupted.py."""
    data = draw_colours(tmp_path / "data", train=30, test=4)
    results = json.loads(
        (
            launch("kill_scenarios.py", tmp_path / "out", 1, data, "quick") / "results.json"
        ).read_text()
    )
    parts = ("weights", "optimizer", "scheduler", "loops", "steps", "epochs")
    killed, control = results["killed"], results["control"]
    assert (killed["killed"], killed["resumed"]) == ([-9], [0])
    assert killed["step"] % STEPS_PER_EPOCH and control["step"] % STEPS_PER_EPOCH  # inside an epoch
    assert [part for part in parts if not killed[part]] == []
    assert not control["weights"]  # an epoch that begins again


@promise("stop")
@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_stops_all_processes_after_the_step_and_saves(colours, tmp_path, devices):
    """In full, for every failure, phase and way of starting: test_ends.py; that it resumes: test_resume.py."""
    fit = [
        "fit",
        colours,
        *QUICKEST,
        "--trainer.max_epochs",
        5000,
        "--trainer.log_every_n_steps",
        1,
    ]
    fit += ["--model.scheduler", "finetune.WarmupCosine"]  # whose rates are logged with each step
    process = start(*fit, "--devices", devices, "--data.cache_limit_gb", 0, cwd=tmp_path)
    try:
        while not list(tmp_path.rglob("last.ckpt")):
            assert process.poll() is None, process.stderr
            time.sleep(0.02)
        started = time.monotonic()
        process.send_signal_to_all(signal.SIGINT)  # as a terminal does
        assert process.wait(30) == 130
        assert left_after([process.pid], 20 - (time.monotonic() - started)) == []
        assert time.monotonic() - started < 20
    finally:
        process.kill()
    usual = ("images: ", "network: ", "training: ", "epoch ", "val has ")
    assert [
        line for line in process.stderr.splitlines() if line and not line.startswith(usual)
    ] == [
        "stopping after this step; Ctrl-C again ends it at once",
        "stopped by SIGINT; continue with the same command and --resume",
    ]
    (last,), (steps,) = tmp_path.rglob("last.ckpt"), tmp_path.rglob("steps.csv")
    # The last step that was trained, not that of an epoch's end before the signal.
    assert (
        torch.load(last, weights_only=True)["global_step"]
        == int(read_metrics(steps)[-1]["step"]) + 1
    )


@pytest.fixture(scope="module")
def finished(colours, tmp_path_factory) -> Path:
    """The folder of a finished run of `finetune fit`, with its report."""
    folder = tmp_path_factory.mktemp("finished")
    process = finetune(
        "fit", colours, *QUICKEST, "--report", "true", "--trainer.max_epochs", 3, cwd=folder
    )
    assert process.returncode == 0, process.stderr
    return folder / "runs/fit/version_0"


@pytest.fixture(scope="module")
def predicted(finished, colours, tmp_path_factory) -> dict[str, np.ndarray]:
    """`finetune predict`: path of each test image to its probabilities."""
    folder = tmp_path_factory.mktemp("predicted")
    words = ["--workers", 0, "--trainer.accelerator", "cpu", "--out", "predictions.csv"]
    process = finetune("predict", finished, colours / "test", *words, cwd=folder)
    assert process.returncode == 0, process.stderr
    rows = list(csv.DictReader((folder / "predictions.csv").read_text().splitlines()))
    assert len(rows) == 30
    return {row["path"]: np.array([float(row[f"p_{name}"]) for name in NAMES]) for row in rows}


@promise("serve")
@control("serve")
def test_serve_answers_as_predict(finished, predicted, tmp_path):
    """In full, with signals, bad requests and many clients: test_serve.py, tests/serving/."""
    process = start("serve", finished, "--port", 0, cwd=tmp_path)
    try:
        while not (address := re.search(r"http://([\w.]+):(\d+)", process.stdout)):
            assert process.poll() is None, process.stderr
            time.sleep(0.02)
        for path in list(predicted)[::7]:
            with closing(
                http.client.HTTPConnection(address[1], int(address[2]), timeout=60)
            ) as connection:
                connection.request("POST", "/predict", Path(path).read_bytes())
                (one,) = json.loads(connection.getresponse().read())["predictions"]
            served = [one["probabilities"][name] for name in NAMES]
            np.testing.assert_allclose(served, predicted[path], rtol=0, atol=2e-6)
        # the control: another image's prediction is another one
        assert not np.allclose(served, predicted[next(iter(predicted))], rtol=0, atol=2e-6)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()


@promise("preparation")
def test_python_answers_as_predict(finished, predicted):
    """In full: tests/api/test_loaded_model.py."""
    answers = load_model(finished, "cpu").predict(list(predicted))
    probabilities = [[answer.probabilities[name] for name in NAMES] for answer in answers]
    np.testing.assert_allclose(probabilities, list(predicted.values()), rtol=0, atol=2e-6)


@promise("multi-label")
def test_several_labels_are_the_same_from_every_program(tmp_path, cli):
    """In full, with the service, other formats and pages: test_several_labels.py."""
    images = draw_labelled(tmp_path / "images", train=48, test=8)
    run = fit_labels(images, tmp_path / "runs", "--trainer.max_epochs", "2")
    checkpoint = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    paths = sorted(map(str, (images / "test").iterdir()))
    # thresholds in the middle of the probabilities, so that images differ
    probabilities = [
        list(one.probabilities.values()) for one in load_model(run, "cpu").predict(paths)
    ]
    thresholds = np.median(probabilities, axis=0).tolist()
    checkpoint["finetune"]["calibration"]["thresholds"] = thresholds
    torch.save(checkpoint, tmp_path / "some.ckpt")
    expected = [
        [name for name, p, t in zip(LABELS, row, thresholds, strict=True) if p >= t]
        for row in probabilities
    ]
    assert len({tuple(labels) for labels in expected}) > 2  # else any answer would do
    options = ("--trainer.accelerator", "cpu", "--out", "predictions.csv")
    cli("predict", "some.ckpt", *paths, *options)
    rows = list(csv.DictReader(Path("predictions.csv").read_text().splitlines()))
    assert [row["labels"] for row in rows] == [";".join(labels) for labels in expected]
    content = read_content(Path("predictions.csv"), TableOptions())
    assert content.kind == "several" and not content.faults
    assert content.rows.labels == [tuple(labels) for labels in expected]
    cli("export", "some.ckpt", "--output", "some.onnx")
    for file in ("some.ckpt", "some.onnx"):
        predictions = load_model(file, "cpu").predict(paths)
        assert [list(one.labels) for one in predictions] == expected
        found = [list(one.probabilities.values()) for one in predictions]
        np.testing.assert_allclose(found, probabilities, rtol=0, atol=1e-5)


@promise("no-code")
@control("no-code")
def test_a_hostile_checkpoint_runs_no_code(finished, colours, tmp_path, cli, monkeypatch):
    """In full, for every way of reading one: tests/commands/test_trust.py, tests/component/test_weight_files.py."""
    (tmp_path / "hostile.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = torch.load(finished / "checkpoints/best.ckpt", weights_only=True)
    checkpoint["finetune"]["data_class"] = "hostile.Data"
    torch.save(checkpoint, tmp_path / "hostile.ckpt")
    words = ["--workers", 0, "--trainer.accelerator", "cpu"]
    with pytest.raises(ValueError, match="would import hostile"):
        cli("predict", "hostile.ckpt", colours / "test", *words)
    assert not (tmp_path / "ran").exists()
    # the control: with the user's consent the module is imported, which has no such class
    with pytest.raises(SystemExit):
        cli("predict", "hostile.ckpt", colours / "test", *words, "--data", "hostile.Data")
    assert (tmp_path / "ran").exists()
    del sys.modules["hostile"]  # else another test's import of it would run nothing


@promise("report")
@control("report")
@needs_browser
def test_the_report_opens_and_shows_the_accuracy(finished, tmp_path):
    """In full: tests/runs/test_html_report.py; the page of `finetune serve`: tests/serving/test_page.py."""
    page = (finished / "report.html").read_text("utf-8")
    accuracy = json.loads((finished / "test.json").read_text())["test/accuracy"]
    script = """
        const link = document.querySelector("a[href^='#cell-']"), cell = document.querySelector(link.hash);
        const before = getComputedStyle(cell).display;
        link.click();
        setTimeout(() => document.body.dataset.found = before + " " + getComputedStyle(cell).display, 100);
    """
    dom = dom_after(page, script, tmp_path)
    assert 'data-found="none block"' in dom and f"{100 * accuracy:.1f}" in dom
    # the control: without the click the cell stays closed
    assert 'data-found="none none"' in dom_after(
        page, script.replace("link.click();", ""), tmp_path
    )
