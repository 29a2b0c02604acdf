"""Fits that log with TensorBoard, MLflow and wandb: the values of steps.csv and the config, and nothing is sent."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from colours import QUICKEST
from logged_fits import (
    RUN,
    connections,
    events,
    fit_with,
    hyperparameters,
    mlflow_metrics,
    mlflow_run,
    scalars,
    settings,
    steps,
)
from processes import finetune
from wandb.proto.wandb_internal_pb2 import Record

KINDS = ("mlflow", "tensorboard", "wandb")
WANDB = ("--logger", "wandb")
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


def the_files() -> list[Path]:
    """Return wandb's files of the run, the oldest first."""
    wandb.teardown()  # its process may be about to write yet
    return sorted((RUN / "wandb").glob("offline-run-*/*.wandb"))


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


def logged_metrics(kind: str) -> dict[tuple[str, int], float]:
    if kind == "mlflow":
        return mlflow_metrics()
    if kind == "tensorboard":
        return scalars()
    return {name: v for file in the_files() for name, v in metrics(file).items()}


def logged_settings(kind: str) -> dict[str, Any]:
    if kind == "mlflow":
        return mlflow_run()[1].data.params
    if kind == "tensorboard":
        (only,) = hyperparameters()
        return only
    return config(the_files()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_logs_what_steps_csv_has_and_continues_there(colours, cli, capfd, monkeypatch, kind):
    with monkeypatch.context() as elsewhere:  # as after a run in another folder, in a notebook
        elsewhere.chdir(colours)
        wandb.setup()
    logger = ("--logger", kind)
    lines = fit_with(colours, capfd, *logger)
    assert logged_metrics(kind) == pytest.approx(steps(), rel=1e-6)  # float32
    assert {name for name, _ in steps()} >= {"train/loss", "val/accuracy", "test/accuracy"}
    first = settings()
    params = {name: str(value)[:250] for name, value in first.items()}
    assert logged_settings(kind) == (params if kind == "mlflow" else first)
    before = steps()
    fit_with(colours, capfd, *logger, "--resume", "--trainer.max_epochs", "2")
    logged = steps() if kind == "tensorboard" else before | steps()  # which drops repeated steps
    assert logged_metrics(kind) == pytest.approx(logged, rel=1e-6)
    assert max(step for _, step in steps()) == 8
    expected = {"mlflow": params, "tensorboard": first, "wandb": settings()}
    assert logged_settings(kind) == expected[kind]
    assert lines == fit_with(colours, capfd)  # with nothing of the logger's, and no folder of it
    assert not (RUN.parent / "version_1" / kind).exists()
    assert not Path("wandb").exists() and not Path("mlruns").exists()


def test_a_run_of_wandb_that_is_open_is_left_to_its_owner(colours, cli, capfd, tmp_path_factory):
    """As in a notebook; Lightning's logger takes it, and ours would end it."""
    folder = tmp_path_factory.mktemp("own")
    with wandb.init(project="own", mode="offline", dir=folder, config={"mine": 1}) as own:
        fit_with(colours, capfd, *WANDB)
        own.log({"mine": 2})
        assert dict(own.config) == {"mine": 1} and wandb.run is own
    assert logged_metrics("wandb") == steps()


def test_the_logs_of_wandb_itself_are_in_the_run_too(colours, cli, capfd, monkeypatch):
    monkeypatch.delenv("WANDB_CACHE_DIR", raising=False)
    wandb.teardown()
    fit_with(colours, capfd, *WANDB)
    wandb.teardown()
    assert list((RUN / "wandb/cache").rglob("*.log"))


def test_of_two_devices_the_first_logs_alone(colours, tmp_path, monkeypatch):
    several = ["--devices", "2", "--trainer.log_every_n_steps", "1", "--logger", ",".join(KINDS)]
    result = finetune("fit", colours, *QUICKEST, *several, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    reported = [line.split()[0] for line in result.stderr.splitlines()]
    # and nothing of a library's
    assert reported == ["images:", "network:", "training:", "val", "epoch"]
    monkeypatch.chdir(tmp_path)
    assert scalars() == pytest.approx(steps(), rel=1e-6) and mlflow_metrics() == steps()
    assert hyperparameters() == [settings()] and len(the_files()) == 1


def test_test_and_predict_log_in_a_run_of_their_own(colours, cli):
    cli("fit", colours, *QUICKEST, "--test_after_fit", "false")
    with connections() as tried:
        for kind in KINDS:
            cli("test", RUN, "--logger", kind)
        cli("predict", RUN, colours / "test", "--logger", "tensorboard")
    assert not tried
    for i, kind in enumerate(KINDS):
        (place,) = [one for one in Path(f"runs/test/version_{i}").iterdir() if one.is_dir()]
        assert place.name == kind and any(one.is_file() for one in place.rglob("*"))
    result = events(Path("runs/test/version_1/tensorboard"))
    measured = json.loads(Path("runs/test/version_1/test.json").read_text())["test/accuracy"]
    assert [event.value for event in result.Scalars("test/accuracy")] == pytest.approx([measured])
    assert any(Path("runs/predict/version_0/tensorboard").iterdir())
