"""Lists of very many paths, and the ways to name images for prediction."""

import os
import re
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
        ImageFolderData(predict=pattern).read()
    assert repr(pattern) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a/t.csv", "path,label\n1.png,x\nö.PNG,\n1.png,y\n"),
        ("a/t.tsv", "when\tfile\n1\t1.png\n2\tö.PNG\n3\t1.png\n"),
        ("a/t.jsonl", '{"image": "1.png"}\n{"image": "ö.PNG"}\n{"image": "1.png"}\n'),
    ],
)
def test_a_table_lists_its_paths_relative_to_its_folder(some, name, text):
    Path(name).write_text(text, "utf-8")
    expected = ["a/1.png", "a/ö.PNG", "a/1.png"]  # as listed, twice too
    assert list(files_to_predict(name)) == expected
    assert list(files_to_predict([name, "top.png"])) == [*expected, "top.png"]


def test_a_table_of_predictions_has_the_paths_that_were_given(some):
    Path("runs").mkdir()
    Path("runs/predictions.csv").write_text("path,class\na/1.png,x\nnowhere.png,\n")
    assert list(files_to_predict("runs/predictions.csv")) == ["a/1.png", "nowhere.png"]


def test_the_path_of_a_table_may_have_a_name_of_its_own(some):
    Path("t.csv").write_text("photo_of,path\ntop.png,x\n")
    assert list(files_to_predict("t.csv", columns={"path": ["photo_of"]})) == ["top.png"]
    assert list(files_to_predict("t.csv", columns={"path": ["gone"]})) == ["x"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "when\n1\n", "t.csv, line 1: none of the columns 'when' is the path"),
        ("t.csv", "path\ntop.png\nhttps://x/y.png\n", "t.csv, line 3, column path: 'https://x/y.png' is"),
        ("t.json", "[]", r"'t.json': .json tables are unsupported; save it as one of"),
    ],
)  # fmt: skip
def test_a_table_without_paths_is_one_line(some, name, text, message):
    Path(name).write_text(text)
    with pytest.raises(ValueError, match=message):
        files_to_predict(name)


def test_several_images_folders_and_globs_come_in_their_order(tmp_path, monkeypatch):
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


def test_what_is_left_out_of_a_folder_is_reported_once(some, monkeypatch, caplog, without_heic):
    for name in ("a/1.heic", "a/2.HEIC", "a/notes.txt", "only/1.heic"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    ImageFolderData(predict=["a", "top.png"]).read()
    (line,) = caplog.messages
    assert line.startswith("skipped in a, not images: 2 .heic; supported are ")
    advice = "; to read HEIC images: pip install '.[heic]' in a checkout of finetune"
    assert line.endswith(advice)
    with pytest.raises(FileNotFoundError, match=re.escape(advice)):
        files_to_predict("only", is_logged=False)
    caplog.clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    ImageFolderData(predict="a").read()
    assert not caplog.messages


def test_a_link_that_leads_back_can_be_left_out_as_its_line_says(some, caplog):
    Path("a/back").symlink_to("..")
    with pytest.raises(
        OSError, match=r"a/back is a link .* or skip it with --data.on_bad_image skip"
    ):
        ImageFolderData(predict="a").read()
    data = ImageFolderData(predict="a", on_bad_image="skip")
    assert list(data.splits["predict"].paths) == ["a/1.png", "a/ö.PNG"]
    assert caplog.messages == ["skipped a/back is a link to a folder that it lies in"]
