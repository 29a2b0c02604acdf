"""The end of a fit on the screen: result, best checkpoint, folder and next command; on a terminal in one panel."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.rule import Rule
from rich.text import Text

from finetune.runs.outcome import METRICS, outcome_line
from finetune.runs.record import RunRecord, validation_outcome
from finetune.system.messages import shown
from finetune.system.progress import console
from finetune.system.terminal import is_interactive

_WIDEST = 100  # columns of the panel
_LABEL = 13


def has_panel() -> bool:
    """Return whether the result of a fit is printed as a panel: on a terminal, not in a pipe, a notebook or CI."""
    return is_interactive(sys.stdout)


@dataclass
class Summary:
    """What is printed at the end of a fit.

    Attributes:
        record: The run; without a result if its best checkpoint was not tested.
        path: Its folder.
        calibration: The temperature and the threshold in words.
        best: What best.ckpt is; "" if nothing was validated, or if there is none.
        next_command: What to do next; "" for nothing.
        report: Path of the report; "" if there is none.
    """

    record: RunRecord
    path: str
    calibration: list[str]
    best: str
    next_command: str
    report: str = ""

    def print_result(self) -> None:
        """Print lines about the result and the folder before the report is written; a panel is printed afterwards."""
        if has_panel():
            return
        if not self.record.result:  # else `Results` has printed it after the test
            self._print_lines(filter(None, (self._accuracy(), *self.calibration)))
        self._print_lines([f"best.ckpt: {self.best}"] if self.best else [])
        self._print_lines([f"run in {self.path}"])

    def print_rest(self) -> None:
        """Print what `print_result` has not."""
        if has_panel():
            self._print_panel()
            return
        self._print_lines([f"report in {self.report}"] if self.report else [])
        self._print_lines([f"next: {self.next_command}"] if self.next_command else [])

    def _accuracy(self) -> str:
        """Return the accuracy with its interval; "" if nothing was validated or tested."""
        return outcome_line(self.record.result) or validation_outcome(self.record)

    def _metrics(self) -> str:
        """Return the metrics of the test without the accuracy, which the first line has."""
        values = {name: self.record.result.get(f"test/{name}") for name in METRICS}
        texts = {name: f"{value:.4f}" for name, value in values.items() if isinstance(value, float)}
        before = texts.pop("calibration_error_before_scaling", "")
        if before and "calibration_error" in texts:
            texts["calibration_error"] += f" ({before} before scaling)"
        texts.pop("accuracy", None)
        texts.pop("mAP", None)
        return ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in texts.items())

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield labels and texts of the panel."""
        yield "metrics", self._metrics()
        for line in self.calibration:
            label, _, text = line.partition(" ")
            has_label = label in ("temperature", "threshold", "calibration", "thresholds")
            yield (label, text) if has_label else ("", line)
        yield "best.ckpt", self.best
        yield "run", self.path
        yield "report", self.report
        yield "next", self.next_command

    def _print_panel(self) -> None:
        """Print the panel between two rules: without sides, so that paths can be copied where lines wrap."""
        screen = console(sys.stdout)
        width = min(screen.width, _WIDEST)
        screen.print(Rule(Text("result", style="bold"), align="left", style="cyan"), width=width)
        if accuracy := self._accuracy():
            screen.print(Text(accuracy, style="bold green"), soft_wrap=True)
        for label, text in self._rows():
            if text:
                line = f"{label.ljust(_LABEL)}{shown(text)}"
                row = Text(line)
                row.stylize("cyan", 0, _LABEL)
                screen.print(row, soft_wrap=True)
        screen.print(Rule(style="cyan"), width=width)

    @staticmethod
    def _print_lines(lines: Iterable[str]) -> None:
        for line in lines:
            print(line, flush=True)
