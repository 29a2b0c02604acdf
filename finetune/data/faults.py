"""What is wrong with a data set: a fit raises the first fault, `finetune check` lists all."""

from collections.abc import Sequence
from typing import NamedTuple

from finetune.system.messages import counted


class Fault(NamedTuple):
    """What is wrong with a data set, for which a fit refuses it.

    Attributes:
        where: The file or folder; of a table also the line and the column.
        text: What is wrong.
        hint: What to do about it.
        can_skip: Whether `--data.on_bad_image skip` leaves out what is faulty.
        row: Index of the row of a table; -1 for other faults.
    """

    where: str
    text: str
    hint: str = ""
    can_skip: bool = False
    row: int = -1

    def line(self) -> str:
        """Return what is wrong and where."""
        return f"{self.where}: {self.text}"

    def advice(self, more: str = "") -> str:
        """Return what is wrong and where, `more` after it, and what to do about it."""
        return "; ".join(filter(None, [self.line() + more, self.hint]))


def refuse_faults(faults: Sequence[Fault], skip: bool) -> None:
    """Raise the first fault.

    Args:
        faults: The faults of a data set.
        skip: Let those pass that `--data.on_bad_image skip` leaves out.

    Raises:
        ValueError: There is a fault.
    """
    refused = [fault for fault in faults if not (skip and fault.can_skip)]
    if not refused:
        return
    first = refused[0]
    more = f" ({counted(len(refused) - 1, 'more fault')})" if len(refused) > 1 else ""
    skip_it = "; --data.on_bad_image skip leaves it out" if first.can_skip else ""
    raise ValueError(first.advice(more) + skip_it)
