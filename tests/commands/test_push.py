"""`finetune push` uploads a model that timm and finetune load with the same predictions. No other command uploads."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import timm
import torch
import yaml
from colours import QUICK
from hub_server import TOKEN, Fault, environment, hub_server
from paths import ROOT
from small_fits import write_checkpoints

from finetune import load
from finetune.commands.push import _FILES
from finetune.data.decode import decode
from finetune.inference import timm_folder
from finetune.inference.predictor import Predictor
from finetune.runs.exported_files import read_exported
from finetune.system.messages import WrongUsage

# of the hub's client, as it uploads by git LFS
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

NETWORK = "timm/test_convnext"
NAME = "owner/mushrooms"


@pytest.fixture(scope="module")
def checkpoints(colours, tmp_path_factory) -> Path:
    """plain.ckpt, and calibrated.ckpt with a temperature of 0.25."""
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"), colours, NETWORK, 32)


@pytest.fixture
def checkpoint(checkpoints) -> Path:
    return checkpoints / "calibrated.ckpt"


@pytest.fixture
def server(tmp_path):
    with hub_server(tmp_path / "cache") as server:
        yield server


def images_of(colours: Path) -> list[np.ndarray]:
    return [decode(path) for path in sorted((colours / "test").glob("*/*"))[::5]]


def normalized(predictor: Predictor, images: list[np.ndarray]) -> torch.Tensor:
    pixels = np.stack([predictor.prepare(image) for image in images])
    batch = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    return (batch - predictor.model.mean) / predictor.model.std


def test_timm_loads_what_was_pushed_with_the_same_logits(colours, checkpoint, server, cli, capsys):
    cli("push", checkpoint, NAME, "--verify_on", colours / "test")
    output = "".join(capsys.readouterr())
    repository = server.repositories[NAME]
    assert set(repository.files) == {*_FILES, ".gitattributes"}
    assert len(repository.commits) == 2  # that of the empty repository, and one of all files
    assert f"{server.address}/{NAME}/commit/" in output and "same classes" in output
    network = timm.create_model(f"hf-hub:{NAME}", pretrained=True).eval()
    ours = Predictor(checkpoint)
    images = images_of(colours)
    batch = normalized(ours, images)
    with torch.no_grad():
        logits = network(batch)
        expected = ours.model.network(batch)
    # the temperature is part of the head; float32 in another order
    torch.testing.assert_close(logits, expected / 0.25, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)  # control
    assert network.pretrained_cfg["label_names"] == ours.class_names
    card = repository.files["README.md"].decode()
    assert f'timm.create_model("hf-hub:{NAME}"' in card
    for content in repository.files.values():
        assert str(checkpoint.parent).encode() not in content and TOKEN.encode() not in content
    assert TOKEN not in output
    written = [file for file in Path().rglob("*") if file.is_file()]
    assert not any(TOKEN.encode() in file.read_bytes() for file in written)


def test_no_hashes_of_training_images_are_uploaded(checkpoint, server, cli):
    cli("push", checkpoint, NAME)
    Path("pushed.safetensors").write_bytes(server.repositories[NAME].files["model.safetensors"])
    assert read_exported("pushed.safetensors")["finetune"]["seen"] is None
    cli("export", checkpoint, "--format", "safetensors", "--out", "own.safetensors")
    assert read_exported("own.safetensors")["finetune"]["seen"] is not None  # control


def test_the_token_goes_to_the_api_only(checkpoint, server, cli):
    cli("push", checkpoint, NAME)
    tokens = {path: token for _, path, token in server.requests}
    storage = {token for path, token in tokens.items() if path.startswith("/storage/")}
    api = {token for path, token in tokens.items() if path.startswith("/api/")}
    assert storage == {""} and api == {TOKEN}


def test_predict_and_python_take_what_was_pushed(colours, checkpoint, server, cli):
    cli("push", checkpoint, NAME)
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
    images = images_of(colours)
    model = load(f"hf://{NAME}", device="cpu")
    probabilities = [list(p.probabilities.values()) for p in model.predict(images)]
    np.testing.assert_allclose(probabilities, Predictor(checkpoint)(images), rtol=0, atol=1e-5)


def test_a_second_push_keeps_the_card_and_adds_a_commit(checkpoint, server, cli, capsys):
    cli("push", checkpoint, NAME)
    server.repositories[NAME].commit({"README.md": b"completed by its owner"})
    config = server.repositories[NAME].files["config.json"]
    server.repositories[NAME].commit({"config.json": b"{}"})
    cli("push", checkpoint, NAME)
    assert f"kept the README.md of hf://{NAME}" in capsys.readouterr().err
    assert server.repositories[NAME].files["README.md"] == b"completed by its owner"
    assert server.repositories[NAME].files["config.json"] == config  # control: others are replaced


def test_private(checkpoint, server, cli):
    cli("push", checkpoint, NAME, "--private")
    assert server.repositories[NAME].is_private
    cli("push", checkpoint, "owner/other")
    assert not server.repositories["owner/other"].is_private  # control
    before = len(server.repositories["owner/other"].commits)
    with pytest.raises(WrongUsage, match="hf://owner/other exists and is public: make it private"):
        cli("push", checkpoint, "owner/other", "--private")
    assert len(server.repositories["owner/other"].commits) == before


def test_a_dry_run_lists_the_files_and_makes_no_request(
    checkpoint, server, cli, capsys, monkeypatch
):
    monkeypatch.delenv("HF_TOKEN")  # which it does not need
    cli("push", checkpoint, NAME, "--dry_run")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [*_FILES]
    assert all(line.endswith((" KB", " MB")) for line in lines[1:-1])
    assert lines[-1].startswith("nothing was uploaded")
    assert server.requests == []


def test_nothing_is_sent_by_other_commands(colours, checkpoint, server, cli):
    content = torch.load(checkpoint, weights_only=True)
    content["hyper_parameters"]["weights"] = "hf://owner/hostile"
    content["finetune"].pop("licence_of_the_weights", None)
    torch.save(content, "untrusted.ckpt")
    cli("export", "untrusted.ckpt", "--format", "timm", "--out", "folder")
    image = next((colours / "test").glob("*/*"))
    cli("predict", "untrusted.ckpt", image, "--workers", "0")
    assert server.requests == []


def always(method: str, path: str) -> str:
    return "unavailable"


def at_the_commit(method: str, path: str) -> str:
    return "unavailable" if path.endswith("/commit/main") else ""


class Case(NamedTuple):
    """A push that fails, and its error.

    Attributes:
        kind: The class of the error.
        message: A pattern of its message.
        name: The repository.
        token: The token.
        fault: The fault of the server; None if it has none.
    """

    kind: type[Exception]
    message: str
    name: str = NAME
    token: str = TOKEN
    fault: Fault | None = None


FAULTS = {
    "wrong token": Case(OSError, "the token is not valid", token="hf_wrong"),
    "no token": Case(WrongUsage, "needs a token .*: hf auth login, or HF_TOKEN", token=""),
    "another's": Case(OSError, "the token does not allow it", name="else/mushrooms"),
    "503": Case(OSError, "answered with status 503: try again later", fault=always),
    "503 at the end": Case(OSError, "answered with status 503", fault=at_the_commit),
    "no owner": Case(WrongUsage, "hf://OWNER/NAME", name="mushrooms"),
    "a revision": Case(WrongUsage, "remove @", name=f"{NAME}@v1"),
}


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)
def test_each_fault_is_one_line_and_uploads_nothing(checkpoint, server, cli, monkeypatch, case):
    server.fault = case.fault or server.fault
    monkeypatch.setenv("HF_TOKEN", case.token)
    with pytest.raises(case.kind, match=case.message) as raised:
        cli("push", checkpoint, case.name)
    text = str(raised.value)
    assert "\n" not in text and TOKEN not in text and "hf_wrong" not in text
    files = {name for repository in server.repositories.values() for name in repository.files}
    assert files <= {".gitattributes"}  # of a repository that was created


def test_offline_is_refused_before_the_work(checkpoint, server, cli, capsys, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WrongUsage, match=f"to hf://{NAME}: HF_HUB_OFFLINE forbids requests. Unset"):
        cli("push", checkpoint, NAME)
    assert "verified" not in capsys.readouterr().out
    cli("push", checkpoint, NAME, "--dry_run")  # control
    assert "verified" in capsys.readouterr().out and server.requests == []


def test_weights_that_predict_differently_are_not_uploaded(checkpoint, server, cli, monkeypatch):
    monkeypatch.setattr(timm_folder, "_put_calibration_into_head", lambda network, predictor: None)
    with pytest.raises(ValueError, match="the timm folder was discarded"):
        cli("push", checkpoint, NAME)
    assert server.requests == []


def test_a_checkpoint_that_timm_does_not_support_is_refused(colours, server, cli, tmp_path):
    ours = write_checkpoints(tmp_path, colours, "small_cnn", 28)
    with pytest.raises(WrongUsage, match="timm has no network with the weights of small_cnn"):
        cli("push", ours / "plain.ckpt", NAME)
    assert server.requests == []


@pytest.mark.slow
def test_a_network_of_torchvision_is_pushed_as_that_of_timm(colours, server, cli, tmp_path):
    ours = write_checkpoints(tmp_path, colours, "resnet18", 32) / "calibrated.ckpt"
    cli("push", ours, NAME)
    assert json.loads(server.repositories[NAME].files["config.json"])["architecture"] == "resnet18"
    network = timm.create_model(f"hf-hub:{NAME}", pretrained=True).eval()
    predictor = Predictor(ours)
    batch = normalized(predictor, images_of(colours))
    with torch.no_grad():
        expected = predictor.model.network(batch) / 0.25
        torch.testing.assert_close(network(batch), expected, rtol=1e-4, atol=1e-3)
    assert load(f"hf://{NAME}", device="cpu").predictor.backbone == "timm/resnet18.tv_in1k"


def without(*names: str) -> list[str]:
    """Return the options of a quick fit without some."""
    pairs = zip(QUICK[::2], QUICK[1::2], strict=True)
    return [part for pair in pairs if pair[0] not in names for part in pair]


@pytest.mark.slow
def test_a_fit_starts_from_the_hub_with_its_network(colours, checkpoint, server, cli, caplog):
    cli("push", checkpoint, NAME)
    options = without("--model.weights", "--model.backbone", "--data.image_size")
    line = ("fit", colours, "--weights", f"hf://{NAME}", *options, "--resume")
    cli(*line)
    run = Path("runs/fit/version_0")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    commit = [*server.repositories[NAME].commits][-1]
    assert settings["model"]["backbone"] == NETWORK
    assert settings["model"]["weights"] == f"hf://{NAME}"
    assert settings["data"]["init_args"]["image_size"] == 32
    about = json.loads((run / "about.json").read_text())
    text = about["licence_of_the_weights"]
    assert text.startswith(f"the weights of hf://{NAME} (commit {commit[:12]})")
    assert "random weights, which need no licence" in text  # of those that were pushed
    assert f"weights: hf://{NAME} (commit {commit[:12]}), {NETWORK}" in caplog.text
    assert f"images are prepared as defined by hf://{NAME}:" in caplog.text
    assert "snapshots" not in caplog.text  # no folder of the client's cache
    num_requests = len(server.requests)
    cli(*line, "--trainer.max_epochs", "2")  # continues, from its own checkpoint
    assert json.loads((run / "about.json").read_text())["licence_of_the_weights"] == text
    cli("test", run, "--workers", "0")
    assert len(server.requests) == num_requests


@pytest.mark.slow
def test_the_command_in_its_own_process(checkpoint, server, tmp_path):
    values = environment(server, tmp_path / "home")
    command = [sys.executable, "-m", "finetune", "push", str(checkpoint), NAME, "--private"]
    python_path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        env=os.environ | values | python_path,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert server.repositories[NAME].is_private
    assert TOKEN not in done.stdout + done.stderr
    agents = " ".join(server.user_agents)  # no versions of other packages
    assert "hf_hub/" in agents and "torch/" not in agents and "agent/" not in agents
    assert not any(TOKEN.encode() in f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())
    wrong = subprocess.run(
        command,
        env=os.environ | values | python_path | {"HF_TOKEN": "hf_wrong"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert wrong.returncode == 1
    assert wrong.stderr.strip().splitlines()[-1] == (
        f"finetune: error: cannot upload to hf://{NAME}: the token is not valid (hf auth login, or HF_TOKEN)"
    )
