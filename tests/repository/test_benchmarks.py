"""The benchmark scripts start, and published tables are those of the records in benchmarks/."""

import importlib
import json
import re
import runpy
import sys
from typing import Any

import pytest
from paths import ROOT

FOLDER = ROOT / "benchmarks"
# Scripts of peers run in environments of their own.
SCRIPTS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if "def main(" in path.read_text("utf-8") and not path.stem.endswith(("_peer", "driver"))
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Restore the variables that benchmarks/data/loading.py sets when it is imported."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_show_their_options(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(script, run_name="__main__")
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


def blocks_of(name: str, records: Any) -> dict[str, str]:
    """Return the tables that a script makes of its records, by the name of the block in a page."""
    module, function = SOURCES[name]
    script = importlib.import_module(f"benchmarks.{module}")
    if name == "scaling/scaling":
        cases = importlib.import_module("benchmarks.scaling.__main__").CASES
        return script.tables(cases, {record["name"]: record for record in records})
    if name == "recipes/recipes":
        records = script.valid(records)
    made = getattr(script, function)(records)
    return made if isinstance(made, dict) else {BLOCKS.get(name, name.partition("/")[2]): made}


# By the file of the records: the module and its function.
SOURCES = {
    "check/check": ("check.__main__", "table"),
    "check/review": ("check.review", "table"),
    "data/loading": ("data.loading", "table"),
    "data/upload_times": ("data.upload_times", "table"),
    "data/storage_rates": ("data.storage_rates", "table"),
    "defaults/defaults": ("defaults.__main__", "tables"),
    "export/export": ("export.__main__", "table"),
    "gpu/gpu": ("gpu.__main__", "table"),
    "held_out/held_out": ("held_out.__main__", "tables"),
    "labels/labels": ("labels.__main__", "tables"),
    "peers/busy_machine": ("peers.busy_machine", "table"),
    "peers/compare": ("peers.documents", "tables"),
    "quality/quality": ("quality.documents", "blocks"),
    "quality/imagenet": ("quality.documents", "imagenet_blocks"),
    "recipes/fashion_mnist": ("recipes.fashion_mnist", "table"),
    "recipes/recipes": ("recipes.__main__", "tables"),
    "scaling/scaling": ("scaling.documents", "tables"),
    "serving/serving": ("serving.__main__", "tables"),
    "techniques/techniques": ("techniques.__main__", "blocks"),
}
# Blocks that are not called as their records.
BLOCKS = {
    "check/check": "check_faults",
    "check/review": "review_found",
    "data/loading": "data_road",
}
MARKED = re.compile(r"^<!-- (\w+) -->\n(.*?)\n<!-- /\1 -->$", re.M | re.S)
PAGES = [ROOT / "README.md", FOLDER / "NOTEBOOK.md", *(ROOT / "docs").glob("*.md")]


def wrong_blocks(pages: str, made: dict[str, str]) -> set[str]:
    """Return the marked blocks of pages that differ from those of the records, or are missing."""
    shown = MARKED.findall(pages)
    return {name for name, block in shown if made.get(name) != block} | (made.keys() - dict(shown))


@pytest.mark.slow
def test_tables_on_pages_are_those_of_the_records():
    made: dict[str, str] = {}
    for name in SOURCES:
        made |= blocks_of(name, json.loads((FOLDER / f"{name}.json").read_text("utf-8")))
    pages = "\n".join(page.read_text("utf-8") for page in PAGES)
    assert made and wrong_blocks(pages, made) == set()
    # control
    changed = pages.replace(made["defaults"], made["defaults"].replace("0.8", "0.9"))
    assert wrong_blocks(changed, made) == {"defaults"}
