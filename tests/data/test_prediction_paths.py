"""Lists of very many paths, and what a person means by pictures to predict."""

import os
import shutil
from pathlib import Path

import pytest

from finetune.data.datasets.image_folder import ImageFolderData
from finetune.data.prediction_paths import files_to_predict

PATTERNS = {
    "top.png": ["top.png"],
    "notes.md": ["notes.md"],  # what a person names is tried; its row will say what is wrong
    ".": ["./a/1.png", "./a/ö.PNG", "./b/2.png", "./top.png"],
    "a": ["a/1.png", "a/ö.PNG"],
    "*/*.png": ["a/1.png", "b/2.png"],
    "**/*.png": ["a/1.png", "b/2.png", "top.png"],
    "*": ["list.txt", "notes.md", "top.png"],
    "list.txt": ["b/2.png", "nowhere.png", "a/ö.PNG", "b/2.png"],  # as listed, twice too
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_to_be_predicted(some, pattern):
    data = ImageFolderData(predict=pattern)
    assert (
        list(data.splits) == ["predict"] and list(data.splits["predict"].paths) == PATTERNS[pattern]
    )
    assert (data.splits["predict"].targets.labels == -1).all()


def test_file_names_that_are_no_utf8(some):
    name = os.fsdecode(b"a/caf\xe9.png")
    Path(name).write_bytes(Path("top.png").read_bytes())
    # the mark that Windows puts first
    Path("names.txt").write_bytes(b"\xef\xbb\xbf" + os.fsencode(name) + b"\n")
    for pattern in ("a", "a/*.png", "names.txt"):
        assert name in ImageFolderData(predict=pattern).splits["predict"].paths


@pytest.mark.parametrize("pattern", ["nowhere", "nowhere/*.png", "empty", "empty.txt"])
def test_nothing_to_predict(some, pattern):
    Path("empty").mkdir()
    Path("empty.txt").write_text("\n \n")
    with pytest.raises(FileNotFoundError) as caught:
        ImageFolderData(predict=pattern)
    assert repr(pattern) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("all.zip", "archive: unpack"),
        ("all.tar.gz", "archive: unpack"),
        ("all.CSV", "table: a list"),
    ],
)
def test_a_file_of_many_is_named_for_what_it_is(some, name, what):
    if name.endswith("CSV"):
        Path(name).write_text("path\ntop.png\n")
    else:
        shutil.make_archive("all", "zip" if name.endswith("zip") else "gztar", ".", "a")
    with pytest.raises(ValueError, match=rf"^'{name}' is an {what}|^'{name}' is a {what}"):
        ImageFolderData(predict=name)
    # The control: a picture with an archive behind it, as some programs write, is a picture.
    Path("both.any").write_bytes(Path("top.png").read_bytes() + Path(name).read_bytes())
    assert list(ImageFolderData(predict="both.any").splits["predict"].paths) == ["both.any"]


def test_several_pictures_folders_and_globs_come_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a/2.png", "a/1.png", "b/3.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    a, b = str(tmp_path / "a"), str(tmp_path / "b/3.jpg")
    found = files_to_predict([b, a, "~/a/*.png"])
    assert list(found) == [b, *[f"{a}/{i}.png" for i in (1, 2)] * 2]
    assert list(files_to_predict("~/b/3.jpg")) == [b]
    with pytest.raises(FileNotFoundError, match="absent"):
        files_to_predict([b, "absent"])


def test_what_is_left_out_of_a_folder_is_told_once(some, monkeypatch, caplog):
    for name in ("a/1.heic", "a/2.HEIC", "a/notes.txt"):
        Path(name).touch()
    ImageFolderData(predict=["a", "top.png"])
    (line,) = caplog.messages
    assert line.startswith("left out of a, as no pictures: 2 .heic; supported are ")
    caplog.clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    ImageFolderData(predict="a")
    assert not caplog.messages


def test_a_link_that_leads_back_can_be_left_out_as_its_line_says(some, caplog):
    Path("a/back").symlink_to("..")
    with pytest.raises(
        OSError, match=r"a/back is a link .* or leave it out with --data.on_bad_image skip"
    ):
        ImageFolderData(predict="a")
    data = ImageFolderData(predict="a", on_bad_image="skip")
    assert list(data.splits["predict"].paths) == ["a/1.png", "a/ö.PNG"]
    assert caplog.messages == ["left out a/back is a link to a folder that it lies in"]
