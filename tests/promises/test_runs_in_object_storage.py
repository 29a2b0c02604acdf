"""Runs in object storage (`--out s3://…`) have the weights of local ones; a kill before any upload loses nothing."""

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from colours import QUICKEST
from object_server import CREDENTIALS, ObjectServer, no_fault, object_server
from places import are_equal, error_line
from processes import start, start_ranks
from promise import control, promise

import finetune.cli
from finetune import Classifier
from finetune.data import bucket
from finetune.data.addresses import StorageError
from finetune.runs.local_copies import address_of, local_copy
from finetune.runs.run_dir import RunDir
from finetune.runs.sync import Sync, pull_checkpoint, pull_run

slow = pytest.mark.slow
UNTESTED = ("--test_after_fit", "false")
OPTIONS = (*QUICKEST, *UNTESTED, "--trainer.max_epochs", "2")
OUT = ("--out", "s3://photos/runs")
RUN = "runs/fit/version_0"  # local, and the key of the one in the bucket
PLACE = f"s3://photos/{RUN}"
LAST = "checkpoints/last.ckpt"
BEST = "checkpoints/best.ckpt"

Weights = dict[str, torch.Tensor]


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Move to another machine: one without local copies."""

    def to_another_machine() -> None:
        folder = tmp_path / f"cache{len(list(tmp_path.glob('cache*')))}"
        folder.mkdir()
        monkeypatch.setenv("FINETUNE_CACHE", str(folder))

    to_another_machine()
    return to_another_machine


@pytest.fixture
def server(move: Callable[[], None]) -> Iterator[ObjectServer]:
    """An empty bucket, on a machine without local copies."""
    with object_server() as server:
        yield server


def weights_in(content: bytes) -> Weights:
    return torch.load(io.BytesIO(content), weights_only=True)["state_dict"]


def there(server: ObjectServer, run: str = RUN) -> Weights:
    return weights_in(server.objects[f"{run}/{LAST}"])


def files_there(server: ObjectServer) -> set[str]:
    return {key.removeprefix(f"{RUN}/") for key in server.objects if key.startswith(RUN)}


@pytest.fixture(scope="module")
def local(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The weights of the local run of two epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("local"))
        finetune.cli.run(["fit", str(colours), *OPTIONS])
        return weights_in(Path(RUN, LAST).read_bytes())


@promise("object-storage-runs")
@control("object-storage-runs")
def test_out_in_s3_has_the_files_and_weights_of_a_local_run(server, colours, cli, capsys):
    cli("fit", colours, *QUICKEST)
    capsys.readouterr()
    cli("fit", colours, *QUICKEST, *OUT)
    assert f"run in {PLACE}\n" in capsys.readouterr().out
    files = {path.relative_to(RUN).as_posix() for path in Path(RUN).rglob("*") if path.is_file()}
    # a folder of runs on a disk has the mark
    assert files_there(server) - {".finetune"} == files and {"test.json", LAST, ".lock"} < files
    own = weights_in(Path(RUN, LAST).read_bytes())
    assert are_equal(own, there(server))
    config = yaml.safe_load(server.objects[f"{RUN}/config.yaml"])
    assert config["trainer"]["default_root_dir"] == OUT[1]
    secret = CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode()
    assert not any(secret in content for content in server.objects.values())
    cli("fit", colours, *QUICKEST, *OUT, *UNTESTED, "--seed", 1)
    assert not are_equal(own, there(server, "runs/fit/version_1"))  # the control


@pytest.fixture
def states(server: ObjectServer, colours: Path, cli: Callable[..., None]) -> list[dict[str, bytes]]:
    """The contents of the bucket before each request that changed it in a fit of two epochs."""
    kept: list[dict[str, bytes]] = []

    def keep(method: str, path: str) -> str:
        if method in ("PUT", "POST"):
            kept.append(dict(server.objects))
        return ""

    server.fault = keep
    cli("fit", colours, *OPTIONS, *OUT, "--checkpoint_every_n_steps", 3)
    server.fault = no_fault
    return kept


@promise("object-storage-runs")
@pytest.mark.parametrize("which", ["some", pytest.param("others", marks=slow)])
def test_resume_after_a_kill_before_an_upload(server, states, local, colours, cli, move, which):
    has_last = [f"{RUN}/{LAST}" in state for state in states]
    first = has_last.index(True)
    assert first > 2 and len(states) > first + 3
    some = [states[0], states[first - 1], states[first + 2]]
    # before the first last.ckpt there is nothing to go on from
    others = [state for state in states[first:] if state is not some[-1]]
    for state in some if which == "some" else others:
        server.objects = dict(state)
        move()
        cli("fit", colours, *OPTIONS, *OUT, "--resume")
        runs = {key.split("/")[2] for key in server.objects if key.endswith(LAST)}
        assert are_equal(local, there(server, f"runs/fit/{max(runs)}"))


@slow
def test_a_run_that_sigterm_stops_is_uploaded_before_it_ends(server, colours, tmp_path):
    process = start("fit", colours, *OPTIONS, "--trainer.max_epochs", 1000, *OUT, cwd=tmp_path)

    def stop(method: str, path: str) -> str:
        if method == "PUT" and path.endswith(LAST):
            process.send_signal(signal.SIGTERM)
            server.fault = no_fault
        return ""

    server.fault = stop
    assert process.wait() == 128 + signal.SIGTERM, process.stderr
    for name in (LAST, "metrics.csv", "config.yaml"):
        assert server.objects[f"{RUN}/{name}"] == (local_copy(PLACE) / name).read_bytes()


@promise("one-writer")
@pytest.mark.parametrize("last_there", ["metrics.csv", pytest.param(LAST, marks=slow)])
def test_a_server_that_is_gone_ends_the_run_and_resume_uploads_it(
    server, colours, local, cli, monkeypatch, last_there
):
    monkeypatch.setattr(bucket, "RETRY_SECONDS", 0.3)
    monkeypatch.setattr(bucket, "START_SECONDS", 0.3)
    server.fault = lambda *_: "cut" if f"{RUN}/{last_there}" in server.objects else ""
    line = error_line(cli, "fit", colours, *OPTIONS, *OUT)
    copy = local_copy(PLACE)
    assert line.count("cannot upload the run") == 1 and f"It is kept in {copy}:" in line
    assert (copy / LAST).is_file()
    assert f"{RUN}/{LAST}" not in server.objects or not are_equal(local, there(server))
    server.fault = no_fault
    cli("fit", colours, *OPTIONS, *OUT, "--resume")
    assert are_equal(local, there(server))


def test_a_fit_that_fails_leaves_nothing_in_s3(server, colours, cli, monkeypatch):
    def fail(*_: object) -> None:
        raise ValueError("it fails")

    monkeypatch.setattr(Classifier, "training_step", fail)
    with pytest.raises(ValueError, match="it fails"):
        cli("fit", colours, *OPTIONS, *OUT)
    assert server.requests["PUT"] > 2  # lock, config.yaml, run.json
    assert not server.objects and not local_copy("s3://photos/runs/fit").exists()


def uploaded(content: str = "first") -> Sync:
    """Return the upload of a small run, which has been sent."""
    run = local_copy(PLACE)
    (run / "checkpoints").mkdir(parents=True)
    (run / LAST).write_text(content)
    os.link(run / LAST, run / BEST)
    upload = Sync(run)
    assert upload.claim()
    send(upload)
    return upload


def send(upload: Sync) -> None:
    upload.push()
    upload.wait()


def overwrite_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "create", lambda path, content: bucket.write(path, content, 0))


@promise("one-writer", controls=[overwrite_what_is_there])
def test_one_process_writes_a_run(server, move):
    first = uploaded()
    assert not Sync(first.run).claim()
    move()
    run = local_copy(PLACE)
    pull_run(run)
    assert (run / LAST).read_text() == (run / BEST).read_text() == "first"
    assert (run / LAST).stat().st_mtime_ns == (first.run / LAST).stat().st_mtime_ns
    Sync(run).take_over()
    (first.run / LAST).write_text("later")
    first.push()
    with pytest.raises(StorageError, match="another process has continued") as caught:
        first.wait()
    assert "--resume" not in str(caught.value)  # it would end the other process
    first.withdraw()
    assert files_there(server) == {".lock", LAST, BEST}
    assert server.objects[f"{RUN}/{LAST}"] == b"first"


def upload_the_oldest_first(monkeypatch):
    def by_time(files, key):
        return sorted(files, key=lambda file: file.status.st_mtime_ns)

    monkeypatch.setattr("finetune.runs.sync.sorted", by_time, raising=False)


@promise("object-storage-runs", controls=[upload_the_oldest_first])
def test_last_ckpt_is_uploaded_last(server):
    upload = uploaded()
    (upload.run / "test.json").write_text("of an earlier best.ckpt")
    send(upload)
    (upload.run / "test.json").unlink()
    order: list[str] = []

    def keep(method: str, path: str) -> str:
        if method in ("PUT", "POST"):
            order.append(path.rpartition("/")[2])
        return ""

    server.fault = keep
    for number, name in enumerate((LAST, BEST, "metrics.csv")):
        path = upload.run / name
        path.unlink(missing_ok=True)
        path.write_text("later")
        os.utime(path, (number, number))  # last.ckpt is the oldest
    send(upload)
    assert order == ["photos?delete", "best.ckpt", "metrics.csv", "last.ckpt"]


def test_the_results_of_an_earlier_best_ckpt_are_withdrawn_before_the_next_one_arrives(server):
    upload = uploaded()
    record = RunDir(upload.run)
    accuracy = {"split": "test", "metric": "accuracy", "value": 1, "low": 0, "high": 1}
    record.update(kind="fit", test={**accuracy, "num_images": 3})
    send(upload)
    assert b'"test"' in server.objects[f"{RUN}/run.json"]
    (upload.run / BEST).unlink()
    (upload.run / BEST).write_text("later")
    record.update(test={**accuracy, "num_images": 4})
    seen: list[bytes] = []

    def look(method: str, path: str) -> str:
        if method == "PUT" and path.endswith("best.ckpt"):
            seen.append(server.objects[f"{RUN}/run.json"])
        return ""

    server.fault = look
    send(upload)
    assert len(seen) == 1 and b'"fit"' in seen[0] and b'"test"' not in seen[0]
    assert json.loads(server.objects[f"{RUN}/run.json"])["test"]["num_images"] == 4


def test_the_newer_one_of_a_run_and_its_local_copy_is_kept(server):
    upload = uploaded()
    (upload.run / LAST).write_text("later")
    pull_run(upload.run)
    assert upload.has_changes() and (upload.run / LAST).read_text() == "later"
    (upload.run / BEST).unlink()
    send(upload)
    assert files_there(server) == {".lock", LAST} and not upload.has_changes()
    (upload.run / LAST).unlink()  # by hand
    pull_run(upload.run)
    assert (upload.run / LAST).read_text() == "later"
    server.put(f"{RUN}/.lock", b"of another machine")
    server.put(f"{RUN}/{LAST}", b"newest")
    pull_run(upload.run)
    assert (upload.run / LAST).read_text() == "newest"
    server.objects.clear()
    with pytest.raises(ValueError, match="was deleted"):
        pull_run(upload.run)


def test_names_of_objects_and_links_do_not_leave_the_folder_of_a_run(server, tmp_path, move):
    upload = uploaded()
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/secret.txt").write_text("secret")
    (upload.run / "plan.txt").symlink_to(tmp_path / "secrets/secret.txt")
    (upload.run / "folder").symlink_to(tmp_path / "secrets")
    (upload.run / "notes.txt").write_text("notes")  # the control
    send(upload)
    assert files_there(server) == {".lock", LAST, BEST, "notes.txt"}
    for name in (".uploaded.json", "a/.hidden/b", "a\\..\\b"):
        server.put(f"{RUN}/{name}", b"content")
    move()
    run = local_copy(PLACE)
    pull_run(run)
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert names == {LAST, BEST, "notes.txt", ".uploaded.json", ".sync"}
    assert b"content" not in (run / ".uploaded.json").read_bytes()


def test_local_copies_are_apart_from_runs_if_the_working_folder_is_the_cache(monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", ".")
    assert not local_copy(PLACE).is_relative_to(Path("runs").absolute())
    assert address_of(local_copy(PLACE)) == PLACE
    assert address_of("runs/s3/photos/runs/fit/version_0") is None


def test_a_checkpoint_in_s3_is_downloaded_once(server):
    upload = uploaded()
    server.requests.clear()
    for _ in range(2):
        path = pull_checkpoint(PLACE)
        assert path.name == "best.ckpt" and path.read_text() == "first"
        assert server.requests["GET"] == 1
    server.put(f"{RUN}/{BEST}", b"later")
    assert pull_checkpoint(f"{PLACE}/{BEST}").read_text() == "later"
    assert not path.is_relative_to(upload.run)  # which a fit may write


@slow
def test_predict_test_compare_and_report_read_a_run_in_s3(server, colours, cli, move):
    cli("fit", colours, *QUICKEST, *OUT)
    move()
    cli("predict", PLACE, f"{colours}/test", "--out", "table.csv")
    assert "red" in Path("table.csv").read_text()
    cli("test", f"{PLACE}/{LAST}", colours)
    cli("fit", colours, *QUICKEST)
    cli("compare", PLACE, RUN, "--out", "comparison.html")
    assert "version_0" in Path("comparison.html").read_text()
    cli("report", PLACE, "--out", "page.html")
    assert "accuracy" in Path("page.html").read_text()


@slow
def test_two_processes_continue_a_run_in_s3(server, colours, cli, tmp_path, move):
    line = ["fit", colours, *OPTIONS, "--precision", "64-true"]
    cli(*line)
    cli(*line, *OUT, "--trainer.max_epochs", 1)
    move()
    ranks = start_ranks(2, *line, *OUT, "--devices", 2, "--resume", cwd=tmp_path)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert "version_1" not in "".join(server.objects)
    own = weights_in(Path(RUN, LAST).read_bytes())
    # the sum over two processes has another order
    for name, value in there(server).items():
        torch.testing.assert_close(value, own[name], rtol=1e-9, atol=1e-9)
