"""Fits that are killed and resumed, for test_resume.py: `python kill_scenarios.py OUT DATA 1 [quick|three]`.

Every fit is the real command in forked processes, which start at once since this one has imported everything.
"""

import gc
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import timm
import torch
from labelled_files import draw_labelled
from processes import rank_environment
from scenario_results import distance, is_same

import finetune.commands.lightning_cli
from finetune import lightning_private
from finetune.cli import main
from finetune.data import datamodule
from finetune.runs.checkpoint_io import AtomicCheckpointIO
from finetune.runs.folder import versions
from finetune.runs.metrics_csv import read_metrics
from finetune.training.classifier import Classifier

OUT, DATA = Path(sys.argv[1]), Path(sys.argv[2])
STEPS_PER_EPOCH, EPOCHS = 7, 3  # 81 images in batches of 12
FIT = [
    *("fit", "--resume", "--checkpoint_every_n_steps", 3, "--data.root", DATA),
    *("--data.image_size", 32, "--data.batch_size", 12, "--data.val_fraction", 0.1),
    *("--model.weights", "null", "--model.scheduler", "finetune.WarmupCosine"),
    *("--trainer.max_epochs", EPOCHS, "--trainer.accelerator", "cpu"),
    *("--trainer.log_every_n_steps", 1, "--trainer.enable_progress_bar", "false"),
    *("--trainer.precision", "32-true", "--report", "false", "--test_after_fit", "false"),
]
# batch norm, in a third of mobilenet_v3_small's time
TINY = ("--model.backbone", "timm/test_efficientnet")
# several labels an image, mixed
LABELS = (
    *("--data", "labelled_files.LabelledFiles", "--data.root", OUT / "labels"),
    *("--data.mixup", 0.4, "--data.cutmix", 1.0, "--model.class_weights", "balanced", *TINY),
    *("--trainer.max_epochs", 2),
)
SELDOM = ("--checkpoint_every_n_steps", 10**6)
SMALL = ("--model.backbone", "small_cnn", "--data.image_size", 28, "--trainer.precision", "64-true")


class Fit:
    """`finetune fit` in `world_size` processes that form one process group."""

    def __init__(
        self, root: Path, *extra: Any, world_size: int = 1, before: Callable[[], Any] | None = None
    ) -> None:
        self.root, self.pids = root, []
        root.mkdir(parents=True, exist_ok=True)
        arguments = [
            str(a)
            for a in (
                *FIT,
                "--trainer.default_root_dir",
                root,
                "--trainer.devices",
                world_size,
                *extra,
            )
        ]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                self._child(arguments, rank, world_size, port, before)
            os.setpgid(pid, self.pids[0] if self.pids else pid)
            self.pids.append(pid)

    def _child(
        self, arguments: list[str], rank: int, world_size: int, port: int, before: Any
    ) -> None:
        log = os.open(self.root / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if world_size > 1:
            os.environ |= rank_environment(rank, world_size, port)
        code = 70
        try:
            if before:
                before()
            main(arguments)
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)

    def wait(self) -> list[int]:
        """Return the exit codes; negative for a signal."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

    def signal_at(self, step: int, signum: int, everyone: bool = True) -> list[int]:
        """Wait until the metrics of `step` are there, and a random moment longer; send the signal; wait for the end."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            runs = versions(self.root, "fit")
            rows = read_metrics(runs[-1] / "steps.csv") if runs else []
            if rows and int(rows[-1]["step"]) >= step:
                break
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.02))
        os.killpg(self.pids[0], signum) if everyone else os.kill(self.pids[0], signum)
        return self.wait()


def state(root: Path) -> dict[str, Any]:
    (run,) = versions(root, "fit")  # resumed, so still the one run
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    return {
        "weights": checkpoint["state_dict"],
        "optimizer": checkpoint["optimizer_states"],
        "scheduler": checkpoint["lr_schedulers"],
        "loops": checkpoint["loops"],
        "steps": (run / "steps.csv").read_text(),
        "epochs": [{**row, "seconds": ""} for row in read_metrics(run / "metrics.csv")],
    }


def compared(root: Path, reference: dict[str, Any]) -> dict[str, bool]:
    own = state(root)
    return {key: is_same(own[key], reference[key]) for key in reference}


def step_of_last(root: Path) -> int:
    path = versions(root, "fit")[-1] / "checkpoints/last.ckpt"
    return torch.load(path, weights_only=True)["global_step"] if path.exists() else 0


