"""`--model.compile true`: the same training, and the cost of its start."""

import logging
from pathlib import Path

import pytest
import torch
from colours import QUICKEST

from finetune.runs.folder import versions
from finetune.training.compile import seconds_compiling


@pytest.fixture(autouse=True)
def eager_backend(monkeypatch):
    """Trace and run the graph, all but the compiler: it needs a minute. How quick that is must not matter."""
    monkeypatch.setattr("finetune.training.compile._MIN_LOGGED_SECONDS", 0.0)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: real(f, backend="aot_eager"))
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self: setattr(
            self, "_compiled_call_impl", real(self._call_impl, backend="aot_eager")
        ),
    )
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--model.freeze", "conv", "--model.head_init", "probe"]])
def test_a_compiled_network_trains_the_same_and_is_an_ordinary_checkpoint(
    cli, colours, more, caplog
):
    options = ["--data.root", colours, *QUICKEST, *more, "--trainer.precision", "64-true"]
    # a last batch of fewer images would be compiled once more, and so would that of the test
    options += ["--trainer.limit_train_batches", 3, "--test_after_fit", "false"]
    with caplog.at_level(logging.INFO, logger="finetune"):
        before = seconds_compiling()
        cli("fit", *options, "--model.compile", "true")
        assert seconds_compiling() > before
        cli("fit", *options)
    assert "compiling took" in caplog.text
    compiled, plain = (weights(run) for run in versions(Path("runs"), "fit"))
    assert compiled.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-9, atol=1e-9)


def test_a_missing_compiler_is_reported_before_training(monkeypatch, colours, cli):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError,
        match="needs a C\\+\\+ compiler, and there is no no-such-compiler on this machine",
    ):
        cli("fit", "--data.root", colours, *QUICKEST, "--model.compile", "true")
