"""`finetune serve` and Python predict as `finetune predict`."""

import http.client
import json
import re
import signal
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from colours import NAMES
from processes import start
from promise import control, promise

from finetune import load as load_model
from finetune.data.transforms import preparation


@promise("serve")
@control("serve")
def test_serve_answers_as_predict(finished, predicted, tmp_path):
    """In full, with signals, bad requests and many clients: test_serve.py, test_server.py."""
    process = start("serve", finished, "--port", 0, cwd=tmp_path)
    try:
        while not (address := re.search(r"http://([\w.]+):(\d+)", process.stdout)):
            assert process.poll() is None, process.stderr
            time.sleep(0.02)
        for path in list(predicted)[::7]:
            with closing(
                http.client.HTTPConnection(address[1], int(address[2]), timeout=60)
            ) as connection:
                connection.request("POST", "/predict", Path(path).read_bytes())
                (one,) = json.loads(connection.getresponse().read())["predictions"]
            served = [one["probabilities"][name] for name in NAMES]
            np.testing.assert_allclose(served, predicted[path], rtol=0, atol=2e-6)
        # the control: another image's prediction is another one
        assert not np.allclose(served, predicted[next(iter(predicted))], rtol=0, atol=2e-6)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()


def prepare_at_another_size(monkeypatch):
    def of_training(settings):
        return {**preparation(settings), "image_size": 24}

    monkeypatch.setattr("finetune.inference.predictor.preparation", of_training)


@promise("preparation", controls=[prepare_at_another_size])
def test_python_answers_as_predict(finished, predicted):
    """In full: test_python_models.py."""
    answers = load_model(finished, "cpu").predict(list(predicted))
    probabilities = [[answer.probabilities[name] for name in NAMES] for answer in answers]
    np.testing.assert_allclose(probabilities, list(predicted.values()), rtol=0, atol=2e-6)
