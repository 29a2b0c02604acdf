"""The state of a review: decisions, and the effect of a new ranking."""

import time
from collections.abc import Callable

import pytest
from promise import promise
from reviews import MOVED, job_of

from finetune.commands.review import list_images
from finetune.data.corrections import CorrectionsFile
from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.listing import ScanOptions
from finetune.review import review_session
from finetune.review.ranking_job import LabelsNow
from finetune.review.review_session import Conflict, ReviewSession


def name_at(session, position):
    return session.images.name(int(session.order.images[position]))


def test_the_moved_images_come_first(wrong, begin):
    session = begin(wrong)
    before = [name_at(session, i) for i in range(3)]
    job = job_of(session)
    job.rank()
    assert not job.error and job.done == job.total == 120 and session.version == 1
    first = {name_at(session, i) for i in range(3)}
    assert first == {f"blue/{name.replace('/', '_')}" for name in MOVED} != set(before)
    item = session.item(int(session.order.images[0]))
    assert session.images.class_names[item["suggestions"][0]["class"]] in item["name"]
    assert item["reason"].startswith("similar images suggest ")
    labels = [near["labels"] for near in item["neighbours"]]
    assert (
        len(labels) == 6
        and len({near["index"] for near in item["neighbours"]} | {item["index"]}) == 7
    )


@promise("corrections")
def test_the_decisions_of_a_review_are_corrections_and_a_later_fit_has_them(wrong, begin):
    session = begin(wrong)
    red = session.images.class_names.index("red")
    i = list(session.images.names()).index("blue/red_00.png")
    session.decide(i, "change", [red], 0)
    session.decide(0, "exclude", None, 0)
    session.decide(1, "right", None, 0)
    answer = session.decide(2, "change", [red], 0)
    session.decide(2, "none", None, answer["item"]["line"])
    lines = [line[:4] for line in session.file.lines]
    assert lines == [
        ("blue/red_00.png", "blue", "red", "me"),
        ("blue/00.png", "blue", "excluded", "me"),
        ("blue/01.png", "blue", "blue", "me"),
        ("blue/02.png", "blue", "red", "me"),
        ("blue/02.png", "blue", "", "me"),
    ]
    counts = session.state()["counts"]
    assert [counts[name] for name in ("decided", "changed", "excluded", "right")] == [3, 1, 1, 1]
    data = ImageFolderData(root=str(wrong), corrections=str(session.file.path), val_fraction=0.2)
    changes = data.scanned.corrections
    assert changes.total("excluded") <= 1 and changes.unknown == 0


class ReadTooEarly(CorrectionsFile):
    """A file in which another process decides just after this one has read it."""

    decide: Callable[[], object] = staticmethod(lambda: None)

    def refresh(self) -> None:
        super().refresh()
        self.decide()


def test_of_two_decisions_about_an_image_at_once_the_later_one_is_refused(wrong, begin):
    other = begin(wrong)
    file = ReadTooEarly(other.file.path)
    session = ReviewSession(other.images, file, "me too", {})
    decisions = iter([(0, "exclude", None, 0)])
    file.decide = lambda: [other.decide(*one) for one in decisions]
    with pytest.raises(Conflict):
        session.decide(0, "right", None, 0)
    assert [line.now for line in file.lines] == ["excluded"]
    assert session.decide(0, "right", None, 1)["item"]["action"] == "right"
    decisions = iter([(2, "exclude", None, 0)])
    assert session.decide(1, "right", None, 0)["item"]["action"] == "right"  # the control
    assert len(file.lines) == 4


def test_a_table_is_reviewed_as_its_folder(wrong, tmp_path):
    folder = list_images(wrong)
    names = sorted(path.relative_to(wrong).as_posix() for path in wrong.rglob("*.png"))
    rows = [f"{name},{name.split('/')[0]}" for name in names]
    columns = {"path": ["shot"], "label": ["thing"]}
    for table, header, options in (
        (wrong / "labels.csv", "path,label", ScanOptions()),
        (tmp_path / "elsewhere.csv", "shot,thing", ScanOptions(root=str(wrong), columns=columns)),
    ):
        table.write_text("\n".join([header, *rows]) + "\n")
        images = list_images(table, options)
        assert sorted(images.names()) == names and images.class_names == folder.class_names
        assert sorted(images.targets.labels) == sorted(folder.targets.labels)


