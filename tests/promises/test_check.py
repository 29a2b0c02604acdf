"""`finetune check` on a folder with faults, and on one without; it changes nothing and can be stopped."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from browser import dom_after, needs_browser
from colours import QUICKEST
from PIL import Image
from processes import start, start_script


def run(cli, *arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        cli("check", *arguments)
    return int(ended.value.code)


def found(folder: Path) -> dict[str, dict]:
    content = json.loads((folder / "check.json").read_text())
    return {finding["kind"]: finding for finding in content["findings"]}


@pytest.fixture
def images(tmp_path) -> Path:
    """Photographs, in a way: 12 in each of two classes in two splits, all different."""
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / "set" / split / name).mkdir(parents=True)
            for i in range(12):
                pixels = rng.integers(0, 256, (9, 12, 3)).astype(np.uint8)
                image = Image.fromarray(pixels).resize((160, 120), 3)
                image.save(tmp_path / "set" / split / name / f"{i}.jpg", quality=90)
    return tmp_path / "set"


def test_check_of_a_sound_set_finds_nothing(cli, images, tmp_path, capsys):
    assert run(cli, images) == 0
    assert found(tmp_path) == {} and "no problems found" in capsys.readouterr().out
    assert "<strong>No problems</strong> found" in (tmp_path / "check.html").read_text()
    assert run(cli, images, "--out", "own") == run(cli, images, "--out", "own") == 0


def test_check_finds_each_fault_by_name_and_touches_nothing(cli, images, tmp_path, capsys):
    a = images / "train/a"
    (a / "0.jpg").write_bytes((a / "0.jpg").read_bytes()[:900])
    (a / "1.jpg").write_bytes(b"<html>not found</html>")
    (a / "2.jpg").write_bytes(b"<html>not found</html>")
    (a / "dangling.jpg").symlink_to("nowhere")
    Image.new("RGB", (160, 120), "teal").save(a / "4.jpg")
    Image.new("RGB", (160, 120), "teal").save(a / "5.jpg")  # equal, but no copy of an image
    Image.open(a / "6.jpg").crop((0, 0, 160, 50)).save(a / "6.jpg")
    Image.open(a / "7.jpg").convert("CMYK").save(a / "7.jpg")
    shutil.copy(a / "3.jpg", images / "test/b/third.jpg")
    shutil.copy(a / "8.jpg", images / "test/a/copied.jpg")
    Image.open(a / "9.jpg").resize((110, 82)).save(images / "test/b/smaller.jpg")
    shutil.copy(a / "10.jpg", images / "train/b/copied.jpg")
    (images / "train/A ").mkdir()
    (images / "train/c").mkdir()
    Image.open(a / "11.jpg").rotate(90, expand=True).save(images / "train/c/only.jpg")
    before = {path: os.lstat(path).st_mtime_ns for path in images.rglob("*")}
    (tmp_path / "lists").mkdir()
    for name in ("shortcut_size.txt", "blank.txt"):
        (tmp_path / "lists" / name).write_text("of a check before")
    assert run(cli, images, "--lists", "lists") == 1
    names = {
        kind: sorted(file for row in f["rows"] for file in row["files"])
        for kind, f in found(tmp_path).items()
    }
    assert names["unreadable"] == [
        "train/a/0.jpg",
        "train/a/1.jpg",
        "train/a/2.jpg",
    ]
    faults = [row["note"] for row in found(tmp_path)["faults"]["rows"]]
    assert any("dangling.jpg" in fault for fault in faults)
    assert names["blank"] == [
        "train/a/4.jpg",
        "train/a/5.jpg",
    ]
    assert names["wide_or_tall"] == ["train/a/6.jpg"] and names["odd_mode"] == ["train/a/7.jpg"]
    assert names["leak_exact"][:2] == ["test/a/copied.jpg", "test/b/third.jpg"]
    assert names["leak_near"] == ["test/b/smaller.jpg", "train/a/9.jpg"]
    assert names["two_classes_exact"] == ["train/a/10.jpg", "train/b/copied.jpg"]
    assert {
        "alike_names",
        "faults",
        "one_split",
        "tiny_class",
    } <= names.keys() and "copies_exact" not in names
    assert before == {path: os.lstat(path).st_mtime_ns for path in images.rglob("*")}
    assert (tmp_path / "lists/blank.txt").read_text().splitlines() == [
        str(a / "4.jpg"),
        str(a / "5.jpg"),
    ]
    sets = (tmp_path / "lists/leak_exact.txt").read_text().rstrip("\n").split("\n\n")
    assert {frozenset(each.split("\n")) for each in sets} == {
        frozenset([str(a / "3.jpg"), str(images / "test/b/third.jpg")]),
        frozenset([str(a / "8.jpg"), str(images / "test/a/copied.jpg")]),
    }
    out = capsys.readouterr().out
    assert (
        out.index("bad") < out.index("warning") < out.index("note")
        and "train/a/3.jpg = test/b/third.jpg" in out
    )


def test_check_shows_and_lists_names_whatever_they_hold(cli, tmp_path, capsys):
    for name in (b"<b>&amp;'\"", b'"onerror=alert(1) x="', b"new\nline", b"\xff\xfe"):
        folder = os.fsencode(tmp_path / "set") + b"/" + name
        os.makedirs(folder)
        for i in range(2):
            Path(os.fsdecode(folder + b"/" + name + b"%d.jpg" % i)).touch()
    assert run(cli, tmp_path / "set", "--lists", "lists") == 1
    assert "cannot be listed" in capsys.readouterr().out
    page = (tmp_path / "check.html").read_text("utf-8")
    assert "&lt;b&gt;&amp;amp;" in page and "<b>" not in page and '"onerror' not in page
    assert "new\\nline" in page and "\\udcff" in page
    listed = (tmp_path / "lists/unreadable.txt").read_bytes().splitlines()
    assert len(listed) == 6 and all(os.path.exists(path) for path in listed)


def test_check_of_one_image_and_of_none_has_findings(cli, tmp_path):
    (tmp_path / "set/a").mkdir(parents=True)
    assert run(cli, tmp_path / "set") == 1
    assert {"faults"} <= found(tmp_path).keys()
    Image.new("RGB", (30, 30), "red").save(tmp_path / "set/a/x.png")
    assert run(cli, tmp_path / "set") == 1 and {"faults", "blank"} <= found(tmp_path).keys()


def test_two_checks_at_once_leave_one_whole_result(images, tmp_path):
    children = [start("check", images, cwd=tmp_path) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    assert found(tmp_path) == {}
    assert (tmp_path / "check.html").read_text().rstrip().endswith("</html>")
    assert sorted(os.listdir(tmp_path)) == ["check.html", "check.json", "set"]


@pytest.mark.slow
def test_check_with_ckpt_path_ranks_labels(cli, colours, tmp_path):
    """On colours that it was trained on, the images with a wrong class come first."""
    fit = ["fit", "--data.root", colours, *QUICKEST, "--data.batch_size", 12]
    cli(*fit, "--trainer.max_epochs", 3)
    folder = Path(shutil.copytree(colours, tmp_path / "set"))
    moved = sorted((folder / "train").glob("*/*"))[0]
    other = next(path for path in sorted((folder / "train").iterdir()) if path != moved.parent)
    moved.rename(other / "moved.png")
    checkpoint = tmp_path / "runs/fit/version_0/checkpoints/last.ckpt"
    assert run(cli, folder, "--ckpt_path", checkpoint) in (0, 1)
    assert found(tmp_path)["labels"]["rows"][0]["files"] == [f"train/{other.name}/moved.png"]


@pytest.mark.slow
def test_check_after_ctrl_c_ends_in_a_line_and_leaves_nothing(images, tmp_path):
    for i in range(3000):
        os.link(images / "train/a/1.jpg", images / f"train/a/x{i}.jpg")
    program = tmp_path / "program.py"
    program.write_text(
        "import finetune.data.checking.image_facts as f, time, os\n"
        "look = f.inspect_image\n"
        "def slow(*args):\n    open('began', 'w').close(); time.sleep(0.02); return look(*args)\n"
        "f.inspect_image = slow\n"
        "from finetune.cli import main\nmain()\n"
    )
    child = start_script(program, "check", images, "--output", "out", cwd=tmp_path)
    while not (tmp_path / "began").exists():
        time.sleep(0.05)
        assert child.poll() is None, child.stderr
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130 and "Traceback" not in child.stderr and child.stdout == ""
    assert sorted(os.listdir(tmp_path)) == ["began", "program.py", "set"]


@pytest.mark.slow
def test_check_of_a_copy_in_many_files_is_one_set(cli, images, tmp_path):
    for i in range(3000):
        os.link(images / "train/a/1.jpg", images / f"train/a/x{i}.jpg")
    assert run(cli, images) == 1
    (row,) = found(tmp_path)["copies_exact"]["rows"]
    assert len(row["files"]) == 3001 and (tmp_path / "check.html").stat().st_size < 200_000


@pytest.mark.slow
def test_check_of_thousands_of_classes_has_few_lines(cli, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for i in range(3000):
        (tmp_path / f"set/class {i:04}").mkdir(parents=True)
        image = Image.fromarray(rng.integers(0, 256, (9, 9, 3)).astype(np.uint8))
        image.save(tmp_path / f"set/class {i:04}/x.png")
    assert run(cli, tmp_path / "set") == 1
    assert len(capsys.readouterr().out.splitlines()) < 12
    assert len(found(tmp_path)["tiny_class"]["rows"]) == 3000


@pytest.mark.slow
@needs_browser
def test_the_page_sorts_its_rows_and_has_no_errors(cli, images, tmp_path):
    for i in range(3):
        (images / f"train/a/{i}.jpg").write_bytes(b"x" * (3 - i))
    run(cli, images)
    script = (
        "document.querySelector('#unreadable').parentElement.querySelector('th button').click();"
    )
    click_again = script + script
    for clicks, order in ((script, "012"), (click_again, "210")):
        dom = dom_after((tmp_path / "check.html").read_text("utf-8"), clicks, tmp_path)
        assert "".join(re.findall(r'data-value="train/a/(\d)\.jpg"', dom)) == order
