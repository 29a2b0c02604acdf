"""`finetune.fit` does what the command does: the same options, files, metrics and messages, in any kind of program."""

import inspect
import json
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_script

import finetune
from finetune import fit
from finetune.api import fitting
from finetune.api.command_words import command_line
from finetune.commands.options import WORDS
from finetune.distributed.signals import Interrupted
from finetune.runs.checkpoint_io import read_checkpoint


def test_its_arguments_are_the_command_s_short_words():
    assert finetune.fit is fit
    names = set(inspect.signature(fit).parameters)
    others = {"minutes", "patience", "folds", "folder", "config", "resume", "options"}
    assert names == {*WORDS["fit"], *others}
    reported = inspect.getdoc(fit)
    assert [name for name in names if f"\n    {name}: " not in reported] == []


def test_each_argument_that_is_passed_reaches_the_command_and_no_other(monkeypatch):
    lines: list[list[str]] = []
    monkeypatch.setattr(fitting, "_run_here", lambda line, *_: lines.append(line))
    monkeypatch.setattr(fitting, "FittedRun", lambda path: path)
    values = dict.fromkeys(set(inspect.signature(fit).parameters) - {"folder", "options"}, 3)
    values |= {"weights": None, "backbone": ["a", "b"], "resume": True}
    fit("photos", **values, options={"threshold": "f1"})
    words = {**values, "backbone": "a,b"}
    expected = command_line("photos", words, {"threshold": "f1"})
    assert sorted(lines[0]) == sorted(expected) and len(expected) == 2 * len(values) + 3
    fit("photos", epochs=None, weights=..., freeze=..., resume=False)
    assert lines[1] == ["fit", "photos"]


WORDS_AND_LINES = [
    ({"epochs": np.int64(3), "lr": 1e-05}, ["--epochs", "3", "--lr", "1e-05"]),
    ({"weights": None, "resume": True}, ["--weights", "null", "--resume"]),
    ({"class_weights": {"cat, big": 2}}, ["--class_weights", '{"cat, big": 2}']),
    ({"resume": False}, []),
    ({"minutes": 2.5, "patience": 3}, ["--minutes", "2.5", "--patience", "3"]),
    ({"out": Path("a b"), "lr": np.float32(0.5)}, ["--out", "a b", "--lr", "0.5"]),
    ({"devices": [0, 1]}, ["--devices", "[0, 1]"]),
    ({"backbone": "-x"}, ["--backbone=-x"]),
]


@pytest.mark.parametrize(("words", "line"), WORDS_AND_LINES)
def test_values_are_printed_as_one_would_type_them(words, line):
    assert command_line("photos", words, {}) == ["fit", "photos", *line]


def test_options_have_full_names_and_any_plain_value():
    options = {
        "data.augmentations": [],
        "report": False,
        "model.class_mapping": {"a": Path("b")},
        "threshold": "f1",
    }
    line = [
        "--data.augmentations",
        "[]",
        "--report",
        "false",
        "--model.class_mapping",
        '{"a": "b"}',
    ]
    assert command_line(None, {}, options) == ["fit", *line, "--threshold", "f1"]
    assert command_line("-odd", {"epochs": 2}, {}) == ["fit", "--epochs", "2", "--", "-odd"]


