"""The scenarios of test_every_end.py and test_ends.py: commands that fail or are stopped must end.

    python tests/support/end_scenarios.py OUT "" 1 cover|all|NAME...

Each is the real command in forked processes, which start at once since this one has imported everything. It is
stopped or made to fail at a chosen step of a chosen phase, while its workers are alive; `all` takes about a second of
a core for each of some 1000 scenarios.
"""

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import pty
import random
import re
import select
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from colours import draw_colours
from forked import become_finetune
from processes import processes_of, rank_environment

from finetune.data import image_cache, loader
from finetune.data.loader import Loader
from finetune.data.samples import Samples
from finetune.data.train_loader import TrainLoader
from finetune.models.checkpoint_values import refuse
from finetune.training.classifier import Classifier

DEADLINE = 10.0  # seconds from a signal or a message to the end of the last process
DEADLINE_OF_CONTROL = 5.0  # it never ends
SIGNALS = {"sigint": signal.SIGINT, "sigterm": signal.SIGTERM, "sighup": signal.SIGHUP}
AXES = {
    "failure": [
        *SIGNALS,
        "truncated",
        "exception",
        "memory",
        "idle_killed",
        "busy_killed",
        "main_killed",
    ],
    "phase": ["decode", "train", "validate", "test", "predict", "only_validate", "only_test"],
    "workers": ["0", "1", "3"],
    "processes": ["one", "lightning", "torchrun"],
    "screen": ["file", "terminal"],
}
# fit has the other phases
COMMANDS = {"predict": "predict", "only_validate": "validate", "only_test": "test"}
STEPS = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
STEPS |= {"only_validate": "validation_step", "only_test": "test_step"}
SPLITS = {"decode": "train", "train": "train", "validate": "val", "test": "test", "predict": "test"}
SPLITS |= {"only_validate": "val", "only_test": "test"}
LINES = re.compile(  # what a run may say
    r"|(images|network|training): .*|predicting \d.*|(val|test) has only \d+ images?: .*"
    r"|.* has changed since training: some images .*"
    r"|epoch \d.*|decoded \d.*|the images of .* are decoded again .*|finetune: error: .*|stopp(ed by|ing after) .*"
    r"|(test|run in|predictions|temperature|no temperature|best.ckpt|next)\b.*|\d+ ((of \d+ )?\w+ )?images.*"
)
BASE = [
    *("--data.image_size", 28, "--data.batch_size", 6, "--trainer.accelerator", "cpu"),
    *("--trainer.precision", "32-true"),
]
FIT = ["--model.weights", "null", "--model.backbone", "small_cnn", "--trainer.log_every_n_steps", 1]
FIT += ["--report", "false"]


class Scenario(NamedTuple):
    failure: str
    phase: str
    workers: str
    processes: str
    screen: str

    @property
    def name(self) -> str:
        return "-".join(self)

    @property
    def coin(self) -> int:
        """0 or 1, always the same: which of two processes fails."""
        return zlib.crc32(self.name.encode()) % 2

    def is_possible(self) -> bool:
        if self.failure.endswith(("idle_killed", "busy_killed")) and (
            self.workers == "0" or self.phase == "decode"
        ):
            return False
        return not (self.failure == "idle_killed" and self.phase not in ("train", "validate"))


def every() -> list[Scenario]:
    possible = [
        s for s in map(Scenario._make, itertools.product(*AXES.values())) if s.is_possible()
    ]
    random.Random(0).shuffle(possible)  # so that a part of them says something of all
    return possible


def first_seen() -> list[Scenario]:
    """Return those in which runs stood still first: one process whose worker waits for validation images."""
    failures = (*SIGNALS, "truncated", "exception")
    return [
        Scenario(f, phase, "1", "one", "file") for f in failures for phase in ("train", "validate")
    ]


def usual() -> list[Scenario]:
    """Return what most often ends the commands that only evaluate, with workers alive."""
    failures = ("sigint", "sigterm", "truncated")
    commands = (("only_validate", "1"), ("only_test", "3"))
    return [Scenario(f, *command, "one", "file") for f in failures for command in commands]


def cover() -> list[Scenario]:
    """Return scenarios that hold every possible pair of values, few of them, and those of above."""

    def pairs(scenario: Scenario) -> set[Any]:
        return set(itertools.combinations(zip(AXES, scenario, strict=True), 2))

    possible, chosen = every(), [*first_seen(), *usual()]
    missing = set().union(*map(pairs, possible)) - set().union(*map(pairs, chosen))
    while missing:
        # of several, one process: two take twice the time
        best = max(possible, key=lambda s: (len(pairs(s) & missing), s.processes == "one"))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


descriptors: set[int] = set()  # of all that runs now


def close(descriptor: int) -> None:
    os.close(descriptor)
    descriptors.discard(descriptor)


