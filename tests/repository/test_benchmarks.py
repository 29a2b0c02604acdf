"""The benchmark scripts start, and the tables of docs/benchmarks.md are those of the records."""

import importlib
import re
import runpy
import sys

import pytest
from paths import ROOT

FOLDER = ROOT / "benchmarks"
NAMES = ["accuracy", "peers.__main__", "storage"]
NAMES += [f"speed.{name}" for name in ("loading", "gpu", "serving", "export")]
MARKED = re.compile(r"^<!-- (\w+) -->\n(.*?)\n<!-- /\1 -->$", re.M | re.S)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Restore the variables that benchmarks/speed/loading.py sets when it is imported."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_scripts_show_their_options(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


def wrong_blocks(page: str, made: dict[str, str]) -> set[str]:
    """Return the blocks of a page that differ from those of the records, or are missing."""
    shown = MARKED.findall(page)
    return {name for name, block in shown if made.get(name) != block} | (made.keys() - dict(shown))


def test_tables_are_those_of_the_records():
    made = {}
    for name in NAMES:
        benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
        made[benchmark.name] = benchmark.table(benchmark.newest())
    page = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    assert wrong_blocks(page, made) == set()
    # control
    changed = page.replace(made["accuracy"], made["accuracy"].replace("0.8", "0.9"))
    assert wrong_blocks(changed, made) == {"accuracy"}
