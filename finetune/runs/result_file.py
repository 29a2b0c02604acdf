"""test.json and val.json: the result of an evaluation. Of many classes only the cells with images are written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from finetune.runs.run_dir import read_json
from finetune.system.files import replace_text

MAX_DENSE = 100  # classes whose matrices are written as they are
# Matrices (K, K), and the name of their cells: rows of the true class, the other class and the number of images.
_CELLS = {"confusion_matrix": "confusion_cells", "cooccurrence": "cooccurrence_cells"}


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write the result of an evaluation as JSON."""
    plain = _sparse(result)
    if "test_folder" in plain:  # the result of folds has another one in it
        plain["test_folder"] = _sparse(plain["test_folder"])
    replace_text(path, json.dumps(plain, indent=2, allow_nan=False) + "\n")


def read_result(path: Path) -> dict[str, Any]:
    """Return the result of an evaluation with complete matrices; an empty dict if there is none.

    Raises:
        ValueError: The file is damaged.
    """
    result = _dense(read_json(path), path)
    if "test_folder" in result:
        names = {"class_names": result["class_names"]}
        result["test_folder"] = _dense(names | result["test_folder"], path)
    return result


def _sparse(result: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(result)
    for name, cells in _CELLS.items():
        if len(plain.get(name) or ()) > MAX_DENSE:
            matrix = np.array(plain.pop(name))
            plain[cells] = [[int(i), int(j), int(matrix[i, j])] for i, j in np.argwhere(matrix)]
    return plain


def _dense(result: dict[str, Any], path: Path) -> dict[str, Any]:
    for name, cells in _CELLS.items():
        if cells in result:
            try:
                num_classes = len(result["class_names"])
                matrix = np.zeros((num_classes, num_classes), np.int64)
                for i, j, count in result.pop(cells):
                    matrix[i, j] = count
            except (LookupError, TypeError, ValueError) as error:
                raise ValueError(f"{path} is damaged: {error!r}") from error
            result[name] = matrix.tolist()
    return result
