"""`--model.compile true` trains the same. Without the compiler itself, which needs a minute."""

import logging
from pathlib import Path

import pytest
import torch
from colours import QUICKEST
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: PLC2701 - counts what is compiled
from torch._dynamo.utils import counters  # noqa: PLC2701 - the same
from torchvision.ops import StochasticDepth

from finetune.runs.folder import versions
from finetune.training.dropout import make_per_image, set_keys


@pytest.fixture(autouse=True)
def eager_backend(monkeypatch):
    """Trace and run the graph, all but the compiler."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: real(f, backend="aot_eager"))
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self: setattr(
            self, "_compiled_call_impl", real(self._call_impl, backend="aot_eager")
        ),
    )
    torch.compiler.reset()
    yield real
    torch.compiler.reset()


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.parametrize("more", [[], ["--model.freeze", "conv", "--model.head_init", "probe"]])
def test_compile_trains_the_same_and_writes_an_ordinary_checkpoint(cli, colours, more, caplog):
    options = ["--data.root", colours, *QUICKEST, *more, "--trainer.precision", "64-true"]
    # a last batch of fewer images would be compiled once more, and so would that of the test
    options += ["--trainer.limit_train_batches", 3, "--test_after_fit", "false"]
    with caplog.at_level(logging.INFO, logger="finetune"):
        counters.clear()
        cli("fit", *options, "--model.compile", "true")
        assert counters["stats"]["unique_graphs"] > 0
        cli("fit", *options)
    compiled, plain = (weights(run) for run in versions(Path("runs"), "fit"))
    assert compiled.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-9, atol=1e-9)


def test_compiled_dropout_draws_as_before_and_is_compiled_once(eager_backend):
    twice = nn.Dropout(0.5)
    network = nn.Sequential(twice, nn.Linear(20, 20), StochasticDepth(0.5, "row"), twice).train()
    layers = make_per_image(network)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = eager_backend(network, backend=counter)
    for step in range(4):
        x = torch.rand(6, 20, requires_grad=True)
        results = []
        for run in (network, compiled):
            set_keys(layers, 0, step, torch.arange(6) + step)
            results.append(run(x))
        torch.testing.assert_close(results[1], results[0])
        results[1].sum().backward()
    assert counter.frame_count == 1
