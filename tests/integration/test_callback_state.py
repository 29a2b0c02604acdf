"""Each field of each callback of a fit is in its checkpoint, or there is a reason why `--resume` does not need it."""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
from colours import QUICK, QUICKEST
from tiers import sweep

import finetune
from finetune.distributed.signals import Interrupted, SignalFlag
from finetune.runs.lightning_callbacks import Rates
from finetune.runs.metrics_csv import read_metrics
from finetune.runs.model_checkpoint import Checkpoints

SETTING = "given by the command line, which --resume repeats"
RUN = "the run's folder, which --resume finds again"
SHOWN = "what is on the screen, or when it was drawn"
DERIVED = "made anew in each process"
EVALUATION = "of the test or prediction, which starts again from the beginning"
# Fields of each callback, and where they are saved: SAVED with its key in the state, or why not.
SAVED = "saved as"
FIELDS: dict[str, dict[str, str]] = {
    "Checkpoints": {
        "run": RUN,
        "every_n_steps": SETTING,
        "signal": DERIVED,
        "_deferred": "written at the latest as the process ends; a kill loses them, and the steps since are repeated",
        "highest": f"{SAVED} highest",
        "limits": f"{SAVED} limits, and as is_stopped",
        "_is_due": "false once last.ckpt is written",
        "_is_best": "from the last validation to the end of its epoch, between which nothing is written",
        "_is_stop_held": "between accumulated batches, where nothing is written; then part of limits",
        "_is_of_another": "decided where the checkpoint is loaded",
        "_epoch_began": "the seconds of an epoch in metrics.csv are those since it was entered, as README says",
        "stopped_by": "of this process",
    },
    "Rates": {
        "last": f"{SAVED} last",
        "lrs": "a list of what was logged, which nothing reads",
        "last_momentum_values": DERIVED,
        "last_weight_decay_values": DERIVED,
        "log_momentum": SETTING,
        "log_weight_decay": SETTING,
        "logging_interval": SETTING,
    },
    "WorseThanStart": {"accuracy": f"{SAVED} accuracy", "num_worse": f"{SAVED} num_worse"},
    "EarlyStopping": {
        "best_score": f"{SAVED} best_score",
        "wait_count": f"{SAVED} wait_count",
        "stopped_epoch": f"{SAVED} stopped_epoch",
        "stopping_reason": f"{SAVED} stopping_reason",
        "stopping_reason_message": f"{SAVED} stopping_reason_message",
        "patience": f"{SAVED} patience, in place of which the one of the command line is taken (keep_patience)",
        **dict.fromkeys(
            (
                "check_finite",
                "divergence_threshold",
                "log_rank_zero_only",
                "min_delta",
                "mode",
                "monitor",
            ),
            SETTING,
        ),
        **dict.fromkeys(
            ("stopping_threshold", "strict", "verbose", "_check_on_train_epoch_end"), SETTING
        ),
    },
    "Clock": {
        "run": RUN,
        "seconds": "in seconds.json, read as training starts",
        "_phase": DERIVED,
        "_since": DERIVED,
    },
    "LiveReport": {
        "run": RUN,
        "_cost": "how long the page took to write here",
        "_since": "when it was written",
        "_has_page": "whether this process wrote one",
    },
    "Skipped": {
        "run": RUN,
        "errors": "in skipped.txt at the end of each epoch, and with an exception",
    },
    "Results": {"run": RUN},
    "RunFolder": {"run": RUN, "config": SETTING, "parser": DERIVED},
    "LoggedConfig": {"folder": RUN, "_is_done": "each process writes to its loggers once"},
    "Noise": {"_layers": DERIVED, "_is_checked": "checked once in each process"},
    "StopAtOnce": {},
    "LimitWaits": {},
    "PredictionWriter": {
        "run": RUN,
        **dict.fromkeys(("output", "top_k", "abstain_below"), SETTING),
        **dict.fromkeys(
            ("split", "columns", "counts", "num_rows", "_last", "_part", "_row_format", "_token"),
            EVALUATION,
        ),
        "_has_begun": EVALUATION,
    },
    "ImageProgressBar": {
        **dict.fromkeys(
            ("_cell", "_current_eval_dataloader_idx", "_drawn_at", "_ended_epoch", "_epoch_began"),
            SHOWN,
        ),
        **dict.fromkeys(
            ("_began", "_epoch_seconds", "_num_before", "_num_done", "_table", "_total"), SHOWN
        ),
        **dict.fromkeys(
            ("_has_logged_time_left", "_is_validated", "_loss_read_at", "_loss_text"), SHOWN
        ),
        **dict.fromkeys(("_num_images", "_progress"), SHOWN),
        **dict.fromkeys(
            ("_seconds", "_since", "_speed", "_task", "_trainer", "console", "is_enabled"), SHOWN
        ),
    },
}
# Our callbacks that no fit with `--resume` has.
ELSEWHERE = {"AverageFlip", "RankWeights", "Recorder", "Stopwatch"}
COMPILED = {"Compile"}  # only with --model.compile


