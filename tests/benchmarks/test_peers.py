"""The comparison with other tools: the clock's log, the same pictures for all, and nothing measured twice."""

import importlib
import json
import subprocess
import sys

import pytest
from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """The script, with records of its own."""
    module = importlib.import_module("benchmarks.peers.__main__")
    monkeypatch.setattr(module, "RECORDS", tmp_path / "compare.json")
    return module


def record(experiment, tool, setting="default", repeat=0, **result) -> dict:
    about = {
        "versions": {"torch": "2.15"},
        "commit": "abc1234",
        "machine": "a processor, 2 cores",
        "date": "2026-11-21",
    }
    return {"experiment": experiment, "tool": tool, "setting": setting, "repeat": repeat, **result, **about}


def test_the_steps_times_become_rates(compare):
    rates, failed = compare.measure.rates, compare.measure.Failed
    # Two epochs of 3 batches, 64 + 64 + 32 pictures: 96 pictures between 10 s and 14 s, then 160 in 5 s.
    found = rates([10, 12, 14, 16, 17, 19], 2, 160, 64)
    first = {"first_step": 10, "pictures": 160, "steps": 3, "first_rate": 24}
    assert found == {**first, "later_seconds": 5, "later_rate": 32}
    # The same without its part of a batch: 128 pictures an epoch, 64 of them in 2 s; then 128 in 4, 12 and 8 s.
    found = rates([10, 12, 14, 16, 20, 28, 30, 36], 4, 160, 64)
    first = {"first_step": 10, "pictures": 128, "steps": 2, "first_rate": 32}
    assert found == {**first, "later_seconds": 8, "later_rate": 16}
    assert "later_rate" not in rates([10, 12, 14], 1, 160, 64)
    # Steps that are not understood give no number: none, half an epoch too many, gradients gathered over two batches.
    for stamps, epochs in (([], 1), ([1, 2, 3, 4, 5, 6, 7], 2), ([1, 2], 2)):
        with pytest.raises(failed, match="optimizer steps"):
            rates(stamps, epochs, 160, 64)


def test_an_epoch_was_evaluated_by_the_next_ones_first_step(compare):
    stamps = [10.0, 11.0, 14.0, 15.0, 19.0, 20.0]
    assert importlib.import_module("benchmarks.peers.measure").evaluated(stamps, 3, 23.0) == [14.0, 19.0, 23.0]


def test_the_clock_hears_every_optimizer_and_no_other_process(compare, tmp_path):
    code = """
import sys
assert "torch" not in sys.modules
import torch
weight = torch.nn.Parameter(torch.ones(2))
for optimizer in (torch.optim.SGD([weight], 0.1), torch.optim.AdamW([weight])):
    weight.sum().backward()
    optimizer.step()
print(len([0] * 3))
"""
    done = compare.measure.run([sys.executable, "-c", code], {}, tmp_path / "log")
    assert len(done["stamps"]) == 2 and 0 < done["stamps"][0] <= done["stamps"][1] < done["seconds"]
    assert done["output"] == "3\n" and done["memory_mb"] > 10
    quiet = compare.measure.run([sys.executable, "-c", "print(1)"], {}, tmp_path / "other")
    assert quiet["stamps"] == []
    with pytest.raises(compare.measure.Failed, match=r"^ValueError: no such thing$"):
        compare.measure.run([sys.executable, "-c", "raise ValueError('no such thing')"], {}, tmp_path / "third")


