"""The scripts that measure: nothing is run twice, a changed recipe is, and the documents say what was recorded."""

import importlib
import json
import re
import statistics
import sys

import pytest
from paths import ROOT


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """The script in a checkout of its own, with two recipes that cost nothing."""
    module = importlib.import_module("benchmarks.recipes.__main__")
    for folder in ("benchmarks/recipes", "configs", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("quick", "slow"):
        (tmp_path / f"configs/{name}.yaml").write_text(f"# header\nmodel: {{backbone: {name}}}\n")
    blocks = "\n".join(f"<!-- {name} -->\n<!-- /{name} -->" for name in ("arithmetic", "fashion"))
    (tmp_path / "docs/benchmarks.md").write_text(
        f"above\n<!-- recipes -->\nold\n<!-- /recipes -->\nbetween\n{blocks}\nbelow\n"
    )
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RECORDS", tmp_path / "benchmarks/recipes/recipes.json")
    groups = ([module.Recipe(name, "hotdog", 128) for name in ("quick", "slow")], [], [])
    monkeypatch.setattr(module, "GROUPS", groups)
    monkeypatch.setattr(module, "CONFIGS", ("quick", "slow"))
    monkeypatch.setattr(module, "ARITHMETIC", {})
    measured = []

    def measure(recipe, seed, root, weights):
        measured.append((recipe.name, seed))
        if recipe.name == "slow" and seed == 1 and len(measured) < 5:
            raise KeyboardInterrupt
        common = {"name": recipe.name, "data": recipe.data, "image_size": 128, "seed": seed}
        result = {"accuracy": 0.8 + seed / 100, "calibration_error": 0.05, "loss": 0.5, "seconds": 9.0 + seed}
        return {**common, **result, "fingerprint": recipe.fingerprint(), "command": "finetune fit"}

    monkeypatch.setattr(module, "measure", measure)
    module.measured = measured
    return module


def run(module, monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.recipes", *arguments])
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == 0


def test_a_stopped_measurement_goes_on_where_it_was(recipes, monkeypatch, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(recipes, monkeypatch, "--hotdog", "x")
    assert recipes.measured == [("quick", 0), ("slow", 0), ("quick", 1), ("slow", 1)]
    run(recipes, monkeypatch, "--hotdog", "x")
    assert recipes.measured[4:] == [("slow", 1), ("quick", 2), ("slow", 2)]
    run(recipes, monkeypatch, "--hotdog", "x")
    assert len(recipes.measured) == 7  # all is there
    # A comment changes nothing; a value does, for that recipe alone.
    config = tmp_path / "configs/quick.yaml"
    config.write_text("# another header\nmodel: {backbone: quick}\n")
    run(recipes, monkeypatch, "--hotdog", "x")
    assert len(recipes.measured) == 7
    config.write_text("model: {backbone: quicker}\n")
    run(recipes, monkeypatch, "--hotdog", "x")
    assert recipes.measured[7:] == [("quick", 0), ("quick", 1), ("quick", 2)]


def test_the_documents_hold_what_was_recorded(recipes, monkeypatch, tmp_path):
    recipes.measured += [("", 0)] * 5  # no interruption
    run(recipes, monkeypatch, "--hotdog", "x")
    text = (tmp_path / "docs/benchmarks.md").read_text()
    assert "| quick.yaml | 0.810 ± 0.010 | 0.050 ± 0.000 | 9 |" in text
    assert "\nold\n" not in text and all(word in text for word in ("above\n", "\nbetween\n", "\nbelow\n"))
    assert (tmp_path / "docs/recipes.png").stat().st_size > 5000
    (tmp_path / "docs/benchmarks.md").write_text("no blocks")
    with pytest.raises(ValueError, match="one block <!-- recipes -->"):
        run(recipes, monkeypatch, "--document")


def test_too_late_is_too_late(recipes, monkeypatch):
    run(recipes, monkeypatch, "--hotdog", "x", "--minutes", "-1")
    assert recipes.measured == []


def test_the_shipped_table_is_that_of_the_records(monkeypatch):
    """docs/benchmarks.md as it stands was written from recipes.json and the configs as they stand."""
    recipes = importlib.import_module("benchmarks.recipes.__main__")
    text = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    tables = recipes.tables(recipes.valid(recipes.load(recipes.RECORDS)))
    assert len(tables) == 3
    for name, table in tables.items():
        assert f"<!-- {name} -->\n{table}\n<!-- /{name} -->" in text
    # The control: a record that says something else is seen.
    records = recipes.valid(recipes.load(recipes.RECORDS))
    records[0] = {**records[0], "accuracy": records[0]["accuracy"] + 0.1}
    assert any(table not in text for table in recipes.tables(records).values())


def test_headers_and_readme_say_what_was_recorded(monkeypatch):
    """The figures in a config's header and in the README, mean ± standard deviation, are those of the runs."""
    recipes = importlib.import_module("benchmarks.recipes.__main__")
    readme = (ROOT / "README.md").read_text("utf-8")
    records = recipes.load(recipes.RECORDS)
    for name in sorted({r["name"] for r in records} & set(recipes.CONFIGS)):
        text = (ROOT / "configs" / f"{name}.yaml").read_text("utf-8")
        header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        found = [r["accuracy"] for r in records if (r["name"], r["data"], r["image_size"]) == (name, "hotdog", 128)]
        expected = f"{statistics.fmean(found):.3f} ± {statistics.stdev(found):.3f}"
        assert f"test accuracy {expected}," in header, (name, expected)
        assert re.search(rf"^\| `{name}\.yaml`.* \| {expected} \|$", readme, re.M), (name, expected)


def test_fashion_mnist_s_table_and_headers_are_those_of_the_records(monkeypatch):
    fashion = importlib.import_module("benchmarks.recipes.fashion_mnist")
    records = fashion.load(fashion.RECORDS)
    text = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    table = fashion.table(records)
    assert f"<!-- fashion_mnist -->\n{table}\n<!-- /fashion_mnist -->" in text and len(table.splitlines()) > 2
    assert all(record["command"] == f"finetune {fashion.COMMANDS[record['name']]}" for record in records)
    for record in records:
        if match := re.search(r"--config (\S+)", record["command"]):
            header = (ROOT / "configs" / match[1]).read_text("utf-8")
            assert f"{record['accuracy']:.4f}" in header, record["name"]
    # The control: a record that says something else is seen.
    assert fashion.table([{**records[0], "accuracy": 0.5}, *records[1:]]) not in text


@pytest.mark.parametrize(
    ("name", "script", "records"),
    [("data_road", "data/loading", "pictures_per_second"), ("frozen", "recipes/frozen", "seconds")],
)
def test_the_tables_of_speed_are_those_of_the_records(name, script, records, monkeypatch):
    for variable in ("OMP_NUM_THREADS", "NO_ALBUMENTATIONS_UPDATE"):  # which `loading` sets for itself
        monkeypatch.setenv(variable, "1")
    module = importlib.import_module(f"benchmarks.{script.replace('/', '.')}")
    found = json.loads((ROOT / f"benchmarks/{script}.json").read_text("utf-8"))[records]
    text = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    assert f"<!-- {name} -->\n{module.table(found)}\n<!-- /{name} -->" in text
    # The control: a record that says something else is seen.
    other = {
        road: [{key: 2 * value for key, value in result.items()} for result in results]
        for road, results in found.items()
    }
    assert module.table(other) not in text


def test_very_many_files_are_made_scanned_and_reported(monkeypatch, tmp_path):
    many_files = importlib.import_module("benchmarks.data.indexing")
    found = json.loads((ROOT / "benchmarks/data/indexing.json").read_text("utf-8"))["seconds"]
    text = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    assert f"<!-- many_files -->\n{many_files.table(found)}\n<!-- /many_files -->" in text
    assert many_files.table([{**r, "scan": 2 * r["scan"]} for r in found]) not in text  # another record, another table
    monkeypatch.setattr(many_files, "_CLASSES", 5)
    many_files.make(tmp_path, 100)
    assert many_files.measure(str(tmp_path))["files"] == 100
    assert all(r["bytes"] <= 200 and r["scan"] + r["fingerprint"] < 60 for r in found)  # the targets


def test_two_recipes_are_held_against_each_other_on_the_same_pictures(monkeypatch):
    recipes = importlib.import_module("benchmarks.recipes.__main__")
    assert [recipes.as_text(right) for right in ([1, 0, 1, 0], [1], [0, 0, 0, 1, 1, 1, 1, 1])] == ["a", "8", "1f"]
    rights = {("a", 0): [1, 1, 1, 0, 0, 1], ("b", 0): [1, 0, 0, 0, 1, 0], ("a", 1): [1, 1], ("b", 1): [1, 0]}
    common = {"data": "hotdog", "image_size": 128}
    records = [{"name": n, "seed": s, "right": recipes.as_text(r), **common} for (n, s), r in rights.items()]
    assert recipes.paired(records, ["a", "b"], "hotdog", 224).startswith("no seed of both a and b at 224 pixels")
    assert recipes.paired(records, ["a", "b"], "hotdog", 128).splitlines() == [
        "seed 0: only a right 3, only b right 1, p = 0.625",  # 2 * (1 + 4) / 16
        "seed 1: only a right 1, only b right 0, p = 1.000",
        "all seeds: only a right 4, only b right 1, p = 0.375",  # 2 * (1 + 5) / 32
    ]
