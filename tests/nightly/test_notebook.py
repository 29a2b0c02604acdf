"""The notebook of docs/ and the Python code in README and docs run."""

import re
import shutil
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient
from paths import ROOT
from PIL import Image

import finetune

NOTEBOOK = ROOT / "docs" / "python.ipynb"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)


# A few of the images: to draw and test 880 takes as long as all else.
DRAW_FEW = """
from finetune.demo import drawing
drawing.NUM_TARGET = {"train": 16, "val": 8, "test": 8}
"""


def test_the_notebook_runs_and_shows_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(DRAW_FEW))
    NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (run,) = (cell for cell in notebook.cells if cell.source == "run")
    page = run.outputs[0]["data"]["text/html"]
    assert page.count("<svg ") == 2 and str(tmp_path) not in page
    assert (tmp_path / "runs/fit/version_0/report.html").is_file()


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_python_on_pages_runs(colours, tmp_path, monkeypatch, page):
    # a second one, a script with a LightningCLI, is run by test_plain_trainer.py
    block, *_ = PYTHON.findall((ROOT / page).read_text("utf-8"))
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
    names = {
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
