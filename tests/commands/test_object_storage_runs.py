"""Runs in object storage: the weights are those of a local folder, and a kill after any upload loses nothing."""

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from colours import QUICKEST
from object_server import CREDENTIALS, ObjectServer, begin_test, object_server
from processes import _free_port, rank_environment, start
from promise import control, promise

from finetune import Classifier
from finetune.api.child_process import _run_of
from finetune.commands.error_lines import exit_code, one_line
from finetune.commands.run_places import check_shared
from finetune.data import object_requests
from finetune.data.addresses import StorageError
from finetune.data.storage import STORAGES
from finetune.runs import run_upload
from finetune.runs.local_copies import address_of, local_copy, read_record
from finetune.runs.run_download import fetch_checkpoint, fetch_run
from finetune.runs.run_upload import RunUpload
from finetune.system.messages import WrongUsage

UNTESTED = ("--test_after_fit", "false")
TWO_EPOCHS = ("--trainer.max_epochs", 2, *UNTESTED)
LAST = "checkpoints/last.ckpt"

Cli = Callable[..., None]
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Move to another machine: one without local copies."""

    def to_another_machine() -> None:
        number = len(list(tmp_path.glob("cache*")))
        folder = tmp_path / f"cache{number}"
        folder.mkdir()
        monkeypatch.setenv("FINETUNE_CACHE", str(folder))

    to_another_machine()
    return to_another_machine


@pytest.fixture
def server(
    running: ObjectServer, monkeypatch: pytest.MonkeyPatch, move: Callable[[], None]
) -> Iterator[ObjectServer]:
    """An empty bucket, on a machine without local copies."""
    monkeypatch.setattr(run_upload, "_POLL_SECONDS", 0.01)
    yield from begin_test(running, monkeypatch)


def weights_in(content: bytes) -> Weights:
    return torch.load(io.BytesIO(content), weights_only=True)["state_dict"]


def there(server: ObjectServer, run: str = "version_0") -> Weights:
    return weights_in(server.objects[f"runs/fit/{run}/{LAST}"])


def here(run: str = "version_0") -> Weights:
    return weights_in(Path("runs/fit", run, LAST).read_bytes())


def are_equal(first: Weights, second: Weights) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def files_there(server: ObjectServer, run: str = "version_0") -> set[str]:
    place = f"runs/fit/{run}/"
    return {key.removeprefix(place) for key in server.objects if key.startswith(place)}


def error_line(cli: Cli, *arguments: object) -> str:
    """Return the line with which a command ends."""
    with pytest.raises((ValueError, OSError)) as caught:
        cli(*arguments)
    line = one_line(caught.value)
    assert line is not None and "\n" not in line and exit_code(caught.value) in (1, 2)
    return line


@promise("object-storage-runs")
@control("object-storage-runs")
def test_a_run_there_has_the_files_and_weights_of_a_local_one(server, colours, cli, capsys):
    cli("fit", colours, *QUICKEST)
    out = ("--out", f"{server.address}/runs")
    capsys.readouterr()
    cli("fit", colours, *QUICKEST, *out)
    assert "run in s3://photos/runs/fit/version_0\n" in capsys.readouterr().out
    run = Path("runs/fit/version_0")
    local = {p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file()}
    # a folder of runs on a disk has the mark
    assert files_there(server) - {".finetune"} == local and {"test.json", LAST, ".lock"} < local
    assert are_equal(here(), there(server))
    config = yaml.safe_load(server.objects["runs/fit/version_0/config.yaml"])
    assert config["trainer"]["default_root_dir"] == f"{server.address}/runs"
    secret = CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode()
    assert not any(secret in content for content in server.objects.values())
    cli("fit", colours, *QUICKEST, *out, *UNTESTED, "--seed", 1)
    assert not are_equal(here(), there(server, "version_1"))  # the control


def test_a_run_continues_on_another_machine(server, colours, cli, move):
    cli("fit", colours, *QUICKEST, *TWO_EPOCHS)
    out = ("--out", f"{server.address}/runs")
    cli("fit", colours, *QUICKEST, *UNTESTED, *out)
    assert not are_equal(here(), there(server))
    move()
    cli("fit", colours, *QUICKEST, *TWO_EPOCHS, *out, "--resume")
    assert are_equal(here(), there(server))
    assert "version_1" not in "".join(server.objects)


@pytest.fixture
def states(server: ObjectServer) -> list[dict[str, bytes]]:
    """The contents of the bucket before each of the next requests that change it."""
    kept: list[dict[str, bytes]] = []

    def keep(method: str, path: str) -> str:
        if method in ("PUT", "POST"):
            kept.append(dict(server.objects))
        return ""

    server.fault = keep
    return kept


def resume_from_each(server, states, resume) -> None:
    """Resume from each state of the bucket, on a new machine each time, and check that the weights are the same."""
    server.fault = lambda method, path: ""
    for state in states:
        server.objects = dict(state)
        resume()
        assert are_equal(here(), there(server, max(runs_there(server))))


def runs_there(server: ObjectServer) -> list[str]:
    names = {key.split("/")[2] for key in server.objects if key.endswith(LAST)}
    return sorted(names)


@pytest.fixture
def resumed(server, colours, cli, states, move) -> Callable[[], None]:
    """Fit locally, then in object storage with the states of the bucket; return a function that resumes elsewhere."""
    options = [*QUICKEST, *TWO_EPOCHS, "--checkpoint_every_n_steps", 3]
    cli("fit", colours, *options)
    out = ["--out", f"{server.address}/runs"]
    cli("fit", colours, *options, *out)

    def resume() -> None:
        move()
        cli("fit", colours, *options, *out, "--resume")

    return resume


@promise("object-storage-runs")
def test_a_run_that_is_killed_during_an_upload_continues(server, states, resumed):
    has_last = [f"runs/fit/version_0/{LAST}" in state for state in states]
    first = has_last.index(True)
    assert first > 2 and len(states) > first + 3
    resume_from_each(server, [states[0], states[first - 1], states[first + 2]], resumed)


@promise("object-storage-runs")
@pytest.mark.slow
def test_a_run_that_is_killed_after_any_upload_continues(server, states, resumed):
    resume_from_each(server, list(states), resumed)


@pytest.mark.slow
def test_a_killed_process_continues_here_and_elsewhere(server, colours, cli, tmp_path, move):
    cli("fit", colours, *QUICKEST, *TWO_EPOCHS)
    options = [*QUICKEST, *TWO_EPOCHS, "--out", f"{server.address}/runs"]
    for number, is_elsewhere in enumerate((False, True)):
        name = f"run{number}"
        process = start("fit", colours, *options, "--name", name, cwd=tmp_path)
        num_checkpoints = 0

        def kill(method: str, path: str, process=process) -> str:
            nonlocal num_checkpoints
            num_checkpoints += method == "PUT" and path.endswith(LAST)
            if num_checkpoints == 2:
                process.send_signal(signal.SIGKILL)
                return "cut"
            return ""

        server.fault = kill
        assert process.wait() == -signal.SIGKILL
        server.fault = lambda method, path: ""
        if is_elsewhere:
            move()
        cli("fit", colours, *options, "--name", name, "--resume")
        assert are_equal(here(), there(server, name))


@pytest.mark.slow
def test_a_run_that_is_stopped_is_uploaded_before_it_ends(server, colours, tmp_path):
    options = [*QUICKEST, "--trainer.max_epochs", 1000, "--out", f"{server.address}/runs"]
    process = start("fit", colours, *options, cwd=tmp_path)
    has_stopped = False

    def stop(method: str, path: str) -> str:
        nonlocal has_stopped
        if method == "PUT" and path.endswith(LAST) and not has_stopped:
            has_stopped = True
            process.send_signal(signal.SIGTERM)
        return ""

    server.fault = stop
    assert process.wait() == 128 + signal.SIGTERM, process.stderr
    local = local_copy(f"{server.address}/runs/fit/version_0")
    for name in (LAST, "metrics.csv", "config.yaml"):
        assert server.objects[f"runs/fit/version_0/{name}"] == (local / name).read_bytes()


@pytest.mark.slow
def test_failed_requests_are_repeated(server, colours, cli):
    num = 0

    def fail(method: str, path: str) -> str:
        nonlocal num
        num += 1
        kinds = ("unavailable", "cut", "lose")
        return kinds[num // 3 % 3] if num % 3 == 0 else ""

    cli("fit", colours, *QUICKEST, *TWO_EPOCHS)
    server.fault = fail
    cli("fit", colours, *QUICKEST, *TWO_EPOCHS, "--out", f"{server.address}/runs")
    assert num > 20 and are_equal(here(), there(server))
    assert "version_1" not in "".join(server.objects)


@promise("one-writer")
def test_a_server_that_is_gone_ends_the_run_and_the_checkpoint_is_kept(
    server, colours, cli, monkeypatch
):
    options = [*QUICKEST, *TWO_EPOCHS, "--out", f"{server.address}/runs"]
    cli("fit", colours, *QUICKEST, *TWO_EPOCHS)
    monkeypatch.setattr(object_requests, "RETRY_SECONDS", 0.3)
    monkeypatch.setattr(object_requests, "START_SECONDS", 0.3)
    step = Classifier.training_step

    def training_step(model, *args):
        if model.trainer.global_step == 5:  # after the first of two epochs
            model.trainer.callbacks[0].run.finish_upload()
            server.stop()
        return step(model, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "training_step", training_step)
        text = error_line(cli, "fit", colours, *options)
    run = local_copy(f"{server.address}/runs/fit/version_0")
    assert text.count("cannot upload the run: s3://photos/runs/fit/version_0/") == 1
    assert f"It is kept in {run}:" in text and (run / LAST).is_file()
    server.start()
    assert not are_equal(here(), there(server))
    cli("fit", colours, *options, "--resume")
    assert are_equal(here(), there(server))


@pytest.mark.slow
def test_a_finished_run_that_was_not_uploaded_is_uploaded_by_resume(
    server, colours, cli, monkeypatch
):
    options = [*QUICKEST, "--out", f"{server.address}/runs"]
    monkeypatch.setattr(object_requests, "RETRY_SECONDS", 0.3)
    server.fault = lambda method, path: "unavailable" if path.endswith("test.json") else ""
    assert "cannot upload the run" in error_line(cli, "fit", colours, *options)
    server.fault = lambda method, path: ""
    assert "test.json" not in files_there(server)
    cli("fit", colours, *options, "--resume")
    assert {"test.json", LAST} < files_there(server)


def test_wrong_addresses_and_credentials_are_reported_before_training(
    server, colours, cli, monkeypatch
):
    def line(*arguments: object) -> str:
        STORAGES.pop("s3", None)
        return error_line(cli, *arguments)

    fit = ("fit", colours, *QUICKEST, "--out")
    out = f"{server.address}/runs"
    assert "the bucket s3://other does not exist" in line(*fit, "s3://other/runs")
    assert "BUCKET/FOLDER" in line(*fit, "s3:///runs")
    assert "word@" not in line(*fit, "s3://name:pass/word@photos/runs")
    assert "must not contain '..'" in line(*fit, "s3://photos/../runs")
    assert "local folder" in line(*fit, out, "--folds", 2)
    assert "local folders" in line("runs", out)
    assert "local folders" in line("runs", "rm", f"{out}/fit/version_0")
    assert "--out FILE.html" in line("report", f"{out}/fit/version_0")
    assert "there is no checkpoint s3://" in line("predict", f"{out}/fit/version_0", colours)
    assert "local path" in line("export", f"{out}/fit/version_0")
    assert "local path" in line("fit", colours, "--weights", f"{out}/fit/version_0")
    server.fault = lambda method, path: "deny"
    assert "access denied" in line(*fit, out) and "access denied" in line(*fit, out, "--resume")
    server.fault = lambda method, path: "deny" if method == "PUT" else ""
    assert "access denied" in line(*fit, out)  # reading is allowed
    assert not server.objects
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install '.[storage]'" in line(*fit, out)


@pytest.mark.parametrize("out", ["S3://photos/runs", "s3:/photos/runs", "hf://owner/runs"])
def test_an_address_of_no_object_storage_is_not_a_local_folder(colours, cli, out):
    Path("own.yaml").write_text(f"trainer:\n  default_root_dir: {out}\n")
    for place in (["--out", out], ["--config", "own.yaml"], ["--out", out, "--folds", 2]):
        line = error_line(cli, "fit", colours, *QUICKEST, *place)
        assert f"begin with {out.partition('/')[0]}" in line and "s3://" in line
    assert not list(Path().glob("*:"))
    Path("own.yaml").write_text("trainer:\n  default_root_dir: runs:/s3\n")
    cli("fit", colours, *QUICKEST, *UNTESTED, "--config", "own.yaml")  # control: a folder
    assert Path("runs:/s3/fit/version_0").is_dir()


def test_a_run_without_a_result_leaves_nothing(server, colours, cli, monkeypatch):
    def fail(*_: object) -> None:
        raise ValueError("it fails")

    monkeypatch.setattr(Classifier, "training_step", fail)
    with pytest.raises(ValueError, match="it fails"):
        cli("fit", colours, *QUICKEST, "--out", f"{server.address}/runs")
    assert server.requests["PUT"] > 2  # lock, config.yaml, about.json
    assert not server.objects and not local_copy(f"{server.address}/runs/fit").exists()


def test_a_failed_upload_leaves_nothing_either(server, monkeypatch):
    monkeypatch.setattr(object_requests, "RETRY_SECONDS", 0.2)
    upload = upload_of(server, "first")
    (upload.run / "metrics.csv").write_text("later")
    server.fault = lambda method, path: "unavailable" if method == "PUT" else ""
    upload.send()
    upload.withdraw()
    assert not server.objects
    server.fault = lambda method, path: ""
    shutil.rmtree(upload.run)
    upload = upload_of(server, "first")
    RunUpload(upload.run).take_over()  # of another process
    upload.withdraw()
    assert files_there(server) == {".lock", LAST, "checkpoints/best.ckpt"}  # the control


@pytest.mark.slow
def test_only_the_run_that_continues_is_downloaded(server, colours, cli, move, tmp_path):
    others = tmp_path / "others"
    shutil.copytree(colours, others)
    shutil.copy(others / "train/red/00.png", others / "train/red/more.png")
    out = ("--out", f"{server.address}/runs")
    cli("fit", colours, *QUICKEST, *UNTESTED, *out)
    cli("fit", others, *QUICKEST, *UNTESTED, *out)
    cli("fit", colours, *QUICKEST, *UNTESTED, *out, "--backbone", "resnet18", "--size", 32)
    downloads: list[str] = []

    def keep(method: str, path: str) -> str:
        if method == "GET" and path.endswith(".ckpt"):
            downloads.append(path)
        return ""

    move()
    moved = tmp_path / "moved"  # so that folders say nothing
    shutil.copytree(colours, moved)
    server.fault = keep
    cli("fit", moved, *QUICKEST, *TWO_EPOCHS, *out, "--resume")
    assert downloads and all("fit/version_0/" in path for path in downloads)


def upload_of(server: ObjectServer, content: str) -> RunUpload:
    """Return the upload of a small run, which has been sent."""
    run = local_copy(f"{server.address}/runs/fit/version_0")
    (run / "checkpoints").mkdir(parents=True)
    (run / LAST).write_text(content)
    os.link(run / LAST, run / "checkpoints/best.ckpt")
    upload = RunUpload(run)
    assert upload.claim()
    upload.send()
    upload.wait()
    return upload


def test_what_a_link_leads_out_to_is_not_uploaded(server, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/other.txt").write_text("secret")
    run = upload_of(server, "first").run
    (run / "plan.txt").symlink_to(tmp_path / "secret.txt")
    (run / "folder").symlink_to(tmp_path / "secrets")
    (run / "notes.txt").write_text("notes")  # the control
    upload = RunUpload(run)
    upload.send()
    upload.wait()
    assert "notes.txt" in files_there(server)
    assert b"secret" not in server.objects.values()


@promise("one-writer")
def test_one_process_writes_a_run(server, move):
    first = upload_of(server, "first")
    assert server.objects[f"runs/fit/version_0/{LAST}"] == b"first"
    assert not RunUpload(first.run).claim()
    move()
    run = local_copy(first.address)
    fetch_run(run)
    assert (run / LAST).read_text() == (run / "checkpoints/best.ckpt").read_text() == "first"
    assert (run / LAST).stat().st_mtime_ns == (first.run / LAST).stat().st_mtime_ns
    RunUpload(run).take_over()
    (first.run / LAST).write_text("later")
    first.send()
    with pytest.raises(
        StorageError, match="another process has continued s3://photos/runs/fit"
    ) as caught:
        first.wait()
    assert "--resume" not in str(caught.value)  # it would end the other process
    assert server.objects[f"runs/fit/version_0/{LAST}"] == b"first"


def test_last_ckpt_arrives_after_all_that_it_needs(server):
    upload = upload_of(server, "first")
    (upload.run / "test.json").write_text("of an earlier best.ckpt")
    upload.send()
    upload.wait()
    (upload.run / "test.json").unlink()
    order: list[str] = []

    def keep(method: str, path: str) -> str:
        if method in ("PUT", "POST"):
            order.append(path.rpartition("/")[2])
        return ""

    server.fault = keep
    for number, name in enumerate((LAST, "checkpoints/best.ckpt", "metrics.csv")):
        path = upload.run / name
        path.unlink(missing_ok=True)
        path.write_text("later")
        os.utime(path, (number, number))  # last.ckpt is the oldest
    upload.send()
    upload.wait()
    assert order == ["photos?delete", "best.ckpt", "metrics.csv", "last.ckpt"]


def test_a_local_copy_that_is_newer_is_kept(server):
    upload = upload_of(server, "first")
    (upload.run / LAST).write_text("later")
    assert upload.has_changes()
    fetch_run(upload.run)
    assert (upload.run / LAST).read_text() == "later"
    upload.send()
    upload.wait()
    (upload.run / "checkpoints/best.ckpt").unlink()
    upload.send()
    upload.wait()
    assert files_there(server) == {".lock", LAST} and not upload.has_changes()
    server.put("runs/fit/version_0/.lock", b"of another machine")
    server.put(f"runs/fit/version_0/{LAST}", b"newest")
    fetch_run(upload.run)
    assert (upload.run / LAST).read_text() == "newest"
    server.objects.clear()
    with pytest.raises(ValueError, match="was deleted, but its local copy .* was not"):
        fetch_run(upload.run)


def test_a_last_ckpt_that_was_deleted_by_hand_is_downloaded(server):
    upload = upload_of(server, "first")
    (upload.run / LAST).unlink()
    (upload.run / "checkpoints/best.ckpt").unlink()
    (upload.run / "metrics.csv").write_text("later")
    fetch_run(upload.run)
    assert (upload.run / LAST).read_text() == "first"
    assert (upload.run / "metrics.csv").read_text() == "later"
    assert not (upload.run / "checkpoints/best.ckpt").exists()  # as a killed fit may leave it


def test_resume_of_a_run_without_a_last_ckpt_says_why(server, colours, cli, move):
    run = f"{server.address}/runs/fit/version_0"
    cli("fit", colours, *QUICKEST, "--out", f"{server.address}/runs", "--keep_last", "false")
    for _ in range(2):
        line = error_line(cli, "fit", "--resume", run)
        assert f"{run} cannot be resumed: its last.ckpt was deleted" in line
        move()
    assert "is not a run" not in line and "data folder" not in line
    line = error_line(cli, "fit", "--resume", f"{server.address}/runs/fit/nosuch")
    assert "the data folder" in line  # control: images, perhaps


def test_names_of_objects_stay_in_the_folder(server, tmp_path, move):
    upload = upload_of(server, "first")
    place = "runs/fit/version_0"
    for name in (".uploaded.json", "a/.hidden/b", "a\\..\\b"):
        server.put(f"{place}/{name}", b"content")
    move()
    run = local_copy(upload.address)
    fetch_run(run)
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert names == {LAST, "checkpoints/best.ckpt", ".uploaded.json", ".sync"}
    assert read_record(run).lock is not None
    assert address_of(run) == upload.address and address_of(tmp_path) is None


def test_a_fit_of_several_processes_returns_the_local_copy(move):
    run = _run_of(0, ["run in s3://photos/runs/fit/version_0", "next: finetune predict"])
    assert run == local_copy("s3://photos/runs/fit/version_0")
    assert _run_of(0, ["run in runs/fit/version_0"]) == Path("runs/fit/version_0")


def test_local_copies_are_apart_from_the_runs_of_a_folder_that_is_the_cache(monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", ".")
    copy = local_copy("s3://pictures/runs/fit/version_0")
    assert not copy.is_relative_to(Path("runs").absolute())
    assert address_of(copy) == "s3://pictures/runs/fit/version_0"
    assert address_of("runs/s3/pictures/runs/fit/version_0") is None


def test_several_machines_need_one_folder_of_caches(move, monkeypatch):
    address = "s3://photos/runs"
    check_shared(local_copy(address), 2)
    monkeypatch.delenv("FINETUNE_CACHE")
    check_shared(local_copy(address), 1)
    check_shared("runs", 2)
    with pytest.raises(WrongUsage, match="several machines needs FINETUNE_CACHE"):
        check_shared(local_copy(address), 2)


def test_a_checkpoint_is_downloaded_once(server):
    upload = upload_of(server, "first")
    server.requests.clear()
    for _ in range(2):
        path = fetch_checkpoint(upload.address)
        assert path.name == "best.ckpt" and path.read_text() == "first"
        assert server.requests["GET"] == 1
    server.put("runs/fit/version_0/checkpoints/best.ckpt", b"later")
    assert fetch_checkpoint(f"{upload.address}/checkpoints/best.ckpt").read_text() == "later"
    assert not path.is_relative_to(upload.run)  # which a fit may write


@pytest.mark.slow
def test_other_commands_read_a_run_there(server, colours, cli, capsys, move):
    out = f"{server.address}/runs"
    cli("fit", colours, *QUICKEST, "--out", out, "--name", "photos")
    run = f"{out}/fit/photos"
    move()
    capsys.readouterr()
    cli("predict", run, f"{colours}/test", "--out", "table.csv")
    assert "red" in Path("table.csv").read_text()
    cli("validate", run, colours)
    cli("test", f"{run}/checkpoints/last.ckpt", colours)
    cli("fit", colours, *QUICKEST, "--name", "local")
    cli("compare", run, "runs/fit/local", "--out", "comparison.html")
    assert "photos" in Path("comparison.html").read_text()
    cli("report", run, "--out", "page.html")
    assert "accuracy" in Path("page.html").read_text()
    assert "exists already" in error_line(
        cli, "fit", colours, *QUICKEST, "--out", out, "--name", "photos"
    )
    assert "local path" in error_line(cli, "test", run, colours, "--out", out)
    cli("fit", "--resume", run, "--trainer.max_epochs", 2, *UNTESTED)
    cli("fit", colours, *QUICKEST, *TWO_EPOCHS)
    assert are_equal(here(), there(server, "photos"))


@pytest.mark.slow
def test_two_processes_continue_the_run_of_one(server, colours, cli, tmp_path, move):
    options = ["--out", f"{server.address}/runs", "--precision", "64-true"]
    cli("fit", colours, *QUICKEST, *TWO_EPOCHS, "--precision", "64-true")
    cli("fit", colours, *QUICKEST, *UNTESTED, *options)
    move()
    # as torchrun starts them: one that is forked from another could not use its storage
    port = _free_port()
    command = ["fit", colours, *QUICKEST, *TWO_EPOCHS, *options, "--devices", "2", "--resume"]
    ranks = [start(*command, cwd=tmp_path, **rank_environment(rank, 2, port)) for rank in range(2)]
    for rank in ranks:
        assert rank.wait() == 0, rank.stderr
    assert runs_there(server) == ["version_0"]
    result = there(server)
    # the sum over two processes has another order
    for name, value in here().items():
        torch.testing.assert_close(result[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_process_that_starts_another_one_uploads_its_run(server, colours, tmp_path):
    # a real interpreter, which starts the second rank as another one
    command = [sys.executable, "-m", "finetune", "fit", colours, *QUICKEST, "--devices", "2"]
    done = subprocess.run(
        [*map(str, command), "--out", f"{server.address}/runs"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "run in s3://photos/runs/fit/version_0\n" in done.stdout
    assert {"test.json", LAST} < files_there(server)
