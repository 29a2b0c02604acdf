"""A rank that neither works nor ends ends the run."""

from pathlib import Path

import torch
from colours import draw_colours
from paths import ROOT
from processes import finetune, left_after, start_script
from promise import control, promise


@promise("lost-rank")
@control("lost-rank")
def test_a_suspended_rank_ends_the_run_with_one_line_and_a_complete_checkpoint(tmp_path: Path):
    images = draw_colours(tmp_path / "images", train=4, test=1)
    fit = ["fit", images, "--resume", "--out", tmp_path / "runs", "--epochs", "3", "--size", "28"]
    fit += ["--batch", "6", "--workers", "0", "--devices", 2, "--backbone", "small_cnn"]
    fit += ["--weights", "null", "--trainer.accelerator", "cpu", "--report", "false"]
    script = ROOT / "tests/support/suspended_rank.py"
    process = start_script(script, 1, 3, *fit, cwd=tmp_path)  # in the second epoch of 2 steps
    assert process.wait(60) == 1
    (line,) = {line for line in process.stderr.splitlines() if "finetune: " in line}
    assert "not answered for 4 s" in line and "--resume" in line
    assert left_after([process.pid], 5) == []
    (last,) = tmp_path.glob("runs/fit/*/checkpoints/last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 2
    # the control: where no rank is suspended, the same command ends
    assert finetune(*fit, cwd=tmp_path).returncode == 0
    assert torch.load(last, weights_only=True)["global_step"] == 6
