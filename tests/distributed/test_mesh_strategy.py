"""What a mesh can't do, told in a line, and values written into parameters that are spread or whole."""

import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from colours import QUICKEST
from processes import finetune
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from finetune.distributed.mesh_strategy import MeshStrategy, assign, shard
from finetune.distributed.tensor_parallel import shard_head
from finetune.models.backbones import build
from finetune.system.messages import WrongUsage


def test_classes_that_two_axes_cannot_share_are_refused():
    axes = {"data_parallel": Mock(size=lambda: 2), "tensor_parallel": Mock(size=lambda: 2)}
    with pytest.raises(ValueError, match=r"3 classes can't be shared out evenly on a mesh of 2 x 2: give one axis"):
        shard(build("small_cnn", 3), axes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.strategy.tensor_parallel_size", "2"], "multiplied should equal the world size"),
        (["--trainer.gradient_clip_val", "1"], "gradient_clip_val can't be had"),
    ],
)
def test_what_a_mesh_can_not_do_is_told_in_a_line(colours, tmp_path, options, message):
    mesh = ["--trainer.strategy", "finetune.MeshStrategy", "--trainer.strategy.data_parallel_size", "1"]
    mesh += ["--trainer.strategy.tensor_parallel_size", "1", "--trainer.devices", "1"]
    done = finetune("fit", "--data.root", colours, *QUICKEST, *mesh, *options, cwd=tmp_path)
    *before, line = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("finetune: error: ") and message in line, done.stderr
    assert all(told.startswith(("pictures: ", "network: ", "training: ")) for told in before), done.stderr


@pytest.mark.slow
def test_weights_alone_are_tested_on_a_mesh(colours, tmp_path):
    """An exported file holds no optimizer's state."""

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "finetune", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    alone = run("fit", str(colours), *QUICKEST, "--trainer.max_steps", "1")
    run("export", "runs/fit/version_0", "--format", "safetensors", "--output", "some.safetensors")
    mesh = ["--trainer.strategy", "model_parallel", "--trainer.accelerator", "cpu", "--devices", "2"]
    told = run("test", "some.safetensors", str(colours), *mesh, "--workers", "0")
    assert "test pictures are named rightly" in told and told.splitlines()[-2] in alone


def test_gradients_are_not_scaled_where_some_are_whole_and_some_spread():
    """By its name Lightning lets the strategy have that precision, which it refuses to an instance."""
    trainer = SimpleNamespace(gradient_clip_val=None, precision="16-mixed", state=SimpleNamespace(fn="fit"))
    with pytest.raises(WrongUsage, match="16-mixed can't be had with model_parallel: take bf16-mixed or 32-true"):
        MeshStrategy().setup(trainer)


@pytest.mark.parametrize("is_spread", [False, True])
def test_a_value_is_written_into_a_parameter_in_its_own_type_and_place(group_of_one, is_spread):
    mesh = init_device_mesh("cpu", (1,))
    own = torch.zeros(4, 3, dtype=torch.float64)
    parameter = torch.nn.Parameter(distribute_tensor(own, mesh, [Shard(0)]) if is_spread else own)
    value = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    with torch.no_grad():
        assign(parameter, value)
    whole = parameter.full_tensor() if is_spread else parameter
    assert whole.dtype == torch.float64 and torch.equal(whole, value.double())
    assert isinstance(parameter, DTensor) == is_spread


def test_on_one_device_nothing_is_spread(group_of_one):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    network = build("small_cnn", 3)
    before = {name: id(parameter) for name, parameter in network.named_parameters()}
    shard(network, mesh)
    assert {name: id(parameter) for name, parameter in network.named_parameters()} == before
    shard_head(network, mesh["tensor_parallel"])  # the control: this is what would have been done
    spread = {name: id(parameter) for name, parameter in network.named_parameters()}
    shard(network, mesh)  # once spread, nothing happens
    assert {name: id(parameter) for name, parameter in network.named_parameters()} == spread != before
