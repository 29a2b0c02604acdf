"""What to tell a user of an error, whichever library it comes from: one line, or nothing where the error is ours.

Nothing heavy is imported here.
"""

import os
import re
import sys
import traceback


def raised(error: BaseException) -> BaseException:
    """Return what a constructor raised, which jsonargparse wraps."""
    while str(error).startswith("Does not validate against any of the Union") and error.__cause__ is not None:
        error = error.__cause__
    return error


def stop_behind(error: BaseException) -> BaseException:
    """Return the stop by a signal during which `error` was raised, else `error`."""
    signals = sys.modules.get("finetune.distributed.signals")  # imports torch: who has not got it can't have raised it
    return signals.stop_behind(error) if signals else error


def exit_code(error: BaseException) -> int:
    wrong_usage = type(error).__name__ == "MisconfigurationException"  # Lightning's word for it
    return getattr(raised(error), "exit_code", 2 if wrong_usage else 1)


def one_line(error: BaseException) -> str | None:
    """Return what to tell a user, or None for an error that is ours and deserves a traceback."""
    signals = sys.modules.get("finetune.distributed.signals")  # imports torch: who has not got it can't have raised it
    if isinstance(error, getattr(signals, "Interrupted", ())):
        return str(error)
    error = raised(error)
    text = str(error)
    others: BaseException | None = error
    while others is not None:  # raised anywhere, since a signal brings the news: a library may have made another of it
        if re.search("DataLoader worker .*(killed by signal|exited unexpectedly)", str(others)):
            break
        others = others.__cause__ or others.__context__
    if others is not None or isinstance(error, ConnectionResetError) or _is_hung_up(error):
        return "a process that reads pictures was killed, perhaps for want of memory: fewer --data.num_workers may help"
    if isinstance(error, MemoryError) or "ArrayMemoryError" in text or "DefaultCPUAllocator" in text:
        return "out of memory: a smaller --batch (--data.batch_size) or fewer --workers (--data.num_workers) may help"
    if "Caught " in text and "DataLoader worker" in text:  # a worker's error carries its traceback as text
        text = text.strip().splitlines()[-1].partition(": ")[2]
    elif type(error).__name__ == "OutOfMemoryError":
        return "out of GPU memory: a smaller --batch (--data.batch_size) or --size may help, or --precision bf16-mixed"
    elif "connectFullMesh" in text:
        rank, address = os.environ.get("RANK", "0"), text.rpartition("remote=")[2]
        reached = "it ended, or GLOO_SOCKET_IFNAME must name the network between them"
        return f"process {rank} can't reach another one at {address}: {reached}"
    elif type(error).__name__ == "DistBackendError" or "gloo" in text or _is_left_alone(error):
        return f"process {os.environ.get('RANK') or os.environ.get('LOCAL_RANK', '0')} ended, since another one did"
    elif type(error).__name__ == "DistNetworkError":  # the port is taken, or the first process does not answer
        text = text.partition("\n")[0]
    elif not isinstance(error, (ValueError, OSError)) and type(error).__name__ != "MisconfigurationException":
        told = text.startswith(("Early stopping conditioned on metric", "`devices` selected with"))  # by Lightning
        return " ".join(text.split()) if told else None
    elif isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        return f"{error.strerror}: {os.path.abspath(error.filename)}"
    return " ".join(text.split()) or type(error).__name__


def _is_hung_up(error: BaseException) -> bool:
    """Return whether a process ended while it handed over a batch."""
    if not isinstance(error, (EOFError, OSError)):
        return False
    paths = [frame.f_code.co_filename.split(os.sep) for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_batch = any(path[-1] == "dataloader.py" for path in paths)
    return (is_batch and "multiprocessing" in paths[-1][-2:]) or "in pin memory thread" in str(error)


def _is_left_alone(error: BaseException) -> bool:
    is_network = type(error).__name__ == "DistNetworkError"
    return is_network and re.search("Broken pipe|Failed to recv|reset by peer", str(error)) is not None
