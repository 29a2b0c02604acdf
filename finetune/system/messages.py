"""What is said to the user: what was wrong, what was probably meant, and nothing that nobody can act on."""

import difflib
import logging
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

# What is not shown as it is, on a page or a terminal: control characters, line breaks, and bytes that are not UTF-8.
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class WrongUsage(ValueError):
    """A value that an option can't have, whatever the data: the exit code is that of a mistyped flag."""

    exit_code = 2


class NotFound(WrongUsage, FileNotFoundError):
    """Something that an option names is not there."""


@contextmanager
def as_wrong_usage(option: str) -> Iterator[None]:
    """Tell what a library says of an option's value (ValueError, TypeError) as wrong usage."""
    try:
        yield
    except WrongUsage:
        raise
    except (ValueError, TypeError) as error:
        raise WrongUsage(f"{option}: {reason(error)}") from error


def install(extra: str) -> str:
    """Return how to install what is optional: by its name the package index has another project."""
    return f"pip install '.[{extra}]' in a checkout of finetune"


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


class _ShownFormatter(logging.Formatter):
    """Writes control characters as escapes: a message may hold text of a file from anybody."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(shown(line) for line in super().format(record).split("\n"))


def be_quiet() -> None:
    """Leave on the screen only what a user can act on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_ShownFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("finetune").setLevel(logging.INFO)
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    warnings.filterwarnings(
        "ignore", module="pytorch_lightning|lightning_fabric|torchmetrics|torch"
    )


def counted(num: int, what: str, plural: str = "") -> str:
    """Return `1 picture`, `1,200 pictures`."""
    return f"{num:,} {what if num == 1 else plural or what + 's'}"


def shown(name: object) -> str:
    """Return a name, of a file for one, as text on a line: what could not be seen in it is written as an escape."""
    return _UNSHOWN.sub(lambda match: ascii(match[0])[1:-1], str(name))


def fault_of_names(names: Sequence[str]) -> str:
    """Return why classes cannot have these names, or nothing."""
    if len(names) < 2:
        return "fewer than two classes"
    if len(set(names)) < len(names):
        return "a name more than once"
    return next(
        (f"the name '{shown(name)}'" for name in names if not name or shown(name) != name), ""
    )


def bytes_text(num: float) -> str:
    """Return a number of bytes as `12 KB`, `81.6 MB` or `1.2 GB`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num >= size:
            return f"{num / size:.1f} {unit}"
    return f"{num / 1e3:.0f} KB"
