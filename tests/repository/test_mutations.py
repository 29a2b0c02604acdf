"""The lines that mutations.py breaks exist once each, and two of its runs end as they should."""

import mutations
import pytest
from mutations import MUTATIONS, TIERS, Mutation, caught, harmless
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
def test_a_wrong_line_is_caught_and_a_harmless_one_is_not(tmp_path, monkeypatch):
    """In a checkout of one module; `make mutations` begins with a harmless line in a copy of the whole one."""
    files = {
        "finetune/__init__.py": "",
        "finetune/doubled.py": "def doubled(x):\n    return 2 * x\n",
        "tests/test_doubled.py": "from finetune.doubled import doubled\n\n"
        "def test_it():\n    assert doubled(3) == 6\n",
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["slow", "network"]\n',
    }
    for name, content in files.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(mutations, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(mutations, "_COPIED", ("finetune", "tests", "pyproject.toml"))
    own = {"make test": TIERS["make test"][:1]}  # its own quick tests alone
    wrong = Mutation("twice", "doubled.py", "2 * x", "3 * x", "tests/test_doubled.py")
    for name in ("wrong", "right"):
        (tmp_path / name).mkdir()
    assert caught(wrong, tmp_path / "wrong", own) == "make test"
    assert caught(harmless(wrong), tmp_path / "right", own) == ""
