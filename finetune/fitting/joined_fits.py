"""The join of several fits: the networks of folds or members as one checkpoint, and their results.

Each fold was tested on other images, so the result of a cross-validation is that of all its predictions. The members of
an ensemble are calibrated and tested together.
"""

import csv
import logging
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from pytorch_lightning import Trainer

from finetune.data.datamodule import ImageDataModule, data_arguments
from finetune.data.loader import end_workers
from finetune.data.seen import AllSeenError, exclude_seen
from finetune.fitting.build import build_trainer, closing, one_device
from finetune.fitting.evaluate import evaluate
from finetune.fitting.plan import Plan
from finetune.inference.joined_checkpoint import calibrated_network, join_checkpoints, network_of
from finetune.runs.best_epoch import num_trials_of_labels
from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from finetune.runs.clock import Clock
from finetune.runs.folder import Run
from finetune.runs.headline import (
    INTERVAL,
    Best,
    headline_of,
    headline_of_groups,
    mean_precision_interval,
    validation_headline,
)
from finetune.runs.intervals import percent
from finetune.runs.predictions_table import Predictions
from finetune.runs.record import RunRecord, read_run
from finetune.runs.result_file import write_result
from finetune.settings.fields import ClassSettings
from finetune.settings.layers import Layer, Layers
from finetune.system.files import replacing
from finetune.training.calibration import Calibration, read_calibration
from finetune.training.classifier import Classifier
from finetune.training.measure import (
    Measured,
    calibration_error,
    measure_classes,
    measure_labels,
)
from finetune.training.outputs import Outputs, collect

log = logging.getLogger(__name__)

# What run.json takes from the first member: all of them have the same images.
_OF_IMAGES = ("root", "splits", "lines", "doubts", "first_look", "licence_of_the_weights")

# Shapes: N images, K classes or labels.


def join_folds(
    folder: Path, plan: Plan, runs: Sequence[RunRecord], data: ImageDataModule
) -> tuple[Calibration, dict[str, Any]]:
    """Write the checkpoint, the predictions and the result of all folds, and print the result.

    The calibration of each fold is moved into the head of its network. The thresholds of the joined checkpoint are
    chosen on the predictions of all folds together, each for images that it was not trained on.

    Args:
        folder: The folder of the cross-validation.
        plan: Its plan.
        runs: The runs of its folds.
        data: All images.

    Returns:
        The calibration of the joined checkpoint, and facts for run.json.
    """
    predictions = [_predictions_of(run) for run in runs]
    parts = [read_checkpoint(run.path / "checkpoints" / "best.ckpt") for run in runs]
    calibrations = [read_calibration(part) for part in parts]
    networks = [
        calibrated_network(part, own) for part, own in zip(parts, calibrations, strict=True)
    ]
    joined = _joined_calibration(calibrations, predictions)
    checkpoint = folder / "checkpoints" / "best.ckpt"
    content = join_checkpoints(parts, networks, joined, data.fingerprint)
    forget = Run(plan.settings.trainer.default_root_dir, "fit", folder).forget_best
    AtomicCheckpointIO().save_checkpoint(content, checkpoint, forget)
    folders = [run.path for run in runs]
    write_predictions(folders, folder / "predictions.csv")
    if all(run.group_predictions for run in runs):
        write_predictions(folders, folder / "group_predictions.csv", "group")
    result = _merged_result(runs, joined)
    if "test" in data.splits and not data.splits["test"].is_drawn:
        result["test_folder"] = _test_together(folder, plan, checkpoint)
    write_result(folder / "test.json", result)
    headline = headline_of(result)
    by_group = headline_of_groups(result)
    _print_result(result, joined.describe(result["class_names"])[1:])
    about = _merged_about(runs)
    if untested := _untested(predictions, data):
        log.warning("%s", untested)
        about["doubts"].append(untested)
    return joined, {**about, "test": headline, "test_by_group": by_group}


def _untested(predictions: Sequence[Predictions], data: ImageDataModule) -> str:
    """Return how many images no fold has tested, and why; "" for none."""
    splits = data.splits.items()
    num = sum(len(samples) for name, samples in splits if name == "train" or samples.is_drawn)
    num_tested = sum(len(part.paths) for part in predictions)
    if num_tested == num:
        return ""
    return (
        f"{num - num_tested:,} of {num:,} images were not tested: their folds skipped them, as copies of images that "
        "they were trained on, or as unreadable"
    )


def _predictions_of(run: RunRecord) -> Predictions:
    """Return the predictions of a fold for the images that it tested.

    Raises:
        ValueError: It has none.
    """
    if not run.result or run.predictions is None:
        raise ValueError(f"{run.path} has no result of its test, so the folds cannot be joined")
    return run.predictions


