"""Trackio's database in the run's folder: what steps.csv has, the config once, a picture of test predictions."""

import json
import sqlite3
from pathlib import Path

import pytest
from logged_fits import RUN, connections, fit_with, settings, steps
from PIL import Image

from finetune.commands.logged_sheet import NAME
from finetune.runs.trackio_logger import write_into

LOGGER = ("--trainer.logger", "TrackioLogger")


def rows(folder: Path) -> list[tuple[int, dict]]:
    with sqlite3.connect(folder / "trackio/finetune.db") as database:
        found = database.execute("select step, metrics from metrics order by id").fetchall()
    return [(step, json.loads(text)) for step, text in found]


def metrics(folder: Path = RUN) -> dict[tuple[str, int], float]:
    return {(name, step): v for step, row in rows(folder) for name, v in row.items() if name != NAME}


def pictures(folder: Path = RUN) -> list[Path]:
    found = [row[NAME]["file_path"] for _, row in rows(folder) if NAME in row]
    return [folder / "trackio/media" / path for path in found]


def configs(folder: Path = RUN) -> list[dict]:
    with sqlite3.connect(folder / "trackio/finetune.db") as database:
        found = [json.loads(text) for (text,) in database.execute("select config from configs")]
    return [{name: value for name, value in config.items() if not name.startswith("_")} for config in found]


@pytest.mark.slow
def test_a_fit_logs_what_steps_csv_has_and_goes_on_there(colours, cli, capfd, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody")  # whose name Trackio would ask the hub for
    lines = fit_with(colours, capfd, *LOGGER)
    assert metrics() == steps() and configs() == [settings()]
    (picture,) = pictures()
    with Image.open(picture) as sheet:
        assert sheet.width > 900
    before, first = steps(), settings()
    fit_with(colours, capfd, *LOGGER, "--resume", "--trainer.max_epochs", "2")
    assert metrics() == before | steps() and max(step for _, step in steps()) == 8
    assert configs() == [first] and len(pictures()) == 2
    assert lines == fit_with(colours, capfd)
    num_rows = len(rows(RUN))
    fit_with(colours, capfd, *LOGGER)  # another run of this process has a database of its own
    other = RUN.parent / "version_2"
    assert metrics(other) == steps(other) and pictures(other)[0].exists() and len(rows(RUN)) == num_rows


def test_the_network_is_watched(environment, monkeypatch, tmp_path):
    """The control: a run of Trackio's own does ask."""
    write_into(tmp_path)
    import trackio

    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody")
    with connections() as tried:
        trackio.Run(None, "control", None, "control", existing_runs=[]).finish()
    assert tried


@pytest.mark.slow
def test_what_others_log_afterwards_goes_where_they_say(colours, cli, capfd):
    import trackio.utils

    before = trackio.utils.TRACKIO_DIR
    fit_with(colours, capfd, *LOGGER)
    assert before == trackio.utils.TRACKIO_DIR != (RUN / "trackio").absolute()
    assert trackio.utils.MEDIA_DIR.parent == before
