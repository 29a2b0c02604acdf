"""Models on the hub (`hf://OWNER/NAME`): what is downloaded, errors in one line, and configs that nobody trusts."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import timm
import torch
import yaml
from colours import QUICK
from hub_server import TOKEN, Fault, HubServer, Repository, hub_server
from huggingface_hub.utils import HFValidationError, validate_repo_id
from hypothesis import example, given
from hypothesis import strategies as st
from probabilities import probabilities
from promise import promise
from small_fits import write_checkpoints
from timm.models import save_for_hf

from finetune import load
from finetune.data.decode import decode
from finetune.models import hub
from finetune.models.hub import cached_model, download_model, parse_hub_address
from finetune.models.timm_networks import backbone_of
from finetune.models.weights import folder_of, read_weights
from finetune.runs.licence import licence
from finetune.system.messages import WrongUsage

NETWORK = "timm/test_convnext"
NAME = "owner/net"
ADDRESS = f"hf://{NAME}"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """config.json and model.safetensors of a random network, as timm writes them."""
    folder = tmp_path_factory.mktemp("net")
    torch.manual_seed(0)
    network = timm.create_model("test_convnext", num_classes=3)
    config = {"label_names": ["a", "b", "c"]}
    save_for_hf(network, str(folder), model_config=config, safe_serialization=True)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def server(tmp_path):
    with hub_server(tmp_path / "cache") as server:
        yield server


def serve(server: HubServer, files: dict[str, bytes]) -> str:
    """Have these files in the repository alone, and return the commit."""
    server.repositories[NAME] = Repository()
    return server.repositories[NAME].commit(files)


@given(st.text("aA1_-./@", min_size=1, max_size=8))
@example("a" * 97)
@example("a.git")
@example("a.github")
@example("../b")
def test_an_address_names_a_repository_as_the_client_of_the_hub_does(name):
    """The client checks it after the first work; a name with a slash or @ is part of another address."""
    try:
        validate_repo_id(f"owner/{name}")
        is_valid = True
    except HFValidationError:
        is_valid = False
    try:
        address = parse_hub_address(f"hf://owner/{name}")
    except WrongUsage:
        assert not is_valid or name[0] in ".-" or "@" in name
    else:
        assert address.repository == f"owner/{name.partition('@')[0]}"
        if "@" not in name:
            assert is_valid


@pytest.mark.parametrize("revision", ["..", "a/../b", "./main", "a//b", "main/"])
def test_a_revision_cannot_lead_to_another_page(revision):
    with pytest.raises(WrongUsage, match="is not a revision"):
        parse_hub_address(f"hf://a/b@{revision}")
    assert parse_hub_address("hf://a/b@refs/pr/1..2").revision == "refs/pr/1..2"  # the control


def load_pickled_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "WEIGHTS_FILE", "pytorch_model.bin")


@promise("hub-models", controls=[load_pickled_weights])
def test_weights_are_those_of_one_commit_and_safetensors_only(server, files, tmp_path):
    pickled = {"pytorch_model.bin": b"cos\nsystem\n"}
    first = serve(server, files | pickled)
    pretrained = read_weights(ADDRESS, NETWORK)
    folder = tmp_path / "here"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    expected = read_weights(str(folder), NETWORK)
    assert all(value.equal(expected.state[name]) for name, value in pretrained.state.items())
    assert backbone_of(folder_of(ADDRESS)) == NETWORK
    server.repositories[NAME].commit({"model.safetensors": b"other"})
    assert download_model(f"{ADDRESS}@{first}").name == first
    download_model.cache_clear()
    assert (download_model(ADDRESS) / "model.safetensors").read_bytes() == b"other"  # the control
    serve(server, {"config.json": files["config.json"], **pickled})
    with pytest.raises(OSError, match="other formats are not loaded"):
        download_model(f"{ADDRESS}@{next(iter(server.repositories[NAME].commits))}")
    assert not any(path.endswith(".bin") for _, path, _ in server.requests)


def test_a_cached_model_is_not_requested_again(server, files):
    serve(server, files)
    assert cached_model(ADDRESS) is None
    folder = download_model(ADDRESS)
    num_requests = len(server.requests)
    assert cached_model(ADDRESS) == download_model(ADDRESS) == folder
    assert licence(ADDRESS, NETWORK).startswith(f"the weights of {ADDRESS} (commit ")
    assert "licence unknown" in licence("hf://owner/other", "timm/resnet18")
    assert len(server.requests) == num_requests


class Case(NamedTuple):
    """A download that fails, and words of its message."""

    words: str
    address: str = ADDRESS
    token: str = TOKEN
    fault: Fault | None = None
    is_private: bool = False
    is_gated: bool = False


@pytest.mark.parametrize(
    "case",
    [
        Case("status 401", token="hf_wrong"),
        Case("its owner grants access", is_gated=True),
        Case("answered with status 503", fault=lambda *_: "unavailable"),
        Case("the connection to", fault=lambda _, path: "cut" * path.endswith(".safetensors")),
    ],
)
def test_each_fault_of_the_hub_is_one_line_without_the_token(server, files, monkeypatch, case):
    serve(server, files)
    repository = server.repositories[NAME]
    repository.is_private, repository.is_gated = case.is_private, case.is_gated
    monkeypatch.setenv("HF_TOKEN", case.token)
    server.fault = case.fault or server.fault
    with pytest.raises(OSError, match=case.words) as raised:
        download_model(case.address)
    text = str(raised.value)
    assert "\n" not in text and len(text) < 300 and (not case.token or case.token not in text)
    server.fault = lambda *_: ""
    repository.is_gated = False
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert download_model(ADDRESS)  # the control


# config.json of a repository, or values of its pretrained_cfg, and words of the message
HOSTILE = {
    "no JSON": (b"\x00", "damaged"),
    "deep": (b"[" * 100_000, "damaged"),
    "a list": ([], "damaged"),
    "no architecture": ({}, "damaged"),
    "not text": ({"architecture": ["resnet18"]}, "damaged"),
    "unknown": ({"architecture": "os.system"}, "has no network"),
    "a path": ({"architecture": "local-dir:/etc"}, "has no network"),
    "an address": ({"architecture": "hf-hub:other/net"}, "has no network"),
    "a pattern": ({"architecture": "*"}, "has no network"),
    "arguments": ({"model_args": {"pretrained_cfg": {"url": "http://x"}}}, "other arguments"),
    "a list of arguments": ({"model_args": ["a"]}, "damaged"),
    "no mapping": ({"pretrained_cfg": "http://127.0.0.1"}, "damaged"),
}
UNSUPPORTED: dict[str, Any] = {
    "crop_mode": ["center"],
    "crop_pct": 1.1,
    "std": [0, 1, 1],
    "input_size": [3, 2.5, 2.5],
}


@promise("hub-models")
@pytest.mark.parametrize("name", [*HOSTILE, *UNSUPPORTED])
def test_a_config_of_the_hub_names_a_network_of_timm_and_nothing_else(server, files, name):
    own = json.loads(files["config.json"])
    if name in UNSUPPORTED:
        content = {"pretrained_cfg": own["pretrained_cfg"] | {name: UNSUPPORTED[name]}}
        words = f"unsupported preparation .*{name}"
    else:
        content, words = HOSTILE[name]
    if isinstance(content, dict) and content:
        content = own | content
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    serve(server, files | {"config.json": text})
    with pytest.raises(ValueError, match=words):
        backbone_of(str(download_model(ADDRESS)))
        read_weights(ADDRESS, NETWORK)
    assert {path.split("/resolve")[0] for _, path, _ in server.requests} == {f"/{NAME}"}


@pytest.fixture(scope="module")
def checkpoint(colours, tmp_path_factory) -> Path:
    """A checkpoint with a temperature of 0.25."""
    folder = write_checkpoints(tmp_path_factory.mktemp("checkpoints"), colours, NETWORK, 32)
    return folder / "calibrated.ckpt"


def upload(server: HubServer, checkpoint: Path, cli) -> str:
    """Put the folder in timm's layout into the repository, and return the commit."""
    cli("export", checkpoint, "--format", "timm", "--out", "exported")
    return serve(server, {file.name: file.read_bytes() for file in Path("exported").iterdir()})


