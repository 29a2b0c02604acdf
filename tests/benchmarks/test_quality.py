"""Accuracy against seconds: what is run in which order, nothing twice, and what the records come to."""

import importlib
import json
import math
import shlex
import statistics
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

from benchmarks.peers.tools import PEERS, Place
from benchmarks.quality import chart, commands, documents, sizes, targets
from benchmarks.quality.plan import ON_ONE_SET, SETS, SETTINGS, SMALL, Run, expected_seconds, first_round, plan
from benchmarks.quality.points import Point, mean_sets, on_set, over_sets

HERE = "a processor, 2 cores"


def record(name, tool, setting, seed=0, machine=HERE, **result) -> dict:
    about = {"versions": {"torch": "2.15"}, "machine": machine, "commit": "abc1234", "date": "2026-11-23"}
    return {"set": name, "tool": tool, "setting": setting, "seed": seed, **result, **about}


def measured(name, tool, setting, accuracy, seconds, seed=0, **more) -> dict:
    return record(name, tool, setting, seed, accuracy=accuracy, seconds=seconds, num_test=100, **more)


@pytest.fixture
def quality(tmp_path, monkeypatch):
    """The script, with records of its own."""
    module = importlib.import_module("benchmarks.quality.__main__")
    monkeypatch.setattr(module, "RECORDS", tmp_path / "quality.json")
    monkeypatch.setattr(module, "document", lambda: None)
    monkeypatch.setattr(module, "where_and_when", lambda: {"machine": HERE})
    return module


def test_the_first_seed_of_everything_comes_first_and_cheap_runs_before_dear_ones():
    first = first_round()
    num = sum(len(settings) for settings in SETTINGS.values()) * len(SETS)
    assert len(first) == len(set(first)) == num - len(ON_ONE_SET) * (len(SETS) - 1)
    assert [run.set for run in first if run[1:3] == ("ultralytics", "epochs_100")] == ["satellite"]
    assert {run.seed for run in first} == {0}
    seconds = [expected_seconds(run) for run in first]
    assert seconds == sorted(seconds) and first[-1].set in ("hotdog", "fashion")
    assert list(plan([])) == first  # the other seeds wait until it is known how long a run is


def test_more_seeds_are_for_what_took_less_than_two_minutes():
    quick = measured("trash", "fastai", "epochs_5", 0.7, 119.9)
    records = [
        quick,
        measured("trash", "fastai", "epochs_20", 0.7, 120.0),
        record("trash", "plain", "epochs_5", failed="…"),
    ]
    more = list(plan(records))[len(first_round()) :]
    assert more == [Run("trash", "fastai", "epochs_5", seed) for seed in (1, 2)]
    # Of later seeds' seconds none decides.
    assert list(plan([measured("trash", "fastai", "epochs_5", 0.7, 10, seed=1)])) == first_round()


def test_a_stopped_measurement_goes_on_where_it_was(quality, monkeypatch):
    runs = []

    def measure(bench, run):
        runs.append(run)
        if len(runs) == 2:
            raise KeyboardInterrupt
        if run.tool == "plain":
            return record(*run, failed="ValueError: no")
        return measured(run.set, run.tool, run.setting, 0.8, 60 if run.setting == "epochs_3" else 300, run.seed)

    monkeypatch.setattr(quality.Bench, "measure", measure)

    def go(*arguments):
        names = ["transformers", "plain", "timm", "satellite", "hotdog", "epochs_3", "epochs_5"]
        command = ["benchmarks.quality", "--sets", "x", "--weights", "y", "--only", *names, *arguments]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as caught:
            quality.main()
        return caught.value.code

    with pytest.raises(KeyboardInterrupt):
        go()
    assert len(json.loads(quality.RECORDS.read_text())) == 1
    assert go() == 1  # something failed
    # Neither timm, whose script is not given, nor hotdog, which is not; one seed of what failed.
    trained = [Run("satellite", "transformers", "epochs_3", seed) for seed in range(3)]
    failed = Run("satellite", "plain", "epochs_5", 0)
    assert runs[:1] + runs[2:] == [trained[0], failed, *trained[1:]]
    num = len(runs)
    assert go() == 0 and len(runs) == num  # what failed is not tried again by itself
    assert go("--again") == 1 and runs[num:] == [failed]
    assert go("--minutes", "-1") == 0 and go("nothing") == 2 and len(runs) == num + 1
    # On another machine nothing is done yet.
    monkeypatch.setattr(quality, "where_and_when", lambda: {"machine": "another"})

    def fail(bench, run):
        runs.append(run)
        return record(*run, "another", failed="…")

    monkeypatch.setattr(quality.Bench, "measure", fail)
    assert go() == 1 and runs[num + 1 :] == [trained[0], failed]


