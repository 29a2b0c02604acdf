"""Imports OpenVINO, without the telemetry of its Python package."""

import sys
from types import ModuleType

from finetune.system.messages import install


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
