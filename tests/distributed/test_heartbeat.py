"""A rank that neither works nor ends: it is noticed, and a rank that is only slow, or has ended, is not."""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from colours import draw_colours
from paths import ROOT
from processes import finetune, left_after, start_script
from pytorch_lightning.strategies import DDPStrategy

from finetune.distributed import heartbeat
from finetune.distributed.heartbeat import Watch

TOKEN = secrets.token_bytes(16)
SILENCE = 0.4


class Lost(Exception):
    """Raised instead of the end of the process, with the lost rank."""


def raise_lost(rank: int) -> None:
    raise Lost(rank)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def watch(listener) -> Watch:
    """The watch of rank 0."""
    watch = Watch(SILENCE, raise_lost)
    watch.listen(listener, TOKEN, 3)
    return watch


def connect(listener: socket.socket, rank: int, token: bytes = TOKEN) -> socket.socket:
    """Return the connection of a rank that sends nothing more."""
    connection = socket.create_connection(listener.getsockname())
    connection.sendall(heartbeat._HELLO.pack(token, rank))
    return connection


def answering(listener: socket.socket, rank: int) -> Callable[[], None]:
    """Start a rank that answers until the returned function is called."""
    watch = Watch(SILENCE, lambda _: None)
    watch.connect("127.0.0.1", listener.getsockname()[1], TOKEN, rank)
    thread = threading.Thread(target=watch.run)
    thread.start()

    def leave() -> None:
        watch._group = object()  # as if the process group was destroyed
        thread.join()

    return leave


def test_only_the_silent_rank_is_lost(watch, listener):
    leave = answering(listener, 1)
    connect(listener, 2).close()  # it has ended
    began = time.monotonic()
    with connect(listener, 3), pytest.raises(Lost) as lost:
        watch.run()
    assert lost.value.args == (3,)
    assert time.monotonic() - began >= SILENCE
    watch._close()
    leave()


class NoFiles:
    """A socket that cannot accept connections, as in a process with too many open files."""

    def __init__(self, listener: socket.socket) -> None:
        self.fileno = listener.fileno
        self.close = listener.close

    def accept(self) -> None:
        raise OSError(24, "Too many open files")


def test_a_process_without_free_files_is_not_lost(listener):
    watch = Watch(SILENCE, raise_lost)
    watch.listen(NoFiles(listener), TOKEN, 1)
    thread = threading.Thread(target=watch.run)
    thread.start()
    with socket.create_connection(listener.getsockname()):
        time.sleep(SILENCE)
        assert thread.is_alive()
    watch._group = object()
    thread.join()


def test_no_further_connection_is_accepted_when_all_ranks_are_there(listener):
    watch = Watch(SILENCE, raise_lost)
    watch.listen(listener, TOKEN, 1)
    address = listener.getsockname()
    leave = answering(listener, 1)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        deadline = time.monotonic() + 2
        while listener.fileno() >= 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        assert list(watch._ranks.values()) == [1]  # it is still watched
    finally:
        watch._group = object()
        thread.join()
        leave()


def test_rank_zero_is_lost_too(listener):
    watch = Watch(SILENCE, raise_lost)
    watch.connect("127.0.0.1", listener.getsockname()[1], TOKEN, 1)
    with pytest.raises(Lost) as lost:
        watch.run()
    assert lost.value.args == (0,)
    watch._close()


def test_the_time_in_which_this_process_was_suspended_does_not_count(watch, listener, monkeypatch):
    leave = answering(listener, 1)
    clock = time.monotonic
    pauses: list[float] = []

    def paused() -> float:
        """A clock that has advanced by an hour at every reading."""
        pauses.append(3600)
        if len(pauses) == 5:
            watch._group = object()
        return clock() + sum(pauses)

    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=paused))
    watch.run()
    assert len(pauses) >= 5
    leave()


def test_a_connection_without_the_token_is_closed(watch, listener):
    leave = answering(listener, 1)
    with connect(listener, 2, bytes(16)) as other:
        threading.Timer(1.5 * SILENCE, lambda: setattr(watch, "_group", object())).start()
        watch.run()
        assert other.recv(1) == b""
    leave()


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [(DDPStrategy()._timeout, 300), (timedelta(minutes=10), 600), (timedelta(seconds=20), 20)],
)
def test_the_timeout_of_the_strategy_is_for_this_too_if_it_is_set(timeout, seconds):
    assert heartbeat._longest_silence(DDPStrategy(timeout=timeout)) == seconds


def test_a_rank_that_cannot_connect_warns_and_continues(monkeypatch, caplog):
    world = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda: 2,
        group=SimpleNamespace(WORLD=object()),
        default_pg_timeout=None,
    )
    monkeypatch.setattr(heartbeat, "dist", world)
    monkeypatch.setattr(heartbeat, "_watched_group", None)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    strategy = SimpleNamespace(
        num_nodes=1, global_rank=1, local_rank=1, broadcast=lambda _: (port, TOKEN)
    )
    trainer = SimpleNamespace(strategy=strategy, state=SimpleNamespace(fn="fit"))
    heartbeat._start(trainer, strategy)
    assert f"process 1 cannot connect to port {port} of 127.0.0.1" in caplog.text
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_a_suspended_rank_ends_the_run_with_one_line_and_a_complete_checkpoint(tmp_path: Path):
    images = draw_colours(tmp_path / "images", train=4, test=1)
    fit = ["fit", images, "--resume", "--out", tmp_path / "runs", "--epochs", "3", "--size", "28"]
    fit += ["--batch", "6", "--workers", "0", "--devices", "2", "--backbone", "small_cnn"]
    fit += ["--weights", "null", "--trainer.accelerator", "cpu", "--report", "false"]
    script = ROOT / "tests/support/suspended_rank.py"
    process = start_script(script, 1, 3, *fit, cwd=tmp_path)  # in the second epoch of 2 steps
    assert process.wait(60) == 1
    assert [line for line in process.stderr.splitlines() if "finetune: " in line] == [
        "finetune: error: process 1 has not answered for 2 s: the process, its machine or the network has stopped; "
        "continue with the same command and --resume"
    ]
    assert left_after([process.pid], 5) == []
    (last,) = tmp_path.glob("runs/fit/*/checkpoints/last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 2
    assert finetune(*fit, cwd=tmp_path).returncode == 0
    assert torch.load(last, weights_only=True)["global_step"] == 6
