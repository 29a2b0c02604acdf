"""Archives of images are unpacked once, complete or not at all; hostile ones are one line and write nothing."""

import errno
import fcntl
import gzip
import io
import multiprocessing
import os
import shutil
import signal
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from promise import promise

from finetune.data import archives
from finetune.data.local_folders import local_folder
from finetune.system.cache_dir import COPIES, COPIES_MARK

FILES = {"cat/1.png": b"1" * 3000, "cat/ö 2.png": b"2" * 600, "dog/1.png": b"3"}
KINDS = (".tar", ".tar.gz", ".tgz", ".zip")
Member = tuple[tarfile.TarInfo, bytes]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of unpacked archives, which does not exist yet."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / COPIES


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
    with zipfile.ZipFile(file, "w") as archive:
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


def files_in(folder: str | Path) -> dict[str, bytes]:
    paths = [
        path
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name not in (COPIES_MARK, ".lock")
    ]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def has_copies(cache: Path) -> bool:
    """Return whether the folder of copies has a copy, or a part of one in the folder of a process."""
    inside = [*cache.glob("*"), *cache.glob(".process-*/*")]
    return any(not path.name.startswith(".") for path in inside)


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
    Path("folder.tar").mkdir()
    assert local_folder("folder.tar") == "folder.tar"


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
def test_a_single_folder_in_an_archive_is_that_of_the_images(kind, prefix, others, inside):
    files = {prefix + name: content for name, content in FILES.items()}
    Path(f"a{kind}").write_bytes(of_kind(kind, {**files, **others}))
    folder = Path(local_folder(f"a{kind}"))
    assert (folder.name == "photos") == (inside == "photos")
    assert files_in(folder if inside else folder / prefix) == FILES
    assert "__MACOSX" not in os.listdir(folder.parent)


def end_of(content: bytes) -> bytes:
    """Return a tar whose last member claims to be larger than any disk."""
    info = tarfile.TarInfo("a")
    info.size = 2**50
    return content[:-10240] + info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd", "size": 0}
GOOD = tar(*(member(name, content) for name, content in FILES.items()))
PACKED = gzip.compress(GOOD)
HEADER = GOOD.index(b"dog/1.png")  # of the third member
# each with two words of its message
HOSTILE = {
    "a link that leads out": (".tar", tar(member("cat/1.png", b"", **LINK)), "is a link"),
    "a link": (".tgz", gzip.compress(tar(member("a", b"", **LINK | {"linkname": "b"}))), "a link"),
    "a hard link": (".tar", tar(member("a", b"", type=tarfile.LNKTYPE, linkname="/x")), "a link"),
    "a pipe": (".tar", tar(member("a", b"", type=tarfile.FIFOTYPE)), "a device"),
    "a path up": (".tar", tar(member("cat/../../x")), "leads out"),
    "an absolute path": (".tar", tar(member("/tmp/x")), "leads out"),
    "a path up in a zip": (".zip", zipped({"../x": b""}), "leads out"),
    "an absolute path in a zip": (".zip", zipped({"/x": b""}), "leads out"),
    "a link in a zip": (".zip", zipped({"a": b"/etc/passwd"}, stat.S_IFLNK | 0o777), "is a link"),
    "a bomb": (".tar.gz", gzip.compress(tar(member("a", bytes(2**22)))), "take more"),
    "a bomb in a zip": (".zip", zipped({"a": bytes(2**22)}), "take more"),
    "a claim": (".tar", end_of(GOOD), "take more"),
    "headers": (".tgz", gzip.compress(tar(*[member(str(i)) for i in range(2500)])), "take more"),
    "files": (".tar", tar(*[member(str(i)) for i in range(150)]), "more than"),
    "files in a zip": (".zip", zipped({str(i): b"" for i in range(150)}), "more than"),
    "a cut before a header": (".tar", GOOD[:HEADER], "truncated"),
    "a cut in a header": (".tar", GOOD[: HEADER + 100], "truncated"),
    "a wrong sum": (".tgz", PACKED[:-5] + bytes([PACKED[-5] ^ 1]) + PACKED[-4:], "CRC"),
    "a cut before the sum": (".tgz", PACKED[:-8], "cannot unpack"),
    "two archives in one": (".tar", GOOD + tar(member("z")), "after its end"),
    "two archives in one, packed": (
        ".tgz",
        PACKED + gzip.compress(tar(member("z"))),
        "after its end",
    ),
    "a long name": (".tar", tar(member("y" * 300)), "photos.tar: .*yyy"),
    "no archive": (".tar", b"text", "cannot unpack"),
    "an empty file": (".tgz", b"", "cannot unpack"),
    "a file and a folder": (".tar", tar(member("a"), member("a/b")), "a/b|exists|directory"),
}