def test_all_tools_get_the_first_pictures_of_each_class(compare, tmp_path):
    for split, num in (("train", 4), ("test", 3)):
        for name in ("cat", "dog"):
            (tmp_path / "root" / split / name).mkdir(parents=True)
            for i in range(num):
                (tmp_path / "root" / split / name / f"{i}.jpg").write_text(f"{split} {name} {i}")
    folder = compare.materials.write_folder(tmp_path / "root", tmp_path / "small", 2, None)
    files = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*/*"))
    assert files == [f"train/{c}/{i}.jpg" for c in ("cat", "dog") for i in range(2)] + [
        f"val/{c}/{i}.jpg" for c in ("cat", "dog") for i in range(3)
    ]
    assert (folder / "val/dog/2.jpg").read_text() == "test dog 2"
    with pytest.raises(ValueError, match="has 4 pictures, 5 are wanted"):
        compare.materials.write_folder(tmp_path / "root", tmp_path / "large", 5, None)


def test_the_peers_get_the_same_weights(compare, tmp_path):
    torch, models = pytest.importorskip("torch"), pytest.importorskip("torchvision.models")
    from safetensors.torch import load_file

    net = models.resnet18(num_classes=99).half()
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    forms = compare.materials.write_weights(tmp_path / "weights.pt", tmp_path / "forms")
    for state in (torch.load(compare.materials.pretrained(forms)), load_file(forms / "hub_model/model.safetensors")):
        models.resnet18().load_state_dict(state)
        assert torch.equal(state["layer4.1.conv2.weight"], net.layer4[1].conv2.weight.float())
        assert torch.equal(state["fc.weight"][:99], net.fc.weight.float()) and not state["fc.weight"][99:].any()


def test_a_stopped_comparison_goes_on_where_it_was(compare, monkeypatch, tmp_path):
    measured = []

    def measure(bench, run):
        measured.append(run)
        if len(measured) == 3:
            raise KeyboardInterrupt
        if run.tool == "ultralytics":
            return record(*run, failed="ValueError: no")
        speed = {"finetune": 5, "fastai": 7}.get(run.tool, 9)
        return record(*run, seconds=speed + run.repeat, accuracy=0.8, first_step=1, later_rate=50)

    monkeypatch.setattr(compare.Bench, "measure", measure)
    monkeypatch.setattr(compare, "document", lambda: None)

    def go(*arguments):
        command = [
            "benchmarks.peers",
            "--root",
            "x",
            "--weights",
            "y",
            "--only",
            "job",
            "finetune",
            "fastai",
            "ultralytics",
        ]
        monkeypatch.setattr(sys, "argv", [*command, *arguments])
        with pytest.raises(SystemExit) as caught:
            compare.main()
        return caught.value.code

    with pytest.raises(KeyboardInterrupt):
        go()
    assert len(json.loads(compare.RECORDS.read_text())) == 2
    assert go() == 1  # something failed
    # Two rounds have all; in the third, we and the two fastest peers take turns.
    everybody = ["finetune", "fastai", "fastai", "ultralytics", "ultralytics"]
    rounds = [*((tool, repeat) for repeat in (0, 1) for tool in everybody), *((tool, 2) for tool in everybody[:3])]
    assert [(r.tool, r.repeat) for r in measured[:2] + measured[3:]] == rounds
    num = len(measured)
    assert go() == 0 and len(measured) == num  # what failed is not tried again by itself
    assert go("--again") == 1 and [r.tool for r in measured[num:]] == 4 * ["ultralytics"]
    assert go("--minutes", "-1") == 0 and len(measured) == num + 4
    assert go("--only", "jobs") == 2


def test_the_fastest_whole_job_is_the_best_peer(compare):
    jobs = [
        record("job", "finetune", seconds=1),
        record("job", "timm", "best", seconds=60),
        record("job", "fastai", seconds=70),
        record("job", "transformers", failed="…"),
        record("throughput", "plain", seconds=2),
    ]
    assert compare.best_peer(jobs) == ("timm", "best")
    # Later rounds, which the others don't have, change nothing.
    assert compare.best_peer([*jobs, record("job", "fastai", repeat=1, seconds=50)]) == ("timm", "best")
    assert compare.fastest_peers(jobs) == [("timm", "best"), ("fastai", "default")]
    assert compare.best_peer(jobs[:1]) is None
    jobs[1]["machine"] = "another"
    assert compare.best_peer(jobs) == ("fastai", "default")


@pytest.mark.parametrize("tool", ["finetune", "plain", "timm", "fastai", "ultralytics", "transformers"])
def test_a_seed_is_one_option_more(compare, tmp_path, tool):
    (tmp_path / "train/cat").mkdir(parents=True)
    place = compare.tools.Place(*(tmp_path for _ in range(6)))
    without = compare.tools.fit(tool, "default", "job", 5, place)
    seeded = compare.tools.fit(tool, "default", "job", 5, place, 7)
    added = [word for word in seeded if word not in without]
    assert " ".join(added) in ("--seed 7", "--seed_everything 7", "seed=7")
    assert [word for word in seeded if word not in added] == without


def test_tables_say_what_was_recorded_and_what_was_not(compare, tmp_path):
    documents = importlib.import_module("benchmarks.peers.documents")
    records = [
        record(
            "throughput", "finetune", repeat=i, seconds=1, later_rate=rate, first_rate=100, first_step=5, memory_mb=900
        )
        for i, rate in enumerate((380, 400, 420))
    ]
    records.append(record("throughput", "timm", "best", seconds=1, later_rate=200, first_step=7))
    records.append(record("throughput", "fastai", failed="ValueError: a | b"))
    records += [
        record("fast", "finetune", seconds=30, accuracy=0.84, epochs=[[18, 0.7], [20, 0.82], [30, 0.84]]),
        record("job", "fastai", seconds=200, accuracy=0.83),
        record("job", "timm", seconds=180, accuracy=0.7),
        record("job", "timm", "best", seconds=90, accuracy=0.8),
    ]
    tables = documents.tables(records, ("timm", "best"))
    lines = tables["compare_throughput"].partition("\n\n")[0].splitlines()
    assert tables["compare_throughput"].endswith("(compare.png)")
    ours = "400 (380 to 420) | 100 (100 to 100) | 5.0 (5.0 to 5.0) | 900 (900 to 900) | 1.00 | 3 | 11-21, abc1234"
    assert f"| finetune fit | {ours} |" in lines
    assert "| timm train.py, best | 200 | – | 7.0 | – | 2.00 | 1 | 11-21 |" in lines
    assert "| fastai, default | failed: `ValueError: a / b` | | | | | | |" in lines
    assert (
        "| timm train.py, default | `train.py` has no option that freezes | | | | | |"
        in tables["compare_head"].splitlines()
    )
    # It was as good after 20 of its 30 seconds.
    assert (
        "| fastest peer: timm train.py, best | 90 | 0.800 | 20 (20 to 20) | 4.5 | 1 | 11-21 |" in tables["compare_fast"]
    )
    assert (
        "| fastest peer with its defaults: timm train.py | 180 | 0.700 | 18 (18 to 18) | 10.0 | 1 | 11-21 |"
        in tables["compare_fast"]
    )
    never = [*records[:-4], record("fast", "finetune", seconds=30, accuracy=0.7, epochs=[[30, 0.7]]), records[-1]]
    assert (
        "timm train.py, best | 90 | 0.800 | – | – | 1 | 11-21 |"
        in documents.tables(never, ("timm", "best"))["compare_fast"]
    )
    assert {line.count("|") for line in lines} == {9}
    documents.draw(records, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 5000
    # The control: another record, another table.
    assert (
        documents.tables([{**r, "later_rate": 1} for r in records], None)["compare_throughput"]
        != tables["compare_throughput"]
    )


def test_the_shipped_tables_are_those_of_the_records(monkeypatch):
    compare, documents = (
        importlib.import_module("benchmarks.peers.__main__"),
        importlib.import_module("benchmarks.peers.documents"),
    )
    records = (
        json.loads((BENCHMARKS / "peers/compare.json").read_text())
        if (BENCHMARKS / "peers/compare.json").exists()
        else []
    )
    text = (BENCHMARKS.parent / "docs/benchmarks.md").read_text("utf-8")
    for name, table in documents.tables(records, compare.best_peer(records)).items():
        assert f"<!-- {name} -->\n{table}\n<!-- /{name} -->" in text


def test_the_peers_own_packages_are_pinned(compare):
    for tool in ("timm", "fastai", "ultralytics", "transformers"):
        pins = compare.materials.pins(tool)
        assert tool in pins and not {"torch", "torchvision", "numpy"} & pins.keys()
    assert (
        subprocess.run([sys.executable, "-m", "benchmarks.peers", "--help"], cwd=ROOT, capture_output=True).returncode
        == 0
    )


def test_what_was_measured_on_another_machine_is_marked_and_not_compared(compare):
    documents = importlib.import_module("benchmarks.peers.documents")
    ours, there = record("head", "finetune", seconds=10.0), record("head", "plain", seconds=20.0)
    table = documents.tables([ours, there], None)["compare_head"]
    assert "| plain PyTorch, default | 20 | – | – | 0.50 | 1 | 11-21 |" in table
    elsewhere = {**there, "machine": "another processor"}
    blocks = documents.tables([ours, elsewhere], None)
    assert "| plain PyTorch, default (on another processor) | 20 | – | – | – | 1 | 11-21 |" in blocks["compare_head"]
    assert "Ours: head on a processor, 2 cores, 2026-11-21. torch 2.15." in blocks["compare_about"]


def test_runs_of_one_seed_have_no_spread_of_accuracy(compare):
    documents = importlib.import_module("benchmarks.peers.documents")
    ours = [record("job", "finetune", repeat=i, seconds=10.0 + i, accuracy=0.8) for i in range(3)]
    assert "| finetune fit | 11 (10 to 12) | 0.800 |" in documents.tables(ours, None)["compare_job"]
    ours[0]["accuracy"] = 0.7
    assert "| finetune fit | 11 (10 to 12) | 0.800 (0.700 to 0.800) |" in documents.tables(ours, None)["compare_job"]
