"""Fits on one or several processes that a signal stops at a step, and what they leave.

`python stopped_fits.py HOW ARGUMENTS…` is `finetune ARGUMENTS` in one process of such a fit; HOW is a `How` as JSON.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from processes import Process, free_port, rank_environment
from scenario_results import is_same
from slow_disk import slow_down

from finetune import lightning_private
from finetune.data import datamodule
from finetune.runs.metrics_csv import read_metrics
from finetune.training.classifier import Classifier


@dataclass(frozen=True)
class How:
    """What happens to a fit.

    Attributes:
        step: Number of the step before which its processes wait for a signal; -1 for none.
        mistake: A deliberate mistake, one of `MISTAKES`; "" for none.
        has_slow_disk: Whether no checkpoint is written before the fit waits for it.
    """

    step: int = -1
    mistake: str = ""
    has_slow_disk: bool = False


def fitted(
    root: Path,
    *arguments: Any,
    num_processes: int = 1,
    signum: int = signal.SIGKILL,
    num_hearing: int = 9,
    **how: Any,
) -> list[int]:
    """Run `finetune ARGUMENTS` in a folder, and return the exit codes of its processes; negative for a signal.

    Args:
        root: The folder, which gets their logs.
        *arguments: The words of the command line.
        num_processes: The number of ranks of one process group.
        signum: What they get where they wait for a signal.
        num_hearing: How many of them, at most, get it.
        **how: The fields of a `How`.
    """
    root.mkdir(exist_ok=True)
    chosen = How(**how)
    argv = [__file__, json.dumps(asdict(chosen)), *map(str, arguments)]
    argv += ["--devices", str(num_processes)]
    port = free_port()
    ranks: list[Process] = []
    try:
        for rank in range(num_processes):
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            if num_processes > 1:
                environment |= rank_environment(rank, num_processes, port)
            log = root / f"log{rank}"
            ranks.append(Process(argv, root, environment, log, log))
        if chosen.step >= 0:
            deadline = time.monotonic() + 120
            while len(waiting := list(root.glob("waits.*"))) < num_processes:
                assert time.monotonic() < deadline, ranks[0].stderr
                time.sleep(0.01)
            for process in ranks[:num_hearing]:
                process.send_signal(signum)
            for path in waiting:
                path.unlink()
        return [process.wait(120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def state(run: Path) -> dict[str, Any]:
    """Return what a run has in last.ckpt and its tables, without the time that it took."""
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    return {
        "weights": checkpoint["state_dict"],
        "optimizer": checkpoint["optimizer_states"],
        "scheduler": checkpoint["lr_schedulers"],
        "loops": checkpoint["loops"],
        "steps": (run / "steps.csv").read_text(),
        "epochs": [{**row, "seconds": ""} for row in read_metrics(run / "metrics.csv")],
    }


def differing(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not the same, bit for bit."""
    return [name for name in other if not is_same(own[name], other[name])]


def wait_at(step: int) -> None:
    """Let a process wait for a signal before a step."""
    original = Classifier.training_step

    def waiting(model: Classifier, *batch: Any) -> Any:
        if model.trainer.global_step == step:
            mark = Path(f"waits.{os.getpid()}")
            mark.touch()
            while mark.exists():
                time.sleep(0.01)
        return original(model, *batch)

    patch.object(Classifier, "training_step", waiting).start()


def start_the_epoch_again() -> None:
    """Do what Lightning does by itself."""
    position = datamodule.position
    patch.object(datamodule, "position", lambda trainer: (position(trainer)[0], 0)).start()


def leave_the_buckets_of_ddp() -> None:
    """Let sums of three gradients be rounded in another way after the first step."""
    set_argument = lightning_private.set_ddp_argument

    def set_others(strategy: Any, name: str, value: Any) -> None:
        if name != "bucket_cap_mb_list":
            set_argument(strategy, name, value)

    patch.object(lightning_private, "set_ddp_argument", set_others).start()


MISTAKES = {each.__name__: each for each in (start_the_epoch_again, leave_the_buckets_of_ddp)}

if __name__ == "__main__":
    from forked import become_finetune

    how = How(**json.loads(sys.argv[1]))
    if how.step >= 0:
        wait_at(how.step)
    if how.mistake:
        MISTAKES[how.mistake]()
    if how.has_slow_disk:
        slow_down(pytest.MonkeyPatch())
    become_finetune(sys.argv[2:])
