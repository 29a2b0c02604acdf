"""Shared by the tests: small folders of pictures, and the command line in this process."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from colours import draw_colours

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # of the onnxruntime that tests compare with
torch.set_num_threads(1)  # the pictures are tiny: more threads only cost time
os.environ["OMP_NUM_THREADS"] = "1"  # so in programs that tests start: threads of several would wait for one another
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it, which what is tested here would inherit


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of decoded pictures, apart from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("caches")
        patch.setenv("FINETUNE_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def no_seed_of_another_run() -> None:
    """Forget the seed that a `fit` in this process left in the environment, be it a fixture's of a whole module."""
    os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.fixture(scope="session")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in three easy classes: 20 pictures each in train, 10 in test."""
    return draw_colours(tmp_path_factory.mktemp("data") / "colours", train=20, test=10)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`finetune` in this process, in an empty folder."""
    from finetune.cli import run

    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield lambda *arguments: run([str(argument) for argument in arguments])
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group in this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
