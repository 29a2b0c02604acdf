"""`predict`, `fit` and `finetune.load` take a model that was uploaded to the Hugging Face hub."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from colours import QUICK
from hub_server import HubServer, Repository, hub_server
from promise import promise
from small_fits import write_checkpoints

from finetune import load
from finetune.data.decode import decode
from finetune.inference.predictor import Predictor

NETWORK = "timm/test_convnext"
NAME = "owner/mushrooms"


@pytest.fixture(scope="module")
def checkpoint(colours, tmp_path_factory) -> Path:
    """A checkpoint with a temperature of 0.25."""
    folder = write_checkpoints(tmp_path_factory.mktemp("checkpoints"), colours, NETWORK, 32)
    return folder / "calibrated.ckpt"


@pytest.fixture
def server(tmp_path):
    with hub_server(tmp_path / "cache") as server:
        yield server


def upload(server: HubServer, checkpoint: Path, cli) -> str:
    """Put the folder in timm's layout into a repository, and return the commit."""
    cli("export", checkpoint, "--format", "timm", "--out", "mushrooms")
    server.repositories[NAME] = Repository()
    files = {file.name: file.read_bytes() for file in Path("mushrooms").iterdir()}
    return server.repositories[NAME].commit(files)


@promise("timm")
def test_predict_and_python_take_an_uploaded_model(colours, checkpoint, server, cli):
    upload(server, checkpoint, cli)
    cli("predict", f"hf://{NAME}", colours / "test", "--out", "hub.csv", "--workers", "0")
    precision = ("--precision", "32-true")
    cli("predict", checkpoint, colours / "test", "--out", "own.csv", "--workers", "0", *precision)
    theirs = np.genfromtxt("hub.csv", delimiter=",", dtype=str)
    ours = np.genfromtxt("own.csv", delimiter=",", dtype=str)
    assert theirs[0].tolist() == ours[0].tolist()
    columns = [i for i, name in enumerate(ours[0]) if name.startswith("p_")]
    assert len(columns) == 3
    # the head is scaled, so that float32 rounds otherwise
    np.testing.assert_allclose(
        theirs[1:, columns].astype(float), ours[1:, columns].astype(float), rtol=0, atol=1e-5
    )
    images = [decode(path) for path in sorted((colours / "test").glob("*/*"))[::5]]
    predictions = load(f"hf://{NAME}", device="cpu").predict(images)
    probabilities = [list(one.probabilities.values()) for one in predictions]
    np.testing.assert_allclose(probabilities, Predictor(checkpoint)(images), rtol=0, atol=1e-5)


def test_nothing_is_sent_for_an_address_in_a_checkpoint(colours, checkpoint, server, cli):
    content = torch.load(checkpoint, weights_only=True)
    content["hyper_parameters"]["weights"] = "hf://owner/hostile"
    content["finetune"].pop("licence_of_the_weights", None)
    torch.save(content, "untrusted.ckpt")
    cli("export", "untrusted.ckpt", "--format", "timm", "--out", "folder")
    image = next((colours / "test").glob("*/*"))
    cli("predict", "untrusted.ckpt", image, "--workers", "0")
    assert server.requests == []


def without(*names: str) -> list[str]:
    """Return the options of a quick fit without some."""
    pairs = zip(QUICK[::2], QUICK[1::2], strict=True)
    return [part for pair in pairs if pair[0] not in names for part in pair]


@pytest.mark.slow
def test_a_fit_starts_from_the_hub_with_its_network(colours, checkpoint, server, cli, caplog):
    commit = upload(server, checkpoint, cli)
    options = without("--model.weights", "--model.backbone", "--data.image_size")
    line = ("fit", colours, "--weights", f"hf://{NAME}", *options, "--resume")
    cli(*line)
    run = Path("runs/fit/version_0")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["model"]["backbone"] == NETWORK
    assert settings["model"]["weights"] == f"hf://{NAME}"
    assert settings["data"]["init_args"]["image_size"] == 32
    about = json.loads((run / "about.json").read_text())
    text = about["licence_of_the_weights"]
    assert text.startswith(f"the weights of hf://{NAME} (commit {commit[:12]})")
    assert "random weights, which need no licence" in text  # of those that were uploaded
    assert f"weights: hf://{NAME} (commit {commit[:12]}), {NETWORK}" in caplog.text
    assert f"images are prepared as defined by hf://{NAME}:" in caplog.text
    assert "snapshots" not in caplog.text  # no folder of the client's cache
    num_requests = len(server.requests)
    cli(*line, "--trainer.max_epochs", "2")  # continues, from its own checkpoint
    assert json.loads((run / "about.json").read_text())["licence_of_the_weights"] == text
    cli("test", run, "--workers", "0")
    assert len(server.requests) == num_requests
