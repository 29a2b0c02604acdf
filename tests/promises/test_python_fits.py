"""`finetune.fit` does what the command does, in any kind of program. What it refuses: refusals/python.yaml.

On several devices: nightly/test_started_processes.py; what it leaves of a process: test_borrowed_process.py.
"""

import asyncio
import copy
import gc
import inspect
import json
import multiprocessing
import os
import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from fit_words import QUICK
from processes import run_script

import finetune
from finetune import Classifier, fit
from finetune.settings.fields import words_of
from finetune.settings.schema import FitSettings

CPU = {"trainer.accelerator": "cpu"}


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Arguments of a fit that takes a second; the test is in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return copy.deepcopy(QUICK)


def test_arguments_of_fit_are_the_short_words_of_the_command_and_explained():
    names = set(inspect.signature(fit).parameters)
    others = {"minutes", "patience", "folds", "members", "folder", "config", "resume", "options"}
    assert names == {*words_of(FitSettings), *others} - {"images"}
    explained = inspect.getdoc(fit)
    assert [name for name in names if f"\n    {name}: " not in explained] == []


def weights(run: os.PathLike[str]) -> dict[str, torch.Tensor]:
    return torch.load(Path(run, "checkpoints/last.ckpt"), weights_only=True)["state_dict"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_the_run_of_fit_is_that_of_the_command_bit_for_bit(colours, quick, cli, tmp_path):
    words = {**quick, "epochs": np.int64(1), "out": Path("ours"), "lr": np.float32(0.5)}
    words |= {
        "class_weights": {"red": 2},
        "options": {**quick["options"], "data.augmentations": []},
    }
    ours = fit(colours, **words)
    command = json.loads((ours.path / "run.json").read_text())["command"]
    assert command.startswith(f"finetune.fit(folder={colours!r}, epochs=")
    line = [f"--{name}={'null' if words[name] is None else words[name]}" for name in quick]
    line = [word for word in line if not word.startswith(("--options", "--report"))]
    more = ["--out=theirs", "--lr=0.5", "--class_weights=red:2", "--data.augmentations=[]"]
    more += ["--trainer.accelerator=cpu", "--report=false"]
    cli("fit", colours, *line, *more)
    theirs = tmp_path / "theirs/fit/version_0"
    assert {path.name for path in ours.path.iterdir()} == {path.name for path in theirs.iterdir()}
    assert same(weights(ours), weights(theirs))
    for name in ("test_predictions.csv", "config.yaml"):
        text = (theirs / name).read_text().replace("theirs", "ours")
        assert (ours.path / name).read_text() == text
    other = fit(colours, **{**quick, "seed": 1})
    assert not same(weights(ours), weights(other))  # the control


@pytest.mark.slow
def test_config_is_read_and_arguments_win(colours, quick, tmp_path):
    lines = ["seed_everything: 3", "trainer: {max_epochs: 2}", "model: {freeze: features}"]
    Path("mine.yaml").write_text("\n".join(lines))
    del quick["epochs"]
    run = fit(colours, config=tmp_path / "mine.yaml", **quick, seed=4, freeze=None)
    config = run.record.config
    found = config["seed_everything"], config["trainer"]["max_epochs"], config["model"]["freeze"]
    assert found == (4, 2, None)


@pytest.mark.slow
def test_fits_in_threads_and_in_an_event_loop_take_turns_and_have_the_same_weights(colours, quick):
    async def cell() -> list[finetune.FittedRun]:
        here = fit(colours, **quick)
        return [here, await asyncio.to_thread(fit, colours, **quick)]

    runs = asyncio.run(cell())
    with ThreadPoolExecutor(2) as threads:
        runs += threads.map(lambda out: fit(colours, **{**quick, "out": out}), ("a", "b"))
    assert [same(weights(runs[0]), weights(run)) for run in runs] == [True] * 4


FILLED: list[weakref.ref] = []


def fill_memory(model: Classifier) -> None:
    images = torch.zeros(1)
    FILLED.append(weakref.ref(images))
    try:
        fill_layer()
    except KeyError:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")  # noqa: B904


def fill_layer() -> None:
    activations = torch.zeros(1)
    FILLED.append(weakref.ref(activations))
    raise KeyError


def test_an_error_of_memory_keeps_nothing_that_has_filled_it(colours, quick, monkeypatch):
    """In a notebook, the next cell tries again with smaller batches."""
    FILLED.clear()
    monkeypatch.setattr(Classifier, "on_train_start", fill_memory)
    with pytest.raises(MemoryError, match="out of GPU memory") as reported:
        fit(colours, **quick)
    gc.collect()
    assert [ref() is None for ref in FILLED] == [True, True]
    assert reported.value.__cause__ is None and reported.value.__suppress_context__


PROGRAM = """
import os, sys, threading, time
import torch
from finetune import Classifier, fit
from finetune.settings.fields import words_of
from finetune.settings.schema import FitSettings

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
    import slow
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
SLOW = """
import time
from finetune import Classifier

def be_slow(model, *_):
    if model.current_epoch:
        open('slow', 'w').close()
        time.sleep(9)

Classifier.on_train_batch_start = be_slow
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["once", "twice", "terminated"])
def test_ctrl_c_stops_fit_and_leaves_a_run_that_resume_continues(colours, tmp_path, how):
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "program.py").write_text(PROGRAM)
    began = time.monotonic()
    done = run_script(tmp_path / "program.py", colours, "runs", how, cwd=tmp_path)
    lines = done.stdout.splitlines()
    if how == "terminated":
        assert done.returncode == -signal.SIGTERM and "stopped" not in done.stdout
    else:
        assert done.returncode == 0, done.stderr
        (stopped,) = [line for line in lines if line.startswith("stopped:")]
        assert "Ctrl-C" in stopped and "resume=True" in stopped
        assert "Ctrl-C is the program's again" in lines
        assert "Ctrl-C again" in done.stderr
        assert how != "once" or lines[-1] == "True True"
    assert "Traceback" not in done.stderr and time.monotonic() - began < 250
    assert (tmp_path / "runs/fit/version_0/checkpoints/last.ckpt").exists()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_fit_and_predict_in_a_forked_process_are_refused_if_they_would_wait_for_ever(
    fitted_runs, colours, quick, num_threads
):
    model = finetune.load(fitted_runs.single, device="cpu")
    image = np.zeros((9, 9, 3), np.uint8)

    def child() -> None:
        code = 2
        try:
            torch.set_num_threads(num_threads)
            model.predict(image)
            code = 0
        except RuntimeError as error:
            try:
                fit(colours, **quick)
            except RuntimeError as second:
                is_named = "set_num_threads" in str(error) and "forked" in str(second)
                code = 1 if is_named else 3
        finally:
            os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == num_threads - 1  # with one thread it works
