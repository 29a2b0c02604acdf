"""test.json and val.json: the result of an evaluation. Of many classes only the cells with images are written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import numpy as np

from finetune.runs.facts import Corrections
from finetune.runs.headline import Count, Share
from finetune.runs.run_dir import reading
from finetune.system.files import replace_text

MAX_DENSE = 100  # classes whose matrices are written as they are
# Matrices (K, K), and the name of their cells: rows of the true class, the other class and the number of images.
_CELLS = {"confusion_matrix": "confusion_cells", "cooccurrence": "cooccurrence_cells"}
_NESTED = {"groups", "test_folder"}  # other results in it: of groups, and of folds on a test folder
_Pair = tuple[Count, Count]
_Losses = dict[str, float | None]
_Shares = dict[str, Share | None]
_ROUNDED = 1 + 1e-9  # a mean of ones may be above 1 by rounding
_Interval = tuple[Share, Share] | None


class _Calibration(TypedDict):
    scale: list[float]
    bias: list[float]
    thresholds: list[float]


class _Sets(TypedDict):
    coverage: Share
    line: str
    covered: list[Count]
    size: list[float]
    sizes: list[Count]


class _Fold(TypedDict, total=False):
    run: str
    num_images: Count
    num_right: Count
    mAP: Share | None
    mAP_interval: _Interval


class _Tables(TypedDict, total=False):
    """What pages compute with, of K classes or labels."""

    class_names: list[str]
    confusion_matrix: list[list[Count]]  # (K, K)
    cooccurrence: list[list[Count]]  # (K, K)
    confusion_cells: list[tuple[Count, Count, Count]]
    cooccurrence_cells: list[tuple[Count, Count, Count]]
    label_counts: list[tuple[_Pair, _Pair]]  # (K, 2, 2)
    calibration: _Calibration | None
    sets: _Sets
    joined_calibration: _Calibration | None
    corrections: Corrections
    mAP_interval: _Interval
    unfamiliar: Share
    folds: list[_Fold]
    num_mixed: Count
    num_unread: Count


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write the result of an evaluation as JSON."""
    plain = _sparse(result)
    for name in _NESTED & plain.keys():
        plain[name] = _sparse(plain[name])
    replace_text(path, json.dumps(plain, indent=2, allow_nan=False) + "\n")


def read_result(path: Path) -> dict[str, Any]:
    """Return the result of an evaluation with complete matrices; an empty dict if there is none.

    Raises:
        ValueError: The file is damaged.
    """
    if not path.exists():
        return {}
    with reading(path):
        result = _checked(json.loads(path.read_text("utf-8")))
        for name in _NESTED & result.keys():
            result[name] = _checked({"class_names": result["class_names"]} | result[name])
    return result


def _checked(content: Any) -> dict[str, Any]:
    """Return a result with complete matrices.

    Raises:
        LookupError: It has a cell outside a matrix.
        ValueError: A value has another type or range, or a table another number of rows or columns than there are
            classes.
    """
    msgspec.convert(content, _Tables)
    result = _dense(content)
    for name, value in list(result.items()):
        if "/" in name:
            is_loss = name.split("/")[1] == "loss"
            if value is not None and not is_loss and 1 < value < _ROUNDED:
                result[name] = 1.0
            msgspec.convert({name: result[name]}, _Losses if is_loss else _Shares)
    for fold in result.get("folds", ()):
        if fold.get("num_right", 0) > fold.get("num_images", 0):
            raise ValueError("a fold has more right predictions than images")
    num_classes = len(result.get("class_names", ()))
    sets = [result["sets"][name] for name in ("covered", "size")] if "sets" in result else []
    if {*map(len, sets)} - {num_classes}:
        raise ValueError(f"the sets are not of {num_classes} classes")
    for name in (*_CELLS, "label_counts"):
        sizes = {len(result[name])} if name in result else set()
        if name in _CELLS:
            sizes |= set(map(len, result.get(name, ())))
        if sizes - {num_classes}:
            raise ValueError(f"{name} is not of {num_classes} classes")
    return result


def _sparse(result: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(result)
    for name, cells in _CELLS.items():
        if len(plain.get(name) or ()) > MAX_DENSE:
            matrix = np.array(plain.pop(name))
            plain[cells] = [[int(i), int(j), int(matrix[i, j])] for i, j in np.argwhere(matrix)]
    return plain


def _dense(result: dict[str, Any]) -> dict[str, Any]:
    for name, cells in _CELLS.items():
        if cells in result:
            num_classes = len(result["class_names"])
            matrix = np.zeros((num_classes, num_classes), np.int64)
            for i, j, count in result.pop(cells):
                matrix[i, j] = count
            result[name] = matrix.tolist()
    return result
