"""What ends a fit: a number of epochs, a number of steps, or `--patience`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """The limits of a fit.

    Attributes:
        max_epochs: None or -1 for no limit.
        max_steps: -1 for no limit.
        patience: Validations without improvement after which the fit ends; None for no limit.
    """

    max_epochs: int | None = None
    max_steps: int = -1
    patience: int | None = None

    def reached(self, checkpoint: Mapping[str, Any]) -> str:
        """Return which limit the run of a `last.ckpt` has reached, in words; "" if it has more to do."""
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
        steps = checkpoint["global_step"]
        if self.max_epochs not in (None, -1) and epochs >= self.max_epochs:
            return _reached(epochs, "epochs", "trainer.max_epochs", self.max_epochs)
        if 0 <= self.max_steps <= steps:
            return _reached(steps, "steps", "trainer.max_steps", self.max_steps)
        own = checkpoint["callbacks"].get("Checkpoints", {})
        num_waited = own.get("num_waited", 0)
        if self.patience is not None and num_waited >= self.patience:
            return f"early stopping, patience {self.patience}"
        return ""


def _reached(num: int, what: str, option: str, most: int) -> str:
    """Return a limit in words; if a run was trained beyond it, also how far."""
    limit = f"{option} {most}"
    return limit if num == most else f"{num:,} {what} trained, more than {limit}"