def test_each_tool_is_told_seed_and_length_and_keeps_its_own_batch(tmp_path):
    data = tmp_path / "data"
    for name in "ab":
        (data / "train" / name).mkdir(parents=True)
    place = Place(data, tmp_path / "out", tmp_path / "w.pt", tmp_path / "forms", tmp_path / "envs", tmp_path / "timm")
    batches = {"plain": "--batch_size 64", "fastai": "--batch_size 64", "transformers": "--batch_size 8"}
    batches |= {"timm": "--batch-size 128", "ultralytics": "batch=16"}
    for tool in PEERS:
        shown = place.hidden(shlex.join(commands.command(Run("trash", tool, "epochs_20", 2), place)))
        epochs, seed = ("epochs=20", "seed=2") if tool == "ultralytics" else ("--epochs 20", "--seed 2")
        assert all(f" {words} " in f"{shown} " for word in [batches[tool]] for words in (word, epochs, seed)), shown
        assert str(tmp_path) not in shown and "128" in shown
    ours = {
        setting: place.hidden(shlex.join(commands.command(Run("trash", "finetune", setting, 1), place)))
        for setting in SETTINGS["finetune"]
    }
    rest = "--seed 1 --weights WEIGHTS --out OUT"
    assert ours["default"] == f"finetune fit DATA --size 128 {rest}"
    assert ours["epochs_20"] == f"finetune fit DATA --size 128 --epochs 20 {rest}"
    assert ours["minutes_0.5"] == f"finetune fit DATA --size 128 --minutes 0.5 {rest}"
    assert ours["minutes_10"] == f"finetune fit DATA --size 128 --minutes 10 {rest}"


def test_ours_is_the_accuracy_of_the_test_and_a_peers_that_of_its_last_epoch(tmp_path):
    place = Place(tmp_path, tmp_path, *[tmp_path] * 3, None)
    (tmp_path / "fit/version_0").mkdir(parents=True)
    (tmp_path / "fit/version_0/test.json").write_text('{"test/accuracy": 0.75, "val/accuracy": 0.9}')
    assert commands.accuracy("finetune", place, "") == 0.75
    assert commands.accuracy("plain", place, 'noise\n{"accuracy": 0.5}\n') == 0.5


def test_the_calibration_of_a_run_stands_beside_what_chance_would_give(tmp_path):
    (tmp_path / "fit/version_0").mkdir(parents=True)
    (tmp_path / "fit/version_0/test.json").write_text('{"test/calibration_error": 0.07}')
    rows = "".join(f"{p}\n" for p in (0.5, 0.5, 1.0, 1.0))
    (tmp_path / "fit/version_0/test_predictions.csv").write_text(f"probability\n{rows}")
    # Of two that are right half of the time, both or none are in half of the cases: an error of a half on half of all.
    found = commands.calibration(tmp_path)
    assert found == {"calibration_error": 0.07, "calibration_error_if_true": pytest.approx(0.125, abs=0.01)}


def test_true_probabilities_of_few_pictures_have_an_error_of_many_none():
    confidence = np.random.default_rng(1).random(100_000)
    assert commands.expected_error(confidence[:100]) > 0.05 > 0.01 > commands.expected_error(confidence, draws=20)


def test_the_calibration_of_the_default_is_told_with_its_verdict():
    found = {"calibration_error_before_scaling": 0.04, "calibration_error": 0.03, "calibration_error_if_true": 0.02}
    of_ours = {**measured("trash", "finetune", "default", 0.5, 9), **found}
    assert documents.calibration([{**of_ours, "setting": "minutes_1"}]) == ""
    assert documents.calibration([of_ours]).startswith("met. 0.040, after scaling 0.030 (n = 1); ")
    assert documents.calibration([{**of_ours, "calibration_error_before_scaling": 0.06}]).startswith("missed. 0.060")


