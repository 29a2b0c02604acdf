"""A fit on images in object storage: the weights are those of the same folder on a disk, and faults are survived."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from colours import QUICKEST
from fitted_weights import are_equal, error_line, fit, weights
from object_server import ObjectServer, begin_test, object_server
from processes import _free_port, finetune, rank_environment, start
from promise import control, promise

from finetune import Classifier
from finetune.data import fetching, image_cache, object_requests
from finetune.data.checking.image_facts import inspect_images
from finetune.data.datasets.listing import list_images
from finetune.data.storage import STORAGES
from finetune.features import image_features
from finetune.models.backbones import build


@pytest.fixture(scope="module")
def running(colours: Path) -> Iterator[ObjectServer]:
    with object_server() as server:
        server.put_folder(colours, "set")
        yield server


@pytest.fixture
def server(running: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """The server with the images of `colours` in its folder `set`, and no client yet."""
    yield from begin_test(running, monkeypatch)


UNTESTED = ("--test_after_fit", "false")
NO_CACHE = ("--data.cache_limit_gb", 0)  # another test of this folder may have left one


@promise("object-storage")
@control("object-storage")
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_weights_are_those_of_the_folder_on_a_disk(server, colours, cli, num_workers):
    options = ["--data.num_workers", num_workers, "--data.mixup", 0.2]
    local = fit(cli, colours, "local", *options)
    assert are_equal(local, fit(cli, f"{server.address}/set", "there", *options))
    assert server.requests["HEAD"] == 0 and server.requests["LIST"] == 1
    server.put("set/train/red/00.png", Path(colours, "train/red/01.png").read_bytes())
    other = fit(cli, f"{server.address}/set", "changed", *options)
    assert not are_equal(local, other)  # the control


class Overlap:
    """Delays each request by 10 ms, the first ones until several wait, and counts those that nothing joined.

    Args:
        num_together: Number of requests that the first ones wait for.
        patience: Seconds for which they wait at most.

    Attributes:
        num: Number of requests.
        num_alone: Those during which no other one waited.
        largest: Largest number of requests that waited at a time.
    """

    def __init__(self, num_together: int = 0, patience: float = 20) -> None:
        self.num = 0
        self.num_alone = 0
        self.largest = 0
        self._num_together = num_together
        self._end_of_patience = time.monotonic() + patience
        self._waiting: dict[int, bool] = {}  # whether each has been alone so far
        self._changed = threading.Condition()

    def __call__(self, method: str, path: str) -> str:
        with self._changed:
            number = self.num
            self.num += 1
            self._waiting = dict.fromkeys(self._waiting, False)
            self._waiting[number] = len(self._waiting) == 0
            self.largest = max(self.largest, len(self._waiting))
            self._changed.notify_all()
            left = max(0, self._end_of_patience - time.monotonic())
            self._changed.wait_for(lambda: self.largest >= self._num_together, left)
        time.sleep(0.01)
        with self._changed:
            self.num_alone += self._waiting.pop(number)
        return ""


@promise("object-storage")
@pytest.mark.parametrize("num_ahead", [fetching._NUM_AHEAD, pytest.param(0, id="control")])
def test_requests_are_sent_ahead_also_before_the_first_step(server, cli, monkeypatch, num_ahead):
    monkeypatch.setattr(fetching, "_NUM_AHEAD", num_ahead)
    overlap = Overlap()
    server.fault = overlap
    fit(cli, f"{server.address}/set", "there", *NO_CACHE, *UNTESTED, "--trainer.max_steps", 1)
    assert overlap.num > 150
    share = overlap.num_alone / overlap.num
    assert share > 0.5 if num_ahead == 0 else share < 0.25


@pytest.mark.parametrize("num_ahead", [fetching._NUM_AHEAD, pytest.param(0, id="control")])
def test_check_sends_its_requests_ahead(server, monkeypatch, num_ahead):
    monkeypatch.setattr(fetching, "_NUM_AHEAD", num_ahead)
    listing = list_images(f"{server.address}/set")
    overlap = Overlap(num_together=10 if num_ahead else 0)
    server.fault = overlap
    assert not any(facts.error for facts in inspect_images(listing.paths))
    assert overlap.num == len(listing.paths)
    assert overlap.largest <= 2 if num_ahead == 0 else overlap.largest >= 10


@pytest.mark.parametrize("num_ahead", [fetching._NUM_AHEAD, pytest.param(0, id="control")])
def test_features_are_computed_from_images_that_are_fetched_ahead(
    server, monkeypatch, tmp_path, num_ahead
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetching, "_NUM_AHEAD", num_ahead)
    monkeypatch.setattr(image_features, "_BATCH_SIZE", 1)
    torch.save(build("small_cnn", 2).state_dict(), "weights.pt")
    network = image_features.Features("small_cnn", "weights.pt")
    listing = list_images(f"{server.address}/set")
    overlap = Overlap(num_together=10 if num_ahead else 0)
    server.fault = overlap
    features = image_features.image_features(network, listing.paths, {"image_size": 28})
    assert len([*features]) == overlap.num == len(listing.paths)
    assert overlap.largest <= 2 if num_ahead == 0 else overlap.largest >= 10


@pytest.mark.slow
def test_a_run_continues_and_uses_the_cache(server, colours, cli, monkeypatch):
    place = f"{server.address}/set"
    options = ["--trainer.max_epochs", 2, "--data.num_workers", 1, *UNTESTED]
    fit(cli, place, "parts", *options, "--trainer.max_epochs", 1)
    cli("fit", place, *QUICKEST, *options, "--resume", "runs/fit/parts")
    of_two_epochs = weights("parts")
    cli("fit", "--resume", "runs/fit/parts", "--trainer.max_epochs", 3)
    local = fit(cli, colours, "local", *options, "--trainer.max_epochs", 3)
    assert are_equal(local, weights("parts"))
    monkeypatch.setattr(image_cache, "_MIN_SAVED", 0)
    num_requests = []
    for name in ("cached", "again"):
        server.requests.clear()
        assert are_equal(of_two_epochs, fit(cli, place, name, *options))
        num_requests.append(server.requests["GET"])
    assert num_requests[1] < num_requests[0] - 90  # the images of train and val are not read again


def fit_on_processes(place: str, world_size: int, folder: Path, *more: object) -> None:
    """Fit images there in several processes, as torchrun starts them: one forked from another has no storage."""
    port = _free_port()
    command = ["fit", place, *QUICKEST, "--devices", world_size, "--name", "there", *more]
    ranks = [
        start(*command, cwd=folder, **rank_environment(rank, world_size, port))
        for rank in range(world_size)
    ]
    for rank in ranks:
        assert rank.wait() == 0, rank.stderr


@promise("object-storage")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_train_the_weights_of_the_folder_on_a_disk(
    server, colours, tmp_path, monkeypatch, world_size
):
    monkeypatch.chdir(tmp_path)
    options = ["--workers", 1]
    local = [*QUICKEST, "--devices", world_size, *options, "--name", "local"]
    done = finetune("fit", colours, *local, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    fit_on_processes(f"{server.address}/set", world_size, tmp_path, *options)
    assert are_equal(weights("local"), weights("there"))


class Outage:
    """Stops the server at one of its requests, for some seconds."""

    def __init__(self, server: ObjectServer, number: int, seconds: float) -> None:
        self.server = server
        self.left = number
        self.seconds = seconds
        self.num_before = 0
        self.threads: list[threading.Thread] = []

    def __call__(self, method: str, path: str) -> str:
        self.left -= 1
        if self.left == 0:
            self.num_before = self.server.requests.total()
            self.threads.append(threading.Thread(target=self._restart))
            self.threads[0].start()
        return "cut" if self.left <= 0 else ""

    def _restart(self) -> None:
        self.server.stop()
        time.sleep(self.seconds)
        self.server.start()


@promise("object-storage-failures")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_survives_ten_seconds_without_the_server(
    server, colours, tmp_path, monkeypatch, world_size
):
    monkeypatch.chdir(tmp_path)
    options = ["--trainer.max_epochs", 6, "--workers", 0, *NO_CACHE, *UNTESTED]
    local = [*QUICKEST, "--devices", world_size, "--name", "local", *options]
    done = finetune("fit", colours, *local, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    server.delay = 0.01
    outage = Outage(server, 450, seconds=10)
    server.fault = outage
    begin = time.monotonic()
    fit_on_processes(f"{server.address}/set", world_size, tmp_path, *options)
    assert time.monotonic() - begin > 10
    outage.threads[0].join()
    assert server.requests.total() > outage.num_before + 50
    assert are_equal(weights("local"), weights("there"))


def write_table(colours: Path) -> None:
    rows = [
        f"{path.relative_to(colours)},{path.parent.name},{path.parent.parent.name}"
        for path in sorted(colours.rglob("*.png"))
    ]
    Path("labels.csv").write_text("\n".join(["path,label,split", *rows]))


@pytest.mark.slow
def test_a_table_of_images_there(server, colours, cli):
    write_table(colours)
    local = fit(cli, "labels.csv", "local", "--data.root", colours)
    there = fit(cli, "labels.csv", "there", "--data.root", f"{server.address}/set")
    assert are_equal(local, there)


@pytest.mark.slow
def test_other_commands_read_it(server, colours, cli, capsys):
    place = f"{server.address}/set"
    fit(cli, place, "run")
    for root in (place, colours):
        cli("test", "runs/fit/run", root)
        cli("predict", "runs/fit/run", f"{root}/test", "--out", f"{Path(str(root)).name}.csv")
        with pytest.raises(SystemExit):
            cli("check", root, "--out", f"check-{Path(str(root)).name}")
    tables = [
        Path(name).read_text().replace(f"{root}/", "")
        for name, root in (("set.csv", place), (f"{colours.name}.csv", colours))
    ]
    assert tables[0] == tables[1] and "red" in tables[0]
    findings = [
        json.loads(Path(name, "check.json").read_text())
        for name in ("check-set", f"check-{colours.name}")
    ]
    assert findings[0].pop("root") == place
    assert findings[0]["findings"] == findings[1]["findings"]
    capsys.readouterr()
    cli("predict", "runs/fit/run", f"{place}/test/red/00.png")
    assert f"{place}/test/red/00.png" in capsys.readouterr().out


def test_what_is_wrong_is_reported_in_one_line(server, cli, monkeypatch):
    place = f"{server.address}/set"

    def line(root: str = place, *more: object) -> str:
        STORAGES.pop("s3", None)
        return error_line(cli, "fit", root, *QUICKEST, *more)

    assert "'s3://photos/none' does not exist" in line(f"{server.address}/none")
    assert "the bucket s3://other does not exist" in line("s3://other/set")
    assert "BUCKET/FOLDER" in line("s3:///set")
    text = line("s3://name:password@photos/set")
    assert "AWS_ACCESS_KEY_ID" in text and "password@" not in text and "name:" not in text
    for scheme in ("s3", "S3"):
        text = line(f"{scheme}://name:pass/word@photos/set")
        assert "s3://BUCKET/FOLDER" in text and "word@" not in text and "name:" not in text
    assert "begin with s3:/: write s3://BUCKET/FOLDER" in line("s3:/photos/set")
    text = line("https://photos.example/set?X-Amz-Signature=abc")
    assert "download them first" in text and "abc" not in text
    assert "local path" in line(place, "--weights", "s3://photos/runs/best.ckpt")
    assert "copy it" in line(f"{server.address}/labels.csv")
    assert "download" in line(place, "--data", "finetune.Hotdog")
    server.fault = lambda method, path: "deny"
    assert "access denied: check AWS_ACCESS_KEY_ID" in line()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://storage.example")
    assert "not encrypted" in line() and "AWS_ALLOW_HTTP" in line()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://name:password@127.0.0.1:{server.port}")
    text = line()
    assert "user name or password" in text and "password@" not in text
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install '.[storage]'" in line()
    assert not Path("runs/fit").exists() and not Path("s3:").exists()


@promise("no-code")
def test_a_checkpoint_chooses_no_address(server, colours, cli):
    fit(cli, f"{server.address}/set", "run")
    STORAGES.pop("s3", None)
    server.requests.clear()
    text = error_line(cli, "test", "runs/fit/run")
    assert "a checkpoint may not choose an address" in text and f"{server.address}/set" in text
    cli("test", "runs/fit/run", colours)
    assert not server.requests and "s3" not in STORAGES
    cli("test", "runs/fit/run", f"{server.address}/set")  # the control
    assert server.requests


def test_a_checkpoint_with_a_local_table_chooses_no_address_either(server, colours, cli):
    place = f"{server.address}/set"
    write_table(colours)
    fit(cli, "labels.csv", "run", "--data.root", place, *UNTESTED)
    STORAGES.pop("s3", None)
    server.requests.clear()
    text = error_line(cli, "test", "runs/fit/run")
    assert "a checkpoint may not choose an address" in text and place in text
    assert not server.requests and "s3" not in STORAGES
    cli("test", "runs/fit/run", "labels.csv", "--data.root", place)  # the control
    assert server.requests


def test_a_local_folder_needs_no_obstore(colours):
    code = "import sys; from finetune.data.storage import *; "
    code += f"assert is_local({str(colours)!r}) and kind_of({str(colours)!r}) == 'folder'; "
    code += "sys.exit('obstore' in sys.modules or 'finetune.data.object_storage' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class Faults:
    """Makes the first requests for each image fail, in all ways, and counts them."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, method: str, path: str) -> str:
        self.num += 1
        kinds = ("unavailable", "cut", "truncate")
        return kinds[self.num // 4 % 3] if self.num % 4 == 0 else ""


@pytest.mark.slow
def test_failed_requests_are_repeated(server, colours, cli):
    faults = Faults()
    server.fault = faults
    there = fit(cli, f"{server.address}/set", "there", *NO_CACHE)
    assert faults.num > 100
    assert are_equal(fit(cli, colours, "local"), there)


@pytest.fixture
def in_second_epoch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Make the next fits call a function in their second epoch, of four batches as the first."""
    step = Classifier.training_step
    monkeypatch.setattr(fetching, "_NUM_AHEAD", 1)  # images of later batches are not there yet

    def install(call: Callable[[], None]) -> None:
        def training_step(model, *args):
            if model.trainer.global_step == 4:
                call()
            return step(model, *args)

        monkeypatch.setattr(Classifier, "training_step", training_step)

    return install


@pytest.mark.slow
def test_a_server_that_is_gone_for_a_moment_is_waited_for(server, colours, cli, in_second_epoch):
    options = ["--trainer.max_epochs", 2, *NO_CACHE, *UNTESTED]
    local = fit(cli, colours, "local", *options)

    def restart() -> None:
        server.stop()
        threading.Timer(0.7, server.start).start()

    in_second_epoch(restart)
    assert are_equal(local, fit(cli, f"{server.address}/set", "there", *options))


@promise("object-storage-failures")
@pytest.mark.slow
def test_a_server_that_is_gone_ends_the_run_in_one_line(
    server, colours, cli, monkeypatch, in_second_epoch
):
    place = f"{server.address}/set"
    local = fit(cli, colours, "local", "--trainer.max_epochs", 2)
    monkeypatch.setattr(object_requests, "RETRY_SECONDS", 0.5)
    in_second_epoch(server.stop)
    options = [*QUICKEST, "--trainer.max_epochs", 2, "--data.on_bad_image", "skip"]
    options += NO_CACHE
    text = error_line(cli, "fit", place, *options, "--name", "run")
    assert f"{place}/train/" in text and "does not answer, or not as expected" in text
    server.start()
    in_second_epoch(lambda: None)
    STORAGES.pop("s3")
    cli("fit", "--resume", "runs/fit/run")
    assert are_equal(local, weights("run"))


@promise("object-storage-failures")
def test_an_object_that_is_replaced_in_mid_run_is_named(server, colours, cli, in_second_epoch):
    other = Path(colours, "train/red/01.png").read_bytes()

    def replace() -> None:
        for key in list(server.objects):
            if key.startswith("set/train/red/"):
                server.put(key, other + b" ")

    in_second_epoch(replace)
    options = [*QUICKEST, "--trainer.max_epochs", 2, "--data.on_bad_image", "skip"]
    options += NO_CACHE
    text = error_line(cli, "fit", f"{server.address}/set", *options, "--name", "run")
    assert f"{server.address}/set/train/red/" in text and "was replaced" in text
    assert Path("runs/fit/run/checkpoints/last.ckpt").is_file()
