"""Archives are unpacked once, complete or not at all, and hostile ones are refused in one line and write nothing."""

import gzip
import io
import os
import signal
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from promise import promise

from finetune.data import archives
from finetune.data.local_folders import local_folder

FILES = {"cat/1.png": b"1" * 3000, "cat/ö 2.png": b"2" * 600, "dog/1.png": b"3"}
KINDS = (".tar", ".tar.gz", ".tgz", ".zip")
Member = tuple[tarfile.TarInfo, bytes]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of unpacked archives, which does not exist yet."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache/archives"


def member(name: str, content: bytes = b"x", **more: object) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in more.items():
        setattr(info, key, value)
    return info, content


def tar(*members: Member) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def zipped(files: dict[str, bytes], mode: int = 0) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    return file.getvalue()


def of_kind(kind: str, files: dict[str, bytes]) -> bytes:
    if kind == ".zip":
        return zipped(files)
    content = tar(*(member(name, content) for name, content in files.items()))
    return content if kind == ".tar" else gzip.compress(content)


def files_in(folder: str) -> dict[str, bytes]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_is_unpacked_once_and_anew_if_it_changes(cache, kind):
    path = Path(f"photos{kind}")
    path.write_bytes(of_kind(kind, FILES))
    folder = local_folder(str(path))
    assert files_in(folder) == FILES and Path(folder).is_relative_to(cache)
    Path(folder, "mark").touch()
    assert local_folder(str(path)) == local_folder(str(path.absolute())) == folder
    assert Path(folder, "mark").exists()
    path.write_bytes(of_kind(kind, {**FILES, "dog/2.png": b"4"}))
    assert files_in(local_folder(str(path))) == {**FILES, "dog/2.png": b"4"}
    Path("photos.tar.d.tar").mkdir()
    assert local_folder("photos.tar.d.tar") == "photos.tar.d.tar"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prefix", "others", "inside"),
    [
        ("", {}, ""),
        ("photos/", {}, "photos"),
        ("photos/", {"__MACOSX/photos/cat/._1.png": b"", "._photos": b""}, "photos"),
        ("train/", {}, ""),
        ("photos/", {"readme.txt": b""}, ""),
    ],
)
def test_a_single_folder_is_the_folder_of_the_images(kind, prefix, others, inside):
    files = {prefix + name: content for name, content in FILES.items()}
    Path(f"a{kind}").write_bytes(of_kind(kind, {**files, **others}))
    folder = local_folder(f"a{kind}")
    assert (Path(folder).name == "photos") == (inside == "photos")
    start = prefix if not inside else ""
    assert {name.removeprefix(start) for name in files_in(folder)} >= FILES.keys()
    assert "__MACOSX" not in os.listdir(Path(folder).parent)


def damaged(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]


LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd", "size": 0}
GOOD = tar(*(member(name, content) for name, content in FILES.items()))
HEADER = GOOD.index(b"dog/1.png")  # of the third member
HOSTILE = {
    "a link that leads out": (".tar", tar(member("cat/1.png", b"", **LINK)), "is a link"),
    "a link": (".tgz", gzip.compress(tar(member("a", b"", **LINK | {"linkname": "b"}))), "link"),
    "a hard link": (".tar", tar(member("a", b"", type=tarfile.LNKTYPE, linkname="/etc/x")), "link"),
    "a pipe": (".tar", tar(member("a", b"", type=tarfile.FIFOTYPE)), "is a link or a device"),
    "a path up": (".tar", tar(member("cat/../../x")), "leads out"),
    "an absolute path": (".tar", tar(member("/tmp/x")), "leads out"),
    "a path up in a zip": (".zip", zipped({"../x": b""}), "leads out"),
    "an absolute path in a zip": (".zip", zipped({"/x": b""}), "leads out"),
    "a link in a zip": (".zip", zipped({"a": b"/etc/passwd"}, stat.S_IFLNK | 0o777), "is a link"),
    "a bomb": (".tar.gz", gzip.compress(tar(member("a", bytes(2**22)))), "take more than"),
    "a bomb in a zip": (".zip", zipped({"a": bytes(2**22)}), "take more than"),
    "many headers": (".tgz", gzip.compress(tar(*[member(str(i)) for i in range(4000)])), "take"),
    "many files": (".tar", tar(*[member(str(i)) for i in range(150)]), "more than 100 files"),
    "many files in a zip": (".zip", zipped({str(i): b"" for i in range(150)}), "more than 100"),
    "a truncated header": (".tar", GOOD[: HEADER + 100], "truncated"),
    "a truncated end": (".tar", GOOD[:HEADER], "truncated"),
    "a truncated file": (".tar", GOOD[:2000], "cannot unpack"),
    "a damaged header": (".tar", damaged(GOOD, HEADER + 150), "damaged"),
    "a truncated gzip": (".tgz", gzip.compress(GOOD)[:-20], "cannot unpack"),
    "a truncated zip": (".zip", zipped(FILES)[:-20], "cannot unpack"),
    "a damaged zip": (".zip", damaged(zipped({"a": os.urandom(999)}), 200), "cannot unpack"),
    "no archive": (".tar", b"text", "cannot unpack"),
    "an empty file": (".tgz", b"", "cannot unpack"),
    "a file and a folder": (".tar", tar(member("a"), member("a/b")), "a/b|exists|directory"),
}


@promise("hostile-archives")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_or_damaged_archive_is_one_line_and_leaves_nothing(
    cache, tmp_path, monkeypatch, name
):
    kind, content, text = HOSTILE[name]
    monkeypatch.setattr(archives, "_SMALL", 2**20)
    monkeypatch.setattr(archives, "_MOST_FILES", 10_000 if "headers" in name else 100)
    Path(f"photos{kind}").write_bytes(content)
    with pytest.raises((ValueError, OSError), match=text) as caught:
        local_folder(f"photos{kind}")
    assert "\n" not in str(caught.value)
    assert not cache.exists() or not any(cache.iterdir())
    assert {path.name for path in tmp_path.iterdir()} <= {f"photos{kind}", "cache"}


def long_header() -> bytes:
    info = tarfile.TarInfo("a")
    info.type = tarfile.XHDTYPE
    info.size = 2**30
    return gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(2**26))


def test_a_header_cannot_take_all_memory():
    Path("a.tgz").write_bytes(long_header())
    with pytest.raises(ValueError, match="take more than"):
        local_folder("a.tgz")


KILLED = """
import os, signal
from finetune.data import archives
from finetune.data.local_folders import local_folder
original = archives._extract
def killed(members, limit, folder):
    def few():
        yield next(members)
        os.kill(os.getpid(), signal.SIGKILL)
    original(few(), limit, folder)
archives._extract = killed
local_folder("photos.tar")
"""


@promise("hostile-archives")
def test_a_killed_process_leaves_nothing_that_is_taken_for_complete(cache):
    Path("photos.tar").write_bytes(GOOD)
    done = subprocess.run([sys.executable, "-c", KILLED], timeout=120)
    assert done.returncode == -signal.SIGKILL
    parts = [path.name for path in cache.iterdir()]
    assert any(name.endswith(".part") for name in parts)
    folder = local_folder("photos.tar")
    assert files_in(folder) == FILES
    assert [path.name for path in cache.iterdir()] == [Path(folder).name]


@pytest.mark.parametrize("name", ["none.tar", "none.zip"])
def test_an_archive_that_is_missing(name):
    with pytest.raises(FileNotFoundError, match=f"the archive '{name}' does not exist"):
        local_folder(name)


def test_a_full_disk_leaves_nothing(cache, monkeypatch):
    def fail(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    extract: Callable[..., object] = fail
    monkeypatch.setattr(tarfile.TarFile, "extract", extract)
    Path("photos.tar").write_bytes(GOOD)
    with pytest.raises(OSError, match="No space"):
        local_folder("photos.tar")
    assert not cache.exists() or not any(cache.iterdir())
