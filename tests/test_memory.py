"""The memory of a fit does not grow with its epochs."""

from collections.abc import Callable
from pathlib import Path

import pytorch_lightning as pl
from conftest import QUICK

from finetune.lightning_cli import FinetuneCLI

_EPOCHS = 14
_AFTER = 4  # epochs: caches and allocators have what they want by then
_ALLOWED = 2**21  # bytes over the ten epochs after them, of which the control leaks twenty times as many


class Resident(pl.Callback):
    """Notes the resident memory at each epoch's end; leaks so many bytes in each."""

    def __init__(self, leak: int) -> None:
        self.leak, self.kept, self.seen = leak, [], []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kept.append(b"x" * self.leak)
        self.seen.append(4096 * int(Path("/proc/self/statm").read_text().split()[1]))

    def growth(self) -> int:
        return self.seen[-1] - self.seen[_AFTER - 1]


def fit(cli: Callable[..., None], colours: Path, monkeypatch, leak: int) -> int:
    resident = Resident(leak)
    real = FinetuneCLI.instantiate_trainer

    def with_callback(self: FinetuneCLI, **kwargs) -> pl.Trainer:
        trainer = real(self, **kwargs)
        trainer.callbacks.append(resident)
        return trainer

    with monkeypatch.context() as patch:
        patch.setattr(FinetuneCLI, "instantiate_trainer", with_callback)
        cli("fit", "--data.root", colours, *QUICK, "--trainer.max_epochs", _EPOCHS)
    return resident.growth()


def test_the_memory_of_a_fit_does_not_grow_with_its_epochs(cli, colours, monkeypatch):
    assert fit(cli, colours, monkeypatch, leak=0) < _ALLOWED
    assert fit(cli, colours, monkeypatch, leak=4 * 2**20) > _ALLOWED  # and so it would be seen
