"""Notice a rank that neither works nor ends: a machine without power, a broken network, a suspended process.

If a process ends, its connections are closed, and the other ranks notice this at once. Otherwise they would wait in a
collective for the timeout of the process group, 30 minutes. A shorter timeout would end healthy runs, since other ranks
wait in a collective while rank 0 downloads, fits a head, or compares weights. Therefore rank 0 and each other rank
exchange a byte every few seconds, in a thread, whatever their main threads do.
"""

import logging
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from finetune import lightning_private
from finetune.distributed import ranks
from finetune.system.progress import duration

if TYPE_CHECKING:
    import pytorch_lightning as pl

log = logging.getLogger(__name__)

# Seconds without a byte from a rank, after which it counts as lost. `--trainer.strategy.timeout` replaces it.
SILENCE = 300.0
_INTERVAL = 5.0  # seconds between two bytes
_TIME_TO_CONNECT = 30.0  # seconds
_HELLO = struct.Struct(
    ">16sI"
)  # a token that only the ranks of this run know, and the sender's rank

_watched_group: Any = None  # the process group whose ranks are watched


def watch_ranks(trainer: "pl.Trainer") -> None:
    """Watch the other ranks of a Trainer as soon as there are any. A lost rank ends this process with exit code 1."""
    strategy = trainer.strategy
    lightning_private.call_after_setup(strategy, lambda: _start(trainer, strategy))


def _start(trainer: "pl.Trainer", strategy: Any) -> None:
    """Start the thread of this rank, once for each process group. Every rank must call this at the same point."""
    global _watched_group
    is_initialized = dist.is_available() and dist.is_initialized()
    if not is_initialized or dist.get_world_size() == 1 or _watched_group is dist.group.WORLD:
        return
    _watched_group = dist.group.WORLD
    is_one_machine = strategy.num_nodes == 1
    listener = None
    address = None
    if strategy.global_rank == 0:
        listener = _listen(is_one_machine)
        address = (listener.getsockname()[1], secrets.token_bytes(16))
    port, token = strategy.broadcast(address)
    silence = _longest_silence(strategy)
    # One rank of each machine prints. On the machine of rank 0, rank 1 does so if rank 0 is lost.
    is_printed = strategy.global_rank in (0, 1) or strategy.local_rank == 0
    hint = "; continue with the same command and --resume" if trainer.state.fn == "fit" else ""

    def end(rank: int) -> None:
        what = (
            f"finetune: error: process {rank} has not answered for {duration(silence)}: the process, its machine or "
            f"the network has stopped{hint}"
        )
        ranks.end_run(what if is_printed else None)

    watch = Watch(silence, end)
    if listener is not None:
        watch.listen(listener, token, dist.get_world_size() - 1)
    else:
        host = "127.0.0.1" if is_one_machine else os.environ["MASTER_ADDR"]
        try:
            watch.connect(host, port, token, strategy.global_rank)
        except OSError as error:
            log.warning(
                "process %d cannot connect to port %d of %s: %s. If a machine or the network stops, this is noticed "
                "after the timeout of the process group, and not after %s",
                strategy.global_rank,
                port,
                host,
                error,
                duration(silence),
            )
            return
    threading.Thread(target=watch.run, name="heartbeat", daemon=True).start()


def _listen(is_one_machine: bool) -> socket.socket:
    if is_one_machine:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _longest_silence(strategy: Any) -> float:
    """Return the seconds after which a rank counts as lost: the timeout that the user has set for the strategy."""
    timeout = lightning_private.process_group_timeout(strategy)
    if timeout is None or timeout == dist.default_pg_timeout:
        return SILENCE
    return timeout.total_seconds()


class Watch:
    """Exchanges bytes with other ranks, and calls a function if one of them is silent for too long.

    A rank that closes its connection has ended, and is no longer watched.
    """

    def __init__(self, silence: float, end: Callable[[int], object]) -> None:
        """Prepare a watch without any rank.

        Args:
            silence: Seconds without a byte after which a rank counts as lost.
            end: Called with the lost rank.
        """
        self._silence = silence
        self._end = end
        self._interval = min(_INTERVAL, silence / 4)
        self._group = _watched_group
        self._selector = selectors.DefaultSelector()
        self._num_missing = 0  # ranks that have not connected yet
        self._ranks: dict[socket.socket, int] = {}
        self._seconds_silent: dict[socket.socket, float] = {}  # since the last byte

    def listen(self, listener: socket.socket, token: bytes, num_ranks: int) -> None:
        """Watch each rank that connects to a socket and sends the token.

        Args:
            listener: The socket. It is closed when all ranks have connected.
            token: The token of this run. A connection that begins with other bytes is closed.
            num_ranks: Number of other ranks.
        """
        self._num_missing = num_ranks
        self._selector.register(
            listener, selectors.EVENT_READ, lambda: self._accept(listener, token)
        )

    def connect(self, host: str, port: int, token: bytes, rank: int) -> None:
        """Watch rank 0, which listens there.

        Args:
            host: The machine of rank 0.
            port: The port at which rank 0 listens.
            token: The token of this run, by which rank 0 recognizes its ranks.
            rank: The rank of this process.

        Raises:
            OSError: There is no connection.
        """
        connection = socket.create_connection((host, port), _TIME_TO_CONNECT)
        connection.sendall(_HELLO.pack(token, rank))
        self._add(connection, 0)

    def run(self) -> None:
        """Watch until all ranks have ended, or the process group is destroyed."""
        last_beat = time.monotonic()
        while self._selector.get_map():
            for key, _ in self._selector.select(self._interval):
                key.data()
            now = time.monotonic()
            if now - last_beat < self._interval:
                continue
            # Time in which this process itself was suspended does not count.
            self._beat(min(now - last_beat, 2 * self._interval))
            last_beat = now
            if dist.group.WORLD is not self._group:
                self._close()
        self._selector.close()

    def _accept(self, listener: socket.socket, token: bytes) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # too many open files, or the other side has gone
            time.sleep(self._interval / 4)
            return
        connection.settimeout(self._interval)
        try:
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:
            hello = b""
        if len(hello) == _HELLO.size and secrets.compare_digest(hello[:16], token):
            self._add(connection, _HELLO.unpack(hello)[1])
            self._num_missing -= 1
            if not self._num_missing:
                self._selector.unregister(listener)
                listener.close()
        else:
            connection.close()

    def _add(self, connection: socket.socket, rank: int) -> None:
        connection.setblocking(False)
        self._ranks[connection] = rank
        self._seconds_silent[connection] = 0.0
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(connection))

    def _receive(self, connection: socket.socket) -> None:
        has_ended = False
        try:
            has_ended = not connection.recv(4096)
            self._seconds_silent[connection] = 0.0
        except ConnectionError:
            has_ended = True
        except BlockingIOError:
            pass
        except OSError:  # the network has given up
            self._seconds_silent[connection] = math.inf
        if has_ended:
            self._selector.unregister(connection)
            connection.close()
            del self._ranks[connection]
            del self._seconds_silent[connection]

    def _beat(self, seconds: float) -> None:
        """Send a byte to each rank, and call `end` if one has sent none for too long.

        Args:
            seconds: Time since the last call.
        """
        for connection, rank in self._ranks.items():
            with suppress(OSError):  # its buffer is full, or `_receive` will see the error
                connection.send(b".")
            self._seconds_silent[connection] += seconds
            if self._seconds_silent[connection] > self._silence:
                self._end(rank)

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._ranks.clear()
        self._seconds_silent.clear()
