"""The loop of every measuring command: choose the next run, measure it, record it; at the end write the tables.

A run that is recorded is not measured again, so a command can be stopped at any time and continues when it is started
again. A run that failed is recorded too.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.records import load, save

Records = list[dict]


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the module's docstring as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


@dataclass(frozen=True)
class Benchmark:
    """A command with its file of records.

    Attributes:
        records: File of JSON with one record for each run.
        run: Named tuple of what identifies a run. A record has the same fields.
        plan: Returns all runs in their order, from the records so far.
        write: Writes tables and charts from the records.
        named: Fields of a run whose values `--only` selects.
    """

    records: Path
    run: Any
    plan: Callable[[Records], Iterable[Any]]
    write: Callable[[Records], None]
    named: tuple[str, ...] = ()

    def parser(self, description: str | None) -> argparse.ArgumentParser:
        """Return a parser with the options that all benchmarks have."""
        parser = command_line(description)
        if self.named:
            fields = " and ".join(f"{name}s" for name in self.named)
            parser.add_argument(
                "--only", nargs="*", default=[], help=f"names of {fields}; all without it"
            )
        parser.add_argument(
            "--minutes", type=float, default=float("inf"), help="start no run after this time"
        )
        parser.add_argument("--again", action="store_true", help="repeat the runs that failed")
        parser.add_argument("--document", action="store_true", help="only write the documents")
        parser.add_argument(
            "--records", type=Path, help="file of records; without documents, to try a command"
        )
        return parser

    def key(self, record: dict) -> Any:
        """Return the run of a record."""
        return self.run(*(record[name] for name in self.run._fields))

    def main(
        self,
        args: argparse.Namespace,
        measure: Callable[[Any], dict],
        is_possible: Callable[[Any], bool] = lambda run: True,
    ) -> None:
        """Measure what is planned and not recorded yet, then write the documents and exit: with 1 if a run failed.

        Args:
            args: Of `parser`.
            measure: Returns the result of a run, with the key `failed` if it failed. The fields of the run are added.
            is_possible: Returns whether a run can be measured with these arguments.
        """
        records = args.records or self.records
        has_failed = not args.document and self._measure_all(records, args, measure, is_possible)
        if args.records is None:
            self.write(load(records))
        sys.exit(has_failed)

    def _measure_all(
        self, file: Path, args: argparse.Namespace, measure: Callable, is_possible: Any
    ) -> bool:
        deadline = time.monotonic() + 60 * args.minutes
        is_selected = self._selection(getattr(args, "only", []))

        def is_wanted(run: Any) -> bool:
            return is_selected(run) and is_possible(run)

        if args.again:
            kept = [r for r in load(file) if not _is_failed(r) or not is_wanted(self.key(r))]
            save(file, kept)
        has_failed = False
        while time.monotonic() < deadline:
            records = load(file)
            done = {self.key(record) for record in records}
            run = next((r for r in self.plan(records) if is_wanted(r) and r not in done), None)
            if run is None:
                break
            record = {**run._asdict(), **_result(measure, run)}
            # Another process may have added records meanwhile.
            save(file, [*load(file), record])
            has_failed |= _is_failed(record)
            print(json.dumps(record), flush=True)
        return has_failed

    def _selection(self, only: Iterable[str]) -> Callable[[Any], bool]:
        """Return a predicate of the runs that `--only` selects. A field without a named value is not restricted."""
        values = {name: {getattr(run, name) for run in self.plan([])} for name in self.named}
        known = set[str]().union(*values.values())
        if unknown := set(only) - known:
            sys.exit(f"--only: {', '.join(sorted(unknown))}: none of {', '.join(sorted(known))}")
        chosen = {name: values[name] & {*only} or values[name] for name in self.named}
        return lambda run: all(getattr(run, name) in chosen[name] for name in self.named)


def _is_failed(record: dict) -> bool:
    return "failed" in record


def _result(measure: Callable[[Any], dict], run: Any) -> dict:
    try:
        return measure(run)
    except subprocess.CalledProcessError as error:
        return {"failed": f"exit code {error.returncode}"}
