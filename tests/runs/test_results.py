"""The result on the screen and in its file."""

import json
from types import SimpleNamespace

import pytest
from tiny_module import QUIET, Tiny, loader, trainer

from finetune.runs.folder import Run
from finetune.runs.results import Results, Skipped

pytestmark = QUIET


@pytest.mark.parametrize(("split", "accuracy"), [("test", 0.9375), ("val", 0.75)])
def test_the_result_is_printed_and_written(tmp_path, capsys, split, accuracy):
    run = Run(tmp_path, split)
    run.choose()
    measure = trainer(tmp_path, Results(run))
    (measure.test if split == "test" else measure.validate)(Tiny(), loader(), verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert f"{split}/accuracy {accuracy:.4f}" in lines
    assert [line.split()[0] for line in lines] == [
        *(f"{split}/{n}" for n in ("accuracy", "loss", "f1", "calibration_error")),
        "7",  # right of
        "no",  # temperature
    ]
    named = "test" if split == "test" else "validation"
    assert lines[-2].startswith(f"7 of 8 {named} pictures are named rightly: 87.5 %")
    written = json.loads(run.file(f"{split}.json").read_text())
    assert written[f"{split}/accuracy"] == pytest.approx(accuracy)
    assert written["class_names"] == ["a", "b"] and written["confusion_matrix"] == [[3, 1], [0, 4]]
    assert written["checkpoint"] is None


def test_validation_within_fit_is_no_result(run, tmp_path, capsys):
    trainer(tmp_path, Results(run)).fit(Tiny(), loader(), loader())
    assert capsys.readouterr().out == "" and list(run.path.glob("[!.]*")) == []


def test_only_the_first_device_reports(run, capsys):
    Results(run).on_test_end(SimpleNamespace(is_global_zero=False), Tiny())
    assert capsys.readouterr().out == "" and list(run.path.glob("[!.]*")) == []


def test_an_error_stays_the_news_where_the_list_of_pictures_cannot_be_written(tmp_path, caplog):
    run = Run(tmp_path, "fit")
    run.file = lambda name: tmp_path / "nowhere" / name
    run.choose()
    skipped = Skipped(run)
    skipped.errors.add("a.png: truncated")
    skipped.on_exception(SimpleNamespace(is_global_zero=True), Tiny(), RuntimeError("the news"))
    assert "skipped.txt lacks some pictures" in caplog.text