def test_a_set_is_linked_for_the_peers_and_given_to_us_as_it_is(quality, tmp_path):
    for split in ("train", "test"):
        (tmp_path / "trash" / split / "a").mkdir(parents=True)
        (tmp_path / "trash" / split / "a" / "0.jpg").write_text(split)
    folder = tmp_path / "made"
    folder.mkdir()
    bench = quality.Bench({"trash": tmp_path / "trash"}, None, quality.Given(Path("w"), Path("e"), None, folder))
    assert bench.data(Run("trash", "finetune", "default", 0)) == tmp_path / "trash"
    theirs = bench.data(Run("trash", "plain", "epochs_5", 0))
    assert (theirs / "val/a/0.jpg").read_text() == "test" and (theirs / "train/a/0.jpg").read_text() == "train"
    assert bench.data(Run("trash", "fastai", "epochs_5", 0)) == theirs  # made once


def test_means_are_over_the_sets_that_most_points_are_on():
    records = [
        measured(name, tool, "epochs_5", accuracy, seconds)
        for tool, accuracy, seconds in (("plain", 0.6, 50), ("fastai", 0.7, 60))
        for name in SMALL
    ]
    records += [measured("hotdog", "plain", "epochs_5", 0.9, 300)]
    records += [measured(name, "timm", "epochs_5", 0.1, 9) for name in SMALL[:2]]
    records += [measured("satellite", "ultralytics", "epochs_100", 0.9, 999)]
    assert mean_sets(records) == list(SMALL)  # hotdog has one point of three, the long run doesn't count
    assert over_sets(records) == [Point("plain", "epochs_5", 50, (0.6,)), Point("fastai", "epochs_5", 60, (0.7,))]
    assert len(on_set(records, "satellite")) == 4 and mean_sets([]) == over_sets([]) == []


def test_a_seed_counts_in_a_mean_where_all_sets_have_it():
    records = [measured("trash", "plain", "epochs_5", 0.5 + seed / 10, 10 + seed, seed) for seed in range(3)]
    records += [measured("flowers", "plain", "epochs_5", 0.7 + seed / 10, 30 - seed, seed) for seed in range(2)]
    (point,) = over_sets(records)
    assert point.accuracies == pytest.approx((0.6, 0.7)) and point.seconds == pytest.approx((10 + 29) / 2)
    assert point.accuracy == pytest.approx(0.65)


def ours(minutes: str, seconds: float, *accuracies: float) -> Point:
    return Point("finetune", f"minutes_{minutes}", seconds, accuracies)


def test_in_which_part_of_its_seconds_a_peer_is_reached():
    line = [ours("0.5", 30, 0.7), ours("1", 60, 0.8)]
    peers = [Point("plain", "epochs_5", 100, (0.7,)), Point("fastai", "epochs_5", 100, (0.75,))]
    never = Point("timm", "epochs_5", 100, (0.81,))
    assert dict(targets.reached([*line, *peers, never])) == {peers[0]: 0.3, peers[1]: 0.6, never: math.inf}
    # Any of our settings may be the one.
    assert dict(targets.reached([*line, Point("finetune", "epochs_5", 20, (0.9,)), never])) == {never: 0.2}


def test_errors_at_equal_time_are_those_of_the_longest_budget_that_is_over():
    line = [ours("0.5", 31, 0.8), ours("1", 61, 0.7)]
    early = Point("fastai", "epochs_5", 30, (0.5,))
    good = Point("plain", "epochs_5", 60, (0.6,))
    worse = Point("timm", "epochs_5", 65, (0.55,))  # another is better sooner
    best = Point("plain", "epochs_20", 70, (0.9,))
    rivals = targets.at_equal_time([*line, best, worse, good, early, Point("finetune", "epochs_5", 20, (0.99,))])
    assert [(r.peer, r.ours) for r in rivals] == [(early, None), (good, line[0]), (best, line[1])]
    assert rivals[0].value == math.inf
    assert [r.value for r in rivals[1:]] == pytest.approx([0.2 / 0.4, 0.3 / 0.1])
    perfect = Point("plain", "epochs_20", 70, (1.0,))
    assert targets.error_ratio(line[0], perfect) == math.inf and targets.error_ratio(perfect, perfect) == 1


