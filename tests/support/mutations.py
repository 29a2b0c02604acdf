"""Break the lines that keep the promises of the README, one at a time, and check that a test fails.

    python tests/support/mutations.py [WORD ...]    # those whose promise has one of the words

Each runs in a copy of the checkout, first with its own quick tests and those of some promises, then with its slow ones.
Exit code 1 if a wrong line passes all tests, if more than a third pass the quick ones, or if a test fails without a
wrong line. `test_mutations.py` checks that the lines are still there.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from paths import ROOT

_COPIED = (
    "finetune",
    "configs",
    "tests",
    "benchmarks",
    "docs",
    "pyproject.toml",
    "README.md",
    "Makefile",
    "CONTRIBUTING.md",
    "Dockerfile",
)
NONE_SELECTED = 5  # pytest's exit code


@dataclass(frozen=True)
class Mutation:
    promise: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(
        "what is read ahead is of the epoch that is asked for",
        "data/train_loader.py",
        "self._prefetched == (epoch, first) and not self.is_ended()",
        "self._prefetched is not None and not self.is_ended()",
        "tests/component/test_workers.py",
    ),
    Mutation(
        "a checkpoint prepares images at the size of evaluation",
        "data/transforms.py",
        'settings.get("eval_image_size") or settings["image_size"]',
        'settings["image_size"]',
        "tests/promises/test_prepared_images.py",
    ),
    Mutation(
        "each random transform draws its own numbers",
        "data/transforms.py",
        "transform.set_random_state(np.random.default_rng(seed), random.Random(seed))",
        "transform.set_random_seed(seed)",
        "tests/unit/test_transform_seeds.py",
    ),
    Mutation(
        "batch norm takes its statistics over the whole batch",
        "training/classifier.py",
        "share_statistics(self.network, self.always_eval)",
        "pass",
        "tests/nightly/test_three_devices.py -k trained_batch_norm",
    ),
    Mutation(
        "the loss is a mean over the global batch",
        "distributed/global_loss.py",
        "return loss_sum * (self.world_size / self.total_weight)",
        "return loss_sum / self.weight",
        "tests/nightly/test_three_devices.py -k balanced",
    ),
    Mutation(
        "the temperature is that of all devices' images",
        "training/temperature.py",
        'dtype=torch.float64), dist_reduce_fx="sum")',
        "dtype=torch.float64), dist_reduce_fx=lambda parts: parts[0])",
        "tests/nightly/test_three_devices.py -k temperature_and",
    ),
    Mutation(
        "several labels are measured on the images of all devices",
        "training/logit_histogram.py",
        'self.add_state("counts", empty, dist_reduce_fx="sum")',
        'self.add_state("counts", empty, dist_reduce_fx=lambda parts: parts[0])',
        "tests/nightly/test_three_devices.py -k labels",
    ),
    Mutation(
        "each image counts the same in the loss of several labels",
        "training/multilabel_loss.py",
        "return losses.mean(dim=1).sum()",
        "return losses.mean()",
        "tests/unit/test_losses.py",
    ),
    Mutation(
        "each label has the threshold that validation chose",
        "training/multilabel_calibration.py",
        "return probabilities >= probabilities.new_tensor(self.thresholds)",
        "return probabilities >= 0.5",
        "tests/unit/test_thresholds.py",
    ),
    Mutation(
        "a checkpoint's temperature is of its own weights",
        "training/classifier.py",
        "        self.calibration = self.task.uncalibrated()  # this step changes the weights\n",
        "",
        "tests/promises/test_labels.py -k moved",
    ),
    Mutation(
        "dropout does not depend on the device",
        "training/dropout.py",
        'set_keys(self._layers, run_seed(), step, batch["index"])',
        "pass",
        "tests/unit/test_repeatable_dropout.py tests/nightly/test_noise_on_three_devices.py",
    ),
    Mutation(
        "float64 runs go on in float64",
        "training/classifier.py",
        "self.trainer.precision_plugin.convert_module(self)",
        "pass",
        "tests/nightly/test_noise_on_three_devices.py",
    ),
    Mutation(
        "predictions come in the order of the input",
        "runs/predictions.py",
        "for index in sorted([*good, *errors]):",
        "for index in [*good, *errors]:",
        "tests/component/test_predictions.py",
    ),
    Mutation(
        "a checkpoint is whole or absent",
        "system/files.py",
        'temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")',
        "temporary = target",
        "tests/component/test_checkpoint_files.py",
    ),
    Mutation(
        "a fit tests the best checkpoint",
        "commands/fit.py",
        "ckpt_path=best, verbose=False",
        'ckpt_path=run.checkpoint("last"), verbose=False',
        "tests/commands/test_fit.py -k best",
    ),
    Mutation(
        "no file is unpickled: checkpoints",
        "models/safe_load.py",
        "weights_only=True)\n        except",
        "weights_only=False)\n        except",
        "tests/component/test_weight_files.py tests/commands/test_trust.py",
    ),
    Mutation(
        "no file is unpickled: weights",
        "models/safe_load.py",
        "weights_only=True)\n\n\ndef",
        "weights_only=False)\n\n\ndef",
        "tests/component/test_weight_files.py",
    ),
    Mutation(
        "a checkpoint holds only what a fit writes",
        "runs/checkpoint_io.py",
        "        check_checkpoint(checkpoint, path)",
        "        pass",
        "tests/commands/test_trust.py -k out_of_range",
    ),
    Mutation(
        "a checkpoint chooses no module to import",
        "commands/trust.py",
        "    if not any(module == trusted or module.startswith",
        "    if False and not any(module == trusted or module.startswith",
        "tests/commands/test_trust.py",
    ),
    Mutation(
        "no update checks",
        "__init__.py",
        'os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"',
        'os.environ["NO_ALBUMENTATIONS_UPDATE"] = "0"',
        "tests/promises/test_imports.py",
    ),
    Mutation(
        "a checkpoint says how images are prepared",
        "commands/lightning_cli.py",
        "evaluated_with |= {name: data[name] for name in PREPARATION if name in data}",
        "evaluated_with |= {}",
        "tests/promises/test_commands.py -k predict",
    ),
    Mutation(
        "the head trains at ten times the rate",
        "training/param_groups.py",
        'multipliers["head"] = head_lr_multiplier',
        'multipliers["head"] = 1.0',
        "tests/unit/test_optimizers.py",
    ),
    Mutation(
        "an image's split depends on its own name",
        "data/splits.py",
        r'text = f"{head}\0{len(stem)}\0{suffix}"',
        r'text = f"{head}\0{len(bases)}\0{suffix}"',
        "tests/unit/test_splits.py",
    ),
    Mutation(
        "the loss of a cross-validation is that of all its images",
        "commands/fold_results.py",
        "return float(np.average(losses, weights=weights))",
        "return float(np.mean(losses))",
        "tests/commands/test_cross_validation.py -k metrics_are",
    ),
    Mutation(
        "the networks of all folds together give the mean of their calibrated probabilities",
        "inference/calibrated_head.py",
        "double_weight = double_weight * scale[:, None]",
        "double_weight = double_weight * 1",
        "tests/component/test_predictor.py tests/commands/test_cross_validation.py -k 'need_no or mean_of'",
    ),
    Mutation(
        "test measures nothing that was trained on",
        "data/seen.py",
        "is_seen = np.isin(names, record.names[:most])",
        "is_seen = np.zeros(len(names), bool)",
        "tests/component/test_seen_images.py",
    ),
    Mutation(
        "test measures no copy of what was trained on",
        "data/seen.py",
        "return np.isin(digests, among[among != UNKNOWN])",
        "return np.zeros(len(digests), bool)",
        "tests/component/test_seen_images.py",
    ),
    Mutation(
        "probabilities are finite or an error",
        "training/calibration.py",
        "is_finite = probabilities.isfinite().all(dim=1)",
        "is_finite = torch.ones(len(probabilities), dtype=torch.bool)",
        "tests/component/test_predictor.py",
    ),
    Mutation(
        "a run that fails ends: workers obey the main process",
        "data/loader.py",
        "if signum is not None and signum.si_pid == main.pid:",
        "if False:",
        "tests/component/test_workers.py",
    ),
    Mutation(
        "classes are balanced by their frequency",
        "training/initial_weights.py",
        "return counts.sum() / (len(counts) * torch.where(counts > 0, counts, 1))",
        "return torch.ones(len(counts))",
        "tests/unit/test_losses.py",
    ),
    Mutation(
        "a threshold decides",
        "training/calibration.py",
        "if self.aim is None or self.choice is None or self.choice.value is None:",
        "if True:",
        "tests/unit/test_calibrations.py",
    ),
    Mutation(
        "best.ckpt is of the last epoch within a standard error of the highest",
        "runs/best_epoch.py",
        "return max(i for i, accuracy",
        "return min(i for i, accuracy",
        "tests/unit/test_statistics.py",
    ),
    Mutation(
        "another order is refused on --resume",
        "runs/changes.py",
        "if (order or has_other_images) and not allow:",
        "if False:",
        "tests/refusals/test_refusals.py",
    ),
    Mutation(
        "an exported file that says something else is not kept",
        "commands/export_verification.py",
        "if not agreement.is_good:",
        "if False:",
        "tests/promises/test_exports.py",
    ),
    Mutation(
        "exported files have the probabilities of several labels",
        "inference/end_to_end.py",
        "(logits * self.scale + self.bias).sigmoid()",
        "(logits * self.scale).sigmoid()",
        "tests/promises/test_multi_label.py -k every_program",
    ),
    Mutation(
        "several labels are counted as right only if all are",
        "runs/answers.py",
        "(self.labels == self.predicted).all(axis=1)",
        "(self.labels == self.predicted).any(axis=1)",
        "tests/component/test_predictions.py",
    ),
    Mutation(
        "--tta flip sees mirrored images, too",
        "inference/tta.py",
        "images.flip(-1)",
        "images",
        "tests/component/test_predictor.py",
    ),
    Mutation(
        "a limit takes the same images on any number of devices",
        "data/datamodule.py",
        'self.loader("val", is_limited=True)',
        'self.loader("val")',
        "tests/component/test_batches.py",
    ),
    Mutation(
        "decoded images are not kept past a change of their files",
        "data/storage.py",
        "(status.st_mtime_ns, status.st_ctime_ns)",
        "(status.st_mtime_ns, 0)",
        "tests/component/test_storages.py -k replaced",
    ),
    Mutation(
        "a closed terminal saves as SIGTERM does",
        "distributed/signals.py",
        "_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)",
        "_SIGNALS = (signal.SIGINT, signal.SIGTERM)",
        "tests/promises/test_resume.py -k closed_terminal",
    ),
    Mutation(
        "images that cannot be decoded are skipped on request",
        "data/dataset.py",
        'if self.on_bad_image == "error":',
        "if True:",
        "tests/component/test_batches.py -k bad_image",
    ),
    Mutation(
        "splits may be spelt in other ways",
        "data/splits.py",
        '("val", "valid", "validation", "dev")',
        '("val", "valid", "dev")',
        "tests/unit/test_class_folders.py -k paths_say",
    ),
    Mutation(
        "splits may be spelt in capitals",
        "data/datasets/folders.py",
        "if basename(folder).lower() in SPLIT_NAMES",
        "if basename(folder) in SPLIT_NAMES",
        "tests/unit/test_class_folders.py -k paths_say",
    ),
    Mutation(
        "wrong usage ends with 2",
        "system/messages.py",
        "exit_code = 2",
        "exit_code = 1",
        "tests/refusals/test_refusals.py",
    ),
    Mutation(
        "another optimizer trains at its usual rate",
        "commands/dependent_defaults.py",
        "    optimizer.init_args.lr = usual[name]\n",
        "",
        "tests/commands/test_dependent_defaults.py tests/commands/test_lightning_cli.py -k rate",
    ),
    Mutation(
        "our own checkpoint brings its normalisation",
        "models/weights.py",
        "    pretrained.write_normalization(model.mean, model.std)\n",
        "",
        "tests/component/test_pretrained_weights.py -k normalisation",
    ),
    Mutation(
        "a head begins with the rows of the source classifier",
        "training/initial_weights.py",
        'if self.head_init != "source":',
        "if True:",
        "tests/component/test_pretrained_weights.py -k source_head",
    ),
    Mutation(
        "rows of the source classifier are found by their class's name",
        "models/source_head.py",
        "weight[rows].double().mean(0)",
        "weight[[0]].double().mean(0)",
        "tests/component/test_pretrained_weights.py -k source_head",
    ),
    Mutation(
        "label smoothing counts where the head is solved exactly",
        "features/logistic_regression.py",
        "targets += self.label_smoothing / num_classes * self.class_weights",
        "targets += 0.0",
        "tests/unit/test_logistic_regression.py -k scikit",
    ),
    Mutation(
        "the most probable classes come best first",
        "runs/prediction_rows.py",
        "probabilities.argsort(dim=1, descending=True, stable=True)",
        "probabilities.argsort(dim=1, stable=True)",
        "tests/component/test_predictions.py -k top_k",
    ),
    Mutation(
        "where it is not sure it says no class",
        "runs/prediction_rows.py",
        "is_sure = values[predicted] >= self.abstain_below",
        "is_sure = True",
        "tests/component/test_predictions.py -k abstain",
    ),
    Mutation(
        "one process at a time writes into a run",
        "runs/run_lock.py",
        "os.O_CREAT, fcntl.LOCK_EX)",
        "os.O_CREAT, fcntl.LOCK_SH)",
        "tests/component/test_run_lock.py",
    ),
    Mutation(
        "a run that another process writes into is not resumed",
        "runs/resume.py",
        'hold(run.checkpoint("last").parents[1])',
        "pass",
        "tests/component/test_run_lock.py -k resumed",
    ),
    Mutation(
        "last.ckpt of a run in object storage arrives last",
        "runs/run_upload.py",
        "(file.name == _LAST, file.status.st_mtime_ns)",
        "file.status.st_mtime_ns",
        "tests/promises/test_runs_in_object_storage.py -k uploaded_last",
    ),
    Mutation(
        "one process writes a run in object storage",
        "runs/run_upload.py",
        "            self._check_owner()\n",
        "",
        "tests/promises/test_runs_in_object_storage.py -k one_process",
    ),
    Mutation(
        "no telemetry: onnxruntime",
        "inference/onnx_session.py",
        'os.environ["ORT_DISABLE_TELEMETRY"] = "1"',
        'os.environ["ORT_DISABLE_TELEMETRY"] = "0"',
        "tests/component/test_predictor.py -k onnxruntime_writes_nothing",
    ),
    Mutation(
        "no telemetry: MLflow",
        "runs/mlflow_logger.py",
        '"MLFLOW_DISABLE_TELEMETRY", "true"',
        '"MLFLOW_DISABLE_TELEMETRY", "false"',
        "tests/component/test_loggers.py -k telemetry",
    ),
    Mutation(
        "no telemetry: wandb",
        "runs/wandb_logger.py",
        '"WANDB_ERROR_REPORTING", "false"',
        '"WANDB_ERROR_REPORTING", "true"',
        "tests/component/test_loggers.py -k wandb_sends",
    ),
    Mutation(
        "nothing is sent to Weights & Biases unless the user says so",
        "runs/wandb_logger.py",
        'os.environ.get("WANDB_MODE", "offline")',
        'os.environ.get("WANDB_MODE", "online")',
        "tests/component/test_loggers.py -k wandb_sends",
    ),
    Mutation(
        "a warning names classes of few training images",
        "training/overview.py",
        "_FEW = 2",
        "_FEW = 1",
        "tests/component/test_progress_output.py -k doubted",
    ),
    Mutation(
        "a warning names a test of few images",
        "training/overview.py",
        "_FEW_TO_TEST = 30",
        "_FEW_TO_TEST = 29",
        "tests/component/test_progress_output.py -k doubted",
    ),
    Mutation(
        "a checkpoint's network is made of plain settings",
        "training/checkpoint_settings.py",
        "for class_path in class_paths(settings):",
        "for class_path in ():",
        "tests/commands/test_trust.py -k 'untrusted or way'",
    ),
    Mutation(
        "the networks of an ensemble train as each would alone",
        "training/classifier.py",
        'return loss * self.hparams["members"]',
        "return loss",
        "tests/unit/test_ensembles.py -k alone",
    ),
    Mutation(
        "an ensemble answers with the mean of the probabilities",
        "models/ensemble.py",
        "logits.log_softmax(2).logsumexp(0) - math.log(num)",
        "logits.mean(0)",
        "tests/unit/test_ensembles.py tests/promises/test_members.py -k mean",
    ),
    Mutation(
        "a checkpoint that waits is of its own epoch, whatever is trained meanwhile",
        "runs/deferred_checkpoints.py",
        "copied = copy_of(checkpoint)",
        "copied = checkpoint",
        "tests/component/test_deferred_checkpoints.py",
    ),
    Mutation(
        "a signal between epochs writes what waits",
        "runs/model_checkpoint.py",
        """        if signum := self.signal.agreed(trainer):
            self._write_deferred(trainer)
