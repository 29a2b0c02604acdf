"""Errors of any library become one line."""

import errno
import os
import signal

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from finetune.cli import main
from finetune.commands.error_lines import exit_code, one_line
from finetune.distributed.signals import Interrupted
from finetune.system.messages import WrongUsage

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"),
    RuntimeError("Caught RuntimeError in pin memory thread.\nE: CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
]
OF_LIBRARIES = [
    (TypeError("`devices` selected with `CPUAccelerator` should be an int > 0."), "`devices`"),
    (
        MisconfigurationException("You requested gpu: [0, 1]\n But your machine only has: [0]"),
        "--devices: GPUs 0, 1",
    ),
    (
        RuntimeError("Error(s) in loading state_dict for Classifier:\n\tUnexpected key(s): x"),
        "checkpoint is damaged",
    ),
    *((error, "out of GPU memory: a smaller --batch") for error in OUT_OF_MEMORY),
    (
        RuntimeError("Caught OSError in pin memory thread for device 0.\n  a()\nOSError: no card"),
        "no card",
    ),
    (RuntimeError("x_cuda does not have a deterministic implementation"), "x_cuda"),
    (dist.DistBackendError("NCCL\nLast error:\nno \n/dev/shm"), "no /dev/shm"),
    (dist.DistBackendError("ncclRemoteError: a remote process exiting"), "process 0 ended"),
    (dist.DistNetworkError("Failed to recv, got 0 bytes."), "process 0 ended"),
    (dist.DistNetworkError("port: 29500, EADDRINUSE\nframe #0"), "port: 29500"),
    (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), "process 0 ended"),
    (RuntimeError("[gloo/tcp/buffer.cc:81] Timed out waiting 600000ms for recv"), "600 s"),
    (
        RuntimeError("Gloo connectFullMesh failed with [x] timed out: remote=[127.0.1.1]:31116"),
        "GLOO_SOCKET_IFNAME",
    ),
    *(
        (RuntimeError(f"DataLoader worker {ended}"), "--data.num_workers")
        for ended in (
            "(pid 21) is killed by signal: Killed. ",
            "(pid(s) 21, 22) exited unexpectedly",
        )
    ),
    (FileNotFoundError(errno.ENOENT, "No such file", "a.png"), os.path.abspath("a.png")),
    (ValueError("two\nlines of the class 'igloo' in gloo"), "'igloo' in gloo"),
    (RuntimeError("The NVIDIA driver on your system is too old (found version 12)"), "too old"),
    (RuntimeError("a fault of ours in igloo"), None),
]


@pytest.mark.parametrize(("error", "words"), OF_LIBRARIES)
def test_an_error_of_a_library_that_a_user_can_mend_is_a_line(error, words):
    line = one_line(error)
    assert line is None if words is None else words in line and "\n" not in line


def test_wrong_usage_has_a_code_of_its_own_and_names_the_option_as_typed():
    wrong = WrongUsage("takes a number", setting="data.batch_size")
    assert [exit_code(error) for error in (wrong, ValueError("no"))] == [2, 1]
    assert str(wrong) == "data.batch_size takes a number"
    assert one_line(wrong, "fit") == "--batch (--data.batch_size) takes a number"
    assert one_line(WrongUsage("is empty", "token"), "serve") == "--token is empty"


def breaking_off(error):
    """Raise `error` while a stop by SIGHUP is dealt with."""
    try:
        raise Interrupted(signal.SIGHUP)
    finally:
        raise error


@pytest.mark.parametrize(
    ("error", "code", "reported"),
    [
        # of a display that had half begun
        (IndexError("pop from empty list"), 129, "stopped by SIGHUP"),
        # a worker has ended
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), 129, "stopped by SIGHUP"),
        (
            OSError(errno.ENOSPC, "No space left on device", "a.csv"),
            1,
            "finetune: error: No space left on device",
        ),
    ],
)
def test_a_stop_is_reported_though_what_it_breaks_off_fails_to_end(
    error, code, reported, monkeypatch, capsys
):
    monkeypatch.setattr("finetune.cli.run", lambda *_: breaking_off(error))
    with pytest.raises(SystemExit) as ended:
        main(["fit"])
    assert ended.value.code == code
    assert capsys.readouterr().err.startswith(reported)


def test_advice_about_memory_is_for_commands_with_batches():
    assert "--workers" in one_line(MemoryError())
    assert one_line(MemoryError(), "check") == "out of memory"
    assert "--batch" in one_line(MemoryError(), "test")
    assert one_line(torch.OutOfMemoryError("CUDA out of memory"), "serve") == "out of GPU memory"