def test_a_peer_is_ahead_by_standard_errors_of_the_test_pictures():
    records = [
        measured("trash", "finetune", "minutes_0.5", 0.80, 30),
        measured("trash", "plain", "epochs_5", 0.90, 60),
        measured("trash", "timm", "epochs_5", 0.92, 60),
        measured("trash", "fastai", "epochs_5", 0.70, 60),
        measured("trash", "transformers", "epochs_3", 0.99, 20),
    ]
    found = {rival.peer.tool: rival.value for _, rival in targets.ahead(records)}
    # 100 pictures: the difference of 0.8 and 0.9 has a standard error of sqrt(0.16 / 100 + 0.09 / 100) = 0.05.
    assert found["plain"] == pytest.approx(0.1 / 0.05) and found["fastai"] < 0 and found["transformers"] == math.inf
    assert found["timm"] == pytest.approx(0.12 / math.sqrt((0.16 + 0.0736) / 100))
    text = documents.sets_lost(records)
    assert text.startswith("missed. Ahead are trash: timm train.py, 5 epochs by 2.5. 3 of 4 points are compared, ")
    # The control: with a fourth of the pictures the same difference says nothing.
    assert documents.sets_lost([{**r, "num_test": 25} for r in records]).startswith("met. 3 of 4")
    assert (
        documents.sets_lost(records[1:]) == "0 of 4 points are compared, the others are over before any budget of ours."
    )


def test_a_budget_is_held_against_the_minutes_that_it_was_given():
    runs = [("minutes_0.5", 60.0), ("minutes_1", 65.0), ("minutes_2", 107.0), ("epochs_5", 900.0)]
    records = [measured("trash", "finetune", setting, 0.7, seconds) for setting, seconds in runs]
    assert documents.punctuality(records) == "missed. 1 of 2 runs; not 2 min, trash, 107 s."
    assert documents.punctuality(records[:2]) == "met. 1 of 1 runs."
    assert not documents.punctuality(records[:1])


def test_more_minutes_are_to_give_more_than_any_fewer():
    def told(*accuracies):
        settings = ("minutes_0.75", "minutes_1", "minutes_2", "minutes_10")
        return documents.growth(
            [Point("finetune", setting, 1.0, (a,)) for setting, a in zip(settings, accuracies, strict=True)]
        )

    assert told(0.9, 0.7, 0.75, 0.8) == "met."
    less = "finetune fit --minutes 10 0.740, finetune fit --minutes 2 0.750"
    assert told(0.9, 0.7, 0.75, 0.74) == f"missed. {less}."


def everything(shift: float = 0.0) -> list[dict]:
    """Records of all tools on the small sets, ours better by `shift`."""
    records = []
    for run in first_round():
        if run.set in SMALL and run[1:3] not in ON_ONE_SET:
            seconds = expected_seconds(run)
            accuracy = 0.55 + 0.05 * math.log(seconds / 30) + (0.1 + shift) * (run.tool == "finetune")
            for seed in range(3) if seconds < 120 else [0]:
                records.append(measured(*run[:3], round(accuracy + seed / 100, 5), seconds, seed))
    return records


def test_tables_say_what_was_recorded_and_what_was_not(tmp_path):
    blocks = documents.blocks(records := everything())
    lines = blocks["quality_accuracy"].splitlines()
    assert lines[0] == "|  | satellite, 100 | flowers, 100 | clothing, 100 | trash, 100 | mean |"
    assert {line.count("|") for line in lines[:-2]} == {7} and lines[-1].endswith("(quality.png)")
    own = [r["accuracy"] for r in records if (r["set"], r["tool"], r["setting"]) == ("trash", "plain", "epochs_5")]
    row = next(line for line in lines if line.startswith("| plain PyTorch, 5 epochs"))
    assert f"{statistics.fmean(own):.3f} ± 0.010, 77 s" in row and len(own) == 3
    assert any(line.startswith("| fastai, 1 + 19 epochs") and "(n = 1), " in line for line in lines)
    # What is measured on no set has no row.
    assert not any(line.startswith("| Ultralytics classify, 100 epochs |") for line in lines)
    assert "the means are over satellite, flowers, clothing, trash." in blocks["quality_about"]
    targets_text = blocks["quality_targets"]
    assert targets_text.count(": met") + targets_text.count(": missed") == 5
    assert "| best peer so far |" in targets_text
    # The control: worse figures, other verdicts.
    assert documents.blocks(everything(-0.25))["quality_targets"].count(": missed") == 3
    failed = [*records, record("satellite", "ultralytics", "epochs_100", failed="ValueError: no")]
    shown = documents.blocks(failed)["quality_accuracy"]
    assert "| Ultralytics classify, 100 epochs | failed | – | – | – | – |" in shown
    assert "- Ultralytics classify, 100 epochs, satellite, failed: `ValueError: no`" in shown
    assert blocks["quality_elsewhere"] == "Not measured yet."


