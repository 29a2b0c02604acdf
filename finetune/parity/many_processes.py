"""The kinds of parallelism with several processes: Lightning's DDP, pipelines and sharded layers."""

import copy
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.samplers import run_seed
from finetune.parity.data_parallel import synchronize
from finetune.parity.one_process import (
    LR,
    Batches,
    Job,
    State,
    Trained,
    disable_tf32,
    median,
    on_cpu,
    sgd_step,
    timed,
)
from finetune.parity.pipeline import SCHEDULES, Pipeline, layers, partition
from finetune.parity.tensor_parallel import full_state, linear_names, shard_linear


class RankWeights(pl.Callback):
    """Writes the weights of each rank of a `finetune fit` into a folder, with the median of the seconds of a step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._seconds = list[float]()

    def on_train_start(self, *_: Any) -> None:
        disable_tf32()

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        synchronize([trainer.strategy.root_device])
        self._seconds.append(time.perf_counter() - self._start)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state = {
            n.removeprefix("network."): v
            for n, v in pl_module.state_dict().items()
            if n.startswith("network.")
        }
        torch.save(
            (on_cpu(state), median(self._seconds)), self.folder / f"rank{trainer.global_rank}.pt"
        )


class RankWeightsData(ImageFolderData):
    """Images whose fits have a `RankWeights`.

    Args:
        root: As for `ImageFolderData`.
        folder: As for `RankWeights`.
        start: File with the weights of the network that training starts from, with its head.
        settings: As for `ImageFolderData`.
    """

    def __init__(self, root: str, folder: str, start: str, **settings: Any) -> None:
        super().__init__(root, **settings)
        self.folder = folder
        self.start = start

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            callbacks: list[Any] = self.trainer.callbacks  # type: ignore[union-attr]
            callbacks.append(RankWeights(self.folder))
            model: Any = self.trainer.lightning_module  # type: ignore[union-attr]
            model.network.load_state_dict(torch.load(self.start, weights_only=True))


def by_lightning(network: str, job: Job) -> Trained:
    """Run `finetune fit` in a subprocess, since Lightning's `ddp` starts the current command again for each rank."""
    folder = job.folder / f"fit_{network}"
    folder.mkdir()
    start = str(job.folder / f"{network}.pt")
    settings = {
        "seed_everything": run_seed(),  # images come in the same order as in `draw_batches`
        "data": {
            "class_path": "finetune.parity.many_processes.RankWeightsData",
            "init_args": {**job.data, "num_workers": 0, "folder": str(folder), "start": start},
        },
        "model": {
            "backbone": network,
            "weights": None,
            "head_lr_multiplier": 1,
            "optimizer": {
                "class_path": "torch.optim.SGD",
                "init_args": {"lr": LR, "momentum": 0, "nesterov": False, "weight_decay": 0},
            },
            "scheduler": None,
        },
        "trainer": {
            "accelerator": "gpu" if job.is_cuda else "cpu",
            "devices": job.k,
            "strategy": "ddp",
            "precision": {"float64": "64-true", "float32": "32-true"}[job.dtype],
            "max_epochs": 1,
            "default_root_dir": str(folder),
        },
        "test_after_fit": False,
    }
    (folder / "fit.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    command = [sys.executable, "-m", "finetune", "fit", "--config", str(folder / "fit.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        raise ValueError(
            f"finetune fit of {network} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    saved = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(job.k)]
    return Trained([state for state, _ in saved], max(seconds for _, seconds in saved))


def splits(start: nn.Module, batches: Batches, job: Job) -> dict[str, Trained | str]:
    """Train a network that is split between its layers (pipelines) and within them (sharded layers).

    One set of processes, one per device, trains it in all ways, one after another.

    Returns:
        For each kind of parallelism the result, or why it was skipped.
    """
    torch.save((start, batches), job.folder / "splits.pt")
    torch.multiprocessing.spawn(_split_processes, (job,), nprocs=job.k)
    saved = [torch.load(job.folder / f"split{rank}.pt", weights_only=True) for rank in range(job.k)]
    results: dict[str, Trained | str] = {}
    for name, of_rank_zero in saved[0].items():
        if isinstance(of_rank_zero, str):
            results[name] = of_rank_zero
            continue
        of_ranks = [of_rank[name] for of_rank in saved]
        results[name] = Trained(
            [state for state, _ in of_ranks], max(seconds for _, seconds in of_ranks)
        )
    return results


def _split_processes(rank: int, job: Job) -> None:
    """Train in one of the processes of `splits`, and write the results of this rank to a file."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if job.is_cuda else torch.device("cpu")
    if job.is_cuda:
        torch.cuda.set_device(device)
    disable_tf32()
    rendezvous = f"file://{job.folder / 'rendezvous'}"
    backend = "nccl" if job.is_cuda else "gloo"
    timeout = timedelta(minutes=1)
    dist.init_process_group(backend, rendezvous, rank=rank, world_size=job.k, timeout=timeout)
    # safe to unpickle, since `splits` has written it
    start, batches = torch.load(job.folder / "splits.pt", weights_only=False)
    results: dict[str, Any] = {}
    for name in SCHEDULES:
        try:
            results[f"pipeline {name}"] = _pipeline(
                copy.deepcopy(start), batches, name, job.k, device
            )
        except ValueError as error:
            results[f"pipeline {name}"] = str(error)
    results["layer-wise"] = _layer_wise(start.to(device), batches, job.k, device)
    torch.save(results, job.folder / f"split{rank}.pt")
    dist.destroy_process_group()


def _pipeline(
    network: nn.Module, batches: Batches, name: str, k: int, device: torch.device
) -> tuple[State, float]:
    parts = partition(layers(network), k)
    dtype = next(network.parameters()).dtype
    pipeline = Pipeline(parts, batches[0][0].to("meta", dtype), name, 2 * k, device=device)
    step = sgd_step(pipeline.part, lambda x, y: pipeline.step(x.to(dtype) / 255, y))
    seconds = timed(step, batches, [device])
    return pipeline.full_state(), seconds


def _layer_wise(
    network: nn.Module, batches: Batches, k: int, device: torch.device
) -> tuple[State, float]:
    dtype = next(network.parameters()).dtype
    shard_linear(network, linear_names(network), init_device_mesh(device.type, (k,)))

    def backward(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(network(x.to(device, dtype) / 255), y.to(device)).backward()

    seconds = timed(sgd_step(network, backward), batches, [device])
    return on_cpu(full_state(network)), seconds
