"""Commands that are stopped or fail at a step of a phase, and how they end: all of it soon, with one line.

`python ended_commands.py SCENARIO IMAGES CKPT` is the command of a scenario in one process, which reaches its second
step in the phase while its workers are alive.
"""

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from colours import QUICKEST, draw_colours
from processes import Process, free_port, processes_of, rank_environment

from finetune.data import image_cache, loader
from finetune.data.loader import Loader, TrainLoader
from finetune.data.samples import Samples
from finetune.models.checkpoint import refuse
from finetune.training.classifier import Classifier

DEADLINE = 10.0  # seconds from a signal or a message to the end of the last process
SIGNALS = {"sigint": signal.SIGINT, "sigterm": signal.SIGTERM, "sighup": signal.SIGHUP}
# fit has the other phases
COMMANDS = {"predict": "predict", "only_validate": "validate", "only_test": "test"}
# The split that a phase reads, and the step that it takes
PHASES = {
    "decode": ("train", ""),
    "train": ("train", "training_step"),
    "validate": ("val", "validation_step"),
    "test": ("test", "test_step"),
    "predict": ("test", "predict_step"),
    "only_validate": ("val", "validation_step"),
    "only_test": ("test", "test_step"),
}
LINES = re.compile(  # what a run may say
    r"|(images|network|training): .*|predicting \d.*|(val|test) has only \d+ images?: .*"
    r"|skipped \d+ of the \d+ \w+ images of .*|\d[\d,]* \w+ images of .*"
    r"|epoch \d.*|decoded \d.*|the images of .* are decoded again .*|finetune: error: .*|stopp(ed by|ing after) .*"
    r"|(test|run in|predictions|temperature|not calibrated|best.ckpt|next)\b.*|\d+ ((of \d+ )?\w+ )?images.*"
)


class Scenario(NamedTuple):
    """An end of a command, named by its fields.

    Attributes:
        failure: One of `SIGNALS`, `truncated` (an image), `exception`, `memory`, `main_killed`; or a worker is killed
            that has nothing to do in the phase, `idle_killed`, or has, `busy_killed`; or `mistake`, an exception
            while workers ignore the first SIGTERM.
        phase: What the command does then: a key of `PHASES`.
        workers: The number of workers of each loader.
        processes: `one`; two that `lightning` starts, or `torchrun`.
        screen: What shows the lines, `file` or `terminal`.
    """

    failure: str
    phase: str
    workers: str
    processes: str
    screen: str

    @property
    def num_processes(self) -> int:
        return 1 if self.processes == "one" else 2

    @property
    def failing_rank(self) -> int:
        """0 or 1, always the same."""
        return zlib.crc32("-".join(self).encode()) % self.num_processes


@dataclass
class Ending:
    """How the processes of a command have ended.

    Attributes:
        codes: Their exit codes; None of what still runs.
        left: What still runs.
        output: The text that they have shown.
        seconds: From the signal, or the message of the failure, to the end.
    """

    codes: list[int | None]
    left: list[str]
    output: str
    seconds: float


