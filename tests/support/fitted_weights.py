"""The weights of quick fits, and the error lines of commands, in tests that compare places of images."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from colours import QUICKEST

from finetune.commands.error_lines import exit_code, one_line


def weights(run: str) -> dict[str, torch.Tensor]:
    """Return the weights of a run in this folder, by its name."""
    path = Path("runs/fit", run, "checkpoints/last.ckpt")
    return torch.load(path, weights_only=True)["state_dict"]


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def fit(
    cli: Callable[..., None], root: object, name: str, *more: object
) -> dict[str, torch.Tensor]:
    """Fit images, and return the weights."""
    cli("fit", root, *QUICKEST, "--name", name, *more)
    return weights(name)


def error_line(cli: Callable[..., None], *arguments: object) -> str:
    """Return the line with which a command ends."""
    with pytest.raises((ValueError, OSError)) as caught:
        cli(*arguments)
    line = one_line(caught.value)
    assert line is not None and exit_code(caught.value) in (1, 2)
    return line
