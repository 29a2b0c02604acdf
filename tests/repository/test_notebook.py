"""The notebook of docs/ and the Python code in README and docs run, and their output is right."""

import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from paths import ROOT
from PIL import Image

import finetune

NOTEBOOK = ROOT / "docs" / "python.ipynb"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)


def executed(notebook: Any, folder: Path) -> Any:
    """Run a notebook in a folder; cells show what they have shown, a bar's last state included."""
    NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def shown(cell: Any, kind: str) -> list[str]:
    outputs = [output for output in cell.outputs if kind in output.get("data", {})]
    return [output["data"][kind] for output in outputs]


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(
        not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells
    )
    assert NOTEBOOK.stat().st_size < 10_000


# nbclient keeps what a cell shows last, and the bar is gone by then: each drawing of it is kept instead.
_KEEP_DRAWINGS = """
from IPython.display import DisplayHandle
drawn, update = [], DisplayHandle.update
def kept(self, shown, **options):
    drawn.append(str(shown) if options.get("raw") else shown._repr_mimebundle_((), ())["text/plain"])
    update(self, shown, **options)
DisplayHandle.update = kept
"""
# A tenth of the images: to draw and test 880 takes as long as all else.
_DRAW_FEW = """
from finetune.demo import drawing
drawing.NUM_TARGET = {"train": 40, "val": 20, "test": 20}
"""
_COUNT_DRAWINGS = 'print(sum("images/s" in text for text in drawn), drawn[-1])'


@pytest.mark.slow
def test_it_runs_and_shows_the_bar_the_run_and_its_images(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (fit,) = (cell for cell in notebook.cells if "\nrun = fit(" in cell.source)
    after_fit = notebook.cells.index(fit) + 1
    notebook.cells.insert(after_fit, nbformat.v4.new_code_cell(_COUNT_DRAWINGS))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(_KEEP_DRAWINGS + _DRAW_FEW))
    executed(notebook, tmp_path)
    cells = {cell.source.splitlines()[-1].partition("  #")[0]: cell for cell in notebook.cells}
    num_drawings, _, last_drawing = cells[_COUNT_DRAWINGS].outputs[0].text.strip().partition(" ")
    assert int(num_drawings) >= 2 and last_drawing == "{'text/plain': ''}"
    lines = "".join(text for kind in ("text/plain", "text/html") for text in shown(fit, kind))
    assert all(f"epoch {epoch}/6" in lines for epoch in range(1, 7))
    reported = "".join(output.get("text", "") for output in fit.outputs)
    assert "images: images/target: train 80" in reported and "run in runs/fit/version_0" in reported
    (page,) = shown(cells["run"], "text/html")
    assert (
        page.count("<svg ") == 2
        and "16 of 40 random test images" in page
        and str(tmp_path) not in page
    )
    (predictions,) = shown(
        cells[next(line for line in cells if line.startswith("model.predict"))], "text/plain"
    )
    assert predictions.count("Prediction(label=") == 3
    (counted,) = shown(
        cells["Counter(prediction.label for prediction in predictions)"], "text/plain"
    )
    assert sum(map(int, re.findall(r": (\d+)", counted))) == 40
    assert (tmp_path / "runs/fit/version_0/report.html").is_file()


@pytest.mark.slow
def test_control_a_cell_that_fails_is_noticed(tmp_path):
    cell = nbformat.v4.new_code_cell("raise ValueError('the cell fails')")
    with pytest.raises(CellExecutionError, match="the cell fails"):
        executed(nbformat.v4.new_notebook(cells=[cell]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_lines_of_python_run(colours, tmp_path, monkeypatch, page):
    (block,) = PYTHON.findall((ROOT / page).read_text("utf-8"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(colours, "photos")
    shutil.copytree(colours / "test", "other_photos")
    source_image = colours / "test" / "red" / "00.png"
    shutil.copy(source_image, "a.png")
    shutil.copy(source_image, "b.png")
    fit, quick = finetune.fit, {"size": 28, "weights": None, "backbone": "small_cnn", "workers": 0}
    quick["options"] = {"report": False}  # the notebook's has one
    monkeypatch.setattr(
        finetune, "fit", lambda *given, **words: fit(*given, **{**words, **quick, "epochs": 1})
    )
    with Image.open(source_image) as image:
        image.load()
    names: dict[str, Any] = {
        "pil_image": image,
        "array": np.asarray(Image.open(source_image)),
    }
    names["images"] = torch.zeros(2, 3, 28, 28, dtype=torch.uint8)
    block = block.replace(".jpg", ".png")
    # docs/python.md exports to ONNX; the first such export of a process takes five seconds
    file = "model.safetensors" if page == "README.md" else "model.onnx"
    exec(block.replace("model.onnx", file), names)
    assert names["run"].accuracy is not None
    assert Path(file).is_file()
    if page == "README.md":
        return
    assert [one.path for one in names["predictions"]] == ["a.png", None, None]
    assert names["predictions"][0].label in ("blue", "green", "red")
    assert names["features"].shape == (2, 64)
    assert names["logits"].shape == (2, 3)
    assert sum(map(sum, names["result"]["confusion_matrix"])) == 30
