"""Train on a Ray cluster, also while machines join or leave it: python ray_fit.py MIN MAX fit FOLDER --resume ...

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
    """Run finetune in a subprocess, with the variables of torchrun: each worker counts as a machine with one device."""
    with socket.create_server(("", 0)) as server:
        free_port = server.getsockname()[1]
    host, port = broadcast_from_rank_zero((ray.util.get_node_ip_address(), free_port))
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
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    num_workers = (int(sys.argv[1]), int(sys.argv[2]))
    arguments = sys.argv[3:]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # of a cluster that `ray.init` starts
    ray.init()
    has_gpus = "GPU" in ray.cluster_resources()
    TorchTrainer(
        run_worker,
        train_loop_config=arguments,
        # these workers only start subprocesses, which make their own process group
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=has_gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
