"""Weights on the hub: addresses, downloads, errors in one line, and untrusted configs."""

import json
import socket
from typing import NamedTuple

import pytest
import timm
import torch
from hub_server import TOKEN, Fault, HubServer, Repository, hub_server
from huggingface_hub.utils import HFValidationError, validate_repo_id
from promise import promise
from timm.models import save_for_hf

from finetune.models.hub import (
    cached_model,
    download_model,
    is_hub,
    name_with_commit,
    parse_hub_address,
)
from finetune.models.timm_backbones import backbone_of, describe, folder_of
from finetune.models.weights import read_weights
from finetune.runs.licence import licence
from finetune.system.messages import WrongUsage

NETWORK = "test_convnext"
NAME = "owner/net"
ADDRESS = f"hf://{NAME}"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """config.json and model.safetensors of a random network, as timm writes them."""
    folder = tmp_path_factory.mktemp("net")
    torch.manual_seed(0)
    network = timm.create_model(NETWORK, num_classes=3)
    config = {"label_names": ["a", "b", "c"]}
    save_for_hf(network, str(folder), model_config=config, safe_serialization=True)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def server(tmp_path):
    with hub_server(tmp_path / "cache") as server:
        yield server


@pytest.fixture
def served(server, files) -> HubServer:
    server.repositories[NAME] = Repository()
    server.repositories[NAME].commit(files)
    return server


def put_config(server: HubServer, files: dict[str, bytes], config: object) -> None:
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    server.repositories[NAME] = Repository()
    server.repositories[NAME].commit(files | {"config.json": text})


def changed(files, **pretrained_cfg):
    config = json.loads(files["config.json"])
    return {**config, "pretrained_cfg": config["pretrained_cfg"] | pretrained_cfg}


def test_addresses():
    assert parse_hub_address("hf://timm/resnet18.a1_in1k") == ("timm/resnet18.a1_in1k", None)
    assert parse_hub_address("hf://a/b@refs/pr/1") == ("a/b", "refs/pr/1")
    assert is_hub("hf://a/b") and not is_hub("a/b") and not is_hub(None)


@pytest.mark.parametrize(
    "address", ["hf://name", "hf://a/b/c", "hf://user:secret@host/name", "hf://../b", "hf://a/b@"]
)
def test_other_addresses_are_refused_without_showing_them(address):
    with pytest.raises(WrongUsage, match="an address on the Hugging Face hub is hf://") as raised:
        parse_hub_address(address)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["a--b", "a..b", "a-", "a.", "a.git", "a" * 97])
def test_names_that_the_hub_does_not_allow_are_refused_without_a_request(name):
    with pytest.raises(HFValidationError):  # as by its client, which does so after the first work
        validate_repo_id(f"owner/{name}")
    with pytest.raises(WrongUsage, match="the Hugging Face hub allows no name owner/a"):
        parse_hub_address(f"hf://owner/{name}")


@pytest.mark.parametrize("name", ["a-b", "a.b", "_a_", "a.github", "a" * 96])
def test_other_names_are_allowed(name):
    validate_repo_id(f"owner/{name}")
    assert parse_hub_address(f"hf://owner/{name}").repository == f"owner/{name}"


@pytest.mark.parametrize("revision", ["..", "a/../b", "./main", "a//b", "main/"])
def test_a_revision_cannot_lead_to_another_page(revision):
    with pytest.raises(WrongUsage, match="is not a revision"):
        parse_hub_address(f"hf://a/b@{revision}")
    assert parse_hub_address("hf://a/b@v1..2").revision == "v1..2"  # the control


def test_weights_are_those_of_the_repository(served, files, tmp_path):
    pretrained = read_weights(ADDRESS, f"timm/{NETWORK}")
    folder = tmp_path / "here"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    expected = read_weights(str(folder), f"timm/{NETWORK}")
    assert pretrained.class_names == ["a", "b", "c"]
    assert all(value.equal(expected.state[name]) for name, value in pretrained.state.items())
    assert backbone_of(folder_of(ADDRESS)) == f"timm/{NETWORK}"
    assert "pytorch_model.bin" not in {path.rpartition("/")[2] for _, path, _ in served.requests}


@promise("hub-models")
def test_files_are_of_one_commit_and_of_the_revision(served, files):
    first = next(iter(served.repositories[NAME].commits))
    served.repositories[NAME].commit({"model.safetensors": b"other"})
    assert download_model(f"{ADDRESS}@{first}").name == first
    assert name_with_commit(ADDRESS, download_model(f"{ADDRESS}@{first}")).endswith(
        f"(commit {first[:12]})"
    )
    assert (download_model(ADDRESS) / "model.safetensors").read_bytes() == b"other"  # control


def test_a_cached_model_is_not_requested_again(served):
    assert cached_model(ADDRESS) is None
    folder = download_model(ADDRESS)
    num_requests = len(served.requests)
    assert cached_model(ADDRESS) == folder
    assert download_model(ADDRESS) == folder
    text = licence(ADDRESS, f"timm/{NETWORK}")
    assert text.startswith(f"the weights of {ADDRESS} (commit ")
    assert licence("hf://owner/other", "timm/resnet18").startswith(
        "hf://owner/other: licence unknown"
    )
    assert len(served.requests) == num_requests


