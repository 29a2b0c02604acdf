"""What is said to the user: what was wrong, what was probably meant, and nothing that nobody can act on."""

import difflib
import logging
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class WrongUsage(ValueError):
    """A value that an option can't have, whatever the data: the exit code is that of a mistyped flag."""

    exit_code = 2


@contextmanager
def as_wrong_usage(option: str) -> Iterator[None]:
    """Tell what a library says of an option's value (ValueError, TypeError) as wrong usage."""
    try:
        yield
    except WrongUsage:
        raise
    except (ValueError, TypeError) as error:
        raise WrongUsage(f"{option}: {reason(error)}") from error


def check_seed(seed: int, option: str = "--seed") -> None:
    """Make sure that random numbers can begin with it.

    Raises:
        WrongUsage: They can't.
    """
    if not 0 <= seed < 2**32:
        raise WrongUsage(f"{option} must be from 0 to {2**32 - 1:,}, not {seed}")


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return the end of an error message: the valid names that are nearest, else all if they are few."""
    near = difflib.get_close_matches(name, list(names), n=3)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; valid are {', '.join(names)}" if len(names) < 20 else ""


def reason(error: BaseException, place: object = "") -> str:
    """Return in one line what went wrong, and where if the system says so; else at `place`."""
    if not isinstance(error, OSError) or not error.strerror:
        return " ".join(str(error).split())
    where = error.filename or place
    return f"{error.strerror}: {where}" if where else error.strerror


def be_quiet() -> None:
    """Leave on the screen only what a user can act on."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("finetune").setLevel(logging.INFO)
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric|torchmetrics|torch")
