"""The lines that mutations.py makes wrong are there, once each, and two runs of it as they should be."""

from dataclasses import replace

import pytest
from mutations import MUTATIONS, TIERS, caught
from paths import ROOT


def test_each_line_is_there_once_and_so_are_its_tests():
    wrong = [
        (mutation.promise, mutation.file)
        for mutation in MUTATIONS
        if (ROOT / "finetune" / mutation.file).read_text("utf-8").count(mutation.old) != 1
        or mutation.old == mutation.new
        or not all((ROOT / name).exists() for name in mutation.tests.split(" -k ")[0].split())
    ]
    assert MUTATIONS and wrong == []


@pytest.mark.slow
def test_one_is_caught_and_a_harmless_one_is_not(tmp_path):
    first = next(m for m in MUTATIONS if m.file == "data/splits.py")
    own = {"make test": TIERS["make test"][:1]}  # its own quick tests alone
    (tmp_path / "wrong").mkdir()
    (tmp_path / "right").mkdir()
    assert caught(first, tmp_path / "wrong", own) == "make test"
    assert caught(replace(first, new=first.old), tmp_path / "right", own) == ""
