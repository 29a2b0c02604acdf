"""The commands in docs/cloud.md, and in the files that it names, are accepted by the programs that they call."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch
from urllib.error import HTTPError

import pytest
import yaml
from command_lines import parse, parse_typed
from paths import ROOT
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from torch.distributed import run as torchrun

from finetune.commands import config_files
from finetune.commands.flag_checks import check_flags
from finetune.commands.parsed_line import parse_line
from finetune.distributed.launch import num_processes
from finetune.runs import run_download

DOCS = ROOT / "docs"
PAGE = (DOCS / "cloud.md").read_text("utf-8")
LINES = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
    for line in block.split("\n")
    if line
]
COMMANDS = [line.strip() for line in "\n".join(LINES).replace("\\\n", " ").splitlines()]
FIT = [line for line in COMMANDS if re.search(r"\bfinetune fit ", line)]
TORCHRUN = [line for line in COMMANDS if "--entrypoint torchrun" in line]
JOB = yaml.safe_load((DOCS / "pytorchjob.yaml").read_text("utf-8"))


def parse_torchrun(arguments: list[str]) -> Any:
    """Return the flags that torchrun finds, and those of the command that it starts."""
    flags = torchrun.parse_args(arguments)
    assert flags.module and flags.training_script == "finetune"
    return flags, parse_typed(flags.training_script_args)


def words_after(line: str, word: str) -> list[str]:
    words = shlex.split(line)
    return words[words.index(word) + 1 :]


RAY = [words_after(line, "ray_fit.py") for line in COMMANDS if line.startswith("python ray_fit.py")]


def test_a_wrong_flag_is_caught(capsys):
    with pytest.raises(SystemExit):
        parse(["fit", "--trainer.num_node", "2"])
    assert "num_nodes" in capsys.readouterr().err


@pytest.mark.parametrize("line", [line for line in FIT if line not in TORCHRUN])
def test_finetune_commands(line):
    arguments = words_after(line, "finetune")
    assert (
        "--config" not in arguments
        or arguments[arguments.index("--config") + 1] in config_files.shipped()
    )
    no_objects = patch.object(run_download, "_e_tags", return_value={})
    no_runs = patch.object(run_download, "names_there", return_value=[])
    with no_objects, no_runs:  # an address is only parsed
        parse_typed(arguments)


@pytest.mark.parametrize("line", TORCHRUN)
def test_torchrun_commands(line):
    flags, settings = parse_torchrun(words_after(line, "finetune"))
    assert "--resume" in line, "torchrun starts it again after a crash"
    assert settings.trainer.default_root_dir != "runs"
    least, _, most = flags.nnodes.rpartition(":")
    if least and least != most:  # the numbers change while it runs
        assert settings.trainer.devices == "auto" and settings.trainer.num_nodes == 1
        return
    assert str(settings.trainer.devices) == flags.nproc_per_node
    # 1:1 is torchrun's default
    assert str(settings.trainer.num_nodes) == most


def test_containers_get_what_they_need():
    runs = [line for line in COMMANDS if line.startswith("docker run")]
    assert runs and set(runs) == {line for line in FIT if line.startswith("docker")}
    for line in runs:
        assert (
            "--gpus all --shm-size=8g" in line
            and '--user "$(id -u):$(id -g)"' in line
            and ":/workspace" in line
        )


def test_files_that_the_page_names_exist():
    named = re.findall(r"\]\(((?!http|#)[^)#]+)", PAGE)
    assert {"slurm.sh", "pytorchjob.yaml"} <= set(named)
    assert [name for name in named if not (DOCS / name).exists()] == []


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    """The containers of the manifests whose entrypoint is finetune, with the names of their files."""
    for name in ("kubernetes_fit.yaml", "kubernetes_serve.yaml"):
        for part in yaml.safe_load_all((DOCS / name).read_text("utf-8")):
            if part["kind"] in ("Deployment", "Job"):
                yield from ((name, one) for one in part["spec"]["template"]["spec"]["containers"])
    compose = yaml.safe_load((DOCS / "compose.yaml").read_text("utf-8"))
    for service in compose["services"].values():
        yield "compose.yaml", {**service, "args": service["command"]}


@pytest.mark.parametrize(("name", "container"), list(containers()))
def test_commands_of_containers(name, container):
    command, *rest = container["args"]
    check_flags(command, parse_line(rest))
    assert (command == "fit") == ("--resume" in rest), "a container may be started again"
    probes = {key: probe for key, probe in container.items() if key.endswith("Probe")}
    for probe in probes.values():
        assert probe["httpGet"]["path"] in ("/healthz", "/readyz")
    assert bool(probes) == (name == "kubernetes_serve.yaml")


def test_the_health_check_of_compose_fails_where_nothing_serves():
    compose = yaml.safe_load((DOCS / "compose.yaml").read_text("utf-8"))
    _, python, flag, code = compose["services"]["serve"]["healthcheck"]["test"]
    assert (python, flag) == ("python", "-c")

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/readyz" else 503)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = code.replace("8000", str(server.server_port))
        exec(here, {})
        with pytest.raises(HTTPError):
            exec(here.replace("readyz", "metrics"), {})
        server.shutdown()


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on two nodes, with programs that only write down how they were called."""
    for name, code in (("srun", "${SRUN_CODE:-0}"), ("scontrol", "0")):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/{name}.called"\nexit {code}\n'
        )
        program.chmod(0o755)
    names = {
        "JOB_ID": 7,
        "JOB_NAME": "finetune",
        "NNODES": 2,
        "NTASKS_PER_NODE": 4,
        "CPUS_PER_TASK": 8,
    }
    variables = {f"SLURM_{name}": str(value) for name, value in names.items()}
    return {**os.environ, **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def submit(
    cluster: dict[str, str], *arguments: str, **variables: str
) -> tuple[int, list[str], list[str]]:
    """Run the script as SLURM would and return its exit code, what srun was called with, and scontrol."""
    process = subprocess.run(
        ["bash", DOCS / "slurm.sh", *arguments], env={**cluster, **variables}, timeout=20
    )
    folder = Path(cluster["PATH"].partition(":")[0])
    called = [folder / f"{name}.called" for name in ("srun", "scontrol")]
    srun, scontrol = [path.read_text().splitlines() if path.exists() else [] for path in called]
    return process.returncode, srun, scontrol


def test_slurm_starts_a_run_of_the_jobs_own(cluster):
    code, srun, scontrol = submit(cluster, "--config", "hotdog.yaml", "--data.root", "a b")
    assert (code, scontrol) == (0, [])
    assert srun[:2] == ["--cpus-per-task=8", "finetune"]
    settings = parse(srun[2:])
    assert "--resume" in srun and settings.trainer.default_root_dir == "runs/finetune-7"
    assert (settings.trainer.num_nodes, int(settings.trainer.devices)) == (2, 4)
    assert (settings.data.init_args.num_workers, settings.data.init_args.root) == (8, "a b")


@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [("143", "0", True), ("143", "20", False), ("1", "0", False)],
)
def test_slurm_requeues_what_was_stopped_and_saved(cluster, code, restarts, is_requeued):
    returned, _, scontrol = submit(cluster, SRUN_CODE=code, SLURM_RESTART_COUNT=restarts)
    assert str(returned) == code
    assert scontrol == (["requeue", "Incomplete", "7"] if is_requeued else [])


