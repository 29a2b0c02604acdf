"""Marks of tests that need an extra."""

from importlib.util import find_spec

import pytest

# `find_spec`, since an import of OpenVINO by itself sends something
needs_openvino = pytest.mark.skipif(
    find_spec("openvino") is None, reason="the extra openvino is not installed"
)
needs_coremltools = pytest.mark.skipif(
    find_spec("coremltools") is None, reason="the extra coreml is not installed"
)