class Screen:
    """A terminal or a file, which processes open by its path, and what they have shown on it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.path = folder / "screen"
        self.is_terminal = kind == "terminal"
        self.text = ""
        self.ours, self._theirs = pty.openpty() if self.is_terminal else (-1, -1)
        if self.is_terminal:
            self.path = Path(os.ttyname(self._theirs))

    def read(self) -> str:
        if not self.is_terminal:
            return self.path.read_text(errors="replace") if self.path.exists() else ""
        while self.ours >= 0 and select.select([self.ours], [], [], 0)[0]:
            try:
                self.text += os.read(self.ours, 65536).decode(errors="replace")
            except OSError:  # nobody has it open
                break
        return self.text

    def close(self) -> None:
        self.read()
        for descriptor in {self.ours, self._theirs} - {-1}:
            os.close(descriptor)
        self.ours = self._theirs = -1


def ending(s: Scenario, folder: Path, ckpt: Path, deadline: float = DEADLINE) -> Ending:
    """Run the command of a scenario in a folder to its end, or until the deadline, after which it is killed."""
    images = draw_colours(folder / "images", train=20, val=8, test=8)
    if s.failure == "truncated":
        bad = images / PHASES[s.phase][0] / "red/05.png"
        os.truncate(bad, bad.stat().st_size // 2)
    screen = Screen(s.screen, folder)
    argv = [__file__, "-".join(s), str(images), str(ckpt)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FINETUNE_CACHE": str(folder / "cache")}
    port = free_port()
    processes = []
    for rank in range(2 if s.processes == "torchrun" else 1):
        own = rank_environment(rank, 2, port) if s.processes == "torchrun" else {}
        processes.append(Process(argv, folder, environment | own, screen.path, screen.path))
    pids = [process.pid for process in processes]
    since = 0.0
    end = time.monotonic() + 120
    try:
        while time.monotonic() < end:
            if not since and (folder / "reached").exists():
                since = time.monotonic()
                strike(s, processes, screen)
                (folder / "go").touch()
                end = since + deadline
            if "finetune: error" in screen.read() and end > time.monotonic() + deadline:
                since = time.monotonic()
                end = since + deadline
            codes = [process.poll() for process in processes]
            left = processes_of(pids)
            if None not in codes and not left:
                break
            time.sleep(0.02)
        return Ending(codes, left, cleaned(screen.read()), time.monotonic() - since)
    finally:
        for process in processes_of(pids):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(int(process.split()[0]), signal.SIGKILL)
        screen.close()


def strike(s: Scenario, processes: list[Process], screen: Screen) -> None:
    """Apply the failure of a scenario from outside."""
    if s.failure == "main_killed":
        processes[0].send_signal(signal.SIGKILL)
    if s.failure not in SIGNALS:
        return
    if s.screen == "file":  # a scheduler's way: to every process
        for process in processes:
            process.send_signal_to_all(SIGNALS[s.failure])
    elif s.failure == "sighup":
        screen.close()
    elif s.failure == "sigint":
        os.write(screen.ours, b"\x03")
    else:
        processes[0].send_signal(SIGNALS[s.failure])
    time.sleep(0.05)  # it is there before the step ends


def cleaned(text: str) -> str:
    """Return the lines of a text without the codes of a terminal and the bars of progress."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    bars = ("images/s  -:", "━")
    return "\n".join(
        line.strip().removeprefix("^C")
        for line in text.splitlines()
        if not any(bar in line for bar in bars)
    )


def faults(s: Scenario, end: Ending) -> list[str]:
    """Return what is not as it should be."""
    found = [f"left: {end.left}"] if end.left else []
    expected = {"main_killed": -9, **{name: 128 + signum for name, signum in SIGNALS.items()}}.get(
        s.failure, 1
    )
    if end.codes[0] != expected or end.codes[1:] not in ([], [expected], [1]):
        found.append(f"exit codes {end.codes}, not {expected}")
    lines = end.output.splitlines()
    if s.screen == "file":
        found += [f"said: {line}" for line in lines if not LINES.fullmatch(line)]
    wrong = r"Traceback|Exception ignored|Error in atexit"
    found += [f"said: {line}" for line in lines if re.search(wrong, line)]
    errors = [line for line in lines if line.startswith("finetune: error: ")]
    # What is last written to a terminal may be lost here: its first process, unlike a shell, ends with the command.
    at_least = 1 if s.screen == "file" else 0
    if s.failure in SIGNALS:
        stopped = sum(line.startswith(f"stopped by {s.failure.upper()}") for line in lines)
        found += [f"{stopped} lines of the stop"] * (not at_least <= stopped <= 1)
        # Another process may find out by the first one's end.
        found += [f"said: {errors}"] * (len(errors) >= s.num_processes)
    elif s.failure != "main_killed" and not at_least <= len(errors) <= s.num_processes:
        found.append(f"{len(errors)} errors printed")
    return found