def _joined_calibration(
    calibrations: Sequence[Calibration], predictions: Sequence[Predictions]
) -> Calibration:
    """Return a calibration that leaves the mean of calibrated probabilities as it is, with thresholds for it."""
    first = calibrations[0]
    num_validated = sum(calibration.num_images for calibration in calibrations)
    values: dict[str, Any] = {"num_images": num_validated, "scores": ()}
    joined = msgspec.structs.replace(first.without_scaling(), **values)
    if first.label_kind == "single" and first.aim is None:
        return joined
    p = np.concatenate([part.probabilities for part in predictions])
    labels = np.concatenate([part.labels for part in predictions])
    if first.label_kind == "single":
        labels = labels.argmax(axis=1)
    return joined.with_thresholds(p, labels, first.aim)


def _merged_result(runs: Sequence[RunRecord], joined: Calibration) -> dict[str, Any]:
    """Return test.json of all folds: metrics over all images, and a row for each fold.

    The decisions and the calibrated probabilities are those of each fold, whose calibration and thresholds are from its
    own validation images. So no image is measured with a threshold that was chosen on it. The average precision of a
    label is that of the calibrated probabilities of all folds together.

    Args:
        runs: The runs of the folds, in order.
        joined: The calibration of the networks of all folds together.
    """
    results = [run.result for run in runs]
    names = results[0]["class_names"]
    parts = [_predictions_of(run) for run in runs]
    values, tables = _measured(parts, names)
    values["loss"] = _loss(results)
    of_groups = [run.group_predictions for run in runs]
    with_groups = [part for part in of_groups if part is not None and part.paths]
    if with_groups:
        own, tables["groups"] = _measured(with_groups, names)
        tables["groups"] |= _as_metrics(own)
        for name in ("num_mixed", "num_unread"):
            tables["groups"][name] = sum(result["groups"][name] for result in results)
    return {
        **_as_metrics(values),
        "checkpoint": "checkpoints/best.ckpt",
        "folder": results[0].get("folder"),
        "image_folder": results[0].get("image_folder"),
        "class_names": names,
        **tables,
        "calibration": None,
        "joined_calibration": joined.as_plain(),
        "folds": [_row_of_fold(number, run) for number, run in enumerate(runs, 1)],
    }


def _measured(parts: Sequence[Predictions], names: Sequence[str]) -> Measured:
    """Return the metrics of all images, or of all groups, and the tables behind them."""
    columns = ((part.probabilities, part.labels, part.decided) for part in parts)
    p, labels, decided = map(np.concatenate, zip(*columns, strict=True))
    if not parts[0].is_single:
        return measure_labels(p, p, labels, decided, names, has_interval=True)
    values, tables = measure_classes(labels.argmax(axis=1), decided.argmax(axis=1), names)
    # of the most probable classes, which a threshold may overrule
    is_right = labels[np.arange(len(p)), p.argmax(axis=1)]
    values["calibration_error"] = calibration_error(p.max(axis=1), is_right)
    return values, tables


def _as_metrics(values: dict[str, float]) -> dict[str, float | None]:
    return {f"test/{name}": None if np.isnan(v) else float(v) for name, v in values.items()}


def _sum_of(runs: Sequence[RunRecord], name: str) -> np.ndarray:
    """Return the sum of a table of test.json over all folds."""
    return np.sum([run.result[name] for run in runs], axis=0)


def _loss(results: Sequence[dict[str, Any]]) -> float:
    """Return the weighted mean loss over all images; NaN if the loss of a fold is unknown."""
    losses = [result["test/loss"] for result in results]
    weights = [result["loss_weight"] for result in results]
    if None in losses:
        return float("nan")
    return float(np.average(losses, weights=weights))


def _row_of_fold(number: int, run: RunRecord) -> dict[str, Any]:
    """Return the row of a fold in test.json."""
    predictions = _predictions_of(run)
    row = {
        "fold": number,
        "run": f"fit/{run.path.name}",
        "num_images": len(predictions.paths),
        "num_right": int(predictions.is_right.sum()),
        "loss": run.result["test/loss"],
        "best_epoch": run.facts.best and run.facts.best.epoch,
    }
    if predictions.is_single:
        return row
    value = run.result["test/mAP"]
    bounds = None if value is None else list(mean_precision_interval(run.result))
    return {**row, "mAP": value, INTERVAL: bounds}


