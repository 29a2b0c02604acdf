"""A folder with wrong labels, and its review."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reviews import MOVED, TOKEN, job_of
from starlette.testclient import TestClient

from finetune.data.corrections import CorrectionsFile
from finetune.review.review_app import make_review_app
from finetune.review.review_images import list_images
from finetune.review.review_session import ReviewSession


@pytest.fixture
def wrong(colours: Path, tmp_path: Path) -> Path:
    """Three classes of 20 images, three of which lie in the folder `blue` and should not."""
    root = tmp_path / "wrong"
    shutil.copytree(colours / "train", root)
    for name in MOVED:
        (root / name).rename(root / "blue" / name.replace("/", "_"))
    return root


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

    def session(root: Path, by: str = "me") -> ReviewSession:
        file = CorrectionsFile(root.parent / "corrections.csv")
        return ReviewSession(list_images(root), file, by, {})

    return session


@pytest.fixture
def client(wrong: Path, begin: Callable[..., ReviewSession]) -> Iterator[TestClient]:
    """A client of a review whose labels were ranked."""
    session = begin(wrong)
    job = job_of(session)
    job.rank()
    assert not job.error
    app = make_review_app(session, job, TOKEN, "Review")
    headers = {"Origin": "http://127.0.0.1:8000"}
    with TestClient(app, f"http://127.0.0.1:8000/{TOKEN}/", headers=headers) as client:
        yield client
