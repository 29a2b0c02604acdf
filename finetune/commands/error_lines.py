"""Convert errors of any library into one line for the user.

Errors that a user cannot cause are our bugs: they have no line and are shown with a traceback. A ValueError is for the
user if a `raise` statement of finetune has raised it. This module imports nothing heavy.
"""

import builtins
import os
import re
import sys

from finetune.settings.all_commands import COMMANDS
from finetune.settings.fields import option_name, settings_of
from finetune.system.killed_worker import is_killed_worker_error
from finetune.system.messages import PACKAGE, WrongUsage, is_raised_for_user, shown

# The text of such an error includes its traceback.
_WORKER_ERROR = r"Caught (\w+) in (DataLoader worker|pin memory thread)"
_REPORT = "This is a bug of finetune: open an issue with the lines above"
_STEP = re.compile(r'^  File "(.+)", line \d+, in .+\n    (.+)$', re.MULTILINE)
_LONGEST_REASON = 200  # characters; torch's message may list thousands of keys
# NCCL's messages if another process has ended
_PEER_ENDED = "remote|clos|abort|timeout|timed out|premature"
# beginnings of Lightning's messages about errors that a user can cause
_OF_LIGHTNING = (
    "Early stopping conditioned on metric",
    "`devices` selected with",
    "Found more than one stateful",
)


def find_interruption(error: BaseException) -> BaseException:
    """Return the stop by a signal during which `error` was raised; `error` itself if there was none."""
    # Not imported, since that would import torch: if it is not loaded, it cannot have raised the error.
    signals = sys.modules.get("finetune.distributed.signals")
    return signals.find_interruption(error) if signals else error


def exit_code(error: BaseException) -> int:
    """Return the exit code of the program after an error: 2 for wrong usage, else 1."""
    is_wrong_usage = type(error).__name__ == "MisconfigurationException"  # Lightning's class for it
    return getattr(error, "exit_code", 2 if is_wrong_usage else 1)


def one_line(error: BaseException, command: str = "fit") -> str | None:
    """Return the message for the user in one line; None for our own bug, which needs a traceback.

    Args:
        error: The error.
        command: The command that it has ended, whose options the message may name.
    """
    # Not imported, as in `find_interruption`.
    signals = sys.modules.get("finetune.distributed.signals")
    if isinstance(error, getattr(signals, "Interrupted", ())):
        return str(error)
    if isinstance(error, WrongUsage) and error.setting and command in COMMANDS:
        option = option_name(COMMANDS[command].settings, error.setting, command)
        return f"{option} {' '.join(error.text.split())}"
    text = str(error)
    line = _out_of_memory(error, text, command) or _unusable_gpu(text) or _unfit_weights(text)
    if line:
        return line
    if match := re.search(_WORKER_ERROR, text):
        return _worker_message(match[1], text, error)
    return _nondeterministic(text) or _lost_process(error, text) or _message(error, text)


def bug_line(error: BaseException) -> str:
    """Return the line that follows the traceback of our own bug."""
    # that of a worker has its traceback in its text
    *_, last = f"{type(error).__name__}: {error}".strip().splitlines()
    reason = shown(last[:_LONGEST_REASON])
    return f"finetune: internal error: {reason}. {_REPORT}"


def _worker_message(kind: str, text: str, error: BaseException) -> str | None:
    """Return the message of an error that torch has brought from a worker, with the traceback in its text."""
    steps = _STEP.findall(text)
    is_os_error = issubclass(getattr(builtins, kind, Exception), OSError)
    # without a step, it is a batch that cannot be sent to the main process
    is_ours = not steps or (steps[-1][0].startswith(PACKAGE) and steps[-1][1].startswith("raise "))
    if not is_os_error and not is_ours:
        return None
    return _joined(text.strip().splitlines()[-1].partition(": ")[2], error)


