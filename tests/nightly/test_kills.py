"""Commands that are killed, paused or cannot write, and then started again, end as commands that nothing disturbs.

The fault comes at a call that writes: before it the old file is there, after it the new one, and never half of one.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
from colours import QUICKEST, draw_colours
from probabilities import probabilities
from processes import Process, left_after, start_script
from promise import promise
from stopped_fits import differing, state

from finetune.data.decode import decode
from finetune.runs.folder import versions

FIT = ["fit", "data", *QUICKEST, "--resume", "--epochs", 2, "--checkpoint_every_n_steps", 3]
FIT += ["--trainer.log_every_n_steps", 1]
COMMANDS: dict[str, list[Any]] = {
    "fit": FIT,
    "fit on two": [*FIT, "--devices", 2],
    "fit --folds": [*FIT, "--folds", 2],
    "predict": ["predict", "best.ckpt", "data/test", "--output", "answers.csv"],
    "export": ["export", "best.ckpt", "--format", "safetensors", "--output", "model.safetensors"],
}
NUM_TRIALS = {"fit": (3, 100), "fit on two": (2, 60)}  # in `make test-all` and in `make chaos`
OF_OTHERS = (1, 30)
FIRST = {"fit on two": "pause"}  # of the faults that are tried in turn


def run(folder: Path, command: str, fault: str = "kill", number: int = -1) -> tuple[Process, int]:
    """Run a command with a fault to its end, and return its process and the number of calls that write."""
    count = folder / "count"
    count.unlink(missing_ok=True)
    words = [fault, number, count, *COMMANDS[command]]
    process = start_script(Path(faults.__file__), *words, cwd=folder)
    process.wait(120)
    assert left_after([process.pid], 30) == []
    return process, count.stat().st_size


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a folder with images and a checkpoint."""
    root = tmp_path_factory.mktemp("kills")
    draw_colours(root / "data", train=12, test=2)
    run(root, "fit")
    (best,) = root.glob("runs/fit/*/checkpoints/best.ckpt")

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name.replace(" ", ""))
        (folder / "data").symlink_to(root / "data")
        (folder / "best.ckpt").symlink_to(best)
        return folder

    return make


def result(folder: Path, command: str) -> dict[str, Any]:
    """Return what a command has made, to be compared."""
    left = [path.name for path in folder.rglob("*.tmp*")]
    if command == "predict":
        return {"answers": (folder / "answers.csv").read_bytes(), "left": left}
    if command == "export":
        image = decode(sorted((folder / "data/test").rglob("*.png"))[0])
        return {"p": probabilities(folder / "model.safetensors", [image]).tolist(), "left": left}
    of_all = versions(folder / "runs", "fit")
    made = [run for run in of_all if (run / "checkpoints/best.ckpt").exists()]
    assert len(made) == 1, "one run, and what ended before its first checkpoint"
    if command == "fit --folds":
        return {"answers": (made[0] / "predictions.csv").read_bytes(), "left": left}
    return {**state(made[0]), "left": left}


@promise("kills")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_disturbed_command_that_is_started_again_ends_as_any_other(
    place, trials, record_row, command
):
    undisturbed = place(command)
    done, num_calls = run(undisturbed, command)
    assert done.returncode == 0, done.stderr
    expected = result(undisturbed, command)
    rng = np.random.default_rng(0)
    wrong = []
    names = list(faults.FAULTS)
    first = names.index(FIRST.get(command, "kill"))
    num_trials = trials(*NUM_TRIALS.get(command, OF_OTHERS))
    for i, number in enumerate(rng.integers(0, num_calls, num_trials).tolist()):
        fault = names[(first + i) % len(names)]
        folder = place(f"{command} {i}")
        codes = []
        for once in (number, -1):
            process, _ = run(folder, command, fault, once)
            codes.append(process.returncode)
            if process.returncode == 1 and once >= 0:
                last = process.stderr.strip().rpartition("\n")[2]
                assert re.search("error: ", last) and "Traceback" not in process.stderr
        assert fault != "kill" or codes[0], "it was not killed"
        changed = differing(result(folder, command), expected)
        if codes[1] or changed:
            wrong.append(f"{fault} at {number} of {num_calls}: {codes}, {changed}")
    record_row(f"{command}: {', '.join(faults.FAULTS)}", num_trials, f"{len(wrong)} faults")
    assert wrong == []
