"""One fit on two hosts equals the same fit on one: torchrun in two network namespaces that are connected.

The hosts share one folder, as in docs/cloud.md; the second host can only read it. torchrun and the processes that it
starts are forked; test_started_processes.py has its interpreters.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forked_torchrun
import pytest
import pytorch_lightning as pl
import torch
from colours import draw_colours
from processes import Process
from promise import control, promise
from scenario_results import distance

from finetune import ImageFolderData
from finetune.cli import run
from finetune.data.samplers import TrainBatches, rank_range

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NUM_TEST = 15  # not even: the hosts' shares differ
# 21 images train in batches of 6: in the last batch of an epoch the hosts have 2 images and 1.
FIT = [
    *("fit", "--resume", "--size", "28", "--batch", "6", "--workers", "0", "--epochs", "2"),
    *("--backbone", "small_cnn", "--weights", "null", "--model.optimizer", "SGD"),
    *("--trainer.accelerator", "cpu", "--trainer.precision", "64-true", "--report", "false"),
    *("--trainer.enable_progress_bar", "false", "--data", "test_two_hosts.WitnessData"),
]


class Witness(pl.Callback):
    """Writes down what one process did: `<folder>/rank<r>.pt`."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.seen: list[list[int]] = []  # the images of each step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start = weights(pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append(batch["index"].tolist())

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = {
            "world": (trainer.world_size, trainer.local_rank),
            "network": os.readlink("/proc/self/ns/net"),
            "can_write": os.access(trainer.default_root_dir, os.W_OK),
            "seen": self.seen,
            "start": self.start,
            "end": weights(pl_module),
        }
        self.folder.mkdir(exist_ok=True)
        torch.save(found, self.folder / f"rank{trainer.global_rank}.pt")


class WitnessData(ImageFolderData):
    """Images whose fits have a Witness."""

    def __init__(self, root: str, witness: str, **settings: Any) -> None:
        super().__init__(root, **settings)
        self.witness = witness

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self.trainer.callbacks.append(Witness(self.witness))


def weights(model: pl.LightningModule) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def ip(*arguments: str) -> str:
    return subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=20
    ).stdout


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Names of two network namespaces, each with one interface `cable` that has its address."""
    names = tuple(f"finetune-test-{os.getpid()}-{i}" for i in range(2))
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            link = f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}"
            ip(*link.split())
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "cable", "up")
            ip("netns", "exec", names[1], *read_only(tmp_path_factory.mktemp("shared")), "true")
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(
                f"network namespaces can't be made here: {error} {getattr(error, 'stderr', '')}".strip()
            )
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                end_processes(name)
                ip("netns", "delete", name)  # and its end of the cable


def read_only(folder: Path) -> list[str]:
    """Return the command that runs what follows it with `folder` read-only; `ip netns exec` keeps that to itself."""
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    return ["sh", "-c", script, str(folder)]


def end_processes(name: str) -> None:
    """End all that still runs in a namespace: torchrun's workers too, which are in sessions of their own."""
    for _ in range(100):
        pids = ip("netns", "pids", name).split()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)


