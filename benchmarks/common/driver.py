"""The loop of every benchmark: choose the next run, measure it, record it; at the end write the table.

A run with a record is not measured again, so a command can be stopped at any time and continues when it is started
again.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.records import Record, add, load, this_month, where_and_when
from benchmarks.common.tables import publish


@dataclass(frozen=True)
class Benchmark:
    """A command with its records and its block in docs/benchmarks.md.

    Attributes:
        name: Of the records and of the block.
        run: Named tuple of what identifies a run. A record has the same fields.
        table: Returns the block from the records.
    """

    name: str
    run: Any
    table: Callable[[Sequence[Record]], str]

    def parser(self, description: str | None) -> argparse.ArgumentParser:
        """Return a parser with the options that all benchmarks have."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--only", nargs="*", help="values of a run; without it all runs")
        parser.add_argument("--minutes", type=float, default=1e9, help="start no run later")
        parser.add_argument("--fresh", action="store_true", help="measure again what is recorded")
        parser.add_argument("--document", action="store_true", help="only write the table")
        parser.add_argument("--records", type=Path, help="another file: to try, without the table")
        return parser

    def key(self, record: Record) -> Any:
        """Return the run of a record."""
        return self.run(*(record[name] for name in self.run._fields))

    def newest(self) -> list[Record]:
        """Return the newest record of each run that has not failed."""
        good = [record for record in load(self.name) if "failed" not in record]
        return list({self.key(record): record for record in good}.values())

    def main(
        self, args: argparse.Namespace, runs: Iterable[Any], measure: Callable[[Any], Record]
    ) -> None:
        """Measure runs that are not recorded, then write the table and exit: with 1 if a run failed.

        Args:
            args: Of `parser`.
            runs: All runs, in their order.
            measure: Returns the result of a run, with the key `failed` if it failed.
        """
        has_failed = False if args.document else self._measure_all(args, runs, measure)
        if args.records is None:
            publish(self.name, self.table(self.newest()))
        sys.exit(has_failed)

    def _measure_all(
        self, args: argparse.Namespace, runs: Iterable[Any], measure: Callable[[Any], Record]
    ) -> bool:
        deadline = time.monotonic() + 60 * args.minutes
        file = args.records or this_month()
        known = load(self.name, [file] if args.records else None)
        done = set() if args.fresh else {self.key(r) for r in known if "failed" not in r}
        has_failed = False
        for run in runs:
            is_wanted = not args.only or not {*args.only}.isdisjoint(map(str, run))
            if run in done or not is_wanted or time.monotonic() > deadline:
                continue
            record = {"benchmark": self.name, **run._asdict(), **_result(measure, run)}
            record |= where_and_when()
            add(file, record, self.run._fields)
            has_failed |= "failed" in record
            print(json.dumps(record), flush=True)
        return has_failed


def _result(measure: Callable[[Any], Record], run: Any) -> Record:
    try:
        return measure(run)
    except subprocess.CalledProcessError as error:
        return {"failed": f"exit code {error.returncode}"}
