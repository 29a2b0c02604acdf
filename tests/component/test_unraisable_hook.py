"""A stop during Python's garbage collection is not lost, and a worker that dies after its last batch is no error."""

from collections.abc import Callable
from pathlib import Path

import pytest
from processes import run_script

SCRIPT = """
import os, signal, sys, time
from finetune.cli import main  # sets nothing up by itself
from finetune.system.interpreter import install_unraisable_hook
if {taken}:
    install_unraisable_hook()
class Interrupted(BaseException):
    exit_code = 143
def stop(signum, frame):
    raise Interrupted
signal.signal(signal.SIGTERM, stop)
class Loader:
    def __del__(self):
        {deed}
try:
    loader = Loader()
    del loader
    time.sleep(0.2)
    print("went on")
except BaseException as error:
    print("stopped by", type(error).__name__)
"""
STOP = "os.kill(os.getpid(), signal.SIGTERM)"
WORKER = "raise RuntimeError('DataLoader worker (pid 7) is killed by signal: Killed.')"

# What its `__del__` raises where a stop met it after its workers were started and before it was reset.
HALF_MADE = """
        from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Iterator
        import threading
        iterator = Iterator.__new__(Iterator)
        iterator._shutdown, iterator._persistent_workers, iterator._workers = False, False, [None]
        iterator._workers_done_event, iterator._pin_memory = threading.Event(), False
        iterator._shutdown_workers()
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """What a script prints in which an object ends by a deed, on both streams."""

    def run(deed: str, taken: bool = True) -> tuple[str, str]:
        (tmp_path / "script.py").write_text(SCRIPT.format(deed=deed, taken=taken))
        done = run_script(tmp_path / "script.py", cwd=tmp_path, timeout=60)
        assert done.returncode == 0
        return done.stdout.strip(), done.stderr.strip()

    return run


def test_a_stop_is_heard_after_it(run):
    assert run(STOP) == ("stopped by Interrupted", "")


def test_python_itself_would_lose_it(run):
    output, printed = run(STOP, taken=False)
    assert output == "went on"
    assert "Exception ignored" in printed


@pytest.mark.parametrize("deed", [WORKER, HALF_MADE])
def test_a_worker_that_was_killed_after_its_last_batch_is_no_news_nor_is_an_iterator_half_made(
    run, deed
):
    assert run(deed) == ("went on", "")
