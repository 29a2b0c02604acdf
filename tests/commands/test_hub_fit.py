"""A fit on images in a dataset of the hub: the weights are those of the same folder on a disk."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from colours import QUICKEST
from fitted_weights import are_equal, error_line, fit, weights
from hub_server import TOKEN, HubServer, dataset_server, environment, put_folder
from processes import _free_port, finetune, rank_environment

from finetune.data.storage import STORAGES

NAME = "owner/photos"
PLACE = f"hf://datasets/{NAME}/set"
UNTESTED = ("--test_after_fit", "false")
NO_CACHE = ("--data.cache_limit_gb", 0)  # another test of this folder may have left one


@pytest.fixture
def server(colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server with the images of `colours` in the folder `set` of a dataset, and no client yet."""
    with dataset_server(tmp_path / "cache", monkeypatch) as server:
        put_folder(server, NAME, colours, "set")
        yield server


def replace_one(server: HubServer, colours: Path) -> str:
    """Replace an image by another one, and return the new commit."""
    content = Path(colours, "train/red/01.png").read_bytes()
    return server.repositories[f"datasets/{NAME}"].commit({"set/train/red/00.png": content})


def about(run: str) -> str:
    return Path("runs/fit", run, "about.json").read_text()


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_weights_are_those_of_the_folder_on_a_disk(server, colours, cli, num_workers):
    options = ["--data.num_workers", num_workers, "--data.mixup", 0.2]
    local = fit(cli, colours, "local", *options)
    assert are_equal(local, fit(cli, PLACE, "there", *options))
    asked = [path for _, path, _ in server.requests if path.startswith("/api/")]
    assert len(asked) == 2 and {method for method, _, _ in server.requests} == {"GET"}
    commit = next(iter(server.repositories[f"datasets/{NAME}"].commits))
    assert f"{PLACE} at commit {commit}" in about("there") and "commit" not in about("local")
    for path in Path("runs").rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
    newer = replace_one(server, colours)
    other = fit(cli, PLACE, "changed", *options)
    assert not are_equal(local, other) and newer in about("changed")  # the control


@pytest.mark.slow
def test_two_processes_train_the_weights_of_the_folder_on_a_disk(
    server, colours, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    options = [*QUICKEST, "--devices", 2, "--workers", 1]
    done = finetune("fit", colours, *options, "--name", "local", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # new interpreters, since the client of the hub reads the variables when it is imported
    command = [sys.executable, "-m", "finetune", "fit", PLACE, *options, "--name", "there"]
    port = _free_port()
    ranks = []
    for rank in range(2):
        variables = {**environment(server, tmp_path / "home"), **rank_environment(rank, 2, port)}
        ranks.append(subprocess.Popen(list(map(str, command)), env={**os.environ, **variables}))
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    assert are_equal(weights("local"), weights("there"))


@pytest.mark.slow
def test_a_table_of_images_there(server, colours, cli):
    rows = [
        f"{path.relative_to(colours)},{path.parent.name},{path.parent.parent.name}"
        for path in sorted(colours.rglob("*.png"))
    ]
    Path("labels.csv").write_text("\n".join(["path,label,split", *rows]))
    local = fit(cli, "labels.csv", "local", "--data.root", colours)
    there = fit(cli, "labels.csv", "there", "--data.root", PLACE)
    assert are_equal(local, there)
    Path("labels.csv").write_text(f"path,label\n{PLACE.replace('photos', 'other')}/x.png,red\n")
    text = error_line(cli, "fit", "labels.csv", *QUICKEST, "--data.root", PLACE)
    assert "is an address outside of the folder of the images" in text


@pytest.mark.slow
def test_other_commands_read_it(server, colours, cli):
    fit(cli, PLACE, "run")
    for root in (PLACE, colours):
        cli("validate", "runs/fit/run", root)
        cli("test", "runs/fit/run", root)
        cli("predict", "runs/fit/run", f"{root}/test", "--out", f"{Path(str(root)).name}.csv")
        with pytest.raises(SystemExit):
            cli("check", root, "--out", f"check-{Path(str(root)).name}")
    tables = [
        Path(name).read_text().replace(f"{root}/", "")
        for name, root in (("set.csv", PLACE), (f"{colours.name}.csv", colours))
    ]
    assert tables[0] == tables[1] and "red" in tables[0]
    findings = [
        json.loads(Path(name, "check.json").read_text())
        for name in ("check-set", f"check-{colours.name}")
    ]
    assert findings[0].pop("root") == PLACE
    assert findings[0]["findings"] == findings[1]["findings"]


@pytest.mark.slow
def test_a_run_continues_at_the_commit_where_it_began(server, colours, cli):
    options = [*NO_CACHE, *UNTESTED]
    local = fit(cli, colours, "local", *options, "--trainer.max_epochs", 2)
    fit(cli, PLACE, "run", *options)
    commit = next(iter(server.repositories[f"datasets/{NAME}"].commits))
    replace_one(server, colours)
    text = error_line(cli, "fit", "--resume", "runs/fit/run", "--trainer.max_epochs", 2)
    assert "images" in text
    at_first = PLACE.replace("photos", f"photos@{commit}")
    cli("fit", at_first, *QUICKEST, *options, "--resume", "--trainer.max_epochs", 2)
    assert are_equal(local, weights("run"))


def test_what_is_wrong_is_reported_in_one_line(server, cli, monkeypatch):
    repository = server.repositories[f"datasets/{NAME}"]

    def line(*arguments: object) -> str:
        STORAGES.pop("hf", None)
        return error_line(cli, *arguments)

    def fit_line(root: str = PLACE) -> str:
        return line("fit", root, *QUICKEST)

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
        assert "can only be read" in line(*arguments)
    assert "review needs a local folder" in line("review", PLACE)
    assert not server.requests and not Path("hf:").exists()


def test_a_checkpoint_chooses_no_dataset(server, colours, cli):
    fit(cli, PLACE, "run", *UNTESTED)
    STORAGES.pop("hf", None)
    server.requests.clear()
    text = error_line(cli, "test", "runs/fit/run")
    assert "a checkpoint may not choose an address" in text and PLACE in text
    cli("test", "runs/fit/run", colours)
    assert not server.requests and "hf" not in STORAGES
    cli("test", "runs/fit/run", PLACE)  # the control
    assert server.requests


@pytest.mark.slow
def test_the_command_names_no_other_packages_to_the_hub(server, colours, tmp_path):
    command = [sys.executable, "-m", "finetune", "check", PLACE]
    variables = {**os.environ, **environment(server, tmp_path / "home")}
    subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, timeout=120)
    assert server.user_agents and not any("torch" in agent for agent in server.user_agents)
    assert all(agent.startswith("unknown/None; hf_hub/") for agent in server.user_agents)