class Failure:
    """Applies the failure of a scenario in its processes."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        # the processes of each loader, and whether it is the one of training
        self._started: list[tuple[bool, list[int]]] = []
        self._num_steps = 0

    def prepare(self) -> None:
        """Let this process reach the step at which something is done to it."""
        s = self.scenario
        split, name = PHASES[s.phase]
        self._record_workers()
        if s.failure == "mistake":
            patch.object(loader, "start_worker", ignore_the_first_sigterm).start()
            patch.object(Loader, "__iter__", torch.utils.data.DataLoader.__iter__).start()
        if s.failure == "memory":
            self._use_up_memory_of_workers(f"/{split}/")
        elif s.failure != "truncated":
            owner, name = (Classifier, name) if name else (image_cache, "decode")
            step = getattr(owner, name)

            def stepped(*args: Any, **kwargs: Any) -> Any:
                self._fail()
                return step(*args, **kwargs)

            patch.object(owner, name, stepped).start()

    def _record_workers(self) -> None:
        original = Loader.__iter__

        def recorded(of: Loader) -> Any:
            iterator = original(of)
            pids = [worker.pid for worker in getattr(iterator, "_workers", ())]
            if pids and pids not in [known for _, known in self._started]:
                self._started.append((isinstance(of, TrainLoader), pids))
            return iterator

        patch.object(Loader, "__iter__", recorded).start()

    def _use_up_memory_of_workers(self, folder: str) -> None:
        """Make a worker that reads an image below a folder request more memory than there is."""
        original = Samples.read

        def read(samples: Samples, index: int) -> Any:
            if folder in samples.paths[index]:
                bytearray(1 << 60)
            return original(samples, index)

        patch.object(Samples, "read", read).start()

    def _fail(self) -> None:
        """Apply the failure at the second step, in the process that the scenario names."""
        s = self.scenario
        is_decoding = s.phase == "decode"
        if not is_decoding and int(os.environ.get("LOCAL_RANK", "0")) != s.failing_rank:
            return
        self._num_steps += 1
        if self._num_steps != 2:
            return
        has_others = any(not is_train for is_train, _ in self._started)
        if not is_decoding and s.workers != "0" and not has_others and s.failure != "mistake":
            # no worker of validation's, or the test's, is alive: nothing would be tried
            os._exit(98)
        if s.failure in ("exception", "mistake"):
            refuse("the batch", "the network fails")  # an error that finetune raises for the user
        Path("reached").touch()
        if s.failure in ("idle_killed", "busy_killed"):
            os.kill(self._worker_to_kill(), signal.SIGKILL)
            return
        while not Path("go").exists():
            time.sleep(0.01)

    def _worker_to_kill(self) -> int:
        """Return a worker that has nothing to do in this phase, or one that has."""
        is_train = self.scenario.phase == "train"
        wants_train = is_train == (self.scenario.failure == "busy_killed")
        return next(pids for of_train, pids in self._started if of_train == wants_train)[-1]


def ignore_the_first_sigterm(worker_id: int) -> None:
    """Start a worker that does not know who sends it a signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def command(s: Scenario, images: str, ckpt: str) -> list[str]:
    """Return the words of the command line of a scenario."""
    given = ["--data.image_size", "28", "--data.batch_size", "6", "--data.num_workers", s.workers]
    given += ["--trainer.devices", str(s.num_processes), "--trainer.accelerator", "cpu"]
    if s.phase == "predict":
        return ["predict", "--ckpt_path", ckpt, "--data.predict", f"{images}/test", *given]
    if s.phase in COMMANDS:
        return [COMMANDS[s.phase], "--ckpt_path", ckpt, "--data.root", images, *given]
    limit, epochs = ("1" if s.phase == "decode" else "0"), ("1" if s.phase == "test" else "30")
    fit = ["fit", "--data.root", images, *QUICKEST, *given, "--data.cache_limit_gb", limit]
    return [*fit, "--trainer.max_epochs", epochs, "--trainer.log_every_n_steps", "1"]


if __name__ == "__main__":
    from forked import become_finetune

    name, *places = sys.argv[1:]
    chosen = Scenario(*name.split("-"))
    if chosen.screen == "terminal" and os.environ.get("RANK", "0") == "0":
        os.close(os.open(os.ttyname(1), os.O_RDWR))  # a leader's first terminal becomes its own
    Failure(chosen).prepare()
    become_finetune(command(chosen, *places))