def _out_of_memory(error: BaseException, text: str, command: str) -> str | None:
    """Return a line if a process or a GPU has run out of memory."""
    if is_killed_worker_error(error):
        return "a DataLoader worker was killed, perhaps for lack of memory: fewer --data.num_workers may help"
    is_allocation_error = "ArrayMemoryError" in text or "DefaultCPUAllocator" in text
    has_batches = command in COMMANDS and "data.batch_size" in settings_of(
        COMMANDS[command].settings
    )
    if isinstance(error, MemoryError) or is_allocation_error:
        hint = ": a smaller --batch (--data.batch_size) or fewer --workers (--data.num_workers) may help"
        return f"out of memory{hint if has_batches else ''}"
    if type(error).__name__ == "OutOfMemoryError" or _is_gpu_memory_error(text):
        hint = (
            ": a smaller --batch (--data.batch_size) or --size may help, or --precision bf16-mixed"
        )
        return f"out of GPU memory{hint if has_batches else ''}"
    return None


def _unusable_gpu(text: str) -> str | None:
    """Return a line if torch cannot use this GPU, or there is no such GPU."""
    if "NVIDIA driver on your system is too old" in text or "no kernel image is available" in text:
        reason = text.strip().partition("\n")[0].partition(". ")[0]
        return f"torch cannot use this GPU: {reason}; --trainer.accelerator cpu trains without it"
    if gpus := re.match(
        r"You requested gpu: \[(.*?)\]\s+But your machine only has: \[(.*)\]", text
    ):
        return f"--devices: GPUs {gpus[1]} are requested, and this machine only has {gpus[2]}; auto takes all of them"
    return None


def _unfit_weights(text: str) -> str | None:
    """Return a line if weights do not fit a network. torch's message has one line per key."""
    if not text.startswith("Error(s) in loading state_dict"):
        return None
    first = " ".join(text.partition("\n")[2].partition("\n")[0].split())
    reason = first[:_LONGEST_REASON].rstrip(".,: ")
    return f"the checkpoint is damaged, its weights do not fit its network: {reason}"


def _nondeterministic(text: str) -> str | None:
    """Return a line if an operation has no deterministic form, and `--trainer.deterministic` requires one."""
    if " does not have a deterministic implementation" not in text:
        return None
    operation = text.partition(" ")[0]
    return f"{operation} has no deterministic form on this device: remove --trainer.deterministic, or set it to warn"


def _lost_process(error: BaseException, text: str) -> str | None:
    """Return a line if processes of several devices could not communicate."""
    kind = type(error).__name__
    if waited := re.search(r"Timed out waiting (\d+)ms", text):
        return (
            f"another process has not answered for {int(waited[1]) / 1000:g} s: the process, its machine or the "
            "network has stopped; continue with the same command and --resume"
        )
    if "connectFullMesh" in text:
        rank = os.environ.get("RANK", "0")
        address = text.rpartition("remote=")[2]
        reached = "it ended, or GLOO_SOCKET_IFNAME must name the network between them"
        return f"process {rank} cannot reach another one at {address}: {reached}"
    if kind == "DistBackendError" and not re.search(_PEER_ENDED, text, re.IGNORECASE):
        cause = text.partition("Last error:")[2] or (text.splitlines() or ["?"])[-1]
        return f"the GPUs cannot communicate: {' '.join(cause.split())}"
    if kind == "DistBackendError" or _is_lost_peer(error):
        rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
        return f"process {rank} ended because another one did"
    if kind == "DistNetworkError":  # the port is in use, or rank 0 does not answer
        return _joined(text.partition("\n")[0], error)
    return None


def _message(error: BaseException, text: str) -> str | None:
    """Return the message of an error that a user can cause; None for any other."""
    kind = type(error).__name__
    if not isinstance(error, (ValueError, OSError)) and kind != "MisconfigurationException":
        return " ".join(text.split()) if text.startswith(_OF_LIGHTNING) else None
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        return f"{error.strerror}: {os.path.abspath(error.filename)}"
    if isinstance(error, ValueError) and not is_raised_for_user(error):
        return None
    return _joined(text, error)


def _joined(text: str, error: BaseException) -> str:
    return " ".join(text.split()) or type(error).__name__


def _is_gpu_memory_error(text: str) -> bool:
    words = (
        "CUDA error: out of memory",
        "CUDA out of memory",
        "ALLOC_FAILED",
        "'out of memory'",
        "to CUDA calloc",
    )
    return any(word in text for word in words)


def _is_lost_peer(error: BaseException) -> bool:
    words = {
        "DistNetworkError": "Broken pipe|Failed to recv|reset by peer",
        "RuntimeError": r"\bgloo\b",
    }
    return re.search(words.get(type(error).__name__, "(?!)"), str(error)) is not None
