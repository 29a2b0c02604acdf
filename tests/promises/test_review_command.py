"""`finetune review` as a process: its output, its end, and what it has saved."""

import json
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from colours import QUICKEST
from processes import start, start_script
from promise import promise

from finetune.cli import run
from finetune.data.corrections import parse_corrections

pytestmark = pytest.mark.slow


class Review:
    """A process of `finetune review`."""

    def __init__(self, *arguments: object, cwd: Path) -> None:
        self.process = start("review", *arguments, "--out", "c.csv", cwd=cwd)
        deadline = time.monotonic() + 90
        while (
            "Ctrl-C stops" not in self.process.stdout
            and self.process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        address = re.search(r"open (http://127\.0\.0\.1:\d+)(/[\w-]{32}/)", self.process.stdout)
        assert address, self.process.stderr
        self.origin, self.path = address.groups()

    def ask(self, path: str, body: bytes | None = None) -> Any:
        headers = {"Content-Type": "application/json", "Origin": self.origin}
        request = urllib.request.Request(self.origin + self.path + path, body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def decide(self, index: int) -> str:
        item = self.ask(f"item/{index}")
        body = {"index": index, "action": "exclude", "labels": None, "line": item["line"]}
        self.ask("decide", json.dumps(body).encode())
        return item["name"]


@contextmanager
def reviewed(*arguments: object, cwd: Path) -> Iterator[Review]:
    review = Review(*arguments, cwd=cwd)
    try:
        yield review
    finally:
        review.process.kill()


def lines_in(folder: Path) -> list[Any]:
    return list(parse_corrections((folder / "c.csv").read_bytes(), "c.csv"))


def test_review_saves_and_ends_at_ctrl_c(colours, fitted_runs, tmp_path):
    with reviewed(colours, fitted_runs.single, cwd=tmp_path) as review:
        assert "90 images in 3 classes" in review.process.stdout
        assert "among these images" in review.process.stderr
        deadline = time.monotonic() + 60
        while not review.ask("state")["ranking"]["is_ready"] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert review.ask("item/0")["neighbours"]  # which the network of the run has ranked
        name = review.decide(0)
        with pytest.raises(urllib.error.HTTPError, match="413"):  # and no broken connection
            review.ask("decide", b"x" * 10_000_000)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(review.origin + "/word/", timeout=30)
        review.process.send_signal(signal.SIGINT)
        assert review.process.wait(30) == 0
    assert "--data.corrections c.csv" in review.process.stdout
    assert "Traceback" not in review.process.stderr
    (line,) = lines_in(tmp_path)
    assert line.path == name and line.now == "excluded" and line.by and line.when.endswith("Z")


# A step that takes longer than anybody waits, and an end of Python that does, too.
SLOW = """
import atexit, sys, time
from finetune.cli import main
from finetune.features.image_features import Features
def wait(*_):
    atexit.register(time.sleep, 60)
    open("begun", "w")
    time.sleep(60)
Features.STEP = wait
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("step", "code"), [("__init__", 143), ("forward", 0)])
def test_review_ends_at_once_while_features_are_computed(
    colours, fitted_runs, tmp_path, step, code
):
    (tmp_path / "slow.py").write_text(SLOW.replace("STEP", step))
    words = ["review", colours, fitted_runs.single, "--out", "c.csv"]
    process = start_script(tmp_path / "slow.py", *words, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(30) == code
        assert time.monotonic() - began < 4
    finally:
        process.kill()


def test_review_that_is_killed_has_saved_what_it_has_acknowledged(colours, tmp_path):
    with reviewed(colours, "--weights", "null", cwd=tmp_path) as review:
        names = [review.decide(i) for i in range(5)]
        review.process.send_signal(signal.SIGKILL)
        review.process.wait(30)
    assert [line.path for line in lines_in(tmp_path)] == names
    with reviewed(colours, "--weights", "null", cwd=tmp_path) as again:
        assert again.ask("state")["counts"]["excluded"] == 5


@promise("first-labels")
def test_the_labels_of_a_killed_review_train(colours, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [colours / "train", "--labels", "cat,dog", "--weights", "null"]
    with reviewed(*words, cwd=tmp_path) as review:
        assert "60 images to label" in review.process.stdout
        index = review.ask("state")["next"]
        for i in range(40):
            body = {"index": index, "action": "change", "labels": [i % 2], "line": 0}
            index = review.ask("decide", json.dumps(body).encode())["item"]["next"]
        review.process.send_signal(signal.SIGKILL)
        review.process.wait(30)
    root = ["--data.root", str(colours / "train")]
    run(["fit", "c.csv", *root, *QUICKEST, "--out", "runs"])
    result = json.loads(Path("runs/fit/version_0/test.json").read_text())
    assert result["class_names"] == ["cat", "dog"]
    assert sum(map(sum, result["confusion_matrix"])) == 9  # of 40, the others train
    with reviewed(*words, cwd=tmp_path) as again:
        again.process.send_signal(signal.SIGINT)
        assert again.process.wait(30) == 0
    assert f"finetune fit c.csv --data.root {colours / 'train'}" in again.process.stdout
