"""The lines that mutations.py breaks exist once each."""

from mutations import MUTATIONS
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
