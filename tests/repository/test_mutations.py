"""The lines that mutations.py makes wrong are there, once each, and two runs of it as they should be."""

import pytest
from mutations import MUTATIONS, caught
from paths import ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.promise)
def test_the_line_is_there(mutation):
    assert (ROOT / "finetune" / mutation.file).read_text("utf-8").count(mutation.old) == 1
    assert mutation.old != mutation.new
    for name in mutation.tests.split(" -k ")[0].split():
        assert (ROOT / name).exists()


def test_one_is_caught_and_a_harmless_one_is_not(tmp_path):
    first = next(m for m in MUTATIONS if m.file == "data/splits.py")
    (tmp_path / "wrong").mkdir()
    (tmp_path / "right").mkdir()
    assert caught(first, tmp_path / "wrong")
    assert not caught(type(first)(first.promise, first.file, first.old, first.old, first.tests), tmp_path / "right")