def never_rank_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LabelsNow, "equals", lambda labels, other: True)


@promise("review", controls=[never_rank_again])
def test_after_some_decisions_the_others_are_ranked_by_the_corrected_labels(
    wrong, begin, monkeypatch
):
    monkeypatch.setattr(review_session, "DECISIONS_TO_RANK", 2)
    session = begin(wrong)
    job = job_of(session)
    job.rank()
    first = int(session.order.images[0])
    second = int(session.order.images[1])
    third = int(session.order.images[2])
    last = int(session.order.images[-1])
    before = session.item(last)["suggestions"]
    for i, name in enumerate((first, second)):
        assert not session.outdated.is_set()
        label = session.images.name(name).split("/")[1].split("_")[0]
        session.decide(name, "change", [session.images.class_names.index(label)], 0)
        assert session.version == 1 and session.state()["next"] == (second, third)[i]
    assert session.outdated.is_set()
    job.rank()
    assert session.version == 2
    # an image that was shown comes before all that were not
    assert session.order.images[:4].tolist() == [first, second, last, third]
    assert session.item(first)["reason"] and session.item(last)["suggestions"] != before
    assert session.item(second)["next"] == last and session.item(last)["next"] == third
    assert session.state()["counts"]["doubtful"] == 3
    session.decide(third, "right", None, 0)
    job.rank()  # a confirmed label changes nothing
    assert session.version == 2
    session.decide(third, "exclude", None, 3)
    job.rank()
    assert session.version == 3


def test_the_thread_ranks_again_when_it_should_and_ends_at_an_error(wrong, begin, monkeypatch):
    monkeypatch.setattr(review_session, "DECISIONS_TO_RANK", 1)
    session = begin(wrong)
    job = job_of(session, has_network=False)
    job.start()
    for version in (1, 2):
        deadline = time.monotonic() + 20
        while session.version < version and time.monotonic() < deadline:
            time.sleep(0.005)
        assert session.version == version
        assert not job.error
        if version == 2:
            job.on_ready = None
        session.decide(version, "exclude", None, 0)
    job.join(20)
    assert not job.is_alive() and job.error


def test_several_labels_of_an_image_are_reviewed(several, begin):
    session = begin(several)
    job = job_of(session)
    job.rank()
    assert not job.error and session.images.class_names == ["any", "blue", "green", "red"]
    assert {name_at(session, i) for i in range(3)} == {name.replace("/", "_") for name in MOVED}
    item = session.item(int(session.order.images[0]))
    assert item["labels"] == [0, 1] and "not blue" in item["reason"]
    right = session.images.class_names.index(item["name"].split("_")[0])
    answer = session.decide(item["index"], "change", [right, 0], 0)["item"]
    assert answer["action"] == "change" and answer["chosen"] == [0, right]
    other = int(session.order.images[5])
    session.decide(other, "change", [], 0)
    assert session.item(other)["chosen"] == []
    third = int(session.order.images[6])
    assert session.decide(third, "right", None, 0)["item"]["action"] == "right"
    lines = {line.path: (line.was, line.now) for line in session.file.lines}
    assert lines[item["name"]] == ("any;blue", f"any;{session.images.class_names[right]}")
    assert lines[session.images.name(other)][1] == "[]"
    data = ImageFolderData(table=str(several), corrections=str(session.file.path))
    changes = data.scanned.corrections
    assert changes.total("changed") + changes.in_test == 2
    again = begin(several)
    assert again.state()["counts"]["changed"] == 2 and again.state()["counts"]["right"] == 1
    with pytest.raises(IndexError):
        session.decide(0, "change", [4], 0)
