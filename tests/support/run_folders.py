"""The folder of a run, written by hand: a report reads it, without training."""

import csv
import json
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from finetune.runs.headline import best_of_epoch, headline_of
from finetune.runs.run_dir import RunDir

NAMES = ["blue <b>", "green & red", "ünder"]  # as folders may be called


def write_run(
    folder: Path,
    /,
    labels: list[int],
    probabilities: np.ndarray,
    names: list[str] = NAMES,
    images: Path | None = None,
    **settings: object,
) -> Path:
    """Write a run's files.

    Args:
        folder: The run's.
        labels: The class of each of N test images.
        probabilities: What was said of each, (N, K).
        names: The K classes.
        images: Where the test images are drawn; None where there are none.
        settings: More of run.json.
    """
    folder.mkdir(parents=True)
    num_classes, predicted = len(names), probabilities.argmax(axis=1)
    confusion = np.zeros((num_classes, num_classes), int)
    np.add.at(confusion, (labels, predicted), 1)
    result = {"test/accuracy": float((predicted == labels).mean()), "test/calibration_error": 0.04}
    more = {"class_names": names, "confusion_matrix": confusion.tolist()}
    (folder / "test.json").write_text(json.dumps(result | more))
    config = {"seed_everything": 7, "model": {"backbone": "resnet18", "weights": None}}
    config |= {"data": {"init_args": {"root": "photos", "image_size": 32}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    counts = dict.fromkeys(names, 4)
    splits = {
        "train": {"origin": "its train split", "counts": counts},
        "test": {"origin": "", "counts": counts},
    }
    about = {
        "command": "finetune fit --config a.yaml",
        "root": "photos",
        "splits": splits,
        "lines": ["training: on 1"],
    }
    seconds = 13.5
    best = best_of_epoch(3, 0.75, 0.75, "val/accuracy", num_images=40, num_trials=40)
    facts = {
        **{"kind": "fit", "data": "photos", "network": "resnet18", **about},
        **{"doubts": [], "fingerprint": "f00d", "seconds": seconds, "epochs": 3},
        **{"best": best, "test": headline_of(result | more)},
    }
    RunDir(folder).update(**{**facts, **settings})
    rows = [
        {"step": 3, "epoch": 0, "val/loss": 0.9, "val/accuracy": 0.5, "lr-SGD/head": 0.1},
        {"step": 3, "epoch": 0, "train/loss_epoch": 1.1, "train/accuracy": 0.4},
        {"step": 7, "epoch": 1, "val/loss": 0.6, "val/accuracy": 0.75, "lr-SGD/head": 0.05},
        {"step": 7, "epoch": 1, "train/loss_epoch": 0.7, "train/accuracy": 0.6},
        {"step": 11, "epoch": 2, "val/loss": 0.7, "val/accuracy": 0.75, "lr-SGD/head": 0.01},
        {"step": 11, "epoch": 2, "train/loss_epoch": 0.5, "train/accuracy": 0.7},
    ]
    write_csv(folder / "steps.csv", list(dict.fromkeys(key for row in rows for key in row)), rows)
    paths = [str((images or folder / "gone") / f"{i:03d}.png") for i in range(len(labels))]
    if images is not None:
        images.mkdir(parents=True, exist_ok=True)
        for path, label in zip(paths, labels, strict=True):
            pixels = np.full((40, 48, 3), 30, np.uint8)
            pixels[:, :, label % 3] = 200
            Image.fromarray(pixels).save(path)
    answers = [
        {"path": path, "label": names[label], "class": names[k], "probability": p[k], "error": ""}
        | _others(names, p, k)
        for path, label, k, p in zip(
            paths, labels, predicted.tolist(), probabilities.tolist(), strict=True
        )
    ]
    columns = list(dict.fromkeys([*answers[0], "error"]))
    answers.append({"path": "broken.png", "label": names[0], "error": "truncated"})
    write_csv(folder / "test_predictions.csv", columns, answers)
    return folder


def _others(names: list[str], p: list[float], k: int) -> dict[str, object]:
    """Return the columns beside those of the predicted class k, from the probability of each class (K,)."""
    if len(names) <= 50:
        return {f"p_{name}": value for name, value in zip(names, p, strict=True)}
    best = sorted({*range(len(names))} - {k}, key=lambda one: -p[one])[:4]
    of_place = [
        (f"class_{i}", names[one], f"probability_{i}", p[one]) for i, one in enumerate(best, 2)
    ]
    return {key: value for a, name, b, value in of_place for key, value in ((a, name), (b, value))}


def write_csv(path: Path, columns: list[str], rows: list[dict]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
