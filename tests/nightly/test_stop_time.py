"""A scheduler kills a job some 30 seconds after SIGTERM: by then a fit has ended, with the last step on disk."""

import signal
import time
from pathlib import Path

import torch
from colours import draw_colours
from processes import left_after, start
from promise import promise

from finetune.runs.metrics_csv import read_metrics

# Seconds. Measured with other work on both cores: 1.9 s on one process, 2.3 s on two, for a step and 134 MB.
LIMIT = 20.0


@promise("stop")
def test_a_resnet18_on_two_processes_is_saved_and_has_ended_in_time(tmp_path: Path):
    images = draw_colours(tmp_path / "images", train=32, test=1)
    fit = ["fit", images, "--resume", "--out", tmp_path / "runs", "--epochs", 50, "--size", 64]
    fit += ["--batch", 16, "--workers", 2, "--devices", 2, "--backbone", "resnet18"]
    fit += ["--weights", "null", "--trainer.accelerator", "cpu", "--report", "false"]
    fit += ["--trainer.log_every_n_steps", 1]
    process = start(*fit, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while "epoch 1" not in process.stderr and time.monotonic() < deadline:
        time.sleep(0.05)
    stopped = time.monotonic()
    process.send_signal_to_all(signal.SIGTERM)
    assert process.wait(60) == 143
    assert left_after([process.pid], LIMIT - (time.monotonic() - stopped)) == []
    assert time.monotonic() - stopped < LIMIT
    (run,) = tmp_path.glob("runs/fit/*")
    last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert sum(value.numel() for value in last["state_dict"].values()) > 11e6
    assert last["global_step"] >= 6  # of 6 an epoch
    steps = [int(row["step"]) for row in read_metrics(run / "steps.csv")]
    assert max(steps) + 1 == last["global_step"], "a step is lost"
