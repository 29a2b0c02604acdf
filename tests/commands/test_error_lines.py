"""What is told of errors, whichever library they come from."""

import contextlib
import errno
import multiprocessing
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from finetune.commands.error_lines import exit_code, one_line, stop_behind
from finetune.distributed.signals import Interrupted
from finetune.system.messages import WrongUsage


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("Early stopping conditioned on metric `x` which\n is not available."), "Early stopping"),
        (TypeError("`devices` selected with `CPUAccelerator` should be an int > 0."), "`devices` selected"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of GPU memory: a smaller --batch"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "a process that reads pictures was"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.png"), f"No such file: {os.path.abspath('a.png')}"),
        (ValueError("two\nlines"), "two lines"),
        (torch.distributed.DistNetworkError("Failed to recv, got 0 bytes."), "process 0 ended, since another one did"),
        (torch.distributed.DistNetworkError("port: 29500, EADDRINUSE\nframe #0"), "port: 29500, EADDRINUSE"),
        (RuntimeError("a fault of ours"), None),
    ],
)
def test_what_a_user_can_mend_is_a_line(error, told):
    line = one_line(error)
    assert line is None if told is None else line.startswith(told) and "\n" not in line


def test_wrong_usage_has_a_code_of_its_own_also_where_jsonargparse_wraps_it():
    wrapped = ValueError("Does not validate against any of the Union subtypes")
    wrapped.__cause__ = WrongUsage("no")
    assert [exit_code(error) for error in (WrongUsage("no"), wrapped, ValueError("no"))] == [2, 2, 1]
    assert one_line(wrapped) == "no"


def test_a_stop_is_told_though_what_it_broke_off_fails_to_end():
    stop, error = Interrupted(signal.SIGHUP), IndexError("pop from empty list")  # of a display that had half begun
    with contextlib.suppress(IndexError):
        try:
            raise stop
        finally:
            raise error
    assert stop_behind(error) is stop
    assert (exit_code(stop_behind(error)), one_line(stop_behind(error))) == (129, str(stop))
    assert stop_behind(ValueError("no")).args == ("no",)


class Hanging(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return Answer()


class Answer:
    def __reduce__(self):
        return hang_up, ()


def hang_up():
    ours, theirs = multiprocessing.Pipe()  # as a worker's that is killed while it hands over a batch
    theirs.close()
    ours.recv_bytes()


def test_a_worker_that_ends_while_it_hands_over_a_batch_is_told_of():
    loader = DataLoader(Hanging(), batch_size=None, num_workers=1)
    with pytest.raises(EOFError) as caught:
        next(iter(loader))
    assert one_line(caught.value).startswith("a process that reads pictures was killed")
    with pytest.raises(EOFError) as elsewhere:
        hang_up()
    assert one_line(elsewhere.value) is None
