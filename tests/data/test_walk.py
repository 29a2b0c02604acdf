"""The files beneath a folder; test_class_folders.py has the same within data sets."""

import pytest

from finetune.data.walk import SkippedFiles, dangling_links, find_images, num_loose


@pytest.fixture
def folder(tmp_path):
    for name in (
        "b/2.png",
        "b/1.JPG",
        "a.webp",
        ".hidden/3.png",
        "b/notes.txt",
        "b/clip.mov",
        "b/drawing",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_images_come_sorted_and_what_is_none_is_counted(folder):
    skipped = SkippedFiles()
    found = [path.removeprefix(f"{folder}/") for path in find_images(folder, skipped)]
    assert found == ["a.webp", "b/1.JPG", "b/2.png"]
    assert dict(skipped.suffixes) == {".mov": 1, "": 1}
    assert num_loose(folder) == 1 and num_loose(folder / "b") == 2


def test_two_links_to_one_folder_are_no_circle(folder):
    for name in ("c", "d"):
        (folder / name).symlink_to(folder / "b")
    assert len(list(find_images(folder))) == 7


@pytest.mark.parametrize("target", ["store", "a", "a/b"])
def test_a_circle_is_found_however_long(tmp_path, target):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "store").mkdir()
    (tmp_path / "a/b/out").symlink_to(tmp_path / "store")
    (tmp_path / "store/back").symlink_to(tmp_path / target)
    with pytest.raises(OSError, match="back is a link to a folder that it lies in: remove it"):
        list(find_images(tmp_path / "a"))
    skipped = SkippedFiles(skip_unreadable=True)
    assert list(find_images(tmp_path / "a", skipped)) == []
    assert len(skipped.unread) == 1


def test_links_to_nothing_are_listed(folder):
    (folder / "gone").symlink_to(folder / "nothing")
    (folder / "there").symlink_to(folder / "b")
    assert dangling_links(folder) == [str(folder / "gone")]


def test_the_images_of_runs_are_none_of_the_folder_that_they_were_begun_in(folder):
    """Of `finetune predict RUN .` there; by its own name a folder of runs is one like any other."""
    (folder / "runs").mkdir()
    (folder / "runs/augmented.webp").touch()
    assert len(list(find_images(folder))) == 4  # the control: it has no mark
    (folder / "runs/.finetune").touch()
    assert len(list(find_images(folder))) == 3
    assert list(find_images(folder / "runs")) == [str(folder / "runs/augmented.webp")]