def killed_and_resumed(
    root: Path, step: int, reference: dict[str, Any], *extra: Any, **options: Any
) -> dict[str, Any]:
    world_size = options.get("world_size", 1)
    fit = Fit(root, *extra, world_size=world_size, before=partial(wait_for_the_signal, step + 2))
    killed = fit.signal_at(step, signal.SIGKILL)
    inside = step_of_last(root)
    resumed = Fit(root, *extra, **options).wait()
    return {"ended": killed, "step": inside, "resumed": resumed, **compared(root, reference)}


def wait_for_the_signal(step: int) -> None:
    """Let a fit that is killed wait after a step: on a fast machine it could end before the signal is there."""
    original = Classifier.training_step
    calls: list[int] = []

    def waiting(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > step:
            time.sleep(150)  # longer than the signal is waited for
        return original(*args)

    patch.object(Classifier, "training_step", waiting).start()


def interrupted(
    root: Path, step: int, signum: int, everyone: bool, reference: dict[str, Any], *extra: Any
) -> dict[str, Any]:
    codes = Fit(root, *TINY, *extra, world_size=2).signal_at(step, signum, everyone)
    inside = step_of_last(root)
    resumed = Fit(root, *TINY, *extra, world_size=2).wait()
    return {"ended": codes, "step": inside, "resumed": resumed, **compared(root, reference)}


def stop_inside_an_epoch() -> None:
    """Let SIGTERM come to the first process in the third step of the second epoch."""
    step, calls = Classifier.training_step, []

    def stopped(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == STEPS_PER_EPOCH + 3 and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args)

    patch.object(Classifier, "training_step", stopped).start()


def stopped(root: Path, num_processes: int) -> list[int]:
    """Stop a fit inside its second epoch."""
    return Fit(root, *SMALL, world_size=num_processes, before=stop_inside_an_epoch).wait()


def moved(
    root: Path, codes: list[int], after: int, reference: dict[str, Any], control: Any = None
) -> dict[str, Any]:
    """Go on with a stopped fit on `after` processes; how far from the reference is it before and after?"""
    step, stopped_at = step_of_last(root), distance(state(root)["weights"], reference["weights"])
    output = (root / "log0").read_text()
    resumed = Fit(root, *SMALL, world_size=after, before=control).wait()
    return {
        **{"ended": codes, "step": step, "resumed": resumed},
        "said": [output, (root / "log0").read_text().removeprefix(output)],
        "distances": [stopped_at, distance(state(root)["weights"], reference["weights"])],
    }


def die_while_writing() -> None:
    """Let the second checkpoint be cut off by SIGKILL in the middle of its file."""
    save, calls = torch.save, []

    def half(checkpoint: Any, file: Any) -> None:
        calls.append(1)
        save(checkpoint, file)
        if len(calls) == 2:
            file.flush()
            os.truncate(file.fileno(), os.fstat(file.fileno()).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    patch("torch.save", half).start()


def start_the_epoch_again() -> None:
    """Control: what Lightning does by itself."""
    patch(
        "finetune.data.datamodule.position", lambda trainer: (original_position(trainer)[0], 0)
    ).start()


original_position = datamodule.position


@contextmanager
def temporary_files_on_another_file_system() -> Iterator[None]:
    with patch.dict(os.environ, {"TMPDIR": "/dev/shm"}):
        yield


@contextmanager
def buckets_of_ddp() -> Iterator[None]:
    """Control: sums of three gradients are rounded in another way after the first step."""
    set_argument = lightning_private.set_ddp_argument

    def set_others(strategy: Any, name: str, value: Any) -> None:
        if name != "bucket_cap_mb_list":
            set_argument(strategy, name, value)

    with patch("finetune.lightning_private.set_ddp_argument", set_others):
        yield


@contextmanager
def checkpoints_that_wait() -> Iterator[None]:
    """Let every checkpoint but the first wait as long as it may."""
    with patch.multiple("finetune.runs.deferred_checkpoints", QUICK=0.0, SHARE=1e-9):
        yield


def quick_scenarios() -> Iterator[tuple[str, dict[str, Any]]]:
    """One kill inside an epoch on one process, and the control."""
    two_epochs = (*TINY, "--trainer.max_epochs", 2)
    reference_root = OUT / "reference1"
    yield "reference1", {"codes": Fit(reference_root, *two_epochs).wait()}
    reference, step = state(reference_root), STEPS_PER_EPOCH + 3
    yield "killed", killed_and_resumed(OUT / "killed", step, reference, *two_epochs)
    yield (
        "control",
        killed_and_resumed(
            OUT / "control", step, reference, *two_epochs, before=start_the_epoch_again
        ),
    )


def scenarios() -> Iterator[tuple[str, dict[str, Any]]]:
    random.seed(20)
    yield from scenarios_of_one_process()
    yield from scenarios_of_two_processes()
    draw_labelled(OUT / "labels", train=93)  # 81 without those of validation, or about
    reference_root = OUT / "labels_reference"
    yield "labels_reference", {"codes": Fit(reference_root, *LABELS).wait()}
    reference = state(reference_root)
    yield "killed_labels", killed_and_resumed(OUT / "killed_labels", 10, reference, *LABELS)
    yield from scenarios_of_another_number()


def step_inside_an_epoch() -> int:
    """Draw a step soon after a checkpoint inside an epoch."""
    steps = range(STEPS_PER_EPOCH * EPOCHS)
    return random.choice([step for step in steps if step % STEPS_PER_EPOCH in (3, 4)])


def scenarios_of_one_process() -> Iterator[tuple[str, dict[str, Any]]]:
    reference_root = OUT / "reference1"
    yield "reference1", {"codes": Fit(reference_root, *TINY).wait()}
    reference = state(reference_root)
    with temporary_files_on_another_file_system():
        root = OUT / "cut_off"
        cut = Fit(root, *TINY, before=die_while_writing).wait()
        last = step_of_last(root)
        leftovers = [path.name for path in root.rglob("*.tmp")]
        resumed = Fit(root, *TINY).wait()
        gone = [path.name for path in root.rglob("*.tmp")]
        results = {
            "ended": cut,
            "step": last,
            "leftovers": leftovers,
            "resumed": resumed,
            "gone": gone,
        }
        yield root.name, {**results, **compared(root, reference)}
    with checkpoints_that_wait():
        root = OUT / "waiting_killed"
        yield root.name, killed_and_resumed(root, 16, reference, *TINY, *SELDOM)


def scenarios_of_two_processes() -> Iterator[tuple[str, dict[str, Any]]]:
    reference_root = OUT / "reference2"
    yield "reference2", {"codes": Fit(reference_root, *TINY, world_size=2).wait()}
    reference = state(reference_root)
    root = OUT / "killed_two"
    step = step_inside_an_epoch()
    yield root.name, killed_and_resumed(root, step, reference, *TINY, world_size=2)
    yield "closed_terminal", interrupted(OUT / "closed_terminal", 9, signal.SIGHUP, True, reference)
    with checkpoints_that_wait():
        root = OUT / "waiting_stopped"
        yield root.name, interrupted(root, 16, signal.SIGTERM, False, reference, *SELDOM)


def scenarios_of_three_processes() -> Iterator[tuple[str, dict[str, Any]]]:
    fit = (*TINY, "--trainer.max_epochs", 2)
    for name, context in (("killed_three", nullcontext()), ("control_three", buckets_of_ddp())):
        with context:
            reference_root = OUT / f"reference_{name}"
            Fit(reference_root, *fit, world_size=3).wait()
            reference = state(reference_root)
            step = STEPS_PER_EPOCH + 3
            yield name, killed_and_resumed(OUT / name, step, reference, *fit, world_size=3)


def scenarios_of_another_number() -> Iterator[tuple[str, dict[str, Any]]]:
    reference_root = OUT / "small"
    Fit(reference_root, *SMALL).wait()
    reference = state(reference_root)
    root = OUT / "moved2to1"
    copy = OUT / "moved_control"
    codes = stopped(root, 2)
    shutil.copytree(root, copy)
    yield root.name, moved(root, codes, 1, reference)
    yield copy.name, moved(copy, codes, 1, reference, start_the_epoch_again)
    root = OUT / "moved1to2"
    yield root.name, moved(root, stopped(root, 1), 2, reference)


if __name__ == "__main__":
    # imported before forking
    assert finetune.commands.lightning_cli and AtomicCheckpointIO and timm
    torch.set_num_threads(1)
    # else each process's own garbage collection would copy all the memory that it shares with this one
    gc.freeze()
    chosen = {"quick": quick_scenarios, "three": scenarios_of_three_processes}
    results = dict(chosen.get(sys.argv[-1], scenarios)())
    (OUT / "results.json").write_text(json.dumps(results, indent=1))
