"""Calls in a forked process with limits on time and memory. A crash of that process is a result like any other."""

import ctypes
import faulthandler
import json
import os
import resource
import signal
from collections.abc import Callable
from typing import NoReturn

from image_files import memory

_MARGIN = 2**28  # bytes of address space that allocators reserve and do not use


def faults_of_calls(
    num: int, call: Callable[[int], str], seconds: float, num_bytes: int
) -> dict[int, str]:
    """Call `call(i)` for each i below `num` in a forked process; a new one continues after a crash.

    Args:
        num: Number of calls.
        call: Returns the fault that it found, "" for none.
        seconds: Processor time of one call. 20 times as much real time is allowed.
        num_bytes: Memory that one call may add.

    Returns:
        The faults by the number of their call: what `call` returned or raised, or how the process ended.
    """
    faults: dict[int, str] = {}
    first = 0
    while first < num:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _run_calls(range(first, num), call, seconds, num_bytes, writing)
        os.close(writing)
        with open(reading) as results:
            for line in results:
                number, fault = json.loads(line)
                first = number + 1
                if fault:
                    faults[number] = fault
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if first < num:
            name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
            faults[first] = f"the process ended: {name}"
            first += 1
    return faults


def _run_calls(
    numbers: range, call: Callable[[int], str], seconds: float, num_bytes: int, results: int
) -> NoReturn:
    try:
        faulthandler.disable()
        # the default action ends the process also inside of a C library
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        most = memory("VmSize") + num_bytes + _MARGIN
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        for number in numbers:
            # otherwise a call could use memory that was freed before, and seem to take none
            ctypes.CDLL(None).malloc_trim(0)
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the peak begins anew
            before = memory("VmHWM")
            signal.setitimer(signal.ITIMER_PROF, seconds)
            signal.setitimer(signal.ITIMER_REAL, 20 * seconds)
            try:
                fault = call(number)
            except BaseException as error:
                fault = f"{type(error).__name__}: {error}"
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            added = memory("VmHWM") - before
            if added > num_bytes:
                fault = fault or f"it takes {added:,} bytes of memory"
            os.write(results, f"{json.dumps([number, fault])}\n".encode())
    finally:
        os._exit(0)
