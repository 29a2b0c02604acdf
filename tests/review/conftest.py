"""A folder with wrong labels, and its review."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reviews import begin_review, client_of, copy_with_wrong_labels
from starlette.testclient import TestClient

from finetune.review.review_session import ReviewSession


@pytest.fixture
def wrong(colours: Path, tmp_path: Path) -> Path:
    """Three classes of 20 images. Three images in the folder `blue` belong to another class."""
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
def begin() -> Callable[..., ReviewSession]:
    """Begin a review of a folder, with its file next to it."""
    return begin_review


@pytest.fixture
def client(wrong: Path, begin: Callable[..., ReviewSession]) -> Iterator[TestClient]:
    """A client of a review whose labels were ranked."""
    with client_of(begin(wrong)) as client:
        yield client
