"""benchmarks/export: the pages say what its records say."""

import importlib
import json
import sys

import numpy as np
import pytest
from paths import ROOT

PAGES = [(ROOT / "docs" / name).read_text("utf-8") for name in ("benchmarks.md", "export.md")]


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("benchmarks.export.__main__")


def test_the_tables_are_those_of_the_records(script):
    records = script.load(script.RECORDS)
    assert [record["seed"] for record in records] == list(script.SEEDS)
    block = f"<!-- export -->\n{script.table(records)}\n<!-- /export -->"
    assert all(block in page for page in PAGES)
    changed = json.loads(json.dumps(records))  # the control
    changed[1]["milliseconds"]["int8"] *= 3
    changed[2]["milliseconds"]["int8"] *= 3
    assert script.table(changed) != script.table(records)


def test_the_files_say_what_the_page_says_of_them(script):
    for record in script.load(script.RECORDS):
        assert record["num_pictures"] == 800
        assert record["largest_difference"]["onnx"] <= 1e-4 and record["largest_difference"]["any"] <= 1e-4
        assert record["num_other"]["onnx"] == record["num_other"]["any"] == 0


def test_what_counts_comes_after_as_many_that_do_not(script, monkeypatch):
    clock, last, calls = [0.0], [""], []

    def run_of(name: str):
        def run(i: int) -> None:
            clock[0] += 1.0 if last[0] == name else 9.0
            last[0] = name
            calls.append((name, i))

        return run

    monkeypatch.setattr(script.time, "perf_counter", lambda: clock[0])
    assert script.in_turns({"a": run_of("a"), "b": run_of("b")}, 4, 2) == {"a": 1.0, "b": 1.0}
    assert [i for name, i in calls if name == "a"] == [0, 1, 0, 1, 2, 3, 2, 3]


def test_a_seed_is_measured_again_in_its_place(script, monkeypatch, tmp_path):
    found = script.load(script.RECORDS)[0]
    monkeypatch.setattr(script, "RECORDS", tmp_path / "export.json")
    monkeypatch.setattr(script, "fill", lambda *_: None)
    monkeypatch.setattr(script, "checkpoint", lambda _, seed: seed)
    accuracies = iter(np.arange(9) / 10)
    monkeypatch.setattr(script, "measure", lambda *_: {**found, "accuracy": {n: next(accuracies) for n in ("torch",)}})
    monkeypatch.setattr(script, "table", lambda _: "")
    for seeds in (["1", "0"], ["1"]):
        monkeypatch.setattr(sys, "argv", ["benchmarks.export", "--hotdog", "x", "--seeds", *seeds])
        script.main()
    records = json.loads((tmp_path / "export.json").read_text())
    assert len(records) == 2 and {r["accuracy"]["torch"] for r in records} == {0.1, 0.2}
