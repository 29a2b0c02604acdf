"""`finetune review` as a process: its output, its end, and what it refuses."""

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import start

from finetune.commands import review
from finetune.commands.error_lines import exit_code
from finetune.data.corrections import parse_corrections


class Review:
    """A process of `finetune review`."""

    def __init__(self, *arguments: object, cwd: Path) -> None:
        self.process = start("review", *arguments, cwd=cwd)
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

    def ask(self, path: str, body: dict | None = None) -> dict:
        headers = {"Content-Type": "application/json", "Origin": self.origin}
        request = urllib.request.Request(
            self.origin + self.path + path, body and json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def decide(self, index: int) -> str:
        item = self.ask(f"item/{index}")
        body = {"index": index, "action": "exclude", "labels": None, "line": item["line"]}
        self.ask("decide", body)
        return item["name"]


@contextmanager
def reviewed(*arguments: object, cwd: Path):
    review = Review(*arguments, cwd=cwd)
    try:
        yield review
    finally:
        review.process.kill()


@pytest.mark.slow
def test_it_serves_saves_and_ends_at_ctrl_c(colours, tmp_path):
    with reviewed(colours, "--out", "c.csv", cwd=tmp_path) as review:
        assert "90 images in 3 classes" in review.process.stdout
        name = review.decide(0)
        huge = urllib.request.Request(
            review.origin + review.path + "decide",
            b"x" * 10_000_000,
            {"Content-Type": "application/json", "Origin": review.origin},
        )
        with pytest.raises(urllib.error.HTTPError, match="413"):  # and no broken connection
            urllib.request.urlopen(huge, timeout=30)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(review.origin + "/", timeout=30)
        review.process.send_signal(signal.SIGINT)
        assert review.process.wait(30) == 0
    assert (
        "finetune fit" in review.process.stdout
        and "--data.corrections c.csv" in review.process.stdout
    )
    assert "Traceback" not in review.process.stderr
    (line,) = parse_corrections((tmp_path / "c.csv").read_bytes(), "c.csv")
    assert line.path == name and line.now == "excluded" and line.by and line.when.endswith("Z")


@pytest.mark.slow
def test_killed_it_has_saved_what_it_has_acknowledged_and_continues_there(colours, tmp_path):
    with reviewed(colours, "--out", "c.csv", cwd=tmp_path) as review:
        names = [review.decide(i) for i in range(5)]
        review.process.send_signal(signal.SIGKILL)
        review.process.wait(30)
    content = (tmp_path / "c.csv").read_bytes()
    assert [line.path for line in parse_corrections(content, "c.csv")] == names
    with reviewed(colours, "--out", "c.csv", cwd=tmp_path) as again:
        assert again.ask("state")["counts"]["excluded"] == 5


@pytest.mark.slow
def test_with_a_run_its_network_ranks_labels(untested_run, colours, tmp_path):
    with reviewed(colours, untested_run, "--out", "c.csv", cwd=tmp_path) as review:
        assert "among these images" in review.process.stderr
        deadline = time.monotonic() + 60
        while not review.ask("state")["ranking"]["is_ready"] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert review.ask("item/0")["neighbours"]


def test_a_read_only_folder_is_reported_with_the_way_out(cli, colours, monkeypatch):
    if os.geteuid() != 0:
        monkeypatch.setattr("finetune.system.files.os.access", lambda *_: True)
    monkeypatch.setattr(review.os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    message = "corrections.csv: Read-only file system. --out FILE writes it elsewhere"
    with pytest.raises(OSError, match=message) as caught:
        cli("review", colours)
    assert exit_code(caught.value) == 1
