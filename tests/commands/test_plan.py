"""The plan of a fit is made once: it reads the checkpoint once, and lists the runs once."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from colours import QUICKEST
from tiers import sweep

from finetune.runs import resume
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.resume import read_start

LAST = "checkpoints/last.ckpt"
LENGTH = ("--trainer.max_epochs", "1")
TWO_EPOCHS = ("--trainer.max_epochs", 2)


@pytest.fixture
def reads(monkeypatch) -> Counter[str]:
    """How often each checkpoint is deserialised, by its name, and the folder of runs is listed."""
    counted: Counter[str] = Counter()
    load = torch.load
    iterdir = Path.iterdir

    def counting_load(path: Any, *arguments: Any, **options: Any) -> Any:
        counted[Path(path).name] += 1
        return load(path, *arguments, **options)

    def counting_iterdir(self: Path) -> Any:
        counted["runs"] += self.name == "fit"
        return iterdir(self)

    monkeypatch.setattr(torch, "load", counting_load)
    monkeypatch.setattr(Path, "iterdir", counting_iterdir)
    return counted


@pytest.mark.parametrize(
    ("options", "named"),
    sweep(
        [
            ((), False),
            ((), True),
            (("--trainer.precision", "null"), False),
            (("--patience", 9), False),
            (("--minutes", 9), True),
        ],
        quick=[((), False), ((), True)],
    ),
    ids=["plain", "named", "precision", "patience", "minutes and named"],
)
def test_last_ckpt_is_read_once_to_decide_and_once_to_train(
    colours, cli, run_to_go_on, reads, options, named
):
    which = [run_to_go_on] if named else []
    length = () if "--minutes" in options else TWO_EPOCHS
    quickest = [option for option in QUICKEST if "--minutes" not in options or option not in LENGTH]
    if "--minutes" in options:  # an interrupted run of two epochs
        config = run_to_go_on / "config.yaml"
        config.write_text(config.read_text().replace("max_epochs: 1", "max_epochs: 2"))
    reads.clear()
    cli("fit", "--data.root", colours, *quickest, *length, *options, "--resume", *which)
    # The folder of runs is also listed before torch is imported: the newest run may be a cross-validation.
    assert (reads["last.ckpt"], reads["runs"]) == (2, 1 if named else 2)
    assert read_checkpoint(run_to_go_on / LAST)["global_step"] == 8
    assert reads["last.ckpt"] == 3  # the control: each reading counts


def test_a_finished_run_is_read_once(colours, cli, run_to_go_on, reads):
    fit = ["fit", "--data.root", colours, *QUICKEST, "--test_after_fit", "true", "--resume"]
    cli(*fit)
    # best.ckpt for its calibration, and for its test
    assert (reads["last.ckpt"], reads["best.ckpt"]) == (1, 2)
    cli(*fit)
    assert (reads["last.ckpt"], reads["best.ckpt"]) == (2, 2)


@pytest.mark.slow
def test_a_new_run_that_begins_from_a_checkpoint_reads_it_once_to_decide(
    colours, cli, run_to_go_on, reads, tmp_path
):
    begun = shutil.copy(run_to_go_on / LAST, tmp_path / "begun.ckpt")
    cli("fit", "--data.root", colours, *QUICKEST, *TWO_EPOCHS, "--ckpt_path", begun)
    assert reads["begun.ckpt"] == 2 and reads["last.ckpt"] == 0


@pytest.mark.slow
def test_best_ckpt_is_read_once_at_the_end_and_once_for_the_test(colours, cli, reads):
    cli("fit", "--data.root", colours, *QUICKEST, "--model.head_init", "probe")
    assert (reads["best.ckpt"], reads["start.ckpt"]) == (2, 1)


def tensors_in(content: Any) -> list[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        return [content]
    parts = content.values() if isinstance(content, dict) else content
    if not isinstance(content, dict | list | tuple):
        return []
    return [tensor for part in parts for tensor in tensors_in(part)]


def test_what_is_held_while_training_is_decided_has_no_weights(untested_run):
    full = read_checkpoint(untested_run / LAST)
    held = dict(read_start(untested_run / LAST).content)
    assert tensors_in(held.pop("finetune")["seen"])  # the record of seen images is continued
    del full["finetune"]
    assert all(tensor.is_meta for tensor in tensors_in(held))
    assert not any(tensor.is_meta for tensor in tensors_in(full))  # the control
    shapes = [[tensor.shape for tensor in tensors_in(content)] for content in (full, held)]
    assert shapes[0] == shapes[1] and held["loops"] == full["loops"]


@pytest.mark.slow
def test_a_run_that_another_process_has_written_in_the_meantime_is_left_to_it(
    colours, cli, run_to_go_on, monkeypatch
):
    fit = ["fit", "--data.root", colours, *QUICKEST, *TWO_EPOCHS, "--resume"]
    metrics = (run_to_go_on / "metrics.csv").read_text()

    def replaced(run: Path) -> None:
        copy = shutil.copy(run / LAST, run / "checkpoints/copy.ckpt")
        Path(copy).replace(run / LAST)

    with monkeypatch.context() as patch:
        patch.setattr(resume, "hold", replaced)
        with pytest.raises(ValueError, match="another process has written"):
            cli(*fit)
    assert (run_to_go_on / "metrics.csv").read_text() == metrics
    cli(*fit)  # the control
    assert (run_to_go_on / "metrics.csv").read_text() != metrics
