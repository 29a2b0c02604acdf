"""The precision of a run: bf16 where the hardware is faster with it, that of its checkpoint, or the given one."""

import pytest
import pytorch_lightning as pl
import torch
from colours import QUICKEST
from torchvision import models

from finetune.runs.folder import versions
from finetune.training.precision import automatic_precision, prepare_arithmetic


@pytest.fixture
def on(monkeypatch):
    """A machine whose processor has instructions for bf16 or not, and whose GPU, if there is one, has it or not."""

    def of(cpu: bool = False, gpu: bool | None = None) -> None:
        def has_bf16(including_emulation: bool = True) -> bool:
            return bool(gpu) or including_emulation

        # "bf16" is said on ARM, where it is no reason
        found = {"avx512_bf16": cpu, "bf16": True}
        monkeypatch.setattr("torch.cpu.get_capabilities", lambda: found)
        monkeypatch.setattr("torch.cuda.is_bf16_supported", has_bf16)
        monkeypatch.setattr(
            pl.accelerators.CUDAAccelerator, "is_available", lambda: gpu is not None
        )

    return of


@pytest.mark.parametrize(
    ("accelerator", "cpu", "gpu", "expected"),
    [
        ("cpu", True, None, "bf16-mixed"),
        ("cpu", False, None, "32-true"),
        ("auto", False, True, "bf16-mixed"),
        ("cuda", True, False, "32-true"),  # which emulates it
        ("cpu", True, False, "bf16-mixed"),  # the processor of a machine with a GPU
        ("mps", True, None, "32-true"),
    ],
)
def test_precision_is_bf16_where_the_hardware_is_faster_with_it(
    on, accelerator, cpu, gpu, expected
):
    on(cpu, gpu)
    assert automatic_precision(accelerator, None, False) == expected


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [("resnet18", "bf16-mixed"), ("mobilenet_v3_small", "32-true")],
)
def test_a_network_with_depthwise_convolutions_trains_in_float32_on_a_cpu(on, backbone, expected):
    on(cpu=True)
    with torch.device("meta"):
        network = getattr(models, backbone)()
    assert automatic_precision("cpu", None, False, network) == expected


@pytest.mark.parametrize(
    ("before", "is_resumed", "cpu", "expected"),
    [
        ("32-true", True, True, "32-true"),
        ("bf16-mixed", True, False, "bf16-mixed"),  # slow, but the same run
        ("32-true", False, True, "32-true"),
        ("bf16-mixed", False, False, "32-true"),
    ],
)
def test_a_run_continues_and_is_tested_in_the_precision_of_its_checkpoint(
    on, before, is_resumed, cpu, expected
):
    on(cpu)
    checkpoint = {"finetune": {"precision": before}}
    assert automatic_precision("cpu", checkpoint, is_resumed) == expected


UNSAID = [option for option in QUICKEST if option not in ("--trainer.precision", "32-true")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "written"),
    [
        ([], "bf16-mixed"),
        (["--trainer.precision", "64-true"], "64-true"),
        (["--config", "own.yaml"], "32-true"),
    ],
)
def test_the_precision_that_is_given_wins_and_the_run_says_what_it_was(
    cli, colours, tmp_path, on, options, written
):
    (tmp_path / "own.yaml").write_text("trainer: {precision: 32-true}\n")
    on(cpu=True)
    cli("fit", "--data.root", colours, *UNSAID, "--test_after_fit", "false", *options)
    (run,) = versions(tmp_path / "runs", "fit")
    assert f"precision: {written}\n" in (run / "config.yaml").read_text()
    # mixed: weights stay in float32
    dtype = torch.float64 if written == "64-true" else torch.float32
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["state_dict"]["network.head.weight"].dtype == dtype
    assert checkpoint["finetune"]["precision"] == written
    on(cpu=written != "bf16-mixed")  # on another machine
    cli("fit", "--resume", run, "--trainer.max_epochs", 2, "--test_after_fit", "false")
    assert f"precision: {written}\n" in (run / "config.yaml").read_text()


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_bf16_on_a_processor_without_it_is_warned_of(on, caplog, precision):
    on(cpu=False)
    trainer = pl.Trainer(
        accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False
    )
    with caplog.at_level("WARNING", "finetune"):
        prepare_arithmetic(trainer)
    assert ("bf16-mixed may be ten times slower" in caplog.text) == (precision == "bf16-mixed")
    assert bool(caplog.records) == (precision == "bf16-mixed")
