"""Published tables and figures agree with the records in benchmarks/."""

import importlib
import json
import re
import statistics
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from paths import ROOT

PAGES = {
    path.name: path.read_text("utf-8")
    for path in [
        ROOT / "README.md",
        ROOT / "benchmarks/NOTEBOOK.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
}
# from published figures and networks, not from records
MARKER = re.compile(r"^<!-- (\w+) -->$", re.M)
COMPUTED = {"traffic", "prediction"}


def script(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def records_of(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/{name}.json").read_text("utf-8"))


def many(module: str) -> Callable[[Any], dict[str, str]]:
    """Return what makes all blocks of the records."""
    return lambda found: script(module).tables(found)


def one(block: str, module: str) -> Callable[[Any], dict[str, str]]:
    """Return what makes a single block of the records."""
    return lambda found: {block: script(module).table(found)}


def recipes(found: list) -> dict[str, str]:
    module = script("recipes.__main__")
    return module.tables(module.valid(found))


def scaling(found: list) -> dict[str, str]:
    by_name = {record["name"]: record for record in found}
    return script("scaling.documents").tables(script("scaling.__main__").CASES, by_name)


def techniques(found: list) -> dict[str, str]:
    return script("techniques.__main__").blocks(found)


class Source(NamedTuple):
    """What writes blocks: how they are made of the records, which fields the control changes, where they stand."""

    blocks: Callable[[Any], dict[str, str]]
    fields: tuple[str, ...]
    pages: tuple[str, ...] = ("NOTEBOOK.md", "benchmarks.md")


# The blocks of the short version. All others are in the notebook, which has all of these but the means.
SHORT = {"compare_job", "data_road", "defaults", "quality_means"}


def expected_on(page: str, blocks: dict[str, str]) -> dict[str, str]:
    """Return the blocks that belong on a page."""
    if page == "benchmarks.md":
        return {name: block for name, block in blocks.items() if name in SHORT}
    return {name: block for name, block in blocks.items() if name != "quality_means"}


# By the file of the records in benchmarks/.
SOURCES = {
    "check/check": Source(one("check_faults", "check.__main__"), ("found",)),
    "check/review": Source(one("review_found", "check.review"), ("check",)),
    "data/loading": Source(one("data_road", "data.loading"), ("cpu",)),
    "data/upload_times": Source(one("upload_times", "data.upload_times"), ("seconds",)),
    "data/storage_rates": Source(
        one("storage_rates", "data.storage_rates"), ("preparing", "epochs")
    ),
    "defaults/defaults": Source(many("defaults.__main__"), ("accuracy",)),
    "export/export": Source(
        one("export", "export.__main__"), ("milliseconds",), ("NOTEBOOK.md", "export.md")
    ),
    "gpu/gpu": Source(one("gpu", "gpu.__main__"), ("rates",)),
    "held_out/held_out": Source(many("held_out.__main__"), ("accuracy",)),
    "labels/labels": Source(
        many("labels.__main__"), ("mAP", "f1_micro"), ("NOTEBOOK.md", "labels.md")
    ),
    "peers/busy_machine": Source(one("busy_machine", "peers.busy_machine"), ("seconds",)),
    "peers/compare": Source(many("peers.documents"), ("seconds", "rate", "date")),
    "quality/quality": Source(
        lambda found: script("quality.documents").blocks(found), ("accuracy", "date")
    ),
    "quality/imagenet": Source(
        lambda found: script("quality.documents").imagenet_blocks(found), ("accuracy", "date")
    ),
    "recipes/fashion_mnist": Source(one("fashion_mnist", "recipes.fashion_mnist"), ("accuracy",)),
    "recipes/recipes": Source(recipes, ("accuracy",)),
    "scaling/scaling": Source(scaling, ("seconds",), ("parallelism.md",)),
    "serving/serving": Source(many("serving.__main__"), ("rate", "summary")),
    "techniques/techniques": Source(techniques, ("right",)),
}


def changed(value: Any, fields: tuple[str, ...], is_inside: bool = False) -> Any:
    """Return records whose fields say something else: half of each number, 0 for 1 and 1 for 0 in each text."""
    if isinstance(value, dict):
        return {
            key: changed(inner, fields, is_inside or key in fields) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [changed(inner, fields, is_inside) for inner in value]
    if not is_inside:
        return value
    return value.translate(str.maketrans("01", "10")) if isinstance(value, str) else value / 2


def marked(name: str, block: str) -> str:
    return f"<!-- {name} -->\n{block}\n<!-- /{name} -->"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Restore the variables that benchmarks/data/loading.py sets when it is imported."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ["NOTEBOOK.md", "benchmarks.md", "export.md", "labels.md", "parallelism.md"]
)
def test_the_blocks_of_a_page_equal_the_records(page):
    """Each marked block stands once in its page and is what the records give."""
    blocks = {}
    others = {}
    for name, source in SOURCES.items():
        if page in source.pages:
            records = records_of(name)
            blocks |= source.blocks(records)
            others |= source.blocks(changed(records, source.fields))
    blocks = expected_on(page, blocks)
    others = expected_on(page, others)
    assert sorted(MARKER.findall(PAGES[page])) == sorted(blocks)
    assert [name for name, block in blocks.items() if marked(name, block) not in PAGES[page]] == []
    # The control: with changed records no block is the one in the page.
    same = {name for name, block in others.items() if marked(name, block) in PAGES[page]}
    assert same <= COMPUTED


def test_no_other_page_has_marked_blocks():
    pages = {page for source in SOURCES.values() for page in source.pages}
    assert {name for name, text in PAGES.items() if MARKER.search(text)} == pages


NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def invented(text: str) -> set[str]:
    """Return the numbers in the prose of the short version that the notebook does not have."""
    prose = re.sub(r"^<!-- (\w+) -->$.*?^<!-- /\1 -->$|\]\([^)]*\)", "", text, flags=re.S | re.M)
    return set(NUMBER.findall(prose)) - set(NUMBER.findall(PAGES["NOTEBOOK.md"]))


def test_the_short_version_has_the_numbers_of_the_notebook():
    page = PAGES["benchmarks.md"]
    assert invented(page) == set()
    assert len(page.encode()) <= 10_240
    # The control: another figure.
    assert invented(page.replace("0.8558", "0.8559")) == {"0.8559"}


@pytest.mark.slow
def test_computed_tables_depend_on_the_network(monkeypatch):
    """The control of the tables without records: another network gives blocks that are not in the page."""
    documents = script("scaling.documents")
    untrained = documents.untrained
    monkeypatch.setattr(
        documents, "untrained", lambda name, num_classes: untrained("resnet34", num_classes)
    )
    for table in ("traffic", "prediction"):
        assert marked(table, getattr(documents, f"{table}_table")()) not in PAGES["parallelism.md"]


def test_headers_say_what_was_recorded():
    """The figures in a config's header, mean ± standard deviation, are those of the runs."""
    recorded = records_of("recipes/recipes")
    for name in script("recipes.__main__").CONFIGS:
        if name == "former_default":  # options of image_folder.yaml
            continue
        text = (ROOT / f"configs/{name}.yaml").read_text("utf-8")
        header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        found = [
            r["accuracy"]
            for r in recorded
            if (r["name"], r["data"], r["image_size"]) == (name, "hotdog", 128)
        ]
        if not found:
            assert "On those of hotdog.yaml these defaults are not measured" in header, name
            continue
        expected = f"{statistics.fmean(found):.3f} ± {statistics.stdev(found):.3f}"
        assert f"test accuracy {expected}," in header, (name, expected)
    configs = []
    for record in records_of("recipes/fashion_mnist"):
        assert (
            record["command"]
            == f"finetune {script('recipes.fashion_mnist').COMMANDS[record['name']]}"
        )
        if match := re.search(r"--config (\S+)", record["command"]):
            configs.append(match[1])
            assert f"{record['accuracy']:.4f}" in (ROOT / "configs" / match[1]).read_text(
                "utf-8"
            ), record["name"]
    assert set(configs) == {"fashion_mnist_lenet.yaml", "fashion_mnist_resnet18.yaml"}


def test_records_hold_what_pages_say_of_them():
    export = records_of("export/export")
    assert [record["seed"] for record in export] == [0, 1, 2]
    for record in export:
        assert record["num_pictures"] == 800
        # above it `finetune export` writes no file
        assert record["largest_difference"]["onnx"] <= 1e-4
        assert record["num_other"]["onnx"] == 0
    # Scaling: every setting, seven times; `current` omits the records of a case that has changed since.
    module = script("scaling.__main__")
    found = module.current(records_of("scaling/scaling"))
    assert list(found) == [case.name for case in module.CASES]
    for case in module.CASES:
        seconds = found[case.name]["seconds"]
        assert list(seconds) == [script("scaling.steps").key(*setting) for setting in case.settings]
        assert {len(values) for values in seconds.values()} == {7}


def test_readme_shows_the_results_of_the_benchmarks():
    """Each set's row: both regressions, then the defaults, from the ImageNet weights."""
    page = PAGES["benchmarks.md"]
    rows = {}
    for what in ("logistic regression", "`finetune fit FOLDER`"):
        (row,) = re.findall(rf"^\| timm/tf_efficientnet_lite0 \| {what} \| (.*) \|$", page, re.M)
        rows[what] = row.split(" | ")[:4]
    sentence = r"Without standardising, the regression has (.*?), (.*?), (.*?) and (.*?),"
    plain = re.search(sentence, PAGES["NOTEBOOK.md"]).groups()
    sets = ("flowers", "clothing", "satellite", "trash")
    for cells in zip(
        sets, rows["logistic regression"], plain, rows["`finetune fit FOLDER`"], strict=True
    ):
        assert f"| {' | '.join(cells)} |" in PAGES["README.md"]
