"""Check before training that the fit will be able to validate, choose a threshold, and start from its checkpoint."""

import json

import torch
from pytorch_lightning import Trainer

from finetune.data.batch_limits import batches_within
from finetune.data.datamodule import ImageDataModule
from finetune.data.samplers import evaluated_targets
from finetune.runs.resume import Start
from finetune.system.messages import as_wrong_usage
from finetune.training.classifier import Classifier
from finetune.training.run_limits import fit_limits


def check_validated(trainer: Trainer, data: ImageDataModule, what: str) -> None:
    """Make sure that the fit will validate.

    Args:
        trainer: The Trainer of the fit.
        data: Its images.
        what: The beginning of the error message: what validation is needed for.

    Raises:
        ValueError: There is no validation, or the fit ends before the first one.
    """
    if "val" in data.splits and trainer.limit_val_batches == 0:
        raise ValueError(f"{what}, and trainer.limit_val_batches is 0: omit it")
    if "val" not in data.splits:
        raise ValueError(
            f"{what}, and there is no validation split: --data.val_fraction 0.1 splits one off train"
        )
    num = fit_limits(trainer).num_reads(data.num_batches, 1)  # of batches
    first = _first_validation(trainer, data.num_batches)
    if num < first:
        raise ValueError(
            f"{what}, and the fit ends after {num} batches, before the first validation after {first}: set more "
            "epochs or steps, or a smaller trainer.val_check_interval"
        )


def _first_validation(trainer: Trainer, num_batches: int) -> int:
    """Return after how many batches a fit first validates."""
    interval = trainer.val_check_interval
    batches = batches_within(trainer.limit_train_batches, num_batches)
    inside = interval if isinstance(interval, int) else max(1, int(batches * interval))
    return inside + ((trainer.check_val_every_n_epoch or 1) - 1) * batches


def check_has_positives(trainer: Trainer, data: ImageDataModule) -> None:
    """Make sure that the validation images have both classes, which choosing a threshold needs.

    If images have several labels, one with a label and one without are enough: see `training.calibration`.
    """
    check_validated(trainer, data, "--threshold is chosen on validation images")
    targets = data.splits["val"].targets
    measured = evaluated_targets(targets, trainer.limit_val_batches, data.batch_size)
    num = len(measured)
    counts = measured.counts()
    if data.label_kind == "single" and not counts.all():
        name = data.class_names[int(counts.argmin())]
        left = f" in the {num} that trainer.limit_val_batches leaves" if num < len(targets) else ""
        raise ValueError(
            f"--threshold needs validation images of both classes, there is none of {name}{left}"
        )


def check_begun_from(start: Start, model: Classifier) -> None:
    """Make sure that a new run has the class weights and the optimizer of the checkpoint that it starts from."""
    path = start.path
    checkpoint = start.content
    is_one = model.hparams["members"] == 1  # an ensemble cannot start from weights alone
    hint = "use the same" + (
        f", or begin with its weights alone: --weights {path}" if is_one else ""
    )
    class_weights = checkpoint["hyper_parameters"].get("class_weights")
    if class_weights != model.class_weights:
        difference = f"model.class_weights {json.dumps(class_weights)}, not {json.dumps(model.class_weights)}"
        raise ValueError(f"{path} was trained, and continues, with {difference}: {hint}")
    with as_wrong_usage("model.optimizer"):
        optimizer = model.optimizer([{"params": [torch.zeros(1, 1, requires_grad=True)]}])
    # Optimizers differ in their numeric settings. Boolean settings differ between versions of torch.
    settings = {
        name for name, value in optimizer.defaults.items() if type(value) in (int, float, tuple)
    }
    groups = [
        group for state in checkpoint.get("optimizer_states", ()) for group in state["param_groups"]
    ]
    if groups and (lacking := sorted(settings - groups[0].keys())):
        difference = f"another optimizer than {type(optimizer).__name__}, one without {lacking[0]}"
        raise ValueError(f"{path} was trained, and continues, with {difference}: {hint}")
