"""Marks of tests that need an extra."""

from importlib.util import find_spec

import pytest

# `find_spec`, since an import of OpenVINO by itself sends something
needs_openvino = pytest.mark.skipif(
    find_spec("openvino") is None, reason="the extra openvino is not installed"
)
