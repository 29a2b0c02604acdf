"""Wherever images lie (folder, table, archive, bucket, hub), a fit has the weights of their folder, bit for bit."""

import csv
import json
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from colours import QUICKEST, draw_colours
from hub_server import TOKEN
from object_server import ObjectServer, object_server
from places import PLACES, RARE, Place, a_place, are_equal, error_line
from processes import finetune, start, start_ranks
from promise import control, promise

from finetune.cli import run
from finetune.data import bucket
from finetune.data.image_files import open_file
from finetune.data.local_folders import local_folder

slow = pytest.mark.slow
UNTESTED = ("--test_after_fit", "false")
LAST = "checkpoints/last.ckpt"
OPTIONS = (*QUICKEST, "--data.mixup", "0.2", *UNTESTED)

Cli = Callable[..., None]
Values = dict[str, torch.Tensor]


def values(name: str) -> Values:
    """Return all that a run has learned: weights, moments of the optimizer, and the record of its images."""
    checkpoint = torch.load(Path("runs/fit", name, LAST), weights_only=True)
    moments = checkpoint["optimizer_states"][0]["state"]
    found = {f"exp_avg {key}": state["exp_avg"] for key, state in moments.items()}
    seen = checkpoint["finetune"]["seen"]
    found |= {part: seen[part] for part in ("train", "val")}
    return {**found, **checkpoint["state_dict"]}


def command(*words: object) -> None:
    run([str(word) for word in words])


def fit(*arguments: object, name: str, epochs: int = 1) -> Values:
    """Fit images, and return what the run has learned."""
    command("fit", *arguments, *OPTIONS, "--trainer.max_epochs", epochs, "--name", name)
    return values(name)


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """36 images: each is a request, of each fit."""
    return draw_colours(tmp_path_factory.mktemp("data") / "colours", train=8, test=4)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of the tests of all places."""
    folder = tmp_path_factory.mktemp("places")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def of_folder(home: Path, colours: Path) -> Callable[[int], Values]:
    """What a fit on the folder has learned after some epochs."""
    known: dict[int, Values] = {}

    def values_after(epochs: int) -> Values:
        if epochs not in known:
            known[epochs] = fit(colours, name=f"folder-{epochs}", epochs=epochs)
        return known[epochs]

    return values_after


@pytest.fixture(scope="module")
def changed(colours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images with another one in the place of the first."""
    copy = shutil.copytree(colours, tmp_path_factory.mktemp("changed") / "set")
    shutil.copy(colours / "train/red/01.png", copy / "train/red/00.png")
    return copy


def kinds_without(*others: str) -> list[Any]:
    kinds = [*PLACES, *(pytest.param(kind, marks=slow, id=kind) for kind in RARE)]
    return [kind for kind in kinds if getattr(kind, "id", kind) not in others]


def places_without(*others: str) -> pytest.MarkDecorator:
    """Run a test on all kinds of places but these."""
    return pytest.mark.parametrize("place", kinds_without(*others), indirect=True, scope="module")


@pytest.fixture(scope="module", params=kinds_without())
def place(request: pytest.FixtureRequest, home: Path) -> Iterator[Place]:
    with a_place(request.param, home) as place:
        yield place


@pytest.fixture(scope="module")
def images(place: Place, colours: Path) -> list[str]:
    """The arguments of a command for the images of `colours` at the place."""
    return place.put(colours, f"{place.kind}-photos".replace(" ", "-"))


@pytest.fixture(scope="module")
def fitted(place: Place, images: list[str]) -> str:
    """The name of a run on these images."""
    workers = ("--data.num_workers", 1 if place.kind == "s3" else 0)
    fit(*images, *workers, name=place.kind)
    return place.kind


@promise("table")
@promise("places")
@control("table")
@control("places")
def test_fit_on_a_table_archive_or_bucket_has_the_weights_of_its_folder(
    place, fitted, of_folder, changed
):
    assert are_equal(values(fitted), of_folder(1))
    other = place.put(changed, f"{place.kind}-changed".replace(" ", "-"))
    learned = fit(*other, name=f"{place.kind} changed")
    kernel = next(name for name, value in learned.items() if value.ndim == 4)
    assert not learned[kernel].equal(values(fitted)[kernel])  # the control


def test_resume_from_a_place_has_the_weights_of_an_uninterrupted_fit(images, fitted, of_folder):
    shutil.copytree(f"runs/fit/{fitted}", f"runs/fit/{fitted} resumed")
    more = ["--resume", f"runs/fit/{fitted} resumed", *OPTIONS, "--trainer.max_epochs", "2"]
    run(["fit", *images, *more])
    assert are_equal(values(f"{fitted} resumed"), of_folder(2))


