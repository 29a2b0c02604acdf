"""What techniques give: the callback says what the fit would, and the tables hold like against like."""

import json

import numpy as np
import pytest
import torch
from small_fits import data

from benchmarks.techniques import documents, watch
from benchmarks.techniques.__main__ import TECHNIQUES, Run, command, plan
from benchmarks.techniques.watch import Watch
from finetune import Classifier
from finetune.commands.lightning_cli import FinetuneCLI


def record(technique, on, seed, *epochs, **others) -> dict:
    """A run on 40 pictures or more: digits of four are repeated."""
    right = {f"epoch {i + 1}": digits for i, digits in enumerate(epochs)} | others
    right = {name: digits * 10 if len(digits) == 4 else digits for name, digits in right.items()}
    about = {"machine": "a processor, 2 cores", "date": "2026-11-23"}
    return {"technique": technique, "set": on, "seed": seed, "right": right, **about}


def test_each_technique_comes_once_on_each_set_before_the_next_seed():
    runs = list(plan())
    assert len(runs) == len(set(runs)) == 3 * 4 * len(TECHNIQUES)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@pytest.mark.parametrize("name", TECHNIQUES)
def test_each_command_is_understood_and_changes_what_it_says(name, colours, tmp_path):
    from finetune.commands.command_line import in_full_spelling

    class ParseOnly(FinetuneCLI):
        def before_instantiate_classes(self) -> None: ...
        def instantiate_classes(self) -> None: ...
        def _run_subcommand(self, subcommand: str) -> None: ...

    def parsed(technique):
        words = command(Run(technique, colours.name, 1), colours.parent, tmp_path / "w.pt", tmp_path / "out")
        return ParseOnly(in_full_spelling(words[3:])).config["fit"]

    settings, base = parsed(name), parsed("default")
    assert settings.seed_everything == settings.data.init_args.split_seed == 1
    assert settings.data.init_args.val_fraction == 0.3
    differs = any(settings[part] != base[part] for part in ("model", "data", "trainer"))
    assert differs == (name != "default")


def test_the_callback_says_what_validation_says_and_leaves_the_fit_alone(colours, tmp_path, monkeypatch):
    from small_fits import fit

    monkeypatch.setenv(watch.FILE, str(tmp_path / "right.json"))
    monkeypatch.setattr(watch, "LARGER", (1, 1.25))
    states = []
    for callbacks in ([Watch()], []):
        torch.manual_seed(0)
        pictures = data(colours)
        model = Classifier(pictures.class_names, "mobilenet_v3_small", weights=None)
        trainer = fit(model, pictures, max_epochs=2, callbacks=callbacks)
        states.append({name: value.clone() for name, value in model.network.state_dict().items()})
        accuracy = float(trainer.callback_metrics["val/accuracy"])
    assert all(bool((states[0][name] == value).all()) for name, value in states[1].items())
    found = json.loads((tmp_path / "right.json").read_text())
    right = found["right"]
    assert 1 / 3 < found["confidence"] < 1
    assert documents.right(right["epoch 2"]).mean() == pytest.approx(accuracy)
    assert {"epoch 1", "ema 0.9", "mean of 2", "flip", "five crops", "whole", "× 1.25"} <= right.keys()
    assert right["× 1"] == right["epoch 2"]
    assert {len(digits) for digits in right.values()} == {len(pictures.splits["val"].labels)}


def test_a_brief_look_is_that_of_the_last_epoch(colours, tmp_path, monkeypatch):
    from small_fits import fit

    found = {}
    for is_brief in (True, False):
        monkeypatch.setenv(watch.FILE, str(tmp_path / f"{is_brief}.json"))
        torch.manual_seed(0)
        pictures = data(colours)
        model = Classifier(pictures.class_names, "mobilenet_v3_small", weights=None)
        fit(model, pictures, max_epochs=2, callbacks=[Watch(is_brief)])
        found[is_brief] = json.loads((tmp_path / f"{is_brief}.json").read_text())
    assert found[True]["right"] == {"epoch 2": found[False]["right"]["epoch 2"]}
    assert found[True]["confidence"] == found[False]["confidence"]


def test_differences_are_those_of_runs_with_the_same_split():
    records = [
        record("default", "flowers", 0, "0000", "1100", flip="1110"),
        record("default", "flowers", 1, "0000", "1111", flip="1111"),
        record("cutmix 1", "flowers", 0, "1111", "1000") | {"confidence": 0.35, "seconds": 99.0},
        record("cutmix 1", "flowers", 1, "1111", "1110") | {"seconds": 60.3, "alone": True},
        record("cutmix 1", "trash", 1, "1111", "1111"),  # which has nothing to be held against
        {"technique": "mixup 0.2", "set": "flowers", "seed": 0, "failed": "no"},
    ]
    lines = documents.blocks(records, TECHNIQUES)["techniques"].splitlines()
    assert lines[:2] == ["a processor, 2 cores: 5 runs; 2026-11-23.", ""]
    rows = {line.split("|")[1].strip(): line for line in lines[2:]}
    assert "| 0.750 |" in rows["default, the last epoch"]
    assert "-0.250 ± 0.000 (n = 2)" in rows["cutmix 1"] and "1.000" in rows["cutmix 1"]
    assert "+0.125 ± 0.125 (n = 2)" in rows["mirrored pictures, too"]
    assert rows["mixup 0.2"].count("–") == 7
    assert "| +0.100 (n = 1) | 60 (n = 1) |" in rows["cutmix 1"]
    assert rows["default, the last epoch"].endswith("| – | – | – |")


def test_what_is_kept_is_judged_by_other_pictures_than_chose_it():
    rng = np.random.default_rng(0)
    true = np.linspace(0.5, 0.8, 12)
    digits = ["".join(map(str, row)) for row in rng.binomial(1, true[:, None], (12, 400))]
    found = documents.choices(record("default", "flowers", 0, *digits), num_draws=200)
    assert found["the highest"] < found["kept"] - 0.005 < found["the last"]
    assert found["patience"] < found["kept"] and 0.5 < found["epochs"] < 1
    assert found["the last"] == pytest.approx(documents.right(digits[-1]).mean(), abs=0.003)
    # Control: judged by the pictures that chose it, the highest would be the best of all.
    row = documents.right(digits[-1])
    assert max(documents.right(d)[:30].mean() for d in digits) >= row[:30].mean()


@pytest.mark.parametrize(
    ("accuracies", "num"),
    [([5, 6, 6, 6], 4), ([5, 6, 4, 7, 8, 9], 6), ([9, 1, 9, 9], 3), ([5], 1), ([5, 4, 6, 6, 5], 5)],
)
def test_patience_ends_a_run_after_so_many_that_are_no_higher(accuracies, num):
    assert documents.ended(np.array(accuracies) / 10, patience=2) == num


def test_without_records_the_tables_have_no_figures():
    found = documents.blocks([], TECHNIQUES)
    assert found["kept_epoch"].count("\n") == 1
    assert all(line.count("–") == 7 for line in found["techniques"].splitlines()[2:])
