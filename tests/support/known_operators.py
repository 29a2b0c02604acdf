"""Build torch's table of ONNX operators once for all exports of a process.

torch builds the table of its translations anew in each export, from the source of 500 functions: for a small network
that is half of an export. A program exports once, the tests many times.
"""

from functools import cache
from typing import Any
from unittest.mock import patch

import torch


def remember_operators() -> None:
    """Let exports of this process share the table, which they only read."""
    export = torch.onnx.export

    def export_with_known_operators(*arguments: Any, **options: Any) -> Any:
        _share_table()
        return export(*arguments, **options)

    patch.object(torch.onnx, "export", export_with_known_operators).start()


@cache
def _share_table() -> None:
    # imported at the first export, since it takes its time
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    table = cache(ONNXRegistry.from_torchlib)
    patch.object(ONNXRegistry, "from_torchlib", staticmethod(table)).start()
