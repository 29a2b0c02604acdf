"""`finetune serve` as a process: it answers as `finetune predict`; how it begins, stops, asks for a token and logs.

Bad requests and many clients: test_server.py, test_busy_server.py.
"""

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colours import NAMES
from paths import ROOT
from processes import Process, start
from promise import control, promise

from finetune.commands.serve import fingerprint


@pytest.fixture(scope="module")
def served_run(fitted_runs: Any) -> Path:
    """A finished run; to be read only."""
    return fitted_runs.single


class Service:
    """A process of `finetune serve`."""

    def __init__(self, process: Process) -> None:
        self.process = process
        deadline = time.monotonic() + 60
        while "Ctrl-C" not in self.said and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        address = re.search(r"http://([\w.]+):(\d+)", self.said)
        assert address, process.stderr
        self.host, self.port = address[1], int(address[2])

    @property
    def said(self) -> str:
        return self.process.stdout + self.process.stderr

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        with closing(self.connection()) as connection:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(), response.headers

    def stopped(self, signum: int) -> int:
        self.process.send_signal(signum)
        return self.process.wait(60)


@contextmanager
def served(run: Path, *options: str, **environment: str) -> Iterator[Service]:
    process = start("serve", run, "--port", 0, *options, cwd=run, **environment)
    try:
        yield Service(process)
    finally:
        process.kill()


@promise("serve")
@control("serve")
def test_serve_answers_as_predict(finished, predicted):
    with served(finished) as service:
        for path in list(predicted)[::7]:
            _, body, _ = service.ask("POST", "/predict", Path(path).read_bytes())
            (one,) = json.loads(body)["predictions"]
            answer = [one["probabilities"][name] for name in NAMES]
            np.testing.assert_allclose(answer, predicted[path], rtol=0, atol=2e-6)
        # the control: another image's prediction is another one
        assert not np.allclose(answer, predicted[next(iter(predicted))], rtol=0, atol=2e-6)
        assert service.stopped(signal.SIGTERM) == 0


OTHER_SIGNALS = [
    pytest.param(signum, marks=pytest.mark.slow) for signum in (signal.SIGINT, signal.SIGHUP)
]


@pytest.mark.parametrize("signum", [signal.SIGTERM, *OTHER_SIGNALS])
def test_serve_answers_what_is_accepted_before_a_signal_ends_it(served_run, colours, signum):
    content = next((colours / "test").rglob("*.png")).read_bytes()
    with served(served_run) as service:
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


def test_serve_with_a_token_keeps_others_out_and_without_one_warns(served_run):
    with served(served_run, FINETUNE_TOKEN="secret-word") as service:
        assert service.ask("GET", "/model")[0] == 401
        assert service.ask("GET", "/model", Authorization="Bearer secret-word")[0] == 200
        assert b"secret-word" not in service.ask("GET", "/")[1]
        assert service.stopped(signal.SIGTERM) == 0 and "secret-word" not in service.said
    with served(served_run, "--host", "0.0.0.0") as service:
        assert service.stopped(signal.SIGTERM) == 0
        assert "--token WORD" in service.process.stderr


def test_the_lines_of_the_guide_to_serve_run(served_run, colours, tmp_path):
    guide = (ROOT / "docs/serve.md").read_text("utf-8")
    (lines,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    shutil.copy(next((colours / "test/red").glob("*.png")), tmp_path / "image.png")
    with served(served_run) as service:
        assert "small_cnn, 3 classes, 32-true" in service.said and str(served_run) in service.said
        script = [sys.executable, "-c", lines.replace(":8000", f":{service.port}")]
        options = {"capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(script, cwd=tmp_path, check=False, **options)
    assert done.returncode == 0, done.stderr
    label, probability = done.stdout.split()
    assert label in ("blue", "green", "red") and 0 < float(probability) <= 1


def test_serve_with_log_json_has_requests_alone_on_stdout(served_run, colours):
    image = next((colours / "test/red").iterdir()).read_bytes()
    with served(served_run, "--log", "json") as service:
        _, _, headers = service.ask("POST", "/predict", image)
        assert service.stopped(signal.SIGTERM) == 0
        (line,) = map(json.loads, service.process.stdout.splitlines())
    assert line["request_id"] == headers["X-Request-ID"] and line["status"] == 200
    assert line["model"] == fingerprint(served_run / "checkpoints/best.ckpt")