def component(name: str, **options: Any) -> dict[str, Any]:
    return {"class_path": f"pytorch_lightning.callbacks.{name}", "init_args": options}


def unclassed(callback: pl.Callback) -> list[str]:
    """Return the fields of a callback that the table lacks, and what of it is not there."""
    table, state = FIELDS[type(callback).__name__], callback.state_dict()
    # methods of the model, put there by Lightning
    fields = vars(callback).keys() - {"log", "log_dict"}
    keys = {reason.split()[2].rstrip(",") for reason in table.values() if reason.startswith(SAVED)}
    unnamed = state.keys() - keys - {"is_stopped"}  # whether there are limits
    return sorted((fields ^ table.keys()) | (keys - state.keys()) | unnamed)


@pytest.mark.slow
def test_every_field_is_saved_or_not_needed(cli, colours):
    trainers: list[pl.Trainer] = []
    on_train_end = Checkpoints.on_train_end

    def kept(self: Checkpoints, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainers.append(trainer)
        on_train_end(self, trainer, pl_module)

    limits = [
        "--trainer.max_epochs",
        2,
        "--patience",
        3,
        "--report",
        "true",
    ]
    with patch.object(Checkpoints, "on_train_end", kept):
        cli(
            "fit",
            "--data.root",
            colours,
            *QUICK,
            *limits,
        )
    found = {type(callback).__name__: callback for callback in trainers[0].callbacks}
    assert found.keys() == FIELDS.keys()
    assert {
        name: fields for name, callback in found.items() if (fields := unclassed(callback))
    } == {}
    found["Rates"].new = 1  # control
    assert unclassed(found["Rates"]) == ["new"]
    del found["Rates"].new, found["Rates"].lrs
    assert unclassed(found["Rates"]) == ["lrs"]
    with patch.object(Rates, "state_dict", dict):
        assert unclassed(found["Rates"]) == ["last", "lrs"]


def callbacks_of_ours() -> Iterator[str]:
    """Yield the names of all classes of the package whose base is a callback of Lightning's."""
    bases = {name for name in vars(pl.callbacks) if isinstance(getattr(pl.callbacks, name), type)}
    for path in Path(finetune.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and bases & {
                ast.unparse(base).split(".")[-1] for base in node.bases
            }:
                yield node.name


def test_every_callback_of_ours_is_in_the_table():
    ours = set(callbacks_of_ours())
    assert (
        ours == {name for name in FIELDS if not hasattr(pl.callbacks, name)} | ELSEWHERE | COMPILED
    )
    assert {"Checkpoints", "Rates", "ImageProgressBar"} < ours  # of three kinds of base


@pytest.mark.slow
# of 4 steps an epoch: none is logged, or an earlier one
@pytest.mark.parametrize("every", sweep([50, 3], quick=[50]))
def test_rates_of_an_epoch_that_was_stopped_in_its_validation(
    cli, colours, tmp_path, monkeypatch, every
):
    def fit(folder: str, *extra: str) -> list[dict[str, str]]:
        options = [
            "--trainer.max_epochs",
            3,
            "--trainer.log_every_n_steps",
            every,
            "--test_after_fit",
            "false",
        ]
        schedule = json.dumps({"class_path": "finetune.WarmupCosine", "init_args": {}})
        options += ["--model.scheduler", schedule, "--trainer.default_root_dir", tmp_path / folder]
        cli("fit", "--data.root", colours, *QUICKEST, *options, *extra)
        return read_metrics(tmp_path / folder / "fit/version_0/metrics.csv")

    def agreed(self: SignalFlag, trainer: pl.Trainer) -> int:
        place = sys._getframe(1).f_code.co_name
        return 15 if place == "on_validation_batch_end" and trainer.current_epoch == 1 else 0

    full = fit("whole")
    with monkeypatch.context() as patched:
        patched.setattr(SignalFlag, "agreed", agreed)
        with pytest.raises(Interrupted):
            fit("stopped")
    resumed = fit("stopped", "--resume")
    assert len(full) == 3 and len({row["lr-AdamW/head"] for row in full}) == 3
    for row in (*full, *resumed):
        del row["seconds"]
    assert resumed == full