def free_port() -> int:
    while True:
        # below those that the system gives to others meanwhile
        port = random.randrange(10000, 30000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


class Run:
    """A scenario's processes, and what is seen of them."""

    def __init__(
        self, scenario: Scenario, out: Path, before: Callable[[], Any] | None = None
    ) -> None:
        self.scenario, self.before = scenario, before
        self.deadline = DEADLINE_OF_CONTROL if before else DEADLINE
        # it may be named several times
        self.out = out / f"{scenario.name}.{len(list(out.glob(f'{scenario.name}.*')))}"
        self.out.mkdir()
        self.output = b""
        self.told = 0.0
        self.event = 0.0
        self.began = time.monotonic()
        # in the process that trains: its loaders' workers, and whether they are training's
        self._started: list[tuple[bool, list[int]]] = []
        self._num_steps = 0
        self.reached, self._reached = os.pipe()
        self._go, self.go = os.pipe()
        if scenario.screen == "terminal":
            self.screen, self._screen = pty.openpty()
        else:
            self.screen, self._screen = os.pipe()
        ours = [self.reached, self._reached, self._go, self.go, self.screen, self._screen]
        descriptors.update(ours)
        self.port = free_port()
        self.codes: dict[int, int] = {}
        num = 2 if scenario.processes == "torchrun" else 1
        self.pids = [self._start(rank, num, out) for rank in range(num)]
        for descriptor in (self._reached, self._go, self._screen):
            close(descriptor)

    def _start(self, rank: int, num: int, out: Path) -> int:
        pid = os.fork()
        if pid:
            return pid
        scenario = self.scenario
        os.setsid()
        if scenario.screen == "terminal" and rank == 0:
            # a leader's first terminal becomes its own
            os.close(os.open(os.ttyname(self._screen), os.O_RDWR))
        nowhere = os.open(os.devnull, os.O_RDONLY)
        for target, source in enumerate((nowhere, self._screen, self._screen)):
            os.dup2(source, target)
        # a pipe that another scenario keeps open never ends
        for descriptor in descriptors - {self._reached, self._go}:
            os.close(descriptor)
        if num > 1:
            os.environ |= rank_environment(rank, num, self.port)
        os.environ["FINETUNE_CACHE"] = str(self.out / "cache")
        os.chdir(self.out)
        faulthandler.register(signal.SIGUSR1, open(f"stack{os.getpid()}", "w"), all_threads=True)  # noqa: SIM115
        if self.before:
            self.before()
        self.prepare()
        become_finetune(self.arguments(out))
        raise AssertionError

    def arguments(self, out: Path) -> list[str]:
        s = self.scenario
        data = out / (f"truncated_{SPLITS[s.phase]}" if s.failure == "truncated" else "data")
        given = [
            *BASE,
            "--data.num_workers",
            s.workers,
            "--trainer.devices",
            1 if s.processes == "one" else 2,
        ]
        if s.phase in COMMANDS:
            images = (
                ("--data.predict", data / "test") if s.phase == "predict" else ("--data.root", data)
            )
            given = [COMMANDS[s.phase], "--ckpt_path", out / "best.ckpt", *images, *given]
        else:
            limit, epochs = 1 if s.phase == "decode" else 0, 1 if s.phase == "test" else 30
            given = ["fit", "--data.root", data, *FIT, *given, "--data.cache_limit_gb", limit]
            given += ["--trainer.max_epochs", epochs]
        return [str(argument) for argument in given]

    def prepare(self) -> None:
        """Let the processes reach the step at which something is done to them."""
        s = self.scenario
        self._record_workers()
        if s.failure == "memory" and s.phase != "decode":
            self._use_up_memory_of_workers()
        if s.phase == "decode":
            original = image_cache.decode

            def decoded(*args: Any, **kwargs: Any) -> Any:
                if s.failure == "memory":
                    bytearray(1 << 60)
                else:
                    self._fail()
                return original(*args, **kwargs)

            patch.object(image_cache, "decode", decoded).start()
        elif s.failure not in ("memory", "truncated"):
            name = STEPS[s.phase]
            step = getattr(Classifier, name)

            def stepped(*args: Any) -> Any:
                self._fail()
                return step(*args)

            patch.object(Classifier, name, stepped).start()

    def _record_workers(self) -> None:
        """Record the processes of each loader, and whether it is the one of training."""
        original = Loader.__iter__

        def recorded(loader: Loader) -> Any:
            iterator = original(loader)
            pids = [worker.pid for worker in getattr(iterator, "_workers", ())]
            if pids and pids not in [known for _, known in self._started]:
                self._started.append((isinstance(loader, TrainLoader), pids))
            return iterator

        patch.object(Loader, "__iter__", recorded).start()

    def _use_up_memory_of_workers(self) -> None:
        """Make a worker that reads an image of the phase's split request more memory than there is."""
        original = Samples.read
        folder = f"/{SPLITS[self.scenario.phase]}/"

        def read(samples: Samples, index: int) -> Any:
            if folder in samples.paths[index]:
                bytearray(1 << 60)
            return original(samples, index)

        patch.object(Samples, "read", read).start()

    def _fail(self) -> None:
        """Apply the failure of the scenario at the second step, in the process that the scenario names."""
        s = self.scenario
        is_decoding = s.phase == "decode"
        is_last = os.environ.get("LOCAL_RANK", "0") == "1"
        if not is_decoding and s.processes != "one" and is_last != bool(s.coin):
            return
        self._num_steps += 1
        if self._num_steps != 2:
            return
        os.write(self._reached, b"x")
        has_others = any(not is_train for is_train, _ in self._started)
        if not is_decoding and s.workers != "0" and not has_others:
            # no worker of validation's, or the test's, is alive: nothing would be tried
            os._exit(98)
        if s.failure == "exception":
            refuse("the batch", "the network fails")  # an error that finetune raises for the user
        if s.failure in ("idle_killed", "busy_killed"):
            os.kill(self._worker_to_kill(), signal.SIGKILL)
        elif s.failure in SIGNALS or s.failure == "main_killed":
            os.read(self._go, 1)

    def _worker_to_kill(self) -> int:
        """Return a worker that has nothing to do in this phase, or one that has."""
        of_train = [pids for is_train, pids in self._started if is_train]
        of_eval = [pids for is_train, pids in self._started if not is_train]
        if self.scenario.failure == "idle_killed":
            loaders = {"train": of_eval, "validate": of_train}.get(self.scenario.phase, [])
        else:
            busy = {"train": of_train, "validate": of_eval}
            loaders = busy.get(self.scenario.phase, of_eval[-1:])
        return loaders[0][-1]

    def strike(self) -> None:
        """Apply the failure of the scenario from outside, at its step."""
        s = self.scenario
        self.event = time.monotonic()
        if s.failure == "main_killed":
            os.kill(self.pids[0], signal.SIGKILL)
        elif s.failure in SIGNALS:
            if s.screen == "file":  # a scheduler's way: to every process
                for pid in self.pids:
                    os.killpg(pid, SIGNALS[s.failure])
            elif s.failure == "sighup":
                close(self.screen)
                self.screen = -1
            elif s.failure == "sigint":
                os.write(self.screen, b"\x03")
            else:
                os.kill(self.pids[0], SIGNALS[s.failure])
            time.sleep(0.05)  # it is there before the step ends
        close(self.go)
        self.go = -1

    def look(self) -> bool:
        """Take notice of what has happened; return whether all has ended, or the time is over."""
        watched = [descriptor for descriptor in (self.reached, self.screen) if descriptor >= 0]
        for descriptor in select.select(watched, [], [], 0)[0]:
            if descriptor not in descriptors:  # closed by what the one before has led to
                continue
            try:
                read = os.read(descriptor, 65536)
            except OSError:  # a terminal that nobody has open
                read = b""
            if not read:
                close(descriptor)
            if descriptor == self.reached:
                self.reached = -1 if not read else self.reached
                if read and not self.event:
                    self.strike()
            elif read:
                self.output += read
                self.told = self.told or (
                    time.monotonic() if b"finetune: error" in self.output else 0.0
                )
            else:
                self.screen = -1
        for pid in set(self.pids) - set(self.codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        self.ended = time.monotonic()
        self.left = processes_of(self.pids) if len(self.codes) == len(self.pids) else ["the first"]
        since = max(self.told, self.event)
        return (not self.left and self.screen < 0) or (
            self.ended > (since + self.deadline if since else self.began + 120)
        )

    def result(self) -> dict[str, Any]:
        for signum in (signal.SIGUSR1, signal.SIGKILL):
            for process in processes_of(self.pids):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(int(process.split()[0]), signum)
            time.sleep(0.2 * bool(self.left))
        for descriptor in {self.reached, self.screen, self.go} & descriptors:
            close(descriptor)
        for pid in self.pids:
            if pid not in self.codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output.decode(errors="replace")).replace(
            "\r", "\n"
        )
        output = "\n".join(
            line for line in text.splitlines() if "images/s  -:" not in line and "━" not in line
        )[-3000:]
        (self.out / "said").write_text(output)
        codes = [self.codes.get(pid) for pid in self.pids]
        since = max(self.told, self.event) or self.ended
        stacks = [
            f"{path.name}\n{path.read_text()}"
            for path in self.out.glob("stack*")
            if path.stat().st_size
        ]
        result = {
            "name": self.scenario.name,
            "seconds": round(self.ended - since, 1),
            "codes": codes,
        }
        return result | {
            "left": self.left,
            "wrong": wrong(self.scenario, codes, self.left, text),
            "output": output,
            "stacks": stacks,
        }


def wrong(s: Scenario, codes: list[int | None], left: list[str], text: str) -> list[str]:
    """Return what is not as it should be."""
    found = [f"left: {left}"] if left else []
    expected = {"main_killed": -9, **{name: 128 + signum for name, signum in SIGNALS.items()}}.get(
        s.failure, 1
    )
    if s.failure == "truncated" and s.phase == "predict":
        expected = 0
    if s.failure == "busy_killed" and s.phase == "predict" and "predictions in " in text:
        expected = 0  # the worker had handed over its last image
    if codes[0] != expected:
        found.append(f"exit code {codes[0]}, not {expected}")
    if codes[1:] not in ([], [expected], [1]):
        found.append(f"another process's exit code {codes[1]}")
    lines = [line.strip().removeprefix("^C") for line in text.splitlines()]
    if s.screen == "file":
        found += [f"said: {line}" for line in lines if not LINES.fullmatch(line)]
    found += [
        f"said: {line}"
        for line in lines
        if re.search(r"Traceback|Exception ignored|Error in atexit", line)
    ]
    errors = [line for line in lines if line.startswith("finetune: error: ")]
    num_processes = 1 if s.processes == "one" else 2
    if s.failure in SIGNALS:
        # What is last written to a terminal may be lost here: its first process, unlike a shell, ends with the command.
        at_least = 1 if s.screen == "file" else 0
        stopped = sum(line.startswith(f"stopped by {s.failure.upper()}") for line in lines)
        found += [f"{stopped} lines of the stop"] * (not at_least <= stopped <= 1)
        # Another process may find out by the first one's end.
        found += [f"said: {errors}"] * (len(errors) >= num_processes)
    elif s.failure != "main_killed" and expected:
        at_least = 1 if s.screen == "file" else 0
        found += [f"{len(errors)} errors printed"] * (not at_least <= len(errors) <= num_processes)
    return found


def run_all(
    chosen: list[Scenario], out: Path, control: Scenario | None = None, jobs: int = 2
) -> dict[str, list[dict[str, Any]]]:
    """Return the results of scenarios, and that of the control, which waits for its deadline meanwhile."""
    waiting = list(chosen)
    running = [Run(control, out, as_it_was)] if control else []
    found: dict[str, list[dict[str, Any]]] = {"results": [], "control": []}
    while waiting or running:
        while waiting and sum(run.before is None for run in running) < jobs:
            running.append(Run(waiting.pop(0), out))
        for run in [run for run in running if run.look()]:
            running.remove(run)
            result = run.result()
            found["control" if run.before else "results"].append(result)
            reported = {
                key: value for key, value in result.items() if key not in ("output", "stacks")
            }
            print(reported, flush=True)
        time.sleep(0.02)
    return found


def start_worker_that_ignores_the_first_sigterm(worker_id: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def as_it_was() -> None:
    """Control: workers don't know who sends them a signal."""
    patch.object(loader, "start_worker", start_worker_that_ignores_the_first_sigterm).start()
    patch.object(Loader, "__iter__", torch.utils.data.DataLoader.__iter__).start()


def draw(out: Path) -> None:
    draw_colours(out / "data", train=20, val=8, test=8)
    for split in ("train", "val", "test"):
        bad = (
            draw_colours(out / f"truncated_{split}", train=20, val=8, test=8) / split / "red/05.png"
        )
        os.truncate(bad, bad.stat().st_size // 2)
    base = Run(Scenario("none", "test", "0", "one", "file"), out)
    while not base.look():
        time.sleep(0.02)
    assert base.codes[base.pids[0]] == 0, base.result()
    (out / "best.ckpt").hardlink_to(next(base.out.rglob("best.ckpt")))


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    draw(out)
    sets = {"cover": cover, "all": every}
    scenarios = (
        sets[names[0]]() if names[0] in sets else [Scenario(*name.split("-")) for name in names]
    )
    # else each process's own garbage collection would copy all the memory that it shares with this one
    gc.freeze()
    control = None if names[0] in sets else Scenario("exception", "train", "1", "one", "file")
    found = run_all(scenarios, out, control, int(os.environ.get("END_JOBS", "2")))
    (out / "results.json").write_text(json.dumps(found, indent=1))
    for result in found["results"]:
        if result["wrong"]:
            print(
                result["name"],
                *result["wrong"],
                result["output"],
                *result["stacks"],
                sep="\n",
                end="\n\n",
            )
    print(f"{len(scenarios)} scenarios, {sum(bool(r['wrong']) for r in found['results'])} wrong")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[4:])
