"""Train on a Ray cluster whose machines come and go: python ray_fit.py MIN MAX fit FOLDER --resume ...

MIN to MAX workers train, each with one GPU, or with CPU cores if the cluster has no GPU. See cloud.md.
"""

import os
import socket
import subprocess
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer


def run_worker(arguments: list[str]) -> None:
    """Run finetune in a process of its own, as torchrun would: each worker counts as a machine with one device."""
    with socket.create_server(("", 0)) as server:  # a free port
        port = server.getsockname()[1]
    host, port = broadcast_from_rank_zero((ray.util.get_node_ip_address(), port))
    rank = get_context().get_world_rank()
    variables = {
        "TORCHELASTIC_RUN_ID": "ray",
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "WORLD_SIZE": get_context().get_world_size(),
        "RANK": rank,
        "GROUP_RANK": rank,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, ray.get_gpu_ids())),
    }
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    subprocess.run([sys.executable, "-m", "finetune", *arguments], env=environment, check=True)


if __name__ == "__main__":
    least, most, *arguments = sys.argv[1:]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init()
    has_gpus = "GPU" in ray.cluster_resources()
    TorchTrainer(
        run_worker,
        train_loop_config=arguments,
        torch_config=TorchConfig(backend="gloo"),  # of the workers, which only start processes
        scaling_config=ScalingConfig(num_workers=(int(least), int(most)), use_gpu=has_gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