def test_slurm_options():
    lines = (DOCS / "slurm.sh").read_text().splitlines()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", "\n".join(lines), re.M))
    assert options["gpus-per-node"] == options["ntasks-per-node"], (
        "Lightning wants a task for each GPU"
    )
    assert (
        options["signal"].startswith("TERM@")
        and "requeue" in options
        and options["open-mode"] == "append"
    )
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:]), (
        "sbatch stops reading there"
    )


@pytest.mark.parametrize(("kind", "rank"), [("Master", 0), ("Worker", 1)])
def test_kubernetes_job(kind, rank, monkeypatch):
    replicas = JOB["spec"]["pytorchReplicaSpecs"]
    nodes = sum(replica["replicas"] for replica in replicas.values())
    per_node = JOB["spec"]["nprocPerNode"]
    pod = replicas[kind]["template"]["spec"]
    (container,) = pod["containers"]
    # What the operator sets (kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go and master.go).
    operators = {"NNODES": nodes, "NPROC_PER_NODE": per_node, "NODE_RANK": rank}
    operators |= {"MASTER_ADDR": "finetune-master-0", "MASTER_PORT": 23456}
    for name, value in operators.items():
        monkeypatch.setenv(f"PET_{name}", str(value))

    assert (JOB["apiVersion"], JOB["kind"], replicas["Master"]["replicas"]) == (
        "kubeflow.org/v1",
        "PyTorchJob",
        1,
    )
    assert container["name"] == "pytorch" and container["command"][0] == "torchrun"
    flags, settings = parse_torchrun(container["command"][1:] + container["args"])
    assert (flags.nnodes, flags.nproc_per_node, int(flags.node_rank)) == (
        str(nodes),
        per_node,
        rank,
    )
    assert (flags.master_addr, int(flags.master_port), flags.rdzv_backend) == (
        "finetune-master-0",
        23456,
        "static",
    )
    assert "--resume" in container["args"] and settings.trainer.num_nodes == nodes
    assert (
        str(settings.trainer.devices)
        == per_node
        == str(container["resources"]["limits"]["nvidia.com/gpu"])
    )

    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory" and "emptyDir" in mounts["/tmp"]
    assert "persistentVolumeClaim" in mounts[container["workingDir"]]
    user = pod["securityContext"]
    assert user["runAsNonRoot"] and user["runAsUser"] == user["fsGroup"] != 0
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_trainjob(monkeypatch):
    job = yaml.safe_load((DOCS / "trainjob.yaml").read_text("utf-8"))
    trainer = job["spec"]["trainer"]
    # What the Trainer sets (kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go).
    operators = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"]}
    operators |= {"NODE_RANK": 1, "MASTER_ADDR": "finetune-node-0-0.finetune", "MASTER_PORT": 29500}
    for name, value in operators.items():
        monkeypatch.setenv(f"PET_{name}", str(value))
    assert trainer["command"][0] == "torchrun"
    flags, settings = parse_torchrun(trainer["command"][1:] + trainer["args"])
    assert (flags.nnodes, flags.nproc_per_node, int(flags.node_rank)) == ("2", "4", 1)
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == flags.nproc_per_node
    assert "--resume" in trainer["args"] and settings.trainer.num_nodes == 1
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes


