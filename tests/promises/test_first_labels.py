"""`finetune review FOLDER --labels A,B`: the questions about images without labels, their answers, and the table."""

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from colours import NAMES, draw_colours
from hypothesis import given
from hypothesis import strategies as st
from promise import promise
from reviews import begin_labelling, job_of

from finetune.data.datasets.scan import scan
from finetune.review import ranking_job
from finetune.review.questions import estimate, random_order
from finetune.review.review_session import ReviewSession

NUM_ANSWERS = 15


@pytest.fixture
def unlabelled(tmp_path: Path) -> Path:
    """60 blue images, 57 green ones and 3 red ones, without their classes in folders or names."""
    drawn = draw_colours(tmp_path / "drawn", train=60) / "train"
    root = tmp_path / "new"
    root.mkdir()
    for name, num in zip(NAMES, (60, 57, 3), strict=True):
        for i, path in enumerate(sorted((drawn / name).iterdir())[:num]):
            path.rename(root / f"{i:02d}{name[0]}.png")
    shutil.rmtree(drawn.parent)
    return root


def answer(session: ReviewSession, num: int) -> list[int]:
    """Answer the next questions by the letter at the end of the name. Return how many answers each class has."""
    for _ in range(num):
        i = session.state()["next"]
        letter = session.images.name(i)[2]
        label = [name[0] for name in NAMES].index(letter)
        session.decide(i, "change", [label], session.item(i)["line"])
    return session.state()["counts"]["of_class"]


def ask_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("most_useful", "typical_images"):
        monkeypatch.setattr(ranking_job, name, lambda *_: np.arange(0))


@promise("first-labels", controls=[ask_at_random])
def test_a_review_without_labels_finds_a_rare_class_early(unlabelled):
    session = begin_labelling(unlabelled, *NAMES)
    job = job_of(session)
    first = session.state()["next"]
    assert first == random_order(120)[0]  # before features are computed
    answer(session, 5)
    while sum(answer(session, 0)) < NUM_ANSWERS:
        session.outdated.clear()
        job.rank()
        answer(session, 5)
        assert session.outdated.is_set()  # five answers later
    assert not job.error
    assert min(answer(session, 0)) >= 2  # of the 3 among 120
    job.rank()
    item = session.item(session.state()["next"])
    assert item["labels"] == [] and item["neighbours"]
    assert sum(one["probability"] for one in item["suggestions"]) == pytest.approx(1, abs=1e-3)


@promise("first-labels")
@given(
    decisions=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["change", "exclude", "none"]), st.booleans()),
        max_size=12,
    )
)
def test_the_file_of_a_review_without_labels_is_a_table_of_the_last_answers(
    decisions, tmp_path_factory
):
    root = draw_colours(tmp_path_factory.mktemp("drawn"), train=2)
    session = begin_labelling(root, "cat", "dog")
    expected: dict[str, str] = {}
    for i, action, is_dog in decisions:
        session.decide(i, action, [int(is_dog)], session.item(i)["line"])
        expected.pop(session.images.name(i), None)
        if action == "change":
            expected[session.images.name(i)] = "dog" if is_dog else "cat"
    again = begin_labelling(root, "cat", "dog")  # as after a kill
    assert again.state()["counts"]["changed"] == len(expected)
    if not expected:
        if decisions:
            with pytest.raises(ValueError, match="no labels"):
                scan(str(root / "labels.csv"))
        return
    table = scan(str(root / "labels.csv"))
    labels = [table.class_names[k] for k in table.targets.labels]
    assert dict(zip(table.names(), labels, strict=True)) == expected


@promise("first-labels")
def test_only_images_that_the_table_can_name_are_asked_about(tmp_path, capsys):
    root = tmp_path / "new"
    (root / "new").mkdir(parents=True)
    drawn = sorted((draw_colours(tmp_path / "drawn", train=5) / "train").rglob("*.png"))
    usual = ["a.png", "b c.png", "C:\\d.png", 'e"f,g.png', "h\ni.png", "new/a.png", "e\u0301.png"]
    rare = [" a.png", "\u00a0j.png", "k\udcff.png", "\u00e9.png"]  # the last is e\u0301, composed
    for name, path in zip(usual + rare, drawn, strict=False):
        path.rename(root / name)
    session = begin_labelling(root, "cat", "dog")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "4 images" in said and "rename" in said
    assert len(session.images) == len(usual)
    expected = {}
    for i in range(len(usual)):
        session.decide(i, "change", [i % 2], 0)
        expected[session.images.name(i)] = i % 2
    with contextlib.chdir(tmp_path):
        table = scan("new/labels.csv")
    assert dict(zip(table.names(), table.targets.labels.tolist(), strict=True)) == expected
    assert expected.keys() == {*usual}
    for name in usual:
        (root / name).unlink()
    (root / rare[3]).unlink()
    with pytest.raises(OSError, match="rename"):
        begin_labelling(root, "cat", "dog")


@given(
    right=st.lists(st.booleans(), min_size=1, max_size=30),
    num_asked=st.integers(0, 30),
    data=st.data(),
)
def test_the_accuracy_of_a_review_is_that_of_its_random_images(right, num_asked, data):
    num = len(right)
    is_open = np.arange(num) >= num_asked
    also = data.draw(st.lists(st.integers(0, num - 1)))  # asked as useful
    is_open[[i for i in also if i > num_asked]] = False
    is_right = np.where(is_open, np.nan, np.array(right, float))
    size = min(num, num_asked)
    assert estimate(is_right, is_open) == (sum(right[:size]), size, size)


def test_a_skipped_question_is_left_out_of_the_accuracy(unlabelled):
    session = begin_labelling(unlabelled, *NAMES)
    job = job_of(session)
    index = session.item(session.state()["next"])["following"]
    for _ in range(12):
        label = [name[0] for name in NAMES].index(session.images.name(index)[2])
        index = session.decide(index, "change", [label], 0)["item"]["next"]
    job.rank()
    assert not job.error
    assert "12 of 13 random images" in session.state()["counts"]["accuracy"]
    assert session.item(index)["position"] == 13  # and the next question follows the skipped one
