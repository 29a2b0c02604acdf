"""`finetune test` measures no image that its run was trained on, in whatever folder, and says what it measured."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from colours import QUICKEST
from promise import promise

from finetune.runs.checkpoint_io import read_checkpoint

WORDS = ("--data.num_workers", "0", "--trainer.accelerator", "cpu")


def result(number: int) -> dict:
    return json.loads(Path(f"runs/test/version_{number}/test.json").read_text())


@promise("unseen")
def test_test_excludes_copies_of_training_images_and_refuses_the_training_folder(
    run, cli, colours, tmp_path, caplog
):
    caplog.set_level("INFO")
    other = Path(shutil.copytree(colours / "test", tmp_path / "other/test")).parent
    shutil.copy(colours / "train/red/00.png", other / "test/red/copy.png")
    cli("test", run(), other, *WORDS)
    assert "skipped 1 of the 31 test images" in caplog.text and "red/copy.png" in caplog.text
    assert sum(map(sum, result(0)["confusion_matrix"])) == 30
    with pytest.raises(ValueError, match="has seen 60 of the 60 test images"):
        cli("test", run(), colours / "train", *WORDS)


def test_a_fit_that_has_seen_all_images_of_the_test_folder_says_so_and_is_complete(
    cli, colours, tmp_path, caplog
):
    images = Path(shutil.copytree(colours, tmp_path / "images"))
    shutil.copytree(images / "test", images / "val")
    cli("fit", images, *QUICKEST, "--report", "true")
    assert "has seen 30 of the 30 test images" in caplog.text
    run = Path("runs/fit/version_0")
    assert (run / "report.html").exists() and not (run / "test.json").exists()
    assert (run / "checkpoints/best.ckpt").exists()


@pytest.mark.slow
def test_a_rank_of_an_earlier_job_in_the_environment_hides_no_training_image(colours, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "MASTER_PORT"} | {"RANK": "1"}
    command = (sys.executable, "-m", "finetune", "fit", str(colours), *QUICKEST)
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    path = tmp_path / "runs/fit/version_0/checkpoints/best.ckpt"
    assert len(read_checkpoint(path)["finetune"]["seen"]["train"]) > 0


def test_test_on_a_folder_without_a_class_has_no_result_of_it(run, cli, colours, tmp_path, caplog):
    for name in ("blue", "red"):
        shutil.copytree(colours / "test" / name, tmp_path / "two" / name)
    cli("test", run(), tmp_path / "two", *WORDS)
    assert "'green'" in caplog.text
    found = result(0)
    assert [sum(row) for row in found["confusion_matrix"]] == [10, 0, 10]
    assert found["test/recall/green"] is None
    whole = [found[name] for name in found if name.startswith("test/") and name.count("/") == 1]
    assert len(whole) >= 4 and None not in whole
