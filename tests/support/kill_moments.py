"""Commands that are disturbed at random moments and started again: `python kill_moments.py OUT DATA 1 NUMBER [NAME]`.

Fits on one, two and three processes are killed (also while renames are slow), paused, cannot write, or have their clock
set back, NUMBER times each.
Fits are killed three times as often, cross-validations 1.5 times. Predictions and exports are killed NUMBER times.
With a NUMBER of 1, fits on one and two processes are disturbed once, and no cross-validation is.

Each command is the real one in forked processes. In the end its files must be those of an undisturbed command. NAME
chooses one disturbance of `DISTURBANCES`. "a full disk" runs only if it is chosen, with OUT on a small disk.
"""

import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from colours import QUICKEST
from forked import become_finetune
from kill_scenarios import DATA, OUT, TINY, Fit, compared, state
from scenario_results import is_same

from finetune.data.decode import decode
from finetune.inference.predictor import Predictor
from finetune.runs.folder import versions
from finetune.runs.run_lock import is_held

SHORT = (*TINY, "--trainer.max_epochs", 2)
FOLDS = ["fit", str(DATA / "train"), *QUICKEST, "--folds", "2", "--resume"]
FOLDS += ["--trainer.max_epochs", "4", "--checkpoint_every_n_steps", "1"]
HOUR = 3600.0  # seconds
KILLS = 3  # kills of fits for each disturbance of another kind


def killed_fit(root: Path, world_size: int, seconds: float, reference: dict[str, Any]) -> str:
    """Kill a fit at a random moment, start it again, and return the differences from an undisturbed fit."""
    where = kill(Fit(root, *SHORT, world_size=world_size), seconds)
    return again(root, where, world_size, reference)


def kill(fit: Fit, seconds: float) -> str:
    """Kill a fit at a random moment within some seconds, and return the moment as text."""
    moment = random.uniform(0, seconds)
    time.sleep(moment)
    os.killpg(fit.pids[0], signal.SIGKILL)
    fit.wait()
    return f"killed after {moment:.2f} of {seconds:.2f} s"


def slowly_renamed_fit(
    root: Path, world_size: int, seconds: float, reference: dict[str, Any]
) -> str:
    """Let each rename take half a second, kill the fit at a random moment, and start it again."""
    fit = Fit(root, *SHORT, world_size=world_size, before=_slow_renames)
    return again(root, kill(fit, 2 * seconds), world_size, reference)


def _slow_renames() -> None:
    replace = os.replace

    def replace_slowly(source: Any, target: Any) -> None:
        time.sleep(0.25)
        replace(source, target)
        time.sleep(0.25)

    patch("os.replace", replace_slowly).start()


def again(root: Path, where: str, world_size: int, reference: dict[str, Any]) -> str:
    """Start a fit again, and return the differences from an undisturbed fit."""
    codes = Fit(root, *SHORT, world_size=world_size).wait()
    if any(codes):
        return f"{where}: exit codes {codes}: {(root / 'log0').read_text()[-500:]}"
    return different(root, where, reference)


def different(root: Path, where: str, reference: dict[str, Any]) -> str:
    for run in versions(root, "fit")[:-1]:
        if [*run.glob("checkpoints/*.ckpt")]:
            return f"{where}: {run.name} has a checkpoint and was not resumed"
        shutil.rmtree(run)  # it ended before its first checkpoint, and another one began
    differing = [name for name, is_same in compared(root, reference).items() if not is_same]
    leftovers = [path.name for path in root.rglob("*.tmp*")]
    return f"{where}: {differing} differ, left {leftovers}" if differing or leftovers else ""


def paused_fit(root: Path, world_size: int, seconds: float, reference: dict[str, Any]) -> str:
    """Stop all processes or one of them for 3 seconds at a random moment, then continue them."""
    fit = Fit(root, *SHORT, world_size=world_size)
    moment = random.uniform(0, seconds)
    time.sleep(moment)
    chosen = random.choice([fit.pids, fit.pids[-1:]])
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        for pid in chosen:
            os.kill(pid, signum)
        time.sleep(3 if signum == signal.SIGSTOP else 0)
    codes = fit.wait()
    where = f"paused after {moment:.2f} of {seconds:.2f} s"
    return f"{where}: exit codes {codes}" if any(codes) else different(root, where, reference)


def is_clear_error(codes: list[int], log: str) -> bool:
    """Return whether a fit ended on all ranks with exit code 1 and an error line."""
    is_line = "error: " in log.strip().rpartition("\n")[2] and "Traceback" not in log
    return set(codes) == {1} and is_line


