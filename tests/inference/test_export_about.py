"""The content of the .json next to an exported file."""

import json

import pytest

from finetune.inference.export_about import about
from finetune.inference.export_check import Agreement
from finetune.runs.checkpoint_io import read_checkpoint

FOUND = Agreement(7, 1e-6, 0, (2.0, 1.0))


@pytest.fixture
def read(calibrated) -> dict:
    return read_checkpoint(calibrated)


def test_it_says_what_the_checkpoint_says(predictor, read):
    read["hyper_parameters"]["weights"] = "/home/somebody/some.pt"
    described = json.loads(json.dumps(about(predictor, read, "onnx", {"verified": FOUND})))
    assert (
        described["class_names"] == predictor.class_names and described["began_with"] == "some.pt"
    )
    assert described["licence_of_the_weights"].startswith("the file some.pt: licence unknown")
    assert described["input"] == {"images": ["N", 32, 32, 3, "uint8 RGB"]} and described[
        "output"
    ].keys() == {
        "probabilities",
        "logits",
    }
    assert described["preparation"] == (
        "resize to 37 x 37 pixels, then take the middle 32 x 32; bilinear, antialiased where it gets smaller"
    )
    assert described["members"] == 1
    assert described["temperature"] == 0.25 and described["mean"] == pytest.approx(
        [0.485, 0.456, 0.406]
    )
    assert described["verified"] == {
        "num_pictures": 7,
        "num_other": 0,
        "largest_difference": 1e-6,
        "milliseconds_of_the_network": 2.0,
        "milliseconds_of_the_file": 1.0,
    }


def test_each_kind_says_what_it_takes(predictor, read):
    weights = about(predictor, read, "safetensors", {"verified": FOUND})
    assert weights["input"] == {"images": ["N", 3, 32, 32, "float32, normalised"]}
    assert weights["output"].keys() == {"logits"}
