"""What wandb would send, in the run's folder: the values of steps.csv and the config."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from logged_fits import RUN, fit_with, settings, steps
from promise import promise
from wandb.proto.wandb_internal_pb2 import Record

from finetune.runs.wandb_logger import WandbLogger

LOGGER = ("--logger", "wandb")
# bytes: of a file, and of the blocks that LevelDB's log format, which it is in, has
_HEADER, _BLOCK = 7, 32768


def records(file: Path) -> Iterator[Record]:
    data = file.read_bytes()
    place = _HEADER
    parts = b""
    while place < len(data):
        if _BLOCK - place % _BLOCK < 7:  # no room for a record's header
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def the_file() -> Path:
    """Return the newest of the run's."""
    wandb.teardown()  # its process may be about to write yet
    return sorted((RUN / "wandb").glob("offline-run-*/*.wandb"))[-1]


def rows(file: Path) -> list[dict[str, Any]]:
    histories = [record.history for record in records(file) if record.HasField("history")]
    return [
        {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in h.item}
        for h in histories
    ]


def metrics(file: Path) -> dict[tuple[str, int], float]:
    return {
        (name, row["trainer/global_step"]): value
        for row in rows(file)
        for name, value in row.items()
        if not name.startswith("_") and name != "trainer/global_step"
    }


def config(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in records(file):
        update = record.run.config.update if record.HasField("run") else record.config.update
        found |= {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in update}
    return {name: value for name, value in found.items() if not name.startswith("_")}


@pytest.mark.slow
def test_a_fit_logs_what_steps_csv_has_and_continues_by_the_same_id(
    colours, cli, capfd, monkeypatch
):
    with monkeypatch.context() as elsewhere:  # as after a run in another folder, in a notebook
        elsewhere.chdir(colours)
        wandb.setup()
    lines = fit_with(colours, capfd, *LOGGER)
    first = the_file()
    assert metrics(first) == steps() and config(first) == settings()
    before = steps()
    fit_with(colours, capfd, *LOGGER, "--resume", "--trainer.max_epochs", "2")
    second = the_file()
    assert second != first and second.name == first.name  # of one id
    assert metrics(first) | metrics(second) == before | steps() and config(second) == settings()
    assert lines == fit_with(colours, capfd) and not Path("wandb").exists()


@promise("nothing-sent")
@pytest.mark.parametrize(
    ("given", "output", "offline", "mode"),
    [
        (None, None, True, "offline"),
        (None, "online", False, "online"),
        (None, "disabled", False, "disabled"),
        (False, None, False, "online"),
        (True, "online", True, "offline"),
    ],
)
def test_nothing_is_sent_unless_the_user_says_so(
    environment, monkeypatch, given, output, offline, mode
):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if output:
        monkeypatch.setenv("WANDB_MODE", output)
    logger = WandbLogger(offline=given)
    assert (logger._offline, logger._wandb_init["mode"]) == (offline, mode)
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


def test_where_it_is_sent_is_reported(environment, monkeypatch, run, caplog):
    class Sent:
        id, url = "abc", "https://example.org/abc"

        def define_metric(self, *args: Any, **given: Any) -> None: ...

    monkeypatch.setattr(wandb, "init", lambda **given: Sent())
    logger = WandbLogger(offline=False)
    logger.attach(run, "WandbLogger")
    with caplog.at_level("INFO", "finetune"):
        assert logger.experiment.id == "abc"
    assert caplog.messages == ["logging to https://example.org/abc"]


def test_an_account_that_is_wanted_and_not_there_is_reported_in_a_line(
    environment, monkeypatch, run
):
    def fail(**given):
        raise wandb.errors.UsageError("No API key\nconfigured.")

    monkeypatch.setattr(wandb, "init", fail)
    logger = WandbLogger(offline=False)
    logger.attach(run, "WandbLogger")
    with pytest.raises(ValueError, match="^WandbLogger: No API key configured.$"):
        _ = logger.experiment


@pytest.mark.slow
def test_a_run_that_is_open_is_left_to_its_owner(colours, cli, capfd, tmp_path_factory):
    """As in a notebook; Lightning's logger takes it, and ours would end it."""
    with wandb.init(
        project="own", mode="offline", dir=tmp_path_factory.mktemp("own"), config={"mine": 1}
    ) as own:
        fit_with(colours, capfd, *LOGGER)
        own.log({"mine": 2})
        assert dict(own.config) == {"mine": 1} and wandb.run is own
    assert metrics(the_file()) == steps()


def test_a_place_that_can_not_be_written_is_reported(environment, run, tmp_path):
    """Without the error, wandb would write into the temporary folder."""
    (tmp_path / "file").touch()
    logger = WandbLogger(save_dir=str(tmp_path / "file"))
    logger.attach(run, "WandbLogger")
    with pytest.raises(ValueError, match=f"WandbLogger: .*{tmp_path}/file/wandb"):
        _ = logger.experiment


@pytest.mark.slow
def test_its_own_logs_are_in_the_run_too(colours, cli, capfd, monkeypatch):
    monkeypatch.delenv("WANDB_CACHE_DIR", raising=False)
    wandb.teardown()
    fit_with(colours, capfd, *LOGGER)
    wandb.teardown()
    assert list((RUN / "wandb/cache").rglob("*.log"))