def test_what_another_machine_measured_stands_apart():
    here = everything()
    settings = (("plain", "epochs_5", 0.8, 40.0), ("finetune", "minutes_0.5", 0.9, 15.0))
    there = [measured(name, *row, machine="another") for name in SMALL for row in settings]
    alone, both = documents.blocks(here), documents.blocks([*there, *here])
    apart = both.pop("quality_elsewhere")
    assert both.items() <= alone.items()
    assert apart.startswith("another, 2026-11-23") and apart.count("\n| plain PyTorch, 5 epochs |") == 2
    assert "met. 1 of 1 points of the peers in half, 0 in a fifth." in apart
    assert "transformers" not in apart
    # The control: on the same machine they are in its means.
    as_here = documents.blocks([*here, *({**r, "machine": HERE, "seed": 3} for r in there)])
    assert as_here["quality_accuracy"] != alone["quality_accuracy"]


def test_without_records_nothing_is_claimed():
    assert set(documents.blocks([]).values()) == {"Not measured yet."} and not documents.has_chart([])
    only_failed = [record("trash", "plain", "epochs_5", failed="…")]
    assert set(documents.blocks(only_failed).values()) == {"Not measured yet."} and not documents.has_chart(only_failed)
    peers = [r for r in everything() if r["tool"] != "finetune"]
    assert documents.blocks(peers)["quality_targets"].count("Not measured yet.") == 6
    without_budgets = [r for r in everything() if not r["setting"].startswith("minutes")]
    assert documents.blocks(without_budgets)["quality_targets"].count("Not measured yet.") == 5


def test_the_chart_s_labels_lie_beside_each_other(tmp_path, monkeypatch):
    boxes = []
    write = chart.write_labels
    monkeypatch.setattr(chart, "write_labels", lambda *arguments: boxes.extend(write(*arguments)))
    points = over_sets(everything())
    chart.draw(points, 4, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 20_000
    labels = boxes[len(points) :]
    assert len(labels) == len(points) and not any(chart.overlap(a, b) for a, b in combinations(labels, 2))
    # The control: all at one place, they do.
    monkeypatch.setattr(chart, "_OFFSETS", [(0, 9)])
    boxes.clear()
    chart.draw([point._replace(seconds=60, accuracies=(0.5,)) for point in points], 4, tmp_path / "chart.png")
    assert any(chart.overlap(a, b) for a, b in combinations(boxes[len(points) :], 2))


def test_the_shipped_tables_are_those_of_the_records():
    module = importlib.import_module("benchmarks.quality.__main__")
    text = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    records = module.load(module.RECORDS)
    for name, block in documents.blocks(records).items():
        assert f"<!-- {name} -->\n{block}\n<!-- /{name} -->" in text
    assert documents.has_chart(records) == (ROOT / "docs/quality.png").exists()


def test_the_chosen_size_is_measured_beside_the_given_one():
    all_runs = list(sizes.runs())
    assert len(all_runs) == len(set(all_runs)) == 4 * 4 * 2
    place = Place(Path("d"), Path("o"), Path("w.pt"), Path("f"), Path("e"), None)
    with_size, without = (
        commands.command(Run("trash", "finetune", "minutes_1", 0), place, has_size) for has_size in (True, False)
    )
    assert [word for word in with_size if word not in without] == ["--size", "128"]
    about = {"machine": HERE, "commit": "abc1234", "date": "2026-11-23"}
    records = [
        {**run._asdict(), "accuracy": 0.5 + number / 100, "size": 160, "epochs": 3, "seconds": 60.0 + number, **about}
        for number, run in enumerate(run for run in all_runs if run.length == "minutes_1" and not run.is_given)
    ]
    lines = sizes.table(records).splitlines()
    assert lines[0] == f"{HERE}, 2026-11-23, finetune at abc1234; seed 0, n = 1 each."
    assert next(line for line in lines if "`--minutes 1`" in line) == (
        "| `--minutes 1` | none given | 0.500, 160 px, 60 s | 0.510, 160 px, 61 s | 0.520, 160 px, 62 s | "
        "0.530, 160 px, 63 s | 0.515, 62 s |"
    )
    missing = sizes.table([*records[:3], {**records[3], "date": "2026-11-24"} | {"accuracy": 0.53, "set": "elsewhere"}])
    assert "2026-11-23 to 2026-11-24" in missing and "| – | – |" in missing
