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
from finetune.system.messages import PACKAGE, WrongUsage, install, is_raised_for_user, shown

# The text of such an error includes its traceback.
_WORKER_ERROR = r"Caught (\w+) in (DataLoader worker|pin memory thread)"
_REPORT = "This is a bug of finetune: open an issue with the lines above"
_STEP = re.compile(r'^  File "(.+)", line \d+, in .+\n    (.+)$', re.MULTILINE)
_LONGEST_REASON = 200  # characters; torch's message may list thousands of keys

# The extras of this package that bring packages.
_EXTRAS = {
    **dict.fromkeys(("timm", "huggingface_hub"), "timm"),
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "export"),
    **dict.fromkeys(("fastapi", "multipart", "prometheus_client", "starlette", "uvicorn"), "serve"),
    "obstore": "storage",
    "pyarrow": "parquet",
}
_MEMORY = re.compile("ArrayMemoryError|DefaultCPUAllocator")
_GPU_MEMORY = re.compile(
    "CUDA error: out of memory|CUDA out of memory|ALLOC_FAILED|'out of memory'|to CUDA calloc"
)
# What texts of libraries mean, with their parts in the line: classes of the errors, "" for any, pattern, and line.
_MEANINGS = (
    (
        "",
        r"(?s)(?=.*(?:NVIDIA driver on your system is too old|no kernel image is available))\s*(.*?)(?:\. |\n|$)",
        "torch cannot use this GPU: {0}; --trainer.accelerator cpu trains without it",
    ),
    (
        "",
        r"You requested gpu: \[(.*?)\]\s+But your machine only has: \[(.*)\]",
        "--devices: GPUs {0} are requested, and this machine only has {1}; auto takes all of them",
    ),
    (
        "",
        rf"Error\(s\) in loading state_dict.*\n\s*(.{{0,{_LONGEST_REASON}}})",
        "the checkpoint is damaged, its weights do not fit its network: {0}",
    ),
    (
        "",
        r"(\S+) does not have a deterministic implementation",
        "{0} has no deterministic form on this device: remove --trainer.deterministic, or set it to warn",
    ),
    (
        "",
        r"(?s).*Timed out waiting (\d+)\d{3}ms",
        "another process has not answered for {0} s: the process, its machine or the network has stopped; continue "
        "with the same command and --resume",
    ),
    (
        "",
        r"(?s).*connectFullMesh.*remote=(.*)",
        "process {rank} cannot reach another one at {0}: it ended, or GLOO_SOCKET_IFNAME must name the network between "
        "them",
    ),
    (
        "DistBackendError",
        r"(?s)(?i:.*(?:remote|clos|abort|timeout|timed out|premature))",
        "process {rank} ended because another one did",
    ),
    ("DistBackendError", r"(?s)(?:.*Last error:)?(.*)", "the GPUs cannot communicate: {0}"),
    (
        "DistNetworkError",
        r"(?s).*(?:Broken pipe|Failed to recv|reset by peer)",
        "process {rank} ended because another one did",
    ),
    ("DistNetworkError", r"(.*)", "{0}"),  # the port is in use, or rank 0 does not answer
    ("RuntimeError", r"(?s).*\bgloo\b", "process {rank} ended because another one did"),
    ("TypeError", r"(?s)(`devices` selected with.*)", "{0}"),
)


def find_interruption(error: BaseException) -> BaseException:
    """Return the stop by a signal during which `error` was raised; `error` itself if there was none."""
    # Not imported, since that would import torch: if it is not loaded, it cannot have raised the error.
    signals = sys.modules.get("finetune.distributed.signals")
    return signals.find_interruption(error) if signals else error


def exit_code(error: BaseException) -> int:
    """Return the exit code of the program after an error: 2 for wrong usage, else 1."""
    # Lightning's class for it, or a package that the command needs
    is_wrong_usage = type(error).__name__ == "MisconfigurationException" or bool(_missing(error))
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
    if missing := _missing(error):
        return missing
    text = str(error)
    if line := _out_of_memory(error, text, command):
        return line
    if match := re.search(_WORKER_ERROR, text):
        return _worker_message(match[1], text, error)
    return _of_library(error, text) or _message(error, text)


def bug_line(error: BaseException) -> str:
    """Return the line that follows the traceback of our own bug."""
    # that of a worker has its traceback in its text
    *_, last = f"{type(error).__name__}: {error}".strip().splitlines()
    reason = shown(last[:_LONGEST_REASON])
    return f"finetune: internal error: {reason}. {_REPORT}"


def _missing(error: BaseException) -> str:
    """Return a line about a package of an extra that is not installed; "" for other errors."""
    name = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
    extra = _EXTRAS.get(name.partition(".")[0])
    return f"the package {name} is not installed: {install(extra)}" if extra else ""


def _of_library(error: BaseException, text: str) -> str | None:
    """Return what an error of torch, NCCL, gloo or Lightning means; None if it has no meaning here."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
    for kind, pattern, line in _MEANINGS:
        is_kind = kind in ("", type(error).__name__)
        if is_kind and (match := re.match(pattern, text)):
            return line.format(*(" ".join(part.split()) for part in match.groups()), rank=rank)
    return None


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
    has_batches = command in COMMANDS and "data.batch_size" in settings_of(
        COMMANDS[command].settings
    )
    if isinstance(error, MemoryError) or _MEMORY.search(text):
        hint = ": a smaller --batch (--data.batch_size) or fewer --workers (--data.num_workers) may help"
        return f"out of memory{hint if has_batches else ''}"
    if type(error).__name__ == "OutOfMemoryError" or _GPU_MEMORY.search(text):
        hint = (
            ": a smaller --batch (--data.batch_size) or --size may help, or --precision bf16-mixed"
        )
        return f"out of GPU memory{hint if has_batches else ''}"
    return None


def _message(error: BaseException, text: str) -> str | None:
    """Return the message of an error that a user can cause; None for any other."""
    kind = type(error).__name__
    if not isinstance(error, (ValueError, OSError)) and kind != "MisconfigurationException":
        return None
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        return f"{error.strerror}: {os.path.abspath(error.filename)}"
    if isinstance(error, ValueError) and not is_raised_for_user(error):
        return None
    return _joined(text, error)


def _joined(text: str, error: BaseException) -> str:
    return " ".join(text.split()) or type(error).__name__
