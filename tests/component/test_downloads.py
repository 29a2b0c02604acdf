"""Data sets that are downloaded once: complete or not at all, and with one line that says what to do."""

import errno
import gzip
import hashlib
import io
import shutil
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
from data_files import clothes, idx, real_data
from loopback import LoopbackServer, reply
from PIL import Image
from torchvision.datasets import FashionMNIST as Source

from finetune.data.datasets.download import fetch_archive
from finetune.data.datasets.fashion_mnist import CLASS_NAMES, FashionMNIST, read, write_images

IMAGES = {"hotdog/train/hotdog/0.png": b"a" * 300_000, "hotdog/test/not-hotdog/1.png": b"b"}


class ZipServer(LoopbackServer):
    """Answers /photos.zip, of which it sends some bytes."""

    content = b""
    num_sent: int | None = None
    num_requests = 0

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.num_requests += 1
        status = 200 if request.path == "/photos.zip" else 404
        reply(request, (status, {}, self.content), self.num_sent)

    def publish(self, content: bytes) -> tuple[str, str]:
        """Return the address and the hash of a zip."""
        self.content = content
        return f"{self.address}/photos.zip", hashlib.sha1(content).hexdigest()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ZipServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = ZipServer()
    yield server
    server.stop()


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as writer:
        for name, content in files.items():
            writer.writestr(name, content)
    return buffer.getvalue()


