"""Imports OpenVINO, without the telemetry of its Python package, and keeps its one core."""

import sys
import threading
from functools import cache
from types import ModuleType
from typing import Any

from finetune.system.messages import install

_LOCK = threading.Lock()


def import_openvino() -> ModuleType:
    """Return the package `openvino`.

    Raises:
        ValueError: It is not installed.
    """
    # `import openvino` reports the import to Google Analytics and writes an identifier into the user's folder. It does
    # neither if this package cannot be imported.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import openvino
    except ImportError as error:
        raise ValueError(
            f"files of OpenVINO need the package openvino: {install('openvino')}"
        ) from error
    return openvino


def openvino_core() -> Any:
    """Return the `openvino.Core` of this process, which reads and compiles every model.

    Raises:
        ValueError: OpenVINO is not installed.
    """
    # Each core gives its thread another stack for signals, and unmaps that stack after its last model (2026.4). If
    # another core or thread still has it, the next signal with a handler in Python is a segmentation fault.
    with _LOCK:  # or two threads would create two cores
        return _core()


@cache
def _core() -> Any:
    return import_openvino().Core()
