"""Values that are written as one line of YAML are read back equal."""

import pytest
from jsonargparse import get_loader

from finetune.commands.flow_yaml import flow_yaml

VALUES = [
    ["🌭.png", "b, c.png"],
    {"name": "Brötchen", "x": [1, 2.5, None, True]},
    ["\u2028\x7f\x85\ufeff\\ud83c"],
]


@pytest.mark.parametrize("value", [*VALUES, *VALUES[0], 'a "b"\n\t: c', "null", "1e5"])
def test_it_is_read_as_it_was(value):
    assert get_loader("yaml")(flow_yaml(value)) == value and flow_yaml(value).isascii()


def test_what_is_none_of_it_is_an_error():
    with pytest.raises(TypeError):
        flow_yaml({1j})
    assert flow_yaml({1j}, str) == '"{1j}"'