def weights(run: object) -> dict[str, torch.Tensor]:
    return read_checkpoint(Path(os.fspath(run), "checkpoints", "last.ckpt"))["state_dict"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_the_run_is_the_command_s_file_by_file_and_bit_by_bit(colours, quick, cli, tmp_path):
    ours = fit(colours, **{**quick, "out": "ours", "options": {"trainer.accelerator": "cpu"}})
    about = json.loads((ours.path / "about.json").read_text())
    assert about["command"].startswith(f"finetune fit {colours} --epochs 1 --size 28 ")
    line = about["command"].replace("--out ours", "--out theirs").split()
    cli(*line[1:])
    theirs = tmp_path / "theirs" / "fit" / "version_0"
    assert {path.name for path in ours.path.iterdir()} == {path.name for path in theirs.iterdir()}
    assert same(weights(ours), weights(theirs))
    name = "test_predictions.csv"
    assert (ours.path / name).read_bytes() == (theirs / name).read_bytes()
    assert (ours.path / "config.yaml").read_text() == (theirs / "config.yaml").read_text().replace(
        "theirs", "ours"
    )
    other = fit(colours, **{**quick, "seed": 1})
    assert not same(weights(ours), weights(other))  # control


@pytest.mark.slow
def test_a_config_is_read_and_flags_win(colours, quick, tmp_path):
    Path("mine.yaml").write_text(
        "seed_everything: 3\ntrainer:\n  max_epochs: 2\nmodel:\n  freeze: features\n"
    )
    quick = {name: value for name, value in quick.items() if name != "epochs"}
    run = fit(colours, config=tmp_path / "mine.yaml", **{**quick, "seed": 4, "freeze": None})
    config = run.record.config
    found = config["seed_everything"], config["trainer"]["max_epochs"], config["model"]["freeze"]
    assert found == (4, 2, None)


@pytest.mark.slow
def test_twice_in_one_process_and_in_threads_gives_the_same_weights(colours, quick):
    first = fit(colours, **quick)
    with ThreadPoolExecutor(2) as threads:  # at once: they take turns
        others = list(threads.map(lambda out: fit(colours, **{**quick, "out": out}), ("a", "b")))
    assert [same(weights(first), weights(run)) for run in others] == [True, True]


@pytest.mark.slow
def test_a_run_continues(colours, quick):
    quick["options"]["model.scheduler"] = None  # whose shape is that of the complete run
    full = fit(colours, **{**quick, "epochs": 2})
    part = fit(colours, **quick, out="part")
    assert not same(weights(full), weights(part))
    rest = fit(colours, **{**quick, "epochs": 2}, out="part", resume=True)
    assert rest.path == part.path and same(weights(full), weights(rest))
    # it is finished
    assert fit(colours, **{**quick, "epochs": 2}, out="part", resume=True).path == part.path


def test_ctrl_c_is_reported_though_what_it_breaks_off_fails_to_end(colours, quick, monkeypatch):
    def broken_off(*_, **__):
        try:
            raise Interrupted(signal.SIGINT)
        finally:
            raise IndexError("pop from empty list")  # of a display that had half begun

    monkeypatch.setattr(fitting, "run_lightning", broken_off)
    with pytest.raises(KeyboardInterrupt, match="resume=True"):
        fit(colours, **quick)


def test_an_error_of_ours_keeps_its_traceback(colours, quick, monkeypatch):
    monkeypatch.setattr(fitting, "run_lightning", lambda *_, **__: {}["a fault"])
    with pytest.raises(KeyError, match="a fault"):
        fit(colours, **quick)


def test_an_error_keeps_nothing_of_what_has_filled_the_memory(colours, quick, monkeypatch):
    kept = []

    def layer():
        activations = torch.zeros(1)
        kept.append(weakref.ref(activations))
        raise KeyError

    def fills(*_, **__):
        images = torch.zeros(1)
        kept.append(weakref.ref(images))
        try:
            layer()
        except KeyError:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")  # noqa: B904

    monkeypatch.setattr(fitting, "run_lightning", fills)
    with pytest.raises(MemoryError, match="^out of GPU memory: ") as reported:
        fit(colours, **quick)
    assert [ref() is None for ref in kept] == [True, True]
    assert reported.value.__cause__ is None and reported.value.__suppress_context__


_PROGRAM = """
import os, sys, threading, time
import torch
from finetune import fit
from finetune.runs import metrics_csv

out, how = sys.argv[2:4]

def stop():
    while not os.path.exists("slow" if how == "twice" else f"{out}/fit/version_0/checkpoints/last.ckpt"):
        time.sleep(0.05)
    for _ in range(2 if how == "twice" else 1):
        os.kill(os.getpid(), 15 if how == "terminated" else 2)
        time.sleep(0.3)

threading.Thread(target=stop, daemon=True).start()
options = {"report": False, "trainer.accelerator": "cpu"}
if how == "twice":
    options["trainer.callbacks"] = {"class_path": "slow.Slow"}
quick = dict(size=28, batch=16, workers=0, weights=None, backbone="small_cnn", precision="32-true", out=out)
try:
    fit(sys.argv[1], epochs=400, options=options, **quick)
except KeyboardInterrupt as stopped:
    print("stopped:", stopped, flush=True)
try:
    time.sleep(0.2)
    os.kill(os.getpid(), 2)
    time.sleep(5)
except KeyboardInterrupt:
    print("Ctrl-C is the program's again")
if how == "once":
    state = torch.load(f"{out}/fit/version_0/checkpoints/last.ckpt", weights_only=True)
    run = fit(sys.argv[1], epochs=state["epoch"] + 2, resume=True, options=options, **quick)
    print(len(run.record.line("train/loss_epoch")[0]) == state["epoch"] + 2, run.best.exists())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["once", "twice", "terminated"])
def test_ctrl_c_stops_it_and_leaves_a_run_that_continues(colours, tmp_path, how):
    (tmp_path / "slow.py").write_text(
        "import time, pytorch_lightning as pl\n"
        "class Slow(pl.Callback):\n"
        "    def on_train_batch_start(self, trainer, *_):\n"
        "        if trainer.current_epoch:\n"
        "            open('slow', 'w').close()\n"
        "            time.sleep(9)\n"
    )
    (tmp_path / "program.py").write_text(_PROGRAM)
    began = time.monotonic()
    done = run_script(tmp_path / "program.py", colours, "runs", how, cwd=tmp_path)
    lines = done.stdout.splitlines()
    if how == "terminated":
        assert done.returncode == -signal.SIGTERM and "stopped" not in done.stdout
    else:
        assert done.returncode == 0, done.stderr
        assert (
            "stopped: stopped by Ctrl-C; fit(…, resume=True) continues from its last checkpoint"
            in lines
        )
        assert "Ctrl-C is the program's again" in lines
        assert "stopping after this step; Ctrl-C again ends it at once" in done.stderr
        assert how != "once" or lines[-1] == "True True"
    assert "Traceback" not in done.stderr and time.monotonic() - began < 250
    assert (tmp_path / "runs/fit/version_0/checkpoints/last.ckpt").exists()


@pytest.mark.slow
def test_it_runs_within_a_running_event_loop_and_in_a_thread_of_it(colours, quick):
    import asyncio

    async def cell() -> tuple[object, object]:
        here = fit(colours, **quick)
        there = await asyncio.to_thread(fit, colours, **quick)
        return here, there

    before = (
        threading.active_count()
    )  # with the threads that fetch from object storage, if a test has started them
    here, there = asyncio.run(cell())
    assert same(weights(here), weights(there))
    assert threading.active_count() < before + 20


def test_a_forked_process_that_would_wait_for_ever_is_reported(monkeypatch, colours, quick):
    monkeypatch.setattr(fitting, "_PID", os.getppid())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(RuntimeError, match="this process was forked"):
        fit(colours, **quick)
