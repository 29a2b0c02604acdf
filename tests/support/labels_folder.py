"""The folder of a run with several labels an image, written by hand: pages read it, without training."""

import json
from pathlib import Path

import numpy as np
import yaml
from run_folders import write_csv
from sklearn.metrics import average_precision_score, multilabel_confusion_matrix

from finetune.runs.best_epoch import num_trials_of_labels
from finetune.runs.headline import best_of_epoch, headline_of
from finetune.runs.run_dir import RunDir

NAMES = ["blue <b>", "green & red", "ünder"]  # as labels may be called
THRESHOLDS = [0.5, 0.3, 0.6]
CALIBRATION = {
    "scale": [1.0, 2.0, 0.5],
    "bias": [0.0, -0.5, 0.3],
    "thresholds": THRESHOLDS,
    "num_images": 40,
    "aim": None,
    "reached": None,
    "unreached": [],
}


def drawn(num: int = 60, num_labels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Return labels (N, K) and probabilities (N, K) that are mostly right, with both kinds of mistakes."""
    rng = np.random.default_rng(0)
    labels = rng.random((num, num_labels)) < 0.4
    return labels, 1 / (1 + np.exp(-1.2 * rng.normal(size=labels.shape) - 2.2 * labels + 1.1))


def write_labels_run(
    folder: Path,
    labels: np.ndarray,
    probabilities: np.ndarray,
    names: list[str] = NAMES,
    thresholds: list[float] = THRESHOLDS,
) -> Path:
    """Write a run's files for labels and probabilities (N, K)."""
    folder.mkdir(parents=True)
    predicted = probabilities >= thresholds
    y = labels.astype(int)
    decided = predicted.astype(int)
    average = [
        average_precision_score(y[:, k], probabilities[:, k]) if y[:, k].any() else None
        for k in range(len(names))
    ]
    result = {
        "test/mAP": float(np.mean([value for value in average if value is not None])),
        "test/exact_match": float((predicted == labels).all(axis=1).mean()),
        "test/calibration_error": 0.04,
        "test/calibration_error_before_scaling": 0.09,
        **{f"test/average_precision/{n}": v for n, v in zip(names, average, strict=True)},
        "class_names": names,
        "label_counts": multilabel_confusion_matrix(y, decided).tolist(),
        "cooccurrence": (y.T @ y).tolist(),
        "calibration": {**CALIBRATION, "thresholds": thresholds} if len(names) == 3 else None,
    }
    (folder / "test.json").write_text(json.dumps(result))
    config = {"model": {"backbone": "resnet18", "weights": None}}
    config |= {"data": {"init_args": {"root": "photos", "image_size": 32, "batch_size": 8}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    counts = dict(zip(names, y.sum(axis=0).tolist(), strict=True))
    split = {"origin": "", "counts": counts, "num_images": len(y)}
    about = {"command": "finetune fit", "root": "photos", "lines": [], "fingerprint": "f00d"}
    splits = dict.fromkeys(("train", "val", "test"), split)
    num_trials = num_trials_of_labels(y.sum(axis=0))
    best = best_of_epoch(2, 0.9, 0.9, "val/mAP", num_images=len(y), num_trials=num_trials)
    test = headline_of(result)
    facts = {"kind": "fit", "epochs": 3, "best": best, "splits": splits}
    RunDir(folder).update(**about, **facts, test=test)
    epochs = [
        {"step": 3, "epoch": 0, "val/loss": 0.9, "val/mAP": 0.5, "val/f1_micro": 0.5},
        {"step": 3, "epoch": 0, "train/loss_epoch": 1.1, "train/f1_micro": 0.4},
        {"step": 7, "epoch": 1, "val/loss": 0.6, "val/mAP": 0.9, "val/f1_micro": 0.6},
        {"step": 11, "epoch": 2, "val/loss": 0.7, "val/mAP": 0.7, "val/f1_micro": 0.7},
    ]
    write_csv(folder / "steps.csv", list(dict.fromkeys(k for row in epochs for k in row)), epochs)
    validations = [{**row, "epoch": row["epoch"] + 1} for row in epochs if "val/mAP" in row]
    write_csv(folder / "metrics.csv", list(validations[0]), validations)

    separator = "|" if any(";" in name for name in names) else ";"

    def joined(chosen: np.ndarray) -> str:
        return separator.join(name for name, has in zip(names, chosen, strict=True) if has)

    rows = [
        {
            "path": f"gone/{i:03d}.png",
            "labels": joined(labels[i]),
            "predicted": joined(predicted[i]),
            **{f"p_{name}": p for name, p in zip(names, probabilities[i].tolist(), strict=True)},
            "error": "",
        }
        for i in range(len(labels))
    ]
    columns = list(rows[0])
    rows.append({"path": "broken.png", "labels": names[0], "error": "truncated"})
    write_csv(folder / "test_predictions.csv", columns, rows)
    return folder
