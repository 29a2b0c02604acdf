"""Archives from a loopback server: a valid one, a wrong or damaged one, and no files left by a failure."""

import errno
import hashlib
import io
import shutil
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from finetune.data.datasets.download import fetch_archive

IMAGES = {"hotdog/train/hotdog/0.png": b"a" * 300_000, "hotdog/test/not-hotdog/1.png": b"b"}


class Server(ThreadingHTTPServer):
    """Answers every path in `files`; `missing_bytes` of each answer are promised but never sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.missing_bytes = 0
        self.says_length = True
        self.num_requests = 0

    def publish(self, content: bytes) -> tuple[str, str]:
        self.files["/photos.zip"] = content
        return f"http://127.0.0.1:{self.server_port}/photos.zip", hashlib.sha1(content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.server.num_requests += 1
        if self.path not in self.server.files:
            return self.send_error(404)
        content = self.server.files[self.path]
        self.send_response(200)
        if self.server.says_length:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) - self.server.missing_bytes])

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def archive(files: dict[str | zipfile.ZipInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as writer:
        for name, content in files.items():
            writer.writestr(name, content)
    return buffer.getvalue()


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def assert_fails(
    error: type[BaseException], reason: str, url: str, sha1: str, folder: Path
) -> None:
    """The fetch fails with one line that says what, where and what to do, and `folder` is as it was."""
    (folder / "neighbour").touch()
    for target in (folder / "hotdog", folder / "new" / "parents" / "hotdog"):
        with pytest.raises(error, match=reason) as caught:
            fetch_archive(url, sha1, target)
        assert [path.name for path in folder.rglob("*")] == ["neighbour"]
        if error is not KeyboardInterrupt:
            message = str(caught.value)
            assert (
                message.startswith(f"{url} could not be fetched into {target}: ")
                and "\n" not in message
            )
            assert message.endswith(f". Download it by hand and unpack it to {target}")


def test_the_only_top_folder_becomes_the_target(server, tmp_path, capfd, caplog):
    target = tmp_path / "data" / "sausages"
    assert fetch_archive(*server.publish(archive(IMAGES)), target) == target
    assert tree(tmp_path) == {
        name.replace("hotdog/", "data/sausages/", 1): IMAGES[name] for name in IMAGES
    }
    # the temporary folder is gone
    assert [path.name for path in target.parent.iterdir()] == ["sausages"]
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_several_top_entries_stay_side_by_side(server, tmp_path):
    files = {"train/a/0.png": b"0", "test/a/1.png": b"1", "README": b"text"}
    target = fetch_archive(*server.publish(archive(files)), tmp_path / "target")
    assert tree(target) == files
    (tmp_path / "plain").mkdir()
    # a temporary folder is for its owner only
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_exists_is_left_alone(server, tmp_path):
    target = tmp_path / "hotdog"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    assert fetch_archive(*server.publish(archive(IMAGES)), str(target)) == target
    assert tree(target) == {"mine.txt": b"mine"} and server.num_requests == 0


def test_wrong_hash(server, tmp_path):
    url, sha1 = server.publish(archive(IMAGES))
    assert_fails(ValueError, f"expected sha1:{'0' * 40} but got {sha1}", url, "0" * 40, tmp_path)


def test_broken_downloads(server, tmp_path):
    url, sha1 = server.publish(archive(IMAGES))
    server.missing_bytes = 100
    assert_fails(OSError, "100 more expected", url, sha1, tmp_path)
    assert_fails(OSError, "404 Client Error: Not Found", url + "x", sha1, tmp_path)
    server.server_close()
    assert_fails(OSError, ": Connection refused. ", "http://127.0.0.1:1/photos.zip", sha1, tmp_path)
    assert_fails(OSError, "No connection adapters", "gopher://127.0.0.1/photos.zip", sha1, tmp_path)


def test_a_member_that_leads_outside_lands_inside(server, tmp_path):
    files = {"a/0.png": b"0", "../outside.png": b"1", "/absolute.png": b"2"}
    target = fetch_archive(*server.publish(archive(files)), tmp_path / "target")
    assert tree(tmp_path) == {
        "target/a/0.png": b"0",
        "target/outside.png": b"1",
        "target/absolute.png": b"2",
    }
    assert target == tmp_path / "target"


def test_progress_is_shown_on_a_terminal_alone(server, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch_archive(*server.publish(archive(IMAGES)), tmp_path / "target")
    assert "100%" in capfd.readouterr().err


def test_damaged_archives(server, tmp_path):
    assert_fails(ValueError, "not a zip file", *server.publish(b"<html>Sign in</html>"), tmp_path)
    content = bytearray(archive(IMAGES))
    content[60:70] = bytes(10)  # inside the first member's deflated data
    assert_fails(ValueError, "Error -3|Bad CRC", *server.publish(bytes(content)), tmp_path)
    content = bytearray(archive({"a.png": bytes(range(256)) * 20}))
    content[26:28] = b"\xff\x0f"  # length of the name in the first header
    published = server.publish(bytes(content))
    assert_fails(ValueError, "'a.png' and header …\\. Download", *published, tmp_path)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("during", ["download", "extraction"])
def test_full_disk_and_ctrl_c(server, tmp_path, monkeypatch, error, during):
    url, sha1 = server.publish(archive(IMAGES))
    num_started = 0

    def fail(source, target, *_):
        nonlocal num_started
        num_started += 1
        target.write(b"half")
        raise error

    if during == "extraction":
        monkeypatch.setattr(shutil, "copyfileobj", fail)
    else:
        monkeypatch.setattr(
            "requests.Response.iter_content", lambda *_, **__: fail(None, io.BytesIO())
        )
    assert_fails(type(error), "No space left on device|", url, sha1, tmp_path)
    assert num_started == 2  # one in each of the two targets of assert_fails
