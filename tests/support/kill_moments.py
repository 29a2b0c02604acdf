"""Commands that are disturbed at random moments and started again: `python kill_moments.py OUT DATA 1 NUMBER [NAME]`.

NUMBER times each: fits on one and on two processes that are killed, paused or cannot write; predictions and exports
that are killed. Each command is the real one in forked processes. In the end their files must be those of a command
that nothing has disturbed. With NAME only the fits that are disturbed in this way.
"""

import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forked import become_finetune
from kill_scenarios import DATA, OUT, TINY, Fit, compared, state

from finetune.data.decode import decode
from finetune.inference.predictor import Predictor
from finetune.runs.folder import versions

SHORT = (*TINY, "--trainer.max_epochs", 2)


def killed_fit(root: Path, world_size: int, seconds: float, reference: dict[str, Any]) -> str:
    """Kill a fit at a random moment, start it again, and return what differs from a fit that nothing has killed."""
    fit = Fit(root, *SHORT, world_size=world_size)
    moment = random.uniform(0, seconds)
    time.sleep(moment)
    os.killpg(fit.pids[0], signal.SIGKILL)
    fit.wait()
    return again(root, f"killed after {moment:.2f} of {seconds:.2f} s", world_size, reference)


def again(root: Path, where: str, world_size: int, reference: dict[str, Any]) -> str:
    """Start a fit again, and return what differs from a fit that nothing has disturbed."""
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
    """Stop all processes or one of them for some seconds at a random moment, and let them go on."""
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


def limited_fit(root: Path, world_size: int, seconds: float, reference: dict[str, Any]) -> str:
    """Let no file become larger than a random size, so that a write fails as on a full disk; then start it again."""
    most = int(2 ** random.uniform(12, 22))
    limit = partial(_limit_files, most)
    # no workers: the limit would hold for the shared memory of their batches, too
    alone = ("--data.num_workers", 0)
    codes = Fit(root, *SHORT, *alone, world_size=world_size, before=limit).wait()
    where = f"files of at most {most:,} bytes"
    log = (root / "log0").read_text()
    is_line = "error: " in log.strip().rpartition("\n")[2] and "Traceback" not in log
    if any(codes) and (set(codes) != {1} or not is_line):
        return f"{where}: exit codes {codes}: {log[-700:]}"
    return again(root, where, world_size, reference)


def _limit_files(num_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write then fails with an error
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def start(folder: Path, arguments: list[str]) -> int:
    """Start a command in a folder, and return its process."""
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
    """Return whether an output answers as that of a command that nothing has killed."""
    reference = OUT / f"whole_{path.suffix[1:]}" / path.name
    if path.suffix == ".csv":
        return path.read_bytes() == reference.read_bytes()
    image = decode(next(DATA.rglob("*.png")))
    return bool((Predictor(path)([image]) == Predictor(reference)([image])).all())


DISTURBANCES: dict[str, Callable[[Path, int, float, dict[str, Any]], str]] = {
    "kill -9": killed_fit,
    "SIGSTOP for 3 s": paused_fit,
    "a failing write": limited_fit,
}


def results(number: int, only: str = "") -> Iterator[tuple[str, list[str]]]:
    chosen = {name: disturb for name, disturb in DISTURBANCES.items() if only in name}
    for world_size in (1, 2):
        full = OUT / f"whole{world_size}"
        began = time.monotonic()
        Fit(full, *SHORT, world_size=world_size).wait()
        seconds = time.monotonic() - began
        reference = state(full)
        for name, disturb in chosen.items():
            if disturb is paused_fit and world_size == 1 and number == 1:
                continue  # a pause of one of two processes, which wait for each other, tests more
            faults = []
            for i in range(number):
                root = OUT / f"fit{world_size}_{i}"
                faults.append(disturb(root, world_size, seconds, reference))
                shutil.rmtree(root)
            yield f"fit on {world_size}, {name}", faults
    if only:
        return
    (checkpoint,) = OUT.glob("whole1/fit/*/checkpoints/best.ckpt")
    commands = {
        "answers.csv": ["predict", str(checkpoint), str(DATA / "test"), "--output", "answers.csv"],
        "model.safetensors": ["export", str(checkpoint), "--format", "safetensors"],
    }
    commands["model.safetensors"] += ["--output", "model.safetensors"]
    for name, arguments in commands.items():
        folder = OUT / f"whole_{Path(name).suffix[1:]}"
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
    found = dict(results(int(sys.argv[4]), *sys.argv[5:]))
    (OUT / "results.json").write_text(json.dumps(found, indent=1))