@promise("timm")
def test_predict_and_load_take_an_uploaded_model(colours, checkpoint, server, cli):
    upload(server, checkpoint, cli)
    line = (colours / "test", "--workers", "0", "--precision", "32-true", "--out")
    cli("predict", ADDRESS, *line, "hub.csv")
    cli("predict", checkpoint, *line, "own.csv")
    theirs = np.genfromtxt("hub.csv", delimiter=",", dtype=str)
    ours = np.genfromtxt("own.csv", delimiter=",", dtype=str)
    assert theirs[0].tolist() == ours[0].tolist()
    columns = [i for i, name in enumerate(ours[0]) if name.startswith("p_")]
    assert len(columns) == 3
    # the head is scaled, so that float32 rounds otherwise
    numbers = [rows[1:, columns].astype(float) for rows in (theirs, ours)]
    np.testing.assert_allclose(*numbers, rtol=0, atol=1e-5)
    images = [decode(path) for path in sorted((colours / "test").glob("*/*"))[::5]]
    predictions = load(ADDRESS, device="cpu").predict(images)
    own = [list(one.probabilities.values()) for one in predictions]
    np.testing.assert_allclose(own, probabilities(checkpoint, images), rtol=0, atol=1e-5)


@promise("no-code")
def test_nothing_is_requested_for_an_address_in_a_checkpoint(colours, checkpoint, server, cli):
    content = torch.load(checkpoint, weights_only=True)
    content["hyper_parameters"]["weights"] = "hf://owner/hostile"
    content["finetune"].pop("licence_of_the_weights", None)
    torch.save(content, "untrusted.ckpt")
    cli("export", "untrusted.ckpt", "--format", "timm", "--out", "folder")
    cli("predict", "untrusted.ckpt", next((colours / "test").glob("*/*")), "--workers", "0")
    assert server.requests == []


@pytest.mark.slow
def test_a_fit_from_weights_on_the_hub_has_their_network(colours, checkpoint, server, cli, caplog):
    commit = upload(server, checkpoint, cli)
    pairs = zip(QUICK[::2], QUICK[1::2], strict=True)
    left = ("--model.weights", "--model.backbone", "--data.image_size")
    options = [word for pair in pairs if pair[0] not in left for word in pair]
    line = ("fit", colours, "--weights", ADDRESS, *options, "--resume")
    cli(*line)
    run = Path("runs/fit/version_0")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["model"]["backbone"] == NETWORK and settings["model"]["weights"] == ADDRESS
    assert settings["data"]["init_args"]["image_size"] == 32
    text = json.loads((run / "run.json").read_text())["licence_of_the_weights"]
    assert text.startswith(f"the weights of {ADDRESS} (commit {commit[:12]})")
    assert "random weights, which need no licence" in text  # of those that were uploaded
    assert f"weights: {ADDRESS} (commit {commit[:12]}), {NETWORK}" in caplog.text
    num_requests = len(server.requests)
    cli(*line, "--trainer.max_epochs", "2")  # continues, from its own checkpoint
    assert json.loads((run / "run.json").read_text())["licence_of_the_weights"] == text
    cli("test", run, "--workers", "0")
    assert len(server.requests) == num_requests