def write_predictions(runs: Sequence[Path], target: Path, key: str = "path") -> None:
    """Write the predictions of all folds into one file, with a column `fold`.

    Args:
        runs: The folders of the folds, in order.
        target: The file to write.
        key: The column that a row is of: `path`, or `group`.

    Raises:
        ValueError: An image or a group was tested in more than one fold.
    """
    source = "test_predictions.csv" if key == "path" else "test_group_predictions.csv"
    tested: set[str] = set()
    own_bytes = "surrogateescape"  # of file names that are not UTF-8
    with (
        replacing(target) as temporary,
        open(temporary, "w", newline="", encoding="utf-8", errors=own_bytes) as file,
    ):
        for number, run in enumerate(runs, 1):
            with open(run / source, newline="", encoding="utf-8", errors=own_bytes) as part:
                rows = csv.DictReader(part)
                if number == 1:
                    # a fold whose network knows no familiarity has a column less
                    columns = [*(rows.fieldnames or ()), "fold"]
                    table = csv.DictWriter(
                        file, columns, extrasaction="ignore", lineterminator="\n"
                    )
                    table.writeheader()
                for row in rows:
                    if row[key] in tested:
                        raise ValueError(
                            f"{row[key]} was tested in more than one fold: begin a new run"
                        )
                    tested.add(row[key])
                    table.writerow({**row, "fold": number})