""",
        """        if signum := self.signal.agreed(trainer):
            self._deferred.drop(["best", "last"])
""",
        "tests/component/test_deferred_checkpoints.py",
    ),
    Mutation(
        "no last.ckpt is written before a best.ckpt that has waited",
        "runs/model_checkpoint.py",
        'self._write_deferred(trainer, but=names if "last" in names else ())',
        "self._deferred.drop([*names, 'best'])",
        "tests/component/test_deferred_checkpoints.py",
    ),
    Mutation(
        "pad shows the complete image in the middle",
        "data/resize.py",
        "top = (self.size - height) // 2",
        "top = 0",
        "tests/unit/test_resized_pixels.py",
    ),
]


# Tiers by speed: the pytest selections of each.
TIERS = {
    "make test": (
        '-m "not slow and not network" {tests}',
        '-m "not slow and not network" tests/promises/test_devices.py tests/promises/test_resume.py '
        "tests/promises/test_ends.py tests/promises/test_serving.py tests/promises/test_multi_label.py",
    ),
    "make test-all": ('-m "slow and not network" {tests}',),
}


def caught(mutation: Mutation, folder: Path, tiers: dict[str, tuple[str, ...]] = TIERS) -> str:
    """Return the tier that fails in a copy of the checkout with this line made wrong; "" if none does."""
    for name in _COPIED:
        if (ROOT / name).is_dir():
            # What the benchmarks install next to themselves is large, and no test needs it.
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns(".environments")
            )
        else:
            shutil.copy(ROOT / name, folder / name)
    path = folder / "finetune" / mutation.file
    path.write_text(path.read_text("utf-8").replace(mutation.old, mutation.new), "utf-8")
    for tier, selections in tiers.items():
        if any(
            has_failure(selection.format(tests=mutation.tests), folder) for selection in selections
        ):
            return tier
    return ""


def has_failure(selection: str, folder: Path) -> bool:
    """Return whether one of these tests fails in a folder, or does not end in time."""
    command = f"exec {sys.executable} -m pytest -q -x -p no:cacheprovider --durations=0 {selection}"
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = subprocess.Popen(
        command, shell=True, cwd=folder, env=environment, start_new_session=True, **output
    )
    try:
        text, _ = running.communicate(timeout=900)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        return True
    if running.returncode not in (0, 1, NONE_SELECTED):
        print(text[-500:], file=sys.stderr)
    return running.returncode == 1


def harmless(mutation: Mutation) -> Mutation:
    """Return one that leaves its line as it is."""
    return replace(mutation, new=mutation.old)


def tried(mutation: Mutation) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tier = caught(mutation, Path(folder))
    print(
        f"{f'caught by {tier}' if tier else 'MISSED'}: {mutation.promise} ({mutation.file})",
        flush=True,
    )
    return tier


def main() -> None:
    words = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        if caught(harmless(MUTATIONS[0]), Path(folder)):
            sys.exit("a test fails in a copy of the checkout in which no line is wrong")
    chosen = [m for m in MUTATIONS if not words or any(word in m.promise for word in words)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tiers = list(pool.map(tried, chosen))
    num_caught, num_quick = sum(map(bool, tiers)), tiers.count("make test")
    print(f"{num_caught} of {len(chosen)} caught, {num_quick} of them by make test")
    sys.exit(num_caught < len(chosen) or num_quick < 2 / 3 * len(chosen))


if __name__ == "__main__":
    main()
