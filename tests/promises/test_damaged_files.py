"""A damaged or malicious checkpoint, table, config or file of a run gives one line, and no code of it runs."""

import contextlib
import io
import json
import logging
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from bounded_calls import faults_of_calls
from colours import QUICKEST
from mutated_files import (
    Canary,
    cut,
    other_bytes,
    other_checkpoint,
    other_csv,
    other_lines,
    other_yaml,
    other_zip,
)
from promise import control, promise

from finetune import load
from finetune.cli import run as run_command
from finetune.commands.error_lines import one_line
from finetune.commands.export import export
from finetune.commands.report import compare, report
from finetune.commands.runs import runs
from finetune.data.corrections import CorrectionsFile, read_corrections
from finetune.data.datasets.download import fetch_archive
from finetune.data.datasets.scan import scan
from finetune.data.faults import refuse_faults
from finetune.models.weight_files import read_file
from finetune.runs import run_lock
from finetune.settings.all_commands import (
    CompareSettings,
    ExportSettings,
    ReportSettings,
    RunsSettings,
)

SECONDS = 20.0  # of the processor, for a file
NUM_BYTES = 2**30
_LONGEST = 6000  # characters of a line: a junk value has 5,000
_IMAGE = np.zeros((40, 50, 3), np.uint8)


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    Attributes:
        name: Name of a file.
        mutate: Returns the content of a mutated file; its arguments are the content, a generator and the canary.
        read: Reads the file as the product does.
    """

    name: str
    mutate: Callable[[bytes, np.random.Generator, Path], bytes]
    read: Callable[[Path], object]


def predict(path: Path) -> None:
    load(path).predict(_IMAGE)


def list_rows(path: Path) -> None:
    for skip in (False, True):
        refuse_faults(scan(str(path)).faults, skip)


def correct(path: Path) -> None:
    read_corrections(path)
    CorrectionsFile(path).refresh()


def parse_config(path: Path) -> None:
    run_command(["fit", "--config", str(path), "--print_config"])


def unpack(path: Path) -> None:
    with patch("finetune.data.datasets.download._download", lambda *_: path):
        fetch_archive("http://localhost/a.zip", "0" * 40, path.parent / "unpacked")


def read_run(path: Path) -> None:
    """Read a run by all commands that do; each must answer, also after another one has refused."""
    run = path.parent
    errors = []
    for command in (
        lambda: runs(RunsSettings(folder=str(run.parent))),
        lambda: runs(RunsSettings(folder=str(run.parent), json=True)),
        lambda: report(ReportSettings(runs=[str(run)], output=str(run.parent / "page.html"))),
        lambda: compare(CompareSettings(runs=[str(run), str(run.parent / "sound")])),
    ):
        try:
            command()
        except Exception as error:
            if fault_of(error):
                raise
            errors.append(error)
    if errors:
        raise errors[0]


def plain(function: Callable[..., bytes]) -> Callable[..., bytes]:
    return lambda content, rng, canary: function(content, rng)


KINDS = [
    Kind("last.ckpt", other_checkpoint, predict),
    Kind("weights.ckpt", other_checkpoint, read_file),
    Kind("model.safetensors", plain(other_bytes), predict),
    Kind("labels.csv", plain(other_csv), list_rows),
    Kind("labels.jsonl", plain(other_lines), list_rows),
    Kind("labels.parquet", plain(other_bytes), list_rows),
    Kind("corrections.csv", plain(other_csv), correct),
    Kind("fit.yaml", other_yaml, parse_config),
    Kind("images.zip", other_zip, unpack),
]
# the others that `report`, `compare` and `runs` read, and an export, each in about a second
MORE_KINDS = [
    Kind("model.onnx", plain(other_bytes), predict),
    Kind("run/metrics.csv", plain(other_csv), read_run),
    Kind("run/steps.csv", plain(other_csv), read_run),
    Kind("run/test_predictions.csv", plain(other_csv), read_run),
    Kind("run/test.json", plain(cut), read_run),
    Kind("run/run.json", plain(cut), read_run),
    Kind("run/config.yaml", plain(cut), read_run),
]


@pytest.fixture(scope="module")
def originals(colours, tmp_path_factory) -> Path:
    """A folder with an intact file of each kind, except for .onnx."""
    folder = tmp_path_factory.mktemp("originals")
    with pytest.MonkeyPatch.context() as context:
        context.chdir(folder)
        run_command(["fit", "--data.root", str(colours), *QUICKEST])
        run_lock.release()
    Path(folder, "runs/fit/version_0").rename(folder / "run")
    checkpoint = folder / "run/checkpoints/last.ckpt"
    for name in ("last.ckpt", "weights.ckpt"):
        (folder / name).write_bytes(checkpoint.read_bytes())
    export(
        ExportSettings(
            ckpt_path=str(checkpoint),
            format="safetensors",
            output=str(folder / "model.safetensors"),
        )
    )
    rows = [
        {"path": str(path), "label": path.parent.name, "split": "train", "group": f"g{i % 7}"}
        for i, path in enumerate(sorted((colours / "train").rglob("*.png")))
    ]
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    (folder / "labels.csv").write_text("\n".join(lines))
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "labels.parquet")
    corrections = [f"{row['path']},{row['label']},red,,2026-01-01T10:00:00" for row in rows]
    header = "path,was,now,by,when"
    (folder / "corrections.csv").write_text("\n".join([header, *corrections, ""]))
    (folder / "fit.yaml").write_bytes((folder / "run/config.yaml").read_bytes())
    with zipfile.ZipFile(folder / "images.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for row in rows[:5]:
            archive.write(row["path"], f"images/{Path(row['path']).name}")
    return folder


def fault_of(error: BaseException) -> str:
    """Return what is wrong with an error as the command line shows it, "" for nothing."""
    if isinstance(error, SystemExit):
        return "" if error.code in (0, 2) else f"exit code {error.code}"
    line = one_line(error)
    if line is None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return f"a traceback: {type(error).__name__}: {error} at {where}"
    is_clear = line.strip() and len(line.splitlines()) == 1 and len(line) < _LONGEST
    return "" if is_clear and not line.startswith("out of memory") else f"not one line: {line!r}"


def fault_of_reading(kind: Kind, originals: Path, folder: Path, number: int) -> str:
    """Mutate a file in a new folder, read it, and return what is wrong."""
    folder = folder / str(number)
    path = folder / kind.name
    path.parent.mkdir(parents=True)
    if kind.name.startswith("run/"):
        link_run(originals / "run", path.parent)
        link_run(originals / "run", folder / "sound")
        path.unlink(missing_ok=True)
    canary = folder / "canary"
    content = (originals / kind.name).read_bytes()
    path.write_bytes(kind.mutate(content, np.random.default_rng(number), canary))
    fault = ""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            kind.read(path)
        except BaseException as error:
            fault = fault_of(error)
    if canary.exists():
        return "its code was run"
    return fault


def link_run(run: Path, target: Path) -> None:
    """Make a copy of a run, of links to its files."""
    for path in run.rglob("*"):
        if path.is_file():
            link = target / path.relative_to(run)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.hardlink_to(path)


@promise("damaged-files")
def test_mutated_files_give_one_line_and_run_nothing(
    originals, tmp_path, trials, record_row, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    logging.disable(logging.CRITICAL)
    number = trials(45, 1000)
    kinds = KINDS
    if number == 1000:
        checkpoint = originals / "last.ckpt"
        export(ExportSettings(ckpt_path=str(checkpoint), output=str(originals / "model.onnx")))
        kinds = KINDS + MORE_KINDS

    def call(i: int) -> str:
        return fault_of_reading(kinds[i % len(kinds)], originals, tmp_path, i)

    try:
        faults = faults_of_calls(number, call, SECONDS, NUM_BYTES)
    finally:
        logging.disable(logging.NOTSET)
    named = {f"{i} {kinds[i % len(kinds)].name}": fault for i, fault in faults.items()}
    bad = Counter(kinds[i % len(kinds)].name for i in faults)
    for name, count in Counter(kinds[i % len(kinds)].name for i in range(number)).items():
        record_row(f"file: {name}", count, f"{bad[name]} faults")
    assert named == {}


@control("damaged-files")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_control_an_intact_file_is_read(originals, kind):
    try:
        kind.read(originals / kind.name)
    except SystemExit as end:
        assert end.code == 0


@control("damaged-files")
def test_control_code_that_runs_is_seen(originals, tmp_path):
    import pickle

    def load(path: Path) -> None:
        pickle.loads(path.read_bytes())

    def mutate(content: bytes, rng: np.random.Generator, canary: Path) -> bytes:
        return pickle.dumps(Canary(canary))

    kind = Kind("last.ckpt", mutate, load)
    assert fault_of_reading(kind, originals, tmp_path, 0) == "its code was run"
    damaged = Kind("last.ckpt", lambda *_: b"", lambda path: {}["a"])
    assert fault_of_reading(damaged, originals, tmp_path, 1).startswith("a traceback: KeyError")
