"""A fit on images in a dataset of the hub: the weights are those of the same folder on a disk."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from colours import QUICKEST
from fitted_weights import are_equal, error_line, fit
from hub_server import TOKEN, HubServer, environment, hub_server, put_folder
from promise import control, promise

NAME = "owner/photos"
PLACE = f"hf://datasets/{NAME}/set"
UNTESTED = ("--test_after_fit", "false")
NO_CACHE = ("--data.cache_limit_gb", 0)  # another test of this folder may have left one


@pytest.fixture
def server(colours: Path, tmp_path: Path) -> Iterator[HubServer]:
    """The server with the images of `colours` in the folder `set` of a dataset."""
    with hub_server(tmp_path / "cache") as server:
        put_folder(server, NAME, colours, "set")
        yield server


def replace_one(server: HubServer, colours: Path) -> str:
    """Replace an image by another one, and return the new commit."""
    content = Path(colours, "train/red/01.png").read_bytes()
    return server.repositories[f"datasets/{NAME}"].commit({"set/train/red/00.png": content})


def about(run: str) -> str:
    return Path("runs/fit", run, "about.json").read_text()


@promise("hub-datasets")
@control("hub-datasets")
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_weights_are_those_of_the_folder_on_a_disk(server, colours, cli, num_workers):
    options = ["--data.num_workers", num_workers, "--data.mixup", 0.2]
    local = fit(cli, colours, "local", *options)
    assert are_equal(local, fit(cli, PLACE, "there", *options))
    assert {method for method, _, _ in server.requests} == {"GET", "HEAD"}
    commit = next(iter(server.repositories[f"datasets/{NAME}"].commits))
    assert f"{PLACE} in " in about("there") and f"{commit}/set" in about("there")
    for path in Path("runs").rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
    newer = replace_one(server, colours)
    other = fit(cli, PLACE, "changed", *options)
    assert not are_equal(local, other) and newer in about("changed")  # the control


def test_what_is_wrong_is_reported_in_one_line(server, cli, monkeypatch):
    repository = server.repositories[f"datasets/{NAME}"]

    def fit_line(root: str = PLACE) -> str:
        return error_line(cli, "fit", root, *QUICKEST)

    assert f"'{PLACE}-none' does not exist" in fit_line(f"{PLACE}-none")
    assert "there is no such repository" in fit_line("hf://datasets/owner/none")
    assert "there is no such revision" in fit_line(f"hf://datasets/{NAME}@none")
    assert "images at hf://datasets/OWNER/NAME" in fit_line(f"hf://{NAME}")
    assert "hf://datasets/OWNER/NAME" in fit_line("hf://datasets/owner")
    assert "copy it" in fit_line(f"{PLACE}/labels.csv")
    repository.is_gated = True
    assert "its owner grants access" in fit_line()
    repository.is_gated = False
    repository.is_private = True
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    text = fit_line()
    assert "no valid token is set" in text and "another" not in text
    repository.is_private = False
    assert "the token is not valid" in fit_line()
    server.requests.clear()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for arguments in (
        ("fit", "x", "--out", PLACE),
        ("fit", "x", "--weights", f"{PLACE}/best.ckpt"),
        ("predict", f"{PLACE}/best.ckpt", "x"),
    ):
        assert "can only be read" in error_line(cli, *arguments)
    assert not server.requests and not Path("hf:").exists()


@promise("no-code")
def test_a_checkpoint_chooses_no_dataset(server, colours, cli):
    fit(cli, PLACE, "run", *UNTESTED)
    server.requests.clear()
    text = error_line(cli, "test", "runs/fit/run")
    assert "a checkpoint may not choose an address" in text and PLACE in text
    cli("test", "runs/fit/run", colours)
    assert not server.requests
    cli("test", "runs/fit/run", PLACE)  # the control
    assert server.requests


@pytest.mark.slow
def test_the_command_names_no_other_packages_to_the_hub(server, colours, tmp_path):
    command = [sys.executable, "-m", "finetune", "check", PLACE]
    variables = {**os.environ, **environment(server, tmp_path / "home")}
    subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, timeout=120)
    assert server.user_agents and not any("torch" in agent for agent in server.user_agents)
    assert all(agent.startswith("unknown/None; hf_hub/") for agent in server.user_agents)