def tree(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (IMAGES, {name.removeprefix("hotdog/"): content for name, content in IMAGES.items()}),
        ({"train/a.png": b"0", "README": b"1"}, {"train/a.png": b"0", "README": b"1"}),
        # a member that leads outside lands inside
        ({"../a.png": b"1", "/b.png": b"2", "c/d.png": b"0"}, {"a.png": b"1", "b.png": b"2", "c/d.png": b"0"}),
    ],
)  # fmt: skip
def test_an_archive_is_downloaded_once_and_complete(server, tmp_path, capfd, files, expected):
    target = tmp_path / "data/photos"
    published = server.publish(zipped(files))
    assert fetch_archive(*published, target) == target
    assert tree(tmp_path) == {f"data/photos/{name}": expected[name] for name in expected}
    (target / "mine.txt").write_text("mine")
    assert fetch_archive(*published, str(target)) == target
    assert (target / "mine.txt").exists() and server.num_requests == 1
    assert capfd.readouterr() == ("", "")
    (tmp_path / "plain").mkdir()
    # a temporary folder is for its owner only
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_progress_is_shown_on_a_terminal_alone(server, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch_archive(*server.publish(zipped(IMAGES)), tmp_path / "target")
    assert "100%" in capfd.readouterr().err


def damaged(content: bytes, place: int, by: bytes) -> bytes:
    return content[:place] + by + content[place + len(by) :]


GOOD = zipped(IMAGES)
NAMELESS = damaged(zipped({"a.png": bytes(range(256)) * 20}), 26, b"\xff\x0f")  # a name's length


@pytest.mark.parametrize(
    ("content", "change", "words"),
    [
        (GOOD, {"sha1": "0" * 40}, "expected sha1"),
        (GOOD, {"num_sent": len(GOOD) - 100}, "expected sha1"),
        (GOOD, {"url": "/other.zip"}, "HTTP Error 404"),
        (GOOD, {"url": "http://127.0.0.1:1/photos.zip"}, "Connection refused"),
        (b"<html>Sign in</html>", {}, "not a zip file"),
        (damaged(GOOD, 60, bytes(10)), {}, "Error -3|Bad CRC"),
        (NAMELESS, {}, "'a.png' and header …"),
    ],
)
def test_a_failed_download_is_one_line_and_leaves_nothing(server, tmp_path, content, change, words):
    url, sha1 = server.publish(content)
    server.num_sent = change.get("num_sent")
    other = change.get("url", url)
    url = server.address + other if other.startswith("/") else other
    (tmp_path / "neighbour").touch()
    for target in (tmp_path / "hotdog", tmp_path / "new/parents/hotdog"):
        with pytest.raises((OSError, ValueError), match=words) as caught:
            fetch_archive(url, change.get("sha1", sha1), target)
        assert [*tree(tmp_path)] == ["neighbour"]
        text = str(caught.value)
        assert text.startswith(f"{url} could not be fetched into {target}: ") and "\n" not in text
        assert text.endswith(f"Download it by hand and unpack it to {target}")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("during", ["download", "extraction"])
def test_a_full_disk_and_ctrl_c_leave_nothing(server, tmp_path, monkeypatch, error, during):
    def fail(*args: object, **_: object) -> None:
        raise error

    module = zipfile.ZipFile if during == "extraction" else shutil
    monkeypatch.setattr(module, "extractall" if during == "extraction" else "copyfileobj", fail)
    with pytest.raises(type(error)):
        fetch_archive(*server.publish(GOOD), tmp_path / "target")
    assert not [*tmp_path.iterdir()]


# Fashion-MNIST


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with Fashion-MNIST's four files, which torchvision takes for the originals; it finds no server."""
    raw = tmp_path / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    hashes = []
    for name, array in clothes(60, 20).items():
        content = gzip.compress(idx(array))
        (raw / f"{name}.gz").write_bytes(content)
        hashes.append((f"{name}.gz", hashlib.md5(content).hexdigest()))
    monkeypatch.setattr(Source, "resources", hashes)
    monkeypatch.setattr(Source, "mirrors", ["file:///nowhere/"])
    return tmp_path


def test_fashion_mnist_is_written_once_as_images_in_class_folders(packed):
    data = FashionMNIST(str(packed), val_fraction=0.25, image_size=32, num_workers=0)
    assert data.class_names == list(CLASS_NAMES) and len(data.splits["test"]) == 20
    arrays = clothes(60, 20)
    expected: dict[str, np.ndarray] = {}
    for split, name in (("train", "train"), ("test", "t10k")):
        numbers: Counter[int] = Counter()
        labels = arrays[f"{name}-labels-idx1-ubyte"].tolist()
        for label, image in zip(labels, arrays[f"{name}-images-idx3-ubyte"], strict=True):
            expected[f"{split}/{CLASS_NAMES[label]}/{numbers[label]:04d}.png"] = image
            numbers[label] += 1
    for part in data.splits.values():
        for i, path in enumerate(part.paths):
            _, name, _ = parts = path.split("/")[-3:]
            pixels = expected.pop("/".join(parts)).astype(np.uint8)
            np.testing.assert_array_equal(part.read(i), np.stack([pixels] * 3, axis=-1))
            assert data.class_names[part.targets[i]] == name
    assert not expected
    times = {path: path.stat().st_mtime_ns for path in packed.rglob("*.png")}
    shutil.rmtree(packed / "FashionMNIST/raw")
    assert len(times) == 80 and FashionMNIST.is_in(str(packed))
    again = FashionMNIST(str(packed), val_fraction=0.25)
    assert again.fingerprint == data.fingerprint
    assert {path: path.stat().st_mtime_ns for path in packed.rglob("*.png")} == times


@pytest.mark.parametrize("num_written", [0, 70])
def test_images_of_fashion_mnist_are_all_there_or_none(packed, monkeypatch, num_written):
    written: list[Path] = []
    save = Image.Image.save

    def full(image: Image.Image, path: Path) -> None:
        if len(written) == num_written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        save(image, path)

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", full)
        with pytest.raises(OSError, match="No space left"):
            write_images(packed)
    assert not list(packed.rglob("*.png")) and not list(packed.rglob(".images*"))
    # the control: with enough space
    assert len(list(write_images(packed).rglob("*.png"))) == 80


def test_without_the_files_of_fashion_mnist_a_line_says_where_to_put_them(packed):
    next(packed.rglob("*.gz")).unlink()
    with pytest.raises(OSError, match=r"four \.gz files in .*FashionMNIST/raw"):
        FashionMNIST(str(packed)).read()


@pytest.mark.slow
@pytest.mark.real
def test_the_real_fashion_mnist_has_its_published_mean(tmp_path):
    raw = tmp_path / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for file in (real_data("fashion-mnist") / "FashionMNIST/raw").glob("*.gz"):
        (raw / file.name).symlink_to(file)
    pixels, labels = read(tmp_path, is_train=True)
    assert np.bincount(labels).tolist() == [6000] * 10
    assert pixels.mean() / 255 == pytest.approx(0.2860, abs=5e-5)
    assert np.bincount(read(tmp_path, is_train=False)[1]).tolist() == [1000] * 10