@pytest.fixture(scope="module")
def results(hosts: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each way left: of `hosts` a list of what its ranks wrote down, of others what the one process did."""
    root = tmp_path_factory.mktemp("hosts")
    shared = root / "shared"
    draw_colours(shared / "data", train=8, test=NUM_TEST // 3)
    processes = []
    try:
        for i in range(2):
            command = arguments(root, "hosts", "--trainer.num_nodes", "2")
            folders = ["--read-only", str(shared)] if i == 1 else []
            processes.append(start(hosts[i], i, command, folders, root / f"host{i}.log"))
        alone = in_this_process(root, "alone")
        with patch.object(TrainBatches, "__iter__", of_first_host(TrainBatches.__iter__)):
            half = in_this_process(root, "half")
        codes = wait(processes, seconds=240)
    finally:
        for name in hosts:
            end_processes(name)
        for process in processes:
            process.wait()
    logs = "\n".join(
        f"{path.name}:\n{path.read_text()[-4000:]}" for path in sorted(root.glob("*.log"))
    )
    assert codes == [0, 0], logs
    ranks = [torch.load(root / "hosts" / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    return {"hosts": ranks, "alone": alone, "half": half, "runs": shared}


def arguments(root: Path, name: str, *extra: str) -> list[str]:
    shared = f"{root}/shared"
    folders = ["--data.root", f"{shared}/data", "--trainer.default_root_dir", f"{shared}/{name}"]
    witness = ["--data.witness", f"{root}/{name}"]
    return [*FIT, *witness, *folders, "--trainer.devices", "1", *extra]


def start(network: str, host: int, command: list[str], folders: list[str], log: Path) -> Process:
    torchrun = [
        *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"),
        *("--rdzv-endpoint", f"{ADDRESSES[0]}:29500", "--local-addr", ADDRESSES[host]),
        # both go by the same host name here, so torchrun can't tell
        *("--rdzv-conf", f"is_host={host == 0}"),
    ]
    script = [str(Path(forked_torchrun.__file__)), "--host", network, *folders, "--"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "cable"}
    line = [*script, *torchrun, "-m", "finetune", *command]
    return Process(line, Path.cwd(), environment, log, log)


def in_this_process(root: Path, name: str) -> dict[str, Any]:
    with patch.dict(os.environ):
        run(arguments(root, name))
    return torch.load(root / name / "rank0.pt", weights_only=True)


def of_first_host(
    batches: Callable[[TrainBatches], Iterator[list]],
) -> Callable[[TrainBatches], Iterator[list]]:
    """Control: only the images of the first host, as if gradients were not all-reduced between hosts."""

    def halves(self: TrainBatches) -> Iterator[list]:
        for batch in batches(self):
            yield [batch[i] for i in rank_range(len(batch), 0, 2)]

    return halves


def wait(processes: list[Process], seconds: float) -> list[int | None]:
    """Return the exit codes once all ended or one failed; None of what still runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            break
        time.sleep(0.1)
    return codes


def version(results: dict[str, Any], name: str) -> Path:
    (folder,) = (results["runs"] / name / "fit").iterdir()  # one run, whatever the number of hosts
    return folder


@promise("any-number-of-devices")
def test_weights_of_each_host_and_of_the_checkpoints_are_those_of_one_process(results):
    alone = results["alone"]
    for rank in results["hosts"]:
        # float64: rounding over 8 steps (measured: 3e-17 at a largest weight of 0.2), far below any mistake
        assert distance(rank["end"], alone["end"]) <= 1e-10
        assert (
            distance(rank["start"], rank["end"]) > 1e-2
        )  # else networks that never learned would agree
    for name in ("best", "last"):
        hosts, one = (
            torch.load(version(results, way) / f"checkpoints/{name}.ckpt", weights_only=True)
            for way in ("hosts", "alone")
        )
        assert distance(hosts["state_dict"], one["state_dict"]) <= 1e-10
        assert hosts["global_step"] == one["global_step"] == 8


@control("any-number-of-devices")
def test_control_a_host_that_trains_on_its_share_alone(results):
    first, half = results["hosts"][0], results["half"]
    assert half["seen"] == first["seen"] and distance(half["start"], first["start"]) == 0
    assert distance(half["end"], results["alone"]["end"]) > 1e-4


def test_hosts_are_two_and_share_every_batch(results):
    first, second = results["hosts"]
    # each the first process of its host
    assert [rank["world"] for rank in (first, second)] == [(2, 0), (2, 0)]
    assert len({rank["network"] for rank in (first, second, results["alone"])}) == 3
    together = [a + b for a, b in zip(first["seen"], second["seen"], strict=True)]
    assert together == results["alone"]["seen"]
    assert [len(batch) for batch in second["seen"]] == [3, 3, 3, 1] * 2


def test_every_image_is_tested_once(results):
    hosts, alone = (
        json.loads((version(results, way) / "test.json").read_text()) for way in ("hosts", "alone")
    )
    assert hosts["confusion_matrix"] == alone["confusion_matrix"]
    assert [sum(row) for row in hosts["confusion_matrix"]] == [NUM_TEST // 3] * 3
    for name, value in alone.items():
        if name.startswith("test/"):
            assert hosts[name] == pytest.approx(value, abs=1e-6), name  # metrics are float32


def test_only_the_first_host_writes(results):
    # The second would have failed: for it the shared folder is read-only.
    assert [rank["can_write"] for rank in results["hosts"]] == [True, False]
    files, files_alone = (
        {str(path.relative_to(version(results, way))) for path in version(results, way).rglob("*")}
        for way in ("hosts", "alone")
    )
    assert files == files_alone >= {"config.yaml", "metrics.csv", "checkpoints/best.ckpt"}
