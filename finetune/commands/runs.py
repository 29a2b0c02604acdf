"""`finetune runs`: list the runs beneath a folder, or delete some; without torch, so that it answers at once."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Column
from rich.text import Text

from finetune.commands.plain_table import plain_table, table_console
from finetune.data.addresses import is_address
from finetune.runs.removal import check_removable, delete_run
from finetune.runs.run_table import (
    RunRow,
    as_json,
    run_table,
    size_of,
)
from finetune.settings.all_commands import RunsRmSettings, RunsSettings
from finetune.system.messages import NotFound, WrongUsage, bytes_text, counted, shown
from finetune.system.progress import duration

_WIDTH = 160  # of a table that is not shown on a terminal


def runs(options: RunsSettings) -> None:
    """List runs."""
    if is_address(options.folder):
        raise WrongUsage("finetune runs lists runs in local folders, not in object storage")
    folder = Path(options.folder)
    if not folder.is_dir():
        raise NotFound(f"there is no folder of runs {options.folder!r}: finetune runs FOLDER")
    rows = run_table(folder, options.sort)
    if options.json:
        print(as_json(rows))
    elif not rows:
        print(f"no runs in {shown(folder)}")
    else:
        _print_table(rows)


def _print_table(rows: Sequence[RunRow]) -> None:
    columns = ("when", "data", "network", "epochs", "accuracy (95 %)", "time", "size", "state")
    table = plain_table([Column(name, overflow="fold") for name in (*columns, "folder")])
    for row in rows:
        table.add_row(*map(Text, _cells(row)))
    table_console(max(_WIDTH, *(len(row.folder) + 120 for row in rows))).print(table)
    for row in rows:
        if row.damage:
            print(f"{shown(row.folder)}: {shown(row.damage)}")


def _cells(row: RunRow) -> list[str]:
    return [
        time.strftime("%Y-%m-%d %H:%M", time.localtime(row.began)),
        shown(row.data),
        shown(row.network),
        str(row.epochs),
        _accuracy(row),
        "" if row.seconds is None else duration(row.seconds),
        bytes_text(row.size),
        row.state,
        shown(row.folder),
    ]


def _accuracy(row: RunRow) -> str:
    result = row.result
    if result is None:
        return ""
    split = {"validation": "val"}.get(result.split, result.split)
    metric = "mAP " if result.metric == "mAP" else ""
    return f"{split:<4} {metric}{result.value_text:>7} ({result.interval_text})"


def remove(options: RunsRmSettings) -> None:
    """Delete runs."""
    if not options.runs:
        raise WrongUsage("RUN is missing: finetune runs rm RUN --yes")
    if any(map(is_address, options.runs)):
        raise WrongUsage("finetune runs rm deletes runs in local folders, not in object storage")
    folders = {Path(os.path.realpath(run)): Path(run).expanduser() for run in options.runs}.values()
    for folder in folders:
        check_removable(folder)
    size = bytes_text(sum(size_of([folder]) for folder in folders))
    if not options.yes:
        raise WrongUsage(
            f"nothing was deleted: pass --yes to delete {counted(len(folders), 'run')}, {size}"
        )
    for folder in folders:
        kept = delete_run(folder)
        print(
            f"deleted {shown(folder)}"
            + (", but for files that finetune did not write:" if kept else "")
        )
        for path in kept:
            print(f"  kept {shown(path)}")