@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilot(nodes, tmp_path):
    task = yaml.safe_load((DOCS / "skypilot.yaml").read_text("utf-8"))
    program = tmp_path / "torchrun"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    addresses = [f"10.0.0.{i}" for i in range(nodes)]
    variables = {
        "NUM_NODES": str(nodes),
        "NUM_GPUS_PER_NODE": "1",
        "NODE_RANK": str(nodes - 1),
        "NODE_IPS": "\n".join(addresses),
    }
    done = subprocess.run(
        ["bash", "-ec", task["run"].replace(" /photos ", f" {tmp_path} ")],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            **{f"SKYPILOT_{name}": value for name, value in variables.items()},
        },
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    flags, settings = parse_torchrun(done.stdout.splitlines())
    assert (flags.nnodes, flags.nproc_per_node) == (str(nodes), "1")
    assert (flags.master_addr, flags.node_rank) == ("10.0.0.0", nodes - 1)
    assert "--resume" in task["run"] and settings.data.init_args.root == str(tmp_path)
    assert "/photos" in task["file_mounts"]
    assert settings.trainer.default_root_dir == "/runs/photos"
    assert task["file_mounts"]["/runs"]["mode"] == "MOUNT_CACHED"


def run_ray_script(rank: int, arguments: list[str], monkeypatch) -> None:
    """Run the script's part for one of two workers, with the few functions of Ray that it calls replaced."""
    context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: 2)
    names = {
        "ray": {
            "get_gpu_ids": lambda: [5],
            "util": SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"),
        },
        "ray.train": {"get_context": lambda: context},
        "ray.train.collective": {"broadcast_from_rank_zero": lambda value: value},
        "ray.train.torch": {},
    }
    for name, attributes in names.items():
        monkeypatch.setitem(sys.modules, name, MagicMock(**attributes))
    runpy.run_path(str(DOCS / "ray_fit.py"))["run_worker"](arguments)


@pytest.mark.parametrize("rank", [0, 1])
def test_ray_workers_start_a_process_each_as_torchrun_would(rank, monkeypatch):
    started = {}
    monkeypatch.setattr(
        subprocess, "run", lambda command, env, check: started.update(command=command, env=env)
    )
    run_ray_script(rank, RAY[0][2:], monkeypatch)
    monkeypatch.setattr(os, "environ", started["env"])
    environment = TorchElasticEnvironment()
    assert TorchElasticEnvironment.detect()
    assert (environment.global_rank(), environment.node_rank(), environment.local_rank()) == (
        rank,
        rank,
        0,
    )
    assert environment.main_address == "10.0.0.1" and environment.main_port > 0
    assert num_processes("auto", 1, []) == (1, 2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    assert started["command"][1:3] == ["-m", "finetune"]


def test_ray_commands(tmp_path):
    fit, predict = (words[2:] for words in RAY)
    assert fit[0] == "fit" and predict[0] == "predict" and "--resume" in fit
    settings = parse_typed([str(tmp_path) if word == "/shared/photos" else word for word in fit])
    assert settings.trainer.default_root_dir == "/shared/runs"
