"""The default precision."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from colours import QUICKEST
from torchvision import models

from finetune.runs.folder import versions
from finetune.system.messages import WrongUsage
from finetune.training.precision import automatic_precision, check_precision, prepare_arithmetic

CUDA = "finetune.training.precision.CUDAAccelerator.is_available"


def capabilities(**given: bool):
    return patch("torch.cpu.get_capabilities", lambda: given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, "bf16-mixed"),
        ({"amx_bf16": True}, "bf16-mixed"),
        ({"avx512_bf16": False, "avx512_f": True}, "32-true"),
        ({"neon": True, "bf16": True}, "32-true"),  # not looked into on ARM
    ],
)
@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_a_cpu_computes_in_bf16_where_it_has_instructions_for_it(given, expected, accelerator):
    with capabilities(**given), patch(CUDA, lambda: False):
        assert automatic_precision(accelerator, None, False) == expected


@pytest.mark.parametrize("accelerator", ["gpu", "cuda", "auto"])
@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_computes_in_bf16_if_it_can_without_emulation(accelerator, supported):
    def is_supported(including_emulation: bool = True) -> bool:
        return supported or including_emulation

    with (
        capabilities(),
        patch(CUDA, lambda: True),
        patch("torch.cuda.is_bf16_supported", is_supported),
    ):
        assert automatic_precision(accelerator, None, False) == (
            "bf16-mixed" if supported else "32-true"
        )


def test_the_cpu_of_a_machine_with_a_gpu_may_compute_and_other_accelerators_do_in_float32():
    with capabilities(avx512_bf16=True), patch(CUDA, lambda: True):
        assert automatic_precision("cpu", None, False) == "bf16-mixed"
    with capabilities(avx512_bf16=True), patch(CUDA, lambda: False):
        assert automatic_precision("mps", None, False) == "32-true"


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [
        ("resnet18", "bf16-mixed"),
        ("mobilenet_v3_small", "32-true"),
        ("convnext_tiny", "32-true"),
    ],
)
def test_a_network_with_depthwise_convolutions_trains_in_float32_on_a_cpu(backbone, expected):
    with torch.device("meta"):
        network = getattr(models, backbone)()
    with capabilities(amx_bf16=True), patch(CUDA, lambda: False):
        assert automatic_precision("cpu", None, False, network) == expected


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
def test_what_is_given_wins_and_the_run_says_what_it_was(cli, colours, tmp_path, options, written):
    (tmp_path / "own.yaml").write_text("trainer: {precision: 32-true}\n")
    with capabilities(avx512_bf16=True):
        cli("fit", "--data.root", colours, *UNSAID, "--test_after_fit", "false", *options)
    (run,) = versions(tmp_path / "runs", "fit")
    assert f"precision: {written}\n" in (run / "config.yaml").read_text()
    # mixed: weights stay in float32
    dtype = torch.float64 if written == "64-true" else torch.float32
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["state_dict"]["network.head.weight"].dtype == dtype
    assert checkpoint["finetune"]["precision"] == written


@pytest.mark.parametrize(
    ("before", "is_resumed", "gains", "expected"),
    [
        ("32-true", True, True, "32-true"),
        ("bf16-mixed", True, False, "bf16-mixed"),  # slow, but the same run
        ("64-true", False, True, "64-true"),
        ("32-true", False, True, "32-true"),
        ("bf16-mixed", False, False, "32-true"),
        ("bf16-mixed", False, True, "bf16-mixed"),
        (None, True, True, "bf16-mixed"),  # an older checkpoint does not say
    ],
)
def test_a_run_continues_as_it_was_and_is_tested_so(before, is_resumed, gains, expected):
    checkpoint = {"finetune": {"precision": before} if before else {}}
    with capabilities(avx512_bf16=gains), patch(CUDA, lambda: False):
        assert automatic_precision("cpu", checkpoint, is_resumed) == expected


def test_a_precision_of_a_missing_package_is_refused_in_one_line():
    check_precision("bf16-mixed")
    with patch("finetune.training.precision.find_spec", lambda name: None):
        for precision in ("transformer-engine", "transformer-engine-float16"):
            with pytest.raises(
                WrongUsage, match=f"precision {precision} needs .*: pass --precision 32-true"
            ):
                check_precision(precision)


@pytest.mark.slow
def test_resume_and_test_keep_to_what_the_checkpoint_says(cli, colours, tmp_path):
    with capabilities():
        cli("fit", "--data.root", colours, *UNSAID)
    with capabilities(avx512_bf16=True):  # on another machine
        cli("fit", "--data.root", colours, *UNSAID, "--trainer.max_epochs", 2, "--resume")
        best = tmp_path / "runs/fit/version_0/checkpoints/best.ckpt"
        cli("test", "--ckpt_path", best)
    for command in ("fit", "test"):
        (run,) = versions(tmp_path / "runs", command)
        assert "precision: 32-true\n" in (run / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("precision", "has_bf16", "kind"),
    [
        *(("bf16-mixed", False, "cpu"), ("bf16-true", False, "cpu"), ("32-true", False, "cpu")),
        *(("bf16-mixed", True, "cpu"), ("bf16-mixed", False, "cuda")),
    ],
)
def test_bf16_on_a_cpu_without_it_is_reported(caplog, precision, has_bf16, kind):
    is_reported = precision.startswith("bf16") and not has_bf16 and kind == "cpu"
    device = SimpleNamespace(root_device=torch.device(kind))
    with capabilities(amx_bf16=has_bf16), caplog.at_level("WARNING", "finetune"):
        prepare_arithmetic(SimpleNamespace(strategy=device, precision=precision))
    assert (
        f"this processor does not support bf16: {precision} may be ten times slower" in caplog.text
    ) is is_reported


@pytest.mark.parametrize(
    ("load", "num_threads", "kind", "is_warned"),
    [
        (3.9, 2, "cpu", False),
        (4.0, 2, "cpu", True),
        (9.0, 1, "cpu", False),
        (9.0, 2, "cuda", False),
    ],
)
def test_a_machine_that_other_programs_use_is_warned_of(
    caplog, monkeypatch, load, num_threads, kind, is_warned
):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("torch.get_num_threads", lambda: num_threads)
    monkeypatch.setattr("finetune.training.precision.num_cores", lambda: 4)
    device = SimpleNamespace(root_device=torch.device(kind))
    with caplog.at_level("WARNING", "finetune"):
        prepare_arithmetic(SimpleNamespace(strategy=device, precision="32-true"))
    assert ("Start the command with OMP_NUM_THREADS=1" in caplog.text) is is_warned