def test_a_private_repository_needs_the_token(served, monkeypatch):
    served.repositories[NAME].is_private = True
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(OSError, match="there is no such repository, or it is private") as raised:
        download_model(ADDRESS)
    assert "\n" not in str(raised.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert download_model(ADDRESS)


def unavailable(method: str, path: str) -> str:
    return "unavailable"


def cut(method: str, path: str) -> str:
    return "cut" if method == "GET" and path.endswith(".safetensors") else ""


class Case(NamedTuple):
    """A download that fails, and a pattern of its message."""

    message: str
    address: str = ADDRESS
    token: str = TOKEN
    fault: Fault | None = None


@pytest.mark.parametrize(
    "case",
    [
        Case("there is no such repository, or the token cannot read", address="hf://owner/none"),
        Case("there is no such revision", address=f"{ADDRESS}@none"),
        Case("the token is not valid", token="hf_wrong"),
        Case("answered with status 503: try again later", fault=unavailable),
        Case("cannot download model.safetensors of hf://owner/net: the connection to", fault=cut),
    ],
)
def test_each_fault_is_one_line_without_the_token(served, monkeypatch, case):
    monkeypatch.setenv("HF_TOKEN", case.token)
    served.fault = case.fault or served.fault
    with pytest.raises(OSError, match=case.message) as raised:
        download_model(case.address)
    text = str(raised.value)
    assert "\n" not in text and case.token not in text and len(text) < 300
    # control: the model can be downloaded
    served.fault = lambda method, path: ""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert download_model(ADDRESS)


def test_a_server_that_cannot_be_reached_is_one_line(server, monkeypatch):
    from huggingface_hub import constants

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    with pytest.raises(OSError, match=f"{address} cannot be reached, and it is not in the cache"):
        download_model(ADDRESS)


@promise("hub-models")
def test_weights_that_are_not_safetensors_are_not_loaded(served, files):
    served.repositories[NAME] = Repository()
    pickled = {"config.json": files["config.json"], "pytorch_model.bin": b"cos\nsystem\n"}
    served.repositories[NAME].commit(pickled)
    with pytest.raises(OSError, match="no such file, and weights in other formats are not loaded"):
        read_weights(ADDRESS, f"timm/{NETWORK}")
    assert not any(path.endswith(".bin") for _, path, _ in served.requests)


HOSTILE = {
    "no JSON": b"\x00",
    "deep": b"[" * 100_000,
    "a list": [],
    "no architecture": {},
    "an architecture that is no text": {"architecture": ["resnet18"]},
    "an unknown architecture": {"architecture": "os.system"},
    "a path": {"architecture": "local-dir:/etc"},
    "an address": {"architecture": "hf-hub:other/net"},
    "a pattern": {"architecture": "*"},
}


@promise("hub-models")
@pytest.mark.parametrize("config", HOSTILE.values(), ids=HOSTILE)
def test_a_config_names_a_network_of_timm_and_nothing_else(server, files, config):
    put_config(server, files, config)
    with pytest.raises(ValueError, match=r"is damaged, or not written by timm|has no network"):
        backbone_of(download_model(ADDRESS))
    assert {path.split("/resolve")[0] for _, path, _ in server.requests} == {f"/{NAME}"}


HOSTILE_VALUES = {
    "with other arguments": {"model_args": {"pretrained_cfg": {"url": "http://127.0.0.1"}}},
    "its model_args are not a mapping": {"model_args": ["a"]},
    "its pretrained_cfg is not a mapping": {"pretrained_cfg": "http://127.0.0.1"},
    "an unsupported preparation": {"pretrained_cfg": {"crop_mode": ["center"]}},
    "does not define how images are prepared": {"pretrained_cfg": {"crop_pct": 10**400}},
    "standard deviation .* not supported": {"pretrained_cfg": {"std": [0, 1, 1]}},
    "only square RGB images": {"pretrained_cfg": {"input_size": [3, 2.5, 2.5]}},
}


@pytest.mark.parametrize(("reason", "values"), HOSTILE_VALUES.items(), ids=HOSTILE_VALUES)
def test_a_config_with_unsupported_values_is_refused(server, files, reason, values):
    config = json.loads(files["config.json"])
    about = values.get("pretrained_cfg")
    if isinstance(about, dict):
        config = changed(files, **about)
    else:
        config |= values
    put_config(server, files, config)
    with pytest.raises(ValueError, match=reason):
        read_weights(ADDRESS, f"timm/{NETWORK}")


def test_names_and_licence_of_other_types_are_ignored(server, files):
    config = {**changed(files, license=["mit"]), "label_names": [["a"], "b", "c"]}
    put_config(server, files, config)
    about = describe(f"timm/{NETWORK}", folder_of(ADDRESS))
    assert about.licence is None and about.class_names is None
    put_config(server, files, changed(files, license="mit"))
    download_model.cache_clear()
    assert describe(f"timm/{NETWORK}", folder_of(ADDRESS)).licence == "mit"  # control


def test_another_network_is_named(served):
    with pytest.raises(WrongUsage, match=f"hf://owner/net is of timm/{NETWORK}, not of resnet18"):
        read_weights(ADDRESS, "resnet18")
    with pytest.raises(WrongUsage, match=f"is of {NETWORK}, not of resnet18"):
        read_weights(ADDRESS, "timm/resnet18")