def leave_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives.shutil, "rmtree", lambda *_, **__: None)


@promise("hostile-archives", controls=[leave_the_parts])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_one_line_and_leaves_nothing(cache, tmp_path, monkeypatch, name):
    kind, content, words = HOSTILE[name]
    monkeypatch.setattr(archives, "FREE_BYTES", 2**20)
    monkeypatch.setattr(archives, "MOST_FILES", 10_000 if name == "headers" else 100)
    Path(f"photos{kind}").write_bytes(content)
    with pytest.raises((ValueError, OSError), match=words) as caught:
        local_folder(f"photos{kind}")
    assert "\n" not in str(caught.value) and not has_copies(cache)
    assert {path.name for path in tmp_path.iterdir()} <= {f"photos{kind}", "cache"}


def test_a_header_cannot_take_all_memory():
    info = tarfile.TarInfo("a")
    info.type = tarfile.XHDTYPE
    info.size = 2**30
    header = info.tobuf(tarfile.GNU_FORMAT)
    Path("a.tgz").write_bytes(gzip.compress(header + bytes(2**26), compresslevel=1))
    with pytest.raises(ValueError, match="take more"):
        local_folder("a.tgz")


@promise("hostile-archives")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(KINDS), st.data())
def test_a_damaged_archive_is_one_line_or_writes_into_its_folder_alone(cache, kind, data):
    content = bytearray(of_kind(kind, FILES))
    if data.draw(st.booleans(), "cut"):
        del content[data.draw(st.integers(0, len(content) - 1), "end") :]
    else:
        content[data.draw(st.integers(0, len(content) - 1), "position")] ^= data.draw(
            st.integers(1, 255), "change"
        )
    shutil.rmtree(cache, ignore_errors=True)
    Path(f"photos{kind}").write_bytes(content)
    try:
        folder = local_folder(f"photos{kind}")
    except (ValueError, OSError) as error:
        assert "\n" not in str(error) and not has_copies(cache)
    else:
        assert Path(folder).is_relative_to(cache)
        assert len(files_in(cache)) <= len(FILES)
    assert {path.name for path in Path().iterdir()} <= {"cache", *(f"photos{k}" for k in KINDS)}


@promise("hostile-archives")
@pytest.mark.parametrize("how", ["killed", "full disk", "interrupted"])
def test_an_end_while_an_archive_is_unpacked_leaves_nothing_that_is_taken_for_complete(
    cache, monkeypatch, how
):
    Path("photos.tar").write_bytes(GOOD)
    extract = tarfile.TarFile.extract
    num = 0

    def end_at_the_second(*args: object, **options: object) -> None:
        nonlocal num
        num += 1
        if num < 2:
            extract(*args, **options)  # type: ignore[arg-type]
        elif how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "interrupted":
            raise KeyboardInterrupt
        else:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "extract", end_at_the_second)
        if how == "killed":
            fork = multiprocessing.get_context("fork")
            process = fork.Process(target=local_folder, args=("photos.tar",))
            process.start()
            process.join(60)
            assert process.exitcode == -signal.SIGKILL
            assert has_copies(cache)
        else:
            with pytest.raises((OSError, KeyboardInterrupt)):
                local_folder("photos.tar")
            assert files_in(cache) == {}
    folder = local_folder("photos.tar")
    assert files_in(folder) == FILES
    assert [path.name for path in cache.iterdir() if path.name[0] != "."] == [Path(folder).name]
    assert len(files_in(cache)) == len(FILES)  # the parts of a killed process are gone


def test_two_processes_may_unpack_an_archive_at_once_on_a_disk_without_locks(monkeypatch):
    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    Path("photos.tar").write_bytes(GOOD)
    extract = tarfile.TarFile.extract
    others = ["photos.tar"]

    def extract_after_the_other(*args: object, **options: object) -> None:
        if others:
            assert files_in(local_folder(others.pop())) == FILES
        extract(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tarfile.TarFile, "extract", extract_after_the_other)
    assert files_in(local_folder("photos.tar")) == FILES
