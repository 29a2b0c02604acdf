"""Fixtures of reviews: a folder with wrong labels, and its review."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def wrong(colours: Path, tmp_path: Path) -> Path:
    """Three classes of 20 images. Three images in the folder `blue` belong to another class."""
    from reviews import copy_with_wrong_labels

    return copy_with_wrong_labels(colours, tmp_path / "wrong")


@pytest.fixture
def several(wrong: Path) -> Path:
    """A table of the same images, which all have the label `any`, too."""
    table = wrong.parent / "tables" / "several.csv"
    table.parent.mkdir()
    rows = ["path,label"]
    for path in sorted(wrong.rglob("*.png")):
        label = path.parent.name
        name = path.name if "_" in path.name else f"{label}{path.name}"
        path.rename(table.parent / name)
        rows.append(f"{name},any;{label}" if name != "red19.png" else f"{name},red")
    table.write_text("\n".join(rows) + "\n")
    return table


@pytest.fixture
def begin() -> Callable[..., Any]:
    """Begin a review of a folder, with its file next to it."""
    from reviews import begin_review

    return begin_review


@pytest.fixture
def client(wrong: Path, begin: Callable[..., Any]) -> Iterator[Any]:
    """A client of a review whose labels were ranked."""
    from reviews import client_of

    with client_of(begin(wrong)) as client:
        yield client