def predicted(name: str) -> dict[str, tuple[str, list[float]]]:
    """Return the class and the probabilities of each row of predictions, by the last three parts of the path."""
    with open(name, newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = [key for key in rows[0] if key.startswith("p_")]
    return {
        "/".join(row["path"].split("/")[-3:]): (row["class"], [float(row[key]) for key in numbers])
        for row in rows
    }


@places_without("table in s3")  # predict takes the paths of a table as they are
def test_predict_on_a_place_is_that_on_its_folder(place, images, fitted, colours):
    for where, out in ((images[0], "there.csv"), (colours, "here.csv")):
        run(["predict", f"runs/fit/{fitted}", str(where), "--out", out, "--workers", "0"])
    there, here = predicted("there.csv"), predicted("here.csv")
    assert there.keys() == here.keys() and len(there) == len([*colours.rglob("*.png")])
    for name, (label, numbers) in there.items():
        # a table has another order, and so other batches, in which float32 is rounded otherwise
        assert (label, numbers) == (here[name][0], pytest.approx(here[name][1], abs=2e-7))


@places_without("table in s3")  # check takes the paths of a table as they are
@slow
def test_test_and_check_on_a_place_are_those_on_its_folder(place, images, fitted, colours):
    results, findings = [], []
    for number, where in enumerate((images, [str(colours)])):
        shutil.rmtree("runs/test", ignore_errors=True)
        run(["test", f"runs/fit/{fitted}", *where, "--workers", "0"])
        results.append(json.loads(Path("runs/test/version_0/test.json").read_text()))
        with pytest.raises(SystemExit):
            run(["check", *where, "--out", f"check-{number}"])
        findings.append(json.loads(Path(f"check-{number}/check.json").read_text())["findings"])
    assert results[0]["test/loss"] == results[1]["test/loss"]
    assert findings[0] == findings[1]


@promise("table")
@promise("places")
@places_without("hub")  # a forked process cannot be told of another server
@slow
def test_two_processes_train_the_weights_of_the_folder(place, images, colours, home):
    if not Path("runs/fit/two").exists():
        done = finetune("fit", colours, *OPTIONS, "--devices", "2", "--name", "two", cwd=home)
        assert done.returncode == 0, done.stderr
    name = f"{place.kind} on two"
    line = ["fit", *images, *OPTIONS, "--devices", 2, "--workers", 1, "--name", name]
    ranks = start_ranks(2, *line, cwd=home)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert are_equal(values(name), values("two"))


@promise("no-code")
@places_without("folder", "table", "archive")  # which are on this machine
def test_a_checkpoint_chooses_no_address(place, images, fitted, colours):
    checkpoint = f"runs/fit/{fitted}"
    before = place.num_requests()
    line = error_line(command, "test", checkpoint)
    assert "a checkpoint may not choose an address" in line and images[-1] in line
    command("test", checkpoint, colours)
    assert place.num_requests() == before
    command("test", checkpoint, *images)  # the control
    assert place.num_requests() > before


def test_a_run_on_the_hub_names_its_commit_and_not_the_token(colours, changed, cli, tmp_path):
    with a_place("hub", tmp_path) as place:
        images = place.put(colours, "photos")
        commits = [next(iter(place.server.repositories["datasets/owner/photos"].commits))]
        for name, folder in (("first", None), ("second", changed)):
            if folder:
                commits.append(place.server.put_folder(folder, "owner/photos", "set"))
            cli("fit", *images, *OPTIONS, "--name", name)
            assert commits[-1] in Path("runs/fit", name, "run.json").read_text()
        files = [path for path in Path("runs").rglob("*") if path.is_file()]
        assert not any(TOKEN.encode() in path.read_bytes() for path in files)
        # the client would name the packages that are installed
        agents = place.server.user_agents
        assert agents and not any("torch" in agent for agent in agents)


@pytest.fixture
def server(colours: Path) -> Iterator[ObjectServer]:
    """A server with the images of `colours` in its folder `set`."""
    with object_server() as server:
        server.put_folder(colours, "set")
        yield server


def test_a_fit_lists_a_folder_in_s3_once(server, cli):
    cli("fit", f"{server.address}/set", *OPTIONS)
    assert server.requests["LIST"] == 1 and server.requests["HEAD"] == 0


class Company:
    """Lets each request for an image wait for another one, at most half a second, and counts those that had none."""

    def __init__(self) -> None:
        self.num = 0
        self.num_alone = 0
        self._changed = threading.Condition()

    def __call__(self, method: str, path: str) -> str:
        if path.endswith(".png"):
            with self._changed:
                self.num += 1
                self._changed.notify_all()
                number = self.num
                has_company = self._changed.wait_for(lambda: self.num > number, 0.5)
                self.num_alone += not has_company
        return ""


@promise("places")
@pytest.mark.parametrize("command", ["fit", "check", "predict"])
def test_requests_to_s3_are_sent_ahead(server, cli, colours, command):
    place = f"{server.address}/set"
    if command == "predict":
        cli("fit", colours, *OPTIONS, "--name", "run")
    company = Company()
    server.fault = company
    if command == "fit":
        cli("fit", place, *OPTIONS, "--trainer.max_steps", 1)
        assert company.num >= 24
    elif command == "predict":
        cli("predict", "runs/fit/run", f"{place}/train", "--out", "x.csv")
    else:
        with pytest.raises(SystemExit):
            cli("check", place, "--out", "checked")
    assert company.num_alone < company.num / 5


@control("places")
def test_control_requests_one_by_one_have_no_company(server):
    root = local_folder(f"{server.address}/set")
    company = Company()
    server.fault = company
    for number in range(4):
        open_file(f"{root}/train/red/{number:02d}.png").close()
    assert company.num == company.num_alone == 4


def test_a_later_epoch_and_a_later_fit_ask_for_no_image(server, cli):
    fit = ["fit", f"{server.address}/set", *QUICKEST, "--trainer.max_epochs"]
    counts = []
    for num_epochs in (1, 2):
        cli("cache", "--remove", "all")
        server.requests.clear()
        cli(*fit, num_epochs)
        counts.append(server.requests.copy())
    assert counts[0] == counts[1] and counts[0]["GET"] >= 36
    server.requests.clear()
    cli(*fit, 2)
    assert server.requests == Counter(LIST=1)


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which a quarter of the images have space."""
    used = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used._replace(free=60_000))


@promise("places")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_disk_that_is_too_small_for_the_images_trains_the_same_weights(
    server, of_folder, home, small_disk, workers
):
    place = f"{server.address}/set"
    learned = fit(place, "--data.num_workers", workers, name=f"small-{workers}", epochs=2)
    assert are_equal(learned, of_folder(2))
    assert server.requests["GET"] > 2 * 24


class Outage:
    """Stops the server for half a second at one of its requests."""

    def __init__(self, server: ObjectServer, number: int) -> None:
        self.server = server
        self.left = number
        self.restart = threading.Thread(target=self._restart)

    def __call__(self, method: str, path: str) -> str:
        self.left -= 1
        if self.left == 0:
            self.restart.start()
        return "cut" if self.left <= 0 else ""

    def _restart(self) -> None:
        self.server.stop()
        time.sleep(0.5)
        self.server.start()


@promise("object-storage-failures")
def test_a_fit_waits_for_a_server_that_is_gone_for_a_moment(server, of_folder, home):
    outage = Outage(server, 20)
    server.fault = outage
    assert are_equal(fit(f"{server.address}/set", name="outage"), of_folder(1))
    outage.restart.join()


def test_failed_requests_to_s3_are_repeated(server, of_folder, home):
    num = 0

    def fail(method: str, path: str) -> str:
        nonlocal num
        num += 1
        return ("unavailable", "cut", "truncate")[num // 8 % 3] if num % 8 == 0 else ""

    server.fault = fail
    assert are_equal(fit(f"{server.address}/set", name="faults"), of_folder(1))
    assert num > 24


@promise("object-storage-failures")
def test_a_server_that_is_gone_ends_the_fit_which_can_be_resumed(
    server, of_folder, home, cli, monkeypatch, small_disk
):
    monkeypatch.chdir(home)
    monkeypatch.setattr(bucket, "RETRY_SECONDS", 0.3)
    last = Path("runs/fit/gone", LAST)
    server.fault = lambda method, path: "cut" if last.exists() else ""
    options = [*OPTIONS, "--trainer.max_epochs", 4, "--data.on_bad_image", "skip"]
    line = error_line(cli, "fit", f"{server.address}/set", *options, "--name", "gone")
    assert f"{server.address}/set/train/" in line and "does not answer" in line
    server.fault = lambda method, path: ""
    cli("fit", "--resume", "runs/fit/gone")
    assert are_equal(values("gone"), of_folder(4))


def forget_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request objects without their ETags."""
    read = bucket.read
    monkeypatch.setattr(bucket, "read", lambda path, e_tag, *more: read(path, None, *more))


@promise("object-storage-failures", controls=[forget_the_content])
def test_an_object_that_is_replaced_during_a_fit_is_named(server, cli, small_disk):
    last = Path("runs/fit/run", LAST)

    def replace(method: str, path: str) -> str:
        if last.exists():
            for key in [key for key in server.objects if "train/red" in key]:
                server.put(key, server.objects[key][:-1] + b" ")  # of the same size
        return ""

    server.fault = replace
    options = [*OPTIONS, "--trainer.max_epochs", 4, "--data.on_bad_image", "skip"]
    line = error_line(cli, "fit", f"{server.address}/set", *options, "--name", "run")
    assert f"{server.address}/set/train/red/" in line and "was replaced" in line
    assert last.is_file()


@promise("object-storage-failures")
@pytest.mark.parametrize(
    ("signum", "waits_for"), [(signal.SIGINT, "list-type"), (signal.SIGTERM, ".png")]
)
def test_a_signal_ends_a_wait_for_s3(server, tmp_path, signum, waits_for):
    has_ended = threading.Event()
    is_waiting = threading.Event()

    def never_answer(method: str, path: str) -> str:
        if waits_for in path:
            is_waiting.set()
            has_ended.wait(100)
        return ""

    server.fault = never_answer
    process = start("fit", f"{server.address}/set", *OPTIONS, cwd=tmp_path)
    assert is_waiting.wait(60)
    process.send_signal(signum)
    try:
        assert process.wait(60) == 128 + signum, process.stderr
    finally:
        has_ended.set()
