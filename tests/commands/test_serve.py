"""`finetune serve` as a process: its answers, how it stops, and what it survives."""

import csv
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing, contextmanager
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from processes import start
from promise import promise

from finetune.cli import main
from finetune.commands.serve import Precision
from finetune.serving.access_log import file_fingerprint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(untested_run) -> Path:
    return untested_run


class Served:
    """A process of `finetune serve`."""

    def __init__(self, run: Path, *options: str, **environment: str) -> None:
        self.process = start("serve", run, "--port", 0, *options, cwd=run, **environment)
        deadline = time.monotonic() + 60
        while (
            self.process.stdout.count("\n") < 2
            and self.process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        self.lines = self.process.stdout.splitlines()
        address = re.search(r"http://([\w.]+):(\d+)", self.process.stdout)
        assert address, self.process.stderr
        self.host, self.port = address[1], int(address[2])

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict]:
        connection = self.connection()
        connection.request(method, path, body, headers)
        with closing(connection):
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def stopped(self, signum: int) -> int:
        self.process.send_signal(signum)
        return self.process.wait(60)


@contextmanager
def served(*args: str, **environment: str):
    service = Served(*args, **environment)
    try:
        yield service
    finally:
        service.process.kill()


@pytest.fixture(scope="module")
def service(run):
    with served(run) as service:
        yield service


@promise("serve")
def test_answers_are_those_of_predict(service, run, colours, tmp_path):
    output = tmp_path / "said.csv"
    with pytest.raises(SystemExit) as ended:
        where = ["--output", str(output), "--trainer.default_root_dir", str(tmp_path)]
        main(["predict", str(run), str(colours / "test"), *where])
    assert ended.value.code in (0, None)
    with open(output, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 30
    for row in rows:
        status, answer = service.ask("POST", "/predict", Path(row["path"]).read_bytes())
        (one,) = answer["predictions"]
        assert status == 200 and one["label"] == row["class"]
        found = [one["probabilities"][name] for name in ("blue", "green", "red")]
        np.testing.assert_allclose(
            found, [float(row[f"p_{n}"]) for n in ("blue", "green", "red")], rtol=0, atol=2e-6
        )


def test_it_says_what_it_serves_and_where(service, run):
    assert "small_cnn, 3 classes, 32-true" in service.lines[0] and str(run) in service.lines[0]
    assert "http://127.0.0.1:" in service.lines[1] and "Ctrl-C" in service.lines[1]


OTHER_SIGNALS = [
    pytest.param(signum, marks=pytest.mark.slow) for signum in (signal.SIGINT, signal.SIGHUP)
]


@pytest.mark.parametrize("signum", [signal.SIGTERM, *OTHER_SIGNALS])
def test_what_is_accepted_is_answered_before_it_ends(run, colours, signum):
    content = next((colours / "test").rglob("*.png")).read_bytes()
    with served(run) as service:
        connection = service.connection()
        connection.putrequest("POST", "/predict")
        connection.putheader("Content-Length", str(len(content)))
        connection.endheaders(content[:50])
        time.sleep(0.5)
        service.process.send_signal(signum)
        time.sleep(0.5)
        with pytest.raises(ConnectionRefusedError):  # no new ones
            socket.create_connection((service.host, service.port), timeout=5)
        assert service.process.poll() is None
        connection.send(content[50:])
        with closing(connection):
            response = connection.getresponse()
            assert response.status == 200 and json.loads(response.read())["predictions"]
        assert service.process.wait(30) == 0
        assert service.process.stderr == "stopped\n"


def test_a_tenth_of_bad_requests_harms_no_good_one(service, colours):
    images = sorted((colours / "test").rglob("*.png"))
    contents = [path.read_bytes() for path in images[:10]]
    alone = [service.ask("POST", "/predict", content)[1]["predictions"][0] for content in contents]
    wrong: list[object] = []

    def good(number: int) -> None:
        connection = service.connection()
        for i in range(12):
            k = (number + i) % len(contents)
            connection.request("POST", "/predict", contents[k])
            response = connection.getresponse()
            answer = json.loads(response.read())
            same = response.status == 200 and answer["predictions"][0]["label"] == alone[k]["label"]
            if (
                not same
                or abs(answer["predictions"][0]["probability"] - alone[k]["probability"]) > 2e-6
            ):
                wrong.append(answer)
        connection.close()

    def bad(number: int) -> None:
        for i in range(4):
            body, headers = [
                (contents[0][:80], {}),
                (b"hello", {"Content-Type": "application/json"}),
                (b"", {}),
                (b"x", {"Content-Encoding": "gzip"}),
                (b"--", {"Content-Type": "multipart/form-data; boundary=e"}),
            ][(number + i) % 5]
            status, answer = service.ask("POST", "/predict", body, **headers)
            if status not in (400, 415, 422) or not answer["error"]:
                wrong.append((status, answer))
            # and one that is not waited for
            with socket.create_connection((service.host, service.port)) as gone:
                gone.sendall(
                    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n"
                    + contents[1]
                )
            with socket.create_connection((service.host, service.port)) as noise:
                noise.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")

    threads = [
        threading.Thread(target=f, args=(k,)) for k in range(8) for f in (good, *([bad] * (k % 2)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not wrong
    assert service.ask("GET", "/readyz") == (200, {"status": "ready"})


def test_a_token_keeps_others_out_and_is_on_no_page(run):
    with served(run, FINETUNE_TOKEN="secret-word") as service:
        assert service.ask("GET", "/model")[0] == 401
        assert service.ask("GET", "/model", Authorization="Bearer secret-word")[0] == 200
        connection = service.connection()
        connection.request("GET", "/")
        with closing(connection):
            assert b"secret-word" not in connection.getresponse().read()
        assert service.stopped(signal.SIGTERM) == 0


def test_a_warning_where_anybody_may_ask(run):
    with served(run, "--host", "0.0.0.0") as service:
        assert service.stopped(signal.SIGTERM) == 0
        assert "--token WORD restricts that" in service.process.stderr


def test_its_precisions_are_the_predictor_s():
    """They are listed twice, so that a wrong one is refused before torch is imported."""
    from finetune.inference import predictor

    assert set(get_args(Precision)) == {*predictor._TRUE, *predictor._MIXED}


def test_the_lines_of_the_guide_run(service, colours, tmp_path):
    guide = (ROOT / "docs/serve.md").read_text("utf-8")
    (lines,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    shutil.copy(next((colours / "test/red").glob("*.png")), tmp_path / "image.png")
    script = lines.replace(":8000", f":{service.port}")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    label, probability = done.stdout.split()
    assert label in ("blue", "green", "red") and 0 < float(probability) <= 1


def test_a_log_of_requests_is_all_that_is_on_stdout(run, colours):
    options = ("--log", "json")
    process = start("serve", run, "--port", 0, *options, cwd=run)
    deadline = time.monotonic() + 60
    while "Ctrl-C stops" not in process.stderr and time.monotonic() < deadline:
        time.sleep(0.02)
    address = re.search(r"http://[\w.:]+\d", process.stderr)[0]
    image = next((colours / "test/red").iterdir()).read_bytes()
    with urllib.request.urlopen(f"{address}/predict", image, timeout=60) as response:
        request_id = response.headers["X-Request-ID"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    (line,) = map(json.loads, process.stdout.splitlines())
    assert line["request_id"] == request_id and line["status"] == 200
    assert line["model"] == file_fingerprint(run / "checkpoints/best.ckpt")
