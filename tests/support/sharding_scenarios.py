"""What test_sharding.py runs in 1, 2 and 3 processes: `python sharding_scenarios.py OUT DATA WORLD_SIZE`.

Each scenario leaves its result in OUT/<name>_<rank>.pt; those of several devices have the mesh in their name.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
from ddp_scenarios import (
    BALANCED,
    MOVED,
    NARROW,
    begin,
    evaluated,
    moved,
    sgd,
    small_network,
    small_normalised,
    trainer,
    weights_of,
    with_bad_batches,
)
from elastic_scenarios import noisy_network

from finetune import Classifier, ImageFolderData
from finetune.distributed.mesh_strategy import MeshStrategy
from finetune.distributed.tensor_parallel import full_state
from finetune.models.stages import head

NUM_EVALUATED = (1, 13)
ON_THREE = ("small", "balanced", "noisy", "probe")


def strategy(mesh: tuple[int, int] | None) -> dict[str, Any]:
    """The trainer's options for a mesh, data_parallel x tensor_parallel; one process has none."""
    return {"strategy": MeshStrategy(*mesh)} if mesh else {}


def model_of(data: ImageFolderData, build: Callable, **options: Any) -> Classifier:
    pl.seed_everything(1, verbose=False)
    with patch("finetune.training.classifier.build", build):
        # Lightning refuses precision 64-true for a mesh: the network is made so, and the trainer leaves it.
        return Classifier(data.class_names, weights=None, **{"optimizer": sgd, **options}).double()


def fit(mesh: Any, data: ImageFolderData, model: Classifier, max_steps: int = 10, ckpt: Path | None = None) -> Any:
    fitting = trainer(max_steps=max_steps, max_epochs=-1, limit_val_batches=0, **strategy(mesh))
    fitting.fit(model, datamodule=data, ckpt_path=ckpt)
    return fitting


def weights_after(mesh: Any, data: ImageFolderData, build: Callable, **options: Any) -> dict[str, Any]:
    model = model_of(data, build, **options)
    before = weights_of(model)
    fit(mesh, data, model)
    after = full_state(model.network)
    MOVED.append(moved(model, before, {name: after[name] for name in before}))
    return after


def limited(mesh: Any, root: Path, is_limited: bool = True) -> dict[str, Any]:
    """Weights after three epochs of two batches, and what is said of one batch of validation; or of all, a control."""

    def begun(**limit: Any) -> tuple[pl.Trainer, Classifier, ImageFolderData]:
        data = ImageFolderData(str(root), val_fraction=0.3, batch_size=6, image_size=32, num_workers=0)
        limit = limit if is_limited else {}
        return trainer(max_steps=6, max_epochs=-1, **limit, **strategy(mesh)), model_of(data, small_network), data

    fitting, model, data = begun(overfit_batches=2)
    fitting.fit(model, datamodule=data)
    validating, fresh, data = begun(limit_val_batches=1)
    (metrics,) = validating.validate(fresh, datamodule=data, verbose=False)
    return {"weights": full_state(model.network), "metrics": metrics}


def drifting(data: ImageFolderData) -> dict[str, Any]:
    """Weights after 3 steps whose gradients each device rounds in its own way, as GPUs may."""
    model = model_of(data, small_network)
    for name, parameter in model.network.named_parameters():
        if not name.startswith("8."):  # the head
            parameter.register_hook(lambda gradient: gradient * (1 + 1e-3 * torch.distributed.get_rank()))
    fit((1, 2), data, model, max_steps=3)
    return full_state(model.network)


def head_and_checkpoint(mesh: Any, data: Callable[[], ImageFolderData], path: Path) -> dict[str, Any]:
    """Train 5 steps and write a checkpoint, and go on from it in a new trainer to 10; what each device holds."""
    model = model_of(data(), small_network)
    fit(mesh, data(), model, max_steps=5).save_checkpoint(path)
    at_checkpoint = full_state(model.network)
    resumed = model_of(data(), small_network)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.zero_()  # so that the checkpoint alone can have put the weights there
    fit(mesh, data(), resumed, ckpt=path)
    weight = head(resumed.network).weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return {"at_checkpoint": at_checkpoint, "resumed": full_state(resumed.network), "shape": tuple(local.shape)}


def main() -> None:
    (out, data_root, data), world_size = begin(), int(sys.argv[3])
    scenarios: dict[str, Callable[[Any], Any]] = {
        "small": lambda mesh: weights_after(mesh, data(), small_network),
        "balanced": lambda mesh: weights_after(mesh, data("uneven", 6), **BALANCED),
        "frozen_stages": lambda mesh: weights_after(mesh, data(), freeze="layer2", freeze_batch_norm=True, **NARROW),
        "batch_norm_uneven": lambda mesh: weights_after(mesh, data("uneven", 6, 64), **NARROW),
        "bad_batches": lambda mesh: weights_after(
            mesh, with_bad_batches(data("uneven", 6, on_bad_image="skip")), small_normalised
        ),
        "noisy": lambda mesh: weights_after(mesh, data("uneven", 6), noisy_network),
        "probe": lambda mesh: weights_after(mesh, data(), small_network, head_init="probe"),
    }
    if world_size == 3:  # without ResNet-18, which takes minutes on two cores
        scenarios = {name: scenarios[name] for name in ON_THREE}
    for num in NUM_EVALUATED if world_size < 3 else ():
        scenarios[f"evaluated_{num}"] = lambda mesh, num=num: evaluated(
            data_root / f"test{num}", out, f"evaluated_{num}_{mesh}", lambda: strategy(mesh)
        )
    meshes: tuple[Any, ...] = (None,) if world_size == 1 else ((world_size, 1), (1, world_size))
    for mesh in meshes:
        for name, scenario in scenarios.items():
            save(out, f"{name}_{mesh}", scenario(mesh))
            if MOVED:
                save(out, f"{name}_moved_{mesh}", MOVED.pop())
        if world_size < 3:
            save(out, f"checkpoint_{mesh}", head_and_checkpoint(mesh, data, out / f"{mesh}.ckpt"))
        save(out, f"limited_{mesh}", limited(mesh, data_root / "train"))
    if world_size == 1:
        save(out, "control_unlimited", limited(None, data_root / "train", is_limited=False))
    if world_size == 2:
        # Control: shares by the global rank, so that the devices of one head see different pictures.
        with patch("finetune.data.datamodule.batch_share", lambda t: (t.global_rank, t.world_size)):
            save(out, "control_(1, 2)", weights_after((1, 2), data(), small_network))
        save(out, "drifting", drifting(data()))
        with patch("finetune.distributed.mesh_strategy.copy_gradients", lambda network, mesh: None):
            save(out, "control_drifting", drifting(data()))
    if world_size > 1:
        torch.distributed.destroy_process_group()


def save(out: Path, name: str, result: Any) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save(result, out / f"{name}_{rank}.pt")


if __name__ == "__main__":
    main()