def limited_fit(root: Path, world_size: int, seconds: float, reference: dict[str, Any]) -> str:
    """Let no file become larger than a random size, so that a write fails as on a full disk; then start it again."""
    max_bytes = int(2 ** random.uniform(12, 22))
    limit = partial(_limit_files, max_bytes)
    # no workers: the limit would hold for the shared memory of their batches, too
    codes = Fit(root, *SHORT, "--data.num_workers", 0, world_size=world_size, before=limit).wait()
    where = f"files of at most {max_bytes:,} bytes"
    log = (root / "log0").read_text()
    if any(codes) and not is_clear_error(codes, log):
        return f"{where}: exit codes {codes}: {log[-700:]}"
    return again(root, where, world_size, reference)


def _limit_files(num_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write then fails with an error
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def set_back_fit(root: Path, world_size: int, seconds: float, reference: dict[str, Any]) -> str:
    """Set the clock back by an hour at a random moment, kill the fit at a later one, and start it again."""
    moment = random.uniform(0, seconds / 2)
    before = partial(_set_clock_back, moment)
    fit = Fit(root, *SHORT, world_size=world_size, before=before)
    killed_at = random.uniform(moment, seconds)
    time.sleep(killed_at)
    os.killpg(fit.pids[0], signal.SIGKILL)
    fit.wait()
    where = f"set back after {moment:.2f}, killed after {killed_at:.2f} of {seconds:.2f} s"
    codes = Fit(root, *SHORT, world_size=world_size, before=partial(_set_clock_back, 0.0)).wait()
    if any(codes):
        return f"{where}: exit codes {codes}: {(root / 'log0').read_text()[-500:]}"
    return different(root, where, reference)


def _set_clock_back(moment: float) -> None:
    """After some seconds, let Python's clock and the times of the files that are written be those of an hour ago."""
    begin = time.monotonic()
    now = time.time
    replace = os.replace

    def step() -> float:
        return HOUR if time.monotonic() - begin >= moment else 0.0

    def replace_earlier(source: Any, target: Any) -> None:
        status = os.stat(source)
        os.utime(source, (status.st_atime - step(), status.st_mtime - step()))
        replace(source, target)

    patch("time.time", lambda: now() - step()).start()
    patch("os.replace", replace_earlier).start()


def filled_fit(root: Path, world_size: int, seconds: float, reference: dict[str, Any]) -> str:
    """Leave a random number of bytes on the disk, so that a write fails; then free it and start the fit again."""
    filler = OUT / "filler"
    root.mkdir()
    logs = Path(tempfile.mkdtemp())  # on another disk, or the error could not be logged
    for rank in range(world_size):
        (root / f"log{rank}").symlink_to(logs / f"log{rank}")
    left = int(2 ** random.uniform(12, 22))
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(OUT).free - left)
    codes = Fit(root, *SHORT, world_size=world_size).wait()
    filler.unlink()
    where = f"{left:,} bytes free"
    log = (logs / "log0").read_text()
    if any(codes) and not is_clear_error(codes, log):
        return f"{where}: exit codes {codes}: {log[-700:]}"
    return again(root, where, world_size, reference)


