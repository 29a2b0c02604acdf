"""The baseline of each table of accuracies: scikit-learn's logistic regression on frozen features.

`benchmarks.defaults` measures it. It has no seed, and no seconds that can be compared: the machine was another one.
"""

from benchmarks.common.documents import ROOT
from benchmarks.common.records import load

LABEL = "logistic regression"


def baseline_accuracies(image_size: int, start: str = "resnet18") -> dict[str, float]:
    """Return the test accuracy on each set, from the records of `benchmarks.defaults`.

    Args:
        image_size: Side of the images in pixels.
        start: The pretrained network, as its records name it.
    """
    records = load(ROOT / "benchmarks/defaults/defaults.json")
    key = (start, "regression", image_size)
    return {
        record["set"]: record["accuracy"]
        for record in records
        if (record["start"], record["what"], record["size"]) == key and "accuracy" in record
    }
