"""A run in a notebook's cell: small, escaped, and in the colours of the notebook."""

import numpy as np
import pytest
from run_folders import NAMES, write_run

from finetune.runs.inline_report import inline_report
from finetune.runs.record import read_run

PREDICTED = np.eye(3)[[0, 1, 2, 0]] * 0.7 + 0.1


@pytest.mark.slow
def test_it_has_the_result_two_curves_and_the_sheet(tmp_path, monkeypatch):
    run = read_run(write_run(tmp_path / "run", [0, 1, 2, 1], PREDICTED))
    page = inline_report(run, "data:image/webp;base64,AA", "four <images>")
    assert "test accuracy 75.0 % (3 of 4; " in page and page.count("<svg ") == 2
    assert 'src="data:image/webp;base64,AA"' in page and "four &lt;images&gt;" in page
    assert "<body" not in page and "<style" not in page and "currentColor" in page
    assert "report.html" not in page
    (run.path / "report.html").write_text("")
    assert str(run.path / "report.html") in inline_report(run)
    monkeypatch.chdir(tmp_path)
    assert "run/report.html" in inline_report(run) and str(tmp_path) not in inline_report(run)
    assert "<img" not in inline_report(run)


@pytest.mark.usefixtures("without_charts")
def test_names_of_classes_are_text(tmp_path):
    page = inline_report(read_run(write_run(tmp_path / "run", [0, 0, 0, 0], PREDICTED)))
    assert "Always predicting blue &lt;b&gt;: " in page and NAMES[0] == "blue <b>"