def _merged_about(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return facts about the images of all folds for run.json."""
    facts = runs[0].facts
    result = runs[0].result
    if "label_counts" in result:
        totals = _sum_of(runs, "label_counts")[:, 1].sum(axis=1).tolist()
    else:
        totals = _sum_of(runs, "confusion_matrix").sum(axis=1).tolist()
    num_images = sum(len(_predictions_of(run).paths) for run in runs)
    counts = dict(zip(result["class_names"], totals, strict=True))
    num = len(runs)
    origins = {
        "train": f"each image in {num - 1} of {num} folds, less validation",
        "test": f"each image in one of {num} folds",
    }
    lines = [line for line in facts.lines if not line.startswith("images:")]
    images = f"images: {facts.root}: {num_images:,}, each tested in one of {num} folds"
    return {
        **{name: getattr(facts, name) for name in _OF_IMAGES},
        "splits": {
            split: {"origin": origin, "counts": counts, "num_images": num_images}
            for split, origin in origins.items()
        },
        "lines": [images, *lines],
        "doubts": _merged_doubts([run.facts.doubts for run in runs]),
    }


def _merged_doubts(of_folds: Sequence[Sequence[str]]) -> list[str]:
    """Return each warning of the folds once, with the number of folds."""
    counts = Counter(chain.from_iterable(of_folds))
    return [f"in {num} of {len(of_folds)} folds: {doubt}" for doubt, num in counts.items()]


def _test_together(folder: Path, plan: Plan, checkpoint: Path) -> dict[str, Any]:
    """Return the result on the test folder of the networks of all folds together, on one device.

    Args:
        folder: The folder of the cross-validation.
        plan: Its plan, which names the data: a checkpoint may not choose an address, a pattern or a class of the user.
        checkpoint: That of all folds.
    """
    data = plan.settings.data
    trainer = one_device(plan.settings.trainer, read_checkpoint(checkpoint))
    arguments = data_arguments(data)
    names = ("root", "table", "group_by", "batch_size", "num_workers")
    values = {f"data.{name}": arguments[name] for name in names if arguments.get(name) is not None}
    if isinstance(data, ClassSettings):
        values["data.class_path"] = data.class_path
    values |= {
        "ckpt_path": str(checkpoint),
        "trainer.default_root_dir": str(folder),
        "trainer.accelerator": trainer.accelerator,
        "trainer.precision": trainer.precision,
        "trainer.devices": trainer.devices,
    }
    log.info("testing the networks of all folds together on the test folder")
    run = evaluate(Layers("test", (Layer("finetune fit --folds", "python", values),)))
    assert run.path is not None, "a test has a folder"
    result = read_run(run.path).result
    kept = ("confusion_matrix", "label_counts", "test/mAP", INTERVAL, "test/exact_match")
    return {
        "run": f"test/{run.path.name}",
        **{name: result[name] for name in kept if name in result},
    }


def _print_result(result: dict[str, Any], thresholds: Sequence[str]) -> None:
    """Print the result over all images, and of each fold.

    Args:
        result: The content of test.json.
        thresholds: The thresholds of the networks of all folds together in words; empty if there are none.
    """
    rows = result["folds"]
    if by_group := headline_of_groups(result):
        print(f"by group: {by_group}")
    print(f"{headline_of(result)} Each of these images is in one of {len(rows)} folds.")
    if "mAP" in rows[0]:
        values = ["none" if row["mAP"] is None else f"{row['mAP']:.3f}" for row in rows]
        print(f"test mAP of the folds: {', '.join(values)}")
    else:
        shares = [percent(row["num_right"] / max(1, row["num_images"])) for row in rows]
        print(f"test accuracy of the folds: {', '.join(shares)}")
    if thresholds:
        print("each fold decided by thresholds that it chose on its own validation images")
        print("thresholds of all folds together, chosen on these predictions for new images:")
    for line in thresholds:
        print(f"  {line}")
    if together := headline_of(result.get("test_folder", {})):
        print(f"all folds together on the test folder: {together}")


def join_members(
    folder: Path, plan: Plan, runs: Sequence[RunRecord], data: ImageDataModule
) -> tuple[Calibration, dict[str, Any]]:
    """Write the checkpoint of an ensemble, and test it, on one device.

    Args:
        folder: The folder of the ensemble.
        plan: Its plan.
        runs: The runs of its members.
        data: Their images.

    Returns:
        The calibration of the mean of the members, fitted on their validation images, and facts for run.json.

    Raises:
        ValueError: The images have changed since the members were trained.
    """
    checkpoints = [read_checkpoint(run.path / "checkpoints" / "best.ckpt") for run in runs]
    if any(one["finetune"]["data_fingerprint"] != data.fingerprint for one in checkpoints):
        raise ValueError(
            f"the images of {data.root} have changed since the members were trained: restore them, or begin a new fit"
        )
    unfitted = Calibration.unfitted(data.label_kind, len(data.class_names))
    networks = [network_of(one) for one in checkpoints]
    joined = join_checkpoints(checkpoints, networks, unfitted, data.fingerprint)
    model = Classifier(**joined["hyper_parameters"])
    model.load_state_dict(joined["state_dict"])
    if plan.settings.threshold is not None:
        model.aim = model.task.parse_aim(plan.settings.threshold)
    model.coverage = plan.settings.coverage
    run = Run(plan.settings.trainer.default_root_dir, "fit", folder)
    trainer = build_trainer(
        one_device(plan.settings.trainer, checkpoints[0]),
        run,
        plan.config,
        [Clock(run)],
    )
    calibration = unfitted
    facts = {name: getattr(runs[0].facts, name) for name in _OF_IMAGES}
    with closing(trainer, run):
        if "val" in data.splits and trainer.limit_val_batches != 0:
            outputs = _validation_outputs(trainer, model, data)
            calibration = Calibration.fit(outputs.logits, outputs.labels, model.aim)
            epoch = 1 + max(one["epoch"] for one in checkpoints)
            facts["best"] = _best_of(model, outputs, len(runs), epoch)
        joined["finetune"]["calibration"] = calibration.as_plain()
        AtomicCheckpointIO().save_checkpoint(joined, run.checkpoint("best"), run.forget_best)
        has_test = "test" in data.splits and trainer.limit_test_batches != 0
        if has_test and plan.settings.test_after_fit:
            _test(trainer, model, data, joined, run)
    return calibration, facts


def _test(
    trainer: Trainer, model: Classifier, data: ImageDataModule, joined: dict[str, Any], run: Run
) -> None:
    """Test the joined checkpoint, unless its members have seen all test images, which is logged."""
    try:
        exclude_seen(data, "test", joined, is_logged=True)
    except AllSeenError as error:
        log.warning("not tested: %s", error)
        return
    trainer.test(model, datamodule=data, ckpt_path=run.checkpoint("best"), verbose=False)


def _best_of(model: Classifier, outputs: Outputs, num_members: int, epoch: int) -> Best:
    """Return the record of the joined checkpoint, and print its result on the validation images.

    Args:
        model: The ensemble.
        outputs: Its outputs for the validation images.
        num_members: The number of its members.
        epoch: The latest epoch of a member, counted from one.
    """
    num = len(outputs.labels)
    is_single = outputs.labels.ndim == 1
    trials = num if is_single else num_trials_of_labels(outputs.labels.sum(0).numpy())
    score = model.task.score(outputs.logits, outputs.labels)
    weights = f"{num_members} members"
    metric = model.task.monitor.partition("/")[2]
    result = validation_headline(metric, score, num, trials, weights)
    print(f"all members together: {result.line}", flush=True)
    why = f"the mean of the {weights}"
    return Best(epoch=epoch, weights=weights, why=why, result=result)


def _validation_outputs(trainer: Trainer, model: Classifier, data: ImageDataModule) -> Outputs:
    """Return the logits of the members together for the validation images."""
    model.to(trainer.strategy.root_device).eval()
    trainer.precision_plugin.convert_module(model)
    data.trainer = trainer
    data.setup("validate")
    try:
        return collect(trainer, model, data.loader("val", is_limited=True)).own()
    finally:
        end_workers()
