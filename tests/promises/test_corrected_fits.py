"""A fit with corrected labels: its records, its report, its test, and the labels of a resumed run."""

import json
from pathlib import Path

import pytest
from colours import QUICKEST
from promise import promise

from finetune.commands.error_lines import one_line
from finetune.data.corrections import Correction, CorrectionsFile


@pytest.fixture
def file(tmp_path: Path) -> CorrectionsFile:
    file = CorrectionsFile(tmp_path / "corrections.csv")
    for path, was, now in (
        ("train/blue/00.png", "blue", "red"),
        ("train/red/01.png", "red", "excluded"),
        ("test/red/00.png", "red", "blue"),
        ("test/red/01.png", "red", "excluded"),
    ):
        file.append(Correction(path, was, now, "me", "now"))
    return file


@promise("corrections")
@pytest.mark.slow
def test_a_fit_records_corrections_a_test_applies_them_and_resume_needs_them(
    cli, colours, file, tmp_path
):
    cli("fit", colours, *QUICKEST, "--data.corrections", "corrections.csv", "--report", "true")
    run = tmp_path / "runs/fit/version_0"
    about = json.loads((run / "run.json").read_text())
    counts = about["corrections"]["splits"]
    assert counts.keys() == {"train", "val"}
    assert sum(split["changed"] for split in counts.values()) == 1
    assert sum(split["excluded"] for split in counts.values()) == 1
    assert about["corrections"]["in_test"] == 2
    assert "corrections: corrections.csv" in (run / "config.yaml").read_text()
    page = (run / "report.html").read_text()
    assert "Corrected labels" in page and "The test images were corrected" not in page
    result = json.loads((run / "test.json").read_text())
    assert sum(map(sum, result["confusion_matrix"])) == 30

    cli("test", run, "--data.correct_test", "true", "--data.num_workers", "0")
    tested = tmp_path / "runs/test/version_0"
    result = json.loads((tested / "test.json").read_text())
    assert sum(map(sum, result["confusion_matrix"])) == 29
    assert result["corrections"]["splits"]["test"]["changed"] == 1
    cli("report", tested)
    assert "The test images were corrected" in (tested / "report.html").read_text()

    cli("test", run, colours / "test", "--data.num_workers", "0")  # another folder has none
    result = json.loads((tmp_path / "runs/test/version_1/test.json").read_text())
    assert "corrections" not in result

    file.append(Correction("train/green/03.png", "green", "blue", "me", "now"))
    with pytest.raises(ValueError, match="other images"):
        cli("fit", "--resume", run, "--epochs", "2", "--data.num_workers", "0")
    file.append(Correction("train/green/03.png", "green", "", "me", "now"))
    cli("fit", "--resume", run, "--epochs", "2", "--data.num_workers", "0")
    file.path.unlink()
    with pytest.raises(ValueError) as error:
        cli("test", run)
    assert one_line(error.value) == (
        "--data.corrections: there is no file 'corrections.csv'; null applies none"
    )
