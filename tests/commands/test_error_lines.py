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


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (
            RuntimeError("Early stopping conditioned on metric `x` which\n is not available."),
            "Early stopping",
        ),
        (
            TypeError("`devices` selected with `CPUAccelerator` should be an int > 0."),
            "`devices` selected",
        ),
        (
            MisconfigurationException("You requested gpu: [0, 1]\n But your machine only has: [0]"),
            "--devices: GPUs 0, 1 are requested, and this machine only has 0; auto takes all of them",
        ),
        (
            RuntimeError(
                'Error(s) in loading state_dict for Classifier:\n\tUnexpected key(s) in state_dict: "x". \n\tsize mis'
            ),
            "the checkpoint is damaged, its weights do not fit its network: Unexpected key(s) in "
            'state_dict: "x"',
        ),
        (
            RuntimeError("Found more than one stateful callback of type `Timer`.\n HINT"),
            "Found more than one stateful",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            "out of GPU memory: a smaller --batch",
        ),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"),
            "out of GPU memory: a smaller --batch",
        ),
        (
            RuntimeError(
                "Caught RuntimeError in pin memory thread for device 0.\nE: CUDA error: out of memory"
            ),
            "out of G",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
            "out of GPU memory: a smaller --batch",
        ),
        (
            RuntimeError(
                "Caught OSError in pin memory thread for device 0.\n  a()\nOSError: no such card"
            ),
            "no such card",
        ),
        (
            RuntimeError(
                "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set"
            ),
            "adaptive_avg_pool2d_backward_cuda has no deterministic form on this device: remove",
        ),
        (
            dist.DistBackendError(
                "NCCL error in: x.cpp:1\nncclUnhandledSystemError: System call failed.\nLast error:\nno \n/dev/shm"
            ),
            "the GPUs cannot communicate: no /dev/shm",
        ),
        (
            dist.DistBackendError("x\nDuplicate GPU detected"),
            "the GPUs cannot communicate: Duplicate GPU detected",
        ),
        (
            dist.DistBackendError("ncclRemoteError: a remote process exiting prematurely"),
            "process 0 ended because another",
        ),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
            "a DataLoader worker was",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "a.png"),
            f"No such file: {os.path.abspath('a.png')}",
        ),
        (ValueError("two\nlines"), "two lines"),
        (
            dist.DistNetworkError("Failed to recv, got 0 bytes."),
            "process 0 ended because another one did",
        ),
        (dist.DistNetworkError("port: 29500, EADDRINUSE\nframe #0"), "port: 29500, EADDRINUSE"),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
            "process 0 ended because another",
        ),
        (
            ValueError("no images of the class 'igloo' in gloo"),
            "no images of the class 'igloo' in gloo",
        ),
        (
            RuntimeError(
                "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv"
            ),
            "another process has not answered for 600 s: the process, its machine or the network has stopped; continue "
            "with the same command and --resume",
        ),
        (RuntimeError("a fault of ours in igloo"), None),
        (
            RuntimeError(
                "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU"
            ),
            "torch cannot use this GPU: The NVIDIA driver on your system is too old (found version",
        ),
        (RuntimeError("a fault of ours"), None),
    ],
)
def test_what_a_user_can_mend_is_a_line(error, reported):
    line = one_line(error)
    assert line is None if reported is None else line.startswith(reported) and "\n" not in line


def test_wrong_usage_has_a_code_of_its_own_also_where_jsonargparse_wraps_it():
    wrapped = ValueError("Does not validate against any of the Union subtypes")
    wrapped.__cause__ = WrongUsage("no")
    assert [exit_code(error) for error in (WrongUsage("no"), wrapped, ValueError("no"))] == [
        2,
        2,
        1,
    ]
    assert one_line(wrapped) == "no"


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
    assert one_line(MemoryError()).endswith("fewer --workers (--data.num_workers) may help")
    assert one_line(MemoryError(), "check") == "out of memory"
    assert "--batch" in one_line(MemoryError(), "test")
    assert one_line(torch.OutOfMemoryError("CUDA out of memory"), "serve") == "out of GPU memory"