def killed_folds(folder: Path, seconds: float, reference: Path) -> str:
    """Kill a cross-validation, or its command and not its fold, at a random moment; start it again."""
    moment = random.uniform(0, seconds)
    pid = start(folder, FOLDS)
    time.sleep(moment)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    killed = random.choice([[], [int(child) for child in children]])
    for one in (pid, *killed):
        os.kill(one, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 60
    while any(map(is_held, folder.rglob("fold_*"))) and time.monotonic() < deadline:
        time.sleep(0.1)  # without its command, a fold ends within seconds
    where = f"killed {1 + len(killed)} after {moment:.2f} of {seconds:.2f} s"
    code = os.waitstatus_to_exitcode(os.waitpid(start(folder, FOLDS), 0)[1])
    if code:
        return f"{where}: exit code {code}: {(folder / 'log').read_text()[-500:]}"
    (run,) = [run for run in versions(folder / "runs", "fit") if (run / "predictions.csv").exists()]
    is_equal = is_same(weights_of(run), weights_of(reference)) and (
        (run / "predictions.csv").read_bytes() == (reference / "predictions.csv").read_bytes()
    )
    leftovers = [path.name for path in folder.rglob("*.tmp*")]
    return "" if is_equal and not leftovers else f"{where}: equal: {is_equal}, left {leftovers}"


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/best.ckpt", weights_only=True)["state_dict"]


def start(folder: Path, arguments: list[str]) -> int:
    """Start a command in a folder, and return the id of its process."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        become_finetune(arguments)
    return pid


def killed_command(folder: Path, arguments: list[str], seconds: float, name: str) -> str:
    """Kill a command at a random moment: its file is then complete or absent, and the next start writes it."""
    moment = random.uniform(0, seconds)
    pid = start(folder, arguments)
    time.sleep(moment)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    where = f"killed after {moment:.2f} of {seconds:.2f} s"
    if (folder / name).exists() and not is_complete(folder / name):
        return f"{where}: {name} is incomplete"
    code = os.waitstatus_to_exitcode(os.waitpid(start(folder, arguments), 0)[1])
    if code or not is_complete(folder / name):
        return f"{where}: exit code {code}: {(folder / 'log').read_text()[-500:]}"
    leftovers = [path.name for path in folder.iterdir() if ".tmp" in path.name]
    return f"{where}: left {leftovers}" if leftovers else ""


def is_complete(path: Path) -> bool:
    """Return whether an output is that of an undisturbed command."""
    reference = OUT / f"undisturbed_{path.suffix[1:]}" / path.name
    if path.suffix == ".csv":
        return path.read_bytes() == reference.read_bytes()
    image = decode(next(DATA.rglob("*.png")))
    return bool((Predictor(path)([image]) == Predictor(reference)([image])).all())


KILL = "kill -9"
FULL_DISK = "a full disk"
DISTURBANCES: dict[str, Callable[[Path, int, float, dict[str, Any]], str]] = {
    KILL: killed_fit,
    "SIGSTOP for 3 s": paused_fit,
    "a failing write": limited_fit,
    "the clock set back": set_back_fit,
    "slow renames, kill -9": slowly_renamed_fit,
    FULL_DISK: filled_fit,
}


def results(number: int, only: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each command with its faults, one text for each trial; "" if there is none."""
    if only:
        chosen = {only: DISTURBANCES[only]}
    else:
        chosen = {name: disturb for name, disturb in DISTURBANCES.items() if name != FULL_DISK}
    for world_size in (1, 2) if number == 1 else (1, 2, 3):
        undisturbed = OUT / f"undisturbed{world_size}"
        began = time.monotonic()
        Fit(undisturbed, *SHORT, world_size=world_size).wait()
        seconds = time.monotonic() - began
        reference = state(undisturbed)
        for name, disturb in chosen.items():
            if number == 1 and not is_in_short_part(name, world_size):
                continue
            num_trials = KILLS * number if name == KILL and number > 1 else number
            faults = []
            for i in range(num_trials):
                root = OUT / f"fit{world_size}_{i}"
                faults.append(disturb(root, world_size, seconds, reference))
                shutil.rmtree(root)
            yield f"fit on {world_size}, {name}", faults
    if only in ("", KILL) and number > 1:
        yield "fit --folds, kill -9", list(faults_of_folds(number + number // 2))
    if only:
        return
    yield from killed_commands(number)


def is_in_short_part(name: str, world_size: int) -> bool:
    # a pause of one of two processes, which wait for each other, tests more
    if name == "SIGSTOP for 3 s":
        return world_size == 2
    return name not in ("the clock set back", "slow renames, kill -9")


def faults_of_folds(number: int) -> Iterator[str]:
    began = time.monotonic()
    os.waitpid(start(OUT / "undisturbed_folds", FOLDS), 0)
    seconds = time.monotonic() - began
    (reference,) = versions(OUT / "undisturbed_folds/runs", "fit")
    for i in range(number):
        yield killed_folds(OUT / f"folds{i}", seconds, reference)
        shutil.rmtree(OUT / f"folds{i}")


def killed_commands(number: int) -> Iterator[tuple[str, list[str]]]:
    (checkpoint,) = OUT.glob("undisturbed1/fit/*/checkpoints/best.ckpt")
    commands = {
        "answers.csv": ["predict", str(checkpoint), str(DATA / "test"), "--output", "answers.csv"],
        "model.safetensors": ["export", str(checkpoint), "--format", "safetensors"],
    }
    commands["model.safetensors"] += ["--output", "model.safetensors"]
    for name, arguments in commands.items():
        folder = OUT / f"undisturbed_{Path(name).suffix[1:]}"
        began = time.monotonic()
        os.waitpid(start(folder, arguments), 0)
        seconds = time.monotonic() - began
        faults = [
            killed_command(OUT / f"{arguments[0]}{i}", arguments, seconds, name)
            for i in range(number)
        ]
        yield f"{arguments[0]}, kill -9", faults


if __name__ == "__main__":
    torch.set_num_threads(1)
    random.seed(20)
    gc.freeze()
    faults_of = {}
    for command, faults in results(int(sys.argv[4]), *sys.argv[5:]):
        faults_of[command] = faults
        print(command, len(faults), [fault for fault in faults if fault], flush=True)
        (OUT / "results.json").write_text(json.dumps(faults_of, indent=1))
