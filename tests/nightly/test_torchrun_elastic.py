"""`torchrun --nnodes 1:2`: one machine dies, the other continues, a third joins, and the weights are those of one.

The machines are torchrun's agents on this one. They and the processes that they start are forked.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forked_torchrun
import pytest
import pytorch_lightning as pl
import torch
from colours import draw_colours
from processes import Process, free_port
from promise import promise

from finetune import ImageFolderData
from finetune.cli import run
from finetune.runs.model_checkpoint import Checkpoints

DIES_AT, JOINED_AT = 5, 6  # steps, of 4 an epoch and 12 in all
FIT = [
    *("fit", "--resume", "--epochs", "3", "--size", "28", "--batch", "6", "--workers", "0"),
    *("--backbone", "small_cnn", "--weights", "null", "--model.optimizer", "SGD"),
    *("--trainer.accelerator", "cpu", "--trainer.precision", "64-true", "--report", "false"),
    *("--test_after_fit", "false", "--trainer.enable_progress_bar", "false"),
    *("--data", "test_torchrun_elastic.MachineData"),
]


class Machine(pl.Callback):
    """Dies with its agent, or waits for a machine that joins, and writes down the worlds in which it trained."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            with open(self.folder / "worlds", "a") as worlds:
                worlds.write(f"{trainer.world_size} from {trainer.global_step}\n")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step == DIES_AT and "DIES" in os.environ:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        is_alone = "TORCHELASTIC_RUN_ID" in os.environ and trainer.world_size == 1
        if is_alone and step == JOINED_AT:
            (self.folder / "alone").touch()
            (checkpoints,) = (c for c in trainer.callbacks if isinstance(c, Checkpoints))  # type: ignore[attr-defined]
            deadline = time.monotonic() + 120
            while not checkpoints.signal.received and time.monotonic() < deadline:
                time.sleep(0.05)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            torch.save(pl_module.state_dict(), self.folder / "end.pt")


class MachineData(ImageFolderData):
    """Images whose fits have a Machine."""

    def __init__(self, root: str, witness: str, **settings: Any) -> None:
        super().__init__(root, **settings)
        self.witness = witness

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self.trainer.callbacks.append(Machine(self.witness))


def arguments(folder: Path) -> list[str]:
    folders = ["--data.root", f"{folder.parent}/data", "--out", f"{folder}/runs"]
    return [*FIT, "--data.witness", str(folder), *folders]


def start_machine(folder: Path, name: str, port: int, **environment: str) -> Process:
    command = [str(Path(forked_torchrun.__file__)), "--"]
    command += ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", "test"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    # a few seconds where the defaults wait for a minute
    quick = "last_call_timeout=10,keep_alive_interval=1"
    command += ["--rdzv-conf", f"is_host={name == 'first'},{quick}"]
    command += ["-m", "finetune", *arguments(folder)]
    settings = {
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **environment,
    }
    log = folder / f"{name}.log"
    return Process(command, folder, {**os.environ, **settings}, log, log)


@promise("resume")
@pytest.mark.timeout(300)
def test_a_machine_dies_and_another_joins(tmp_path: Path):
    draw_colours(tmp_path / "data", train=8, test=2)
    folder = tmp_path / "elastic"
    folder.mkdir()
    port = free_port()
    agents = [start_machine(folder, "first", port)]
    try:
        agents.append(start_machine(folder, "dies", port, DIES="1"))
        deadline = time.monotonic() + 200
        while not (folder / "alone").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        agents.append(start_machine(folder, "joins", port))
        while agents[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        codes = [agents[0].poll(), agents[1].poll()]
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGTERM)  # and so its processes end
        for agent in agents:
            agent.wait(60)
    logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
    assert codes == [0, -signal.SIGKILL], logs
    worlds = (folder / "worlds").read_text().splitlines()
    # the epoch begins again at step 4; the one process has saved after the step in which the third joined
    assert worlds == ["2 from 0", "1 from 4", f"2 from {JOINED_AT + 1}"]

    alone = tmp_path / "one"
    alone.mkdir()
    with patch.dict(os.environ):
        run(arguments(alone))
    ends = [torch.load(path / "end.pt", weights_only=True) for path in (folder, alone)]
    # float64: rounding (test_two_hosts.py)
    for name, value in ends[1].items():
        assert float((value - ends[0][name]).abs().max()) <= 1e-10
    assert (alone / "worlds").read_text() == "1 from 0\n"
