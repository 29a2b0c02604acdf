"""What a fit continues: the run that `--resume` names or finds, its settings and changes of them, and its checkpoint.

A fit may also start from the checkpoint of `--ckpt_path`, in a new run. Each setting says in the table what may change
(`About.resume`).
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from msgspec import structs
from torch import Tensor

from finetune.data.addresses import joined, real_place
from finetune.data.data_place import at_place
from finetune.data.datamodule import ImageDataModule
from finetune.distributed.launch import has_launcher
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import ExportedCheckpoint
from finetune.runs.facts import Identity
from finetune.runs.folder import Run, check_unused
from finetune.runs.local_copies import address_of, check_is_in, shown_place
from finetune.runs.loggers import RunLogger
from finetune.runs.metrics_csv import MetricsCSV
from finetune.runs.run_dir import RunDir, check_name, runs_of
from finetune.runs.run_lock import check_free, hold
from finetune.runs.sync import has_last_there, pull_beginnings, pull_run
from finetune.settings.fields import class_paths, find_setting
from finetune.settings.layers import Layer, Layers, flat, read_config
from finetune.settings.schema import DATA_CLASSES, IMAGE_FOLDER, FitSettings
from finetune.system.messages import NotFound, WrongUsage

log = logging.getLogger(__name__)

Pair = tuple[Any, Any]  # the values of a setting in the run and in the command
Changes = Mapping[str, Pair]  # by full name

LIMITS = frozenset({"trainer.max_epochs", "trainer.max_steps", "patience"})
_PLACES = ("root", "table", "corrections")
_CLASSES = ("data", "model.optimizer", "model.scheduler")
# The modules of classes that a run may name.
_TRUSTED = ("finetune.", "torch.optim.", "albumentations.")
_OF_TEST = {"trainer.limit_test_batches", "trainer.precision"}
# What a fit writes next to the weights, and reads when it continues.
_PROGRESS = ("epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers")


def run_to_continue(asked: FitSettings, layers: Layers, root: Path) -> tuple[Path | None, str]:
    """Return the run that `--resume` continues, None for none, and a note about the choice.

    Args:
        asked: The settings of the command.
        layers: Who has set what.
        root: The folder of runs.

    Raises:
        ValueError: The run that is named is of other data or another network, or has no checkpoint from which training
            can continue; or there is neither a run to continue nor data for a new one.
    """
    wanted = _wanted(asked, layers)
    if isinstance(asked.resume, str):
        run = Path(asked.resume)
        if len(run.parts) < 3 or ".." in run.parts:  # the folder of runs is its second parent
            run = Path(os.path.abspath(run))
        _check_named(run, wanted)
        check_is_in(layers.typed.get("trainer.default_root_dir"), run)
        return run, ""
    if asked.name is not None:
        run = root / "fit" / asked.name
        pull_run(run)
        if has_only_begun(run):
            return None, _new_run(f"that {run} ended before its first checkpoint", layers)
        if RunDir(run).is_run:
            _check_named(run, wanted)
            return run, ""
        check_name(asked.name)
        check_unused(run)
        return None, _new_run(f"no run {shown_place(run)}", layers)
    found, note = find_run(root, wanted)
    if found is None:
        return None, _new_run(note, layers)
    pull_run(found)
    check_has_last(found)
    return found, note


def has_only_begun(run: Path) -> bool:
    """Return whether a local run has ended before its first checkpoint of trained weights.

    Raises:
        ValueError: Its only checkpoint is damaged.
    """
    folder = RunDir(run)
    if not folder.is_run or folder.has_ended or folder.fits or address_of(run) is not None:
        return False
    if folder.has("last"):
        return False
    # A best.ckpt may have the weights before training, or those of a validation inside the first epoch.
    best = folder.checkpoint("best")
    return not folder.has("best") or read_checkpoint(best)["global_step"] == 0


def _wanted(asked: FitSettings, layers: Layers) -> Identity:
    """Return the data and the network that the user names; "" and None for any."""
    place = layers.value("data.table") or layers.value("data.root")
    data_class = asked.data.class_path
    return Identity(
        place=real_place(place) if place else "",
        data_class="" if data_class == IMAGE_FOLDER else data_class,  # the default is any class
        network=asked.model.backbone if layers.is_explicit("model.backbone") else "",
        folds=asked.folds,
        members=asked.members,
    )


def _check_named(run: Path, wanted: Identity) -> None:
    """Check that a run that the user names can continue; its data may have been moved.

    Raises:
        ValueError: It has no checkpoint, another number of folds or members, or is of another network or data class.
    """
    pull_run(run)
    check_has_last(run)
    folder = RunDir(run)
    if not folder.fits and not folder.has("last"):
        last = shown_place(folder.checkpoint("last"))
        raise NotFound(f"--resume {shown_place(run)}: there is no {last} to continue from")
    identity = folder.facts.identity
    for name in ("folds", "members"):
        number = getattr(wanted, name)
        of_run = getattr(identity, name, None)
        if number not in (None, of_run):
            raise WrongUsage(f"{run} has {of_run or 'no'} {name}, not {number}: omit --{name}")
    if identity is not None and (
        difference := identity.difference(structs.replace(wanted, place=""))
    ):
        raise WrongUsage(f"--resume {run}: the run is {difference}")


def _new_run(why: str, layers: Layers) -> str:
    """Return the note about a new run, in place of one that continues.

    Raises:
        NotFound: There is no data for it.
    """
    is_folder = layers.value("data.class_path") == IMAGE_FOLDER
    if is_folder and not layers.value("data.root") and not layers.value("data.table"):
        hint = "and there is no data for a new one: finetune fit FOLDER --resume"
        raise NotFound(f"--resume found {why}, {hint}")
    return f"--resume found {why}: a new run begins"


def _has_number_of(identity: Identity, wanted: Identity, has_ended: bool) -> bool:
    """Return whether a run has the wanted number of folds or members; if none is wanted, until it has ended."""
    if (identity.folds, identity.members) == (wanted.folds, wanted.members):
        return True
    return wanted.kind == "fit" and not has_ended


def find_run(root: Path, wanted: Identity) -> tuple[Path | None, str]:
    """Return the newest run of `fit` in a folder of runs that has the wanted identity, before any that has ended.

    Runs that ended before their first checkpoint are passed over. If only such runs have not ended, there is none.

    Args:
        root: The folder of runs.
        wanted: The data and the network.

    Returns:
        Its folder, and a note about the newest run that was passed over, "" for none; or None, and why there is none.

    Raises:
        ValueError: Another process has begun a run of this identity.
        StorageError: The runs are in object storage, which cannot be reached.
    """
    pull_beginnings(root)
    passed = ""
    begun = ""
    ended: tuple[Path, str] | None = None
    for folder in reversed(runs_of(root)):
        run = folder.path
        identity = None if folder.damage else folder.facts.identity
        has_last = folder.has("last") or (address_of(run) is not None and has_last_there(run))
        if identity is None:
            is_named = f"{run} is without a readable run.json (--resume RUN continues it)"
            passed = passed or (is_named if has_last else "")
            continue
        can_go_on = has_last or bool(folder.fits)
        if not _has_number_of(identity, wanted, folder.has_ended):
            continue
        if difference := identity.difference(wanted):
            passed = passed or f"{run} is {difference} (--resume RUN continues it)"
        elif folder.has_ended and (can_go_on or folder.has("best")):
            ended = ended or (run, passed)  # without last.ckpt it is refused with the reason
        elif can_go_on:
            return run, passed and f"passed over: {passed}"
        else:
            # This never finds a run of our own rank 0: that makes its folder after all ranks have passed this line.
            check_free(run)
            begun = begun or f"{run} ended before its first checkpoint"
            passed = passed or begun
    if begun:
        return None, f"that {begun}"
    if ended is not None:
        return ended[0], ended[1] and f"passed over: {ended[1]}"
    where = shown_place((root / "fit").resolve())
    since = f", since {passed}" if passed else ""
    return None, f"no run of these data and this network in {where} to continue{since}"


def check_has_last(run: Path) -> None:
    """Check that the last.ckpt of a finished run was not deleted.

    A run that was killed may have only a best.ckpt, too: that of a validation in its first epoch.

    Raises:
        WrongUsage: It was.
    """
    folder = RunDir(run)
    is_kept = folder.has("best") and not folder.has("last")
    if is_kept and folder.has_ended and not folder.fits:
        raise WrongUsage(
            f"{shown_place(run)} cannot be resumed: its last.ckpt was deleted (--keep_last false); "
            f"start a new run from its weights: finetune fit FOLDER --weights {run}"
        )


def settings_of_run(run: Path, layers: Layers) -> Layer:
    """Return the settings of a run as a layer, without those of the command that began it.

    Raises:
        ValueError: config.yaml is missing or damaged.
    """
    path = run / "config.yaml"
    try:
        values = dict(read_config("fit", str(path), "run").values)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; begin a new run without --resume") from error
    check_trusted(path, values, layers)
    for name in ("resume", "allow_changes", "minutes", "name"):
        values.pop(name, None)
    if has_launcher():  # torchrun or srun decides; the run may have begun with another number
        values.pop("trainer.devices", None)
        values.pop("trainer.num_nodes", None)
    explicit = [name for name in ("root", "table") if layers.is_explicit(f"data.{name}")]
    data = {name[5:]: values.pop(name) for name in list(values) if name.startswith("data.")}
    folder = RunDir(run).facts.folder
    if os.path.isdir(folder) and not os.path.samefile(folder, os.curdir):
        # the paths of the data are relative to the folder in which the run began
        data |= {name: joined(folder, data[name]) for name in _PLACES if data.get(name)}
    values |= {f"data.{name}": value for name, value in at_place(data, explicit).items()}
    return Layer(str(path), "run", values)


def without_repeated(layers: Layers, asked: Mapping[str, Any]) -> Layers:
    """Return layers without what the user says as when the run began, and the run has decided otherwise.

    So the same command with --resume changes nothing. A number of epochs is the most that --minutes may choose, and a
    length without it. A run cannot replace the images of the user.

    Args:
        layers: Those of the user.
        asked: `Facts.asked` of the run.
    """
    is_length = layers.value("minutes") is None and asked.get("trainer.max_epochs") is not None
    repeated = {
        name: value
        for name, value in asked.items()
        if kind_of(name) not in ("free", "images")
        and not (is_length and name == "trainer.max_epochs")
    }
    return layers.without(repeated)


def check_trusted(source: object, values: Mapping[str, Any], layers: Layers) -> None:
    """Check that a run or a checkpoint names no class of a module of others: importing it runs its code.

    Args:
        source: The file that names the classes.
        values: Its settings, by full name.
        layers: Who has set what: the module of the data class that the user names is trusted.

    Raises:
        ValueError: It does, and the user has not named the module of the data, or the other class.
    """
    by_user = layers.layer_of("data.class_path")
    home = "" if by_user is None else by_user.values["data.class_path"].rpartition(".")[0]
    named = [(f"{name}.class_path", values.get(f"{name}.class_path")) for name in _CLASSES]
    named += [("data.augmentations", one) for one in class_paths(values.get("data.augmentations"))]
    for name, class_path in named:
        is_data = name == "data.class_path"
        text = str(class_path)
        is_ours = class_path in (None, *DATA_CLASSES) if is_data else text.startswith(_TRUSTED)
        is_short = not is_data and "." not in text  # without a module it is one of these
        is_beside = bool(home) and text.startswith(f"{home}.")
        is_named = not is_data and layers.is_explicit(name)
        if not (is_ours or is_short or is_beside or is_named):
            option = name.removesuffix(".class_path")
            raise ValueError(
                f"{source} would import {text}, whose code is not part of finetune: if you trust it, pass --{option} "
                "with it"
            )


@dataclass(frozen=True)
class Start:
    """The checkpoint from which a fit starts, read once.

    Attributes:
        path: Its file.
        content: Its content. Tensors have shapes and types, but no values, except in the record of seen images.
        written: When the file was written, in nanoseconds; 0 if it is at an address.
    """

    path: Path | str
    content: Mapping[str, Any]
    written: int

    def check_unchanged(self) -> None:
        """Check that the file is still the one that was read.

        Raises:
            ValueError: The file has been replaced, so decisions based on its content may be wrong.
        """
        if os.stat(self.path).st_mtime_ns != self.written:
            raise ValueError(
                f"another process has written {self.path} since this one read it: start this command again"
            )


def read_start(path: Path | str) -> Start:
    """Read a checkpoint and drop the values of its tensors: Lightning reads them when training starts.

    Raises:
        ValueError: It is not a checkpoint of finetune.
        WrongUsage: It is an exported file.
    """
    written = os.stat(path).st_mtime_ns if Path(path).is_file() else 0
    checkpoint = read_checkpoint(path)
    if isinstance(checkpoint, ExportedCheckpoint):
        raise WrongUsage(
            f"{path} is an exported file, which cannot be resumed: pass the checkpoint"
        )
    # the record of seen images is small, and continued
    content = {**_without_values(checkpoint), "finetune": checkpoint["finetune"]}
    return Start(path, content, written)


def _without_values(content: Any) -> Any:
    """Return nested containers in which tensors hold no memory."""
    if isinstance(content, Tensor):
        return content.to("meta")
    if isinstance(content, Mapping):
        return {key: _without_values(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_values(value) for value in content]
    return content


def check_resumable(start: Start) -> None:
    """Check that training can continue from a checkpoint.

    Raises:
        ValueError: It lacks what a fit writes next to the weights.
    """
    checkpoint = start.content
    missing = [name for name in _PROGRESS if name not in checkpoint]
    is_solved = checkpoint["hyper_parameters"].get("freeze") == "backbone"  # without an optimizer
    if not missing and not checkpoint["optimizer_states"] and not is_solved:
        missing = ["optimizer_states"]
    if missing:
        hint = f"begin a new run with its weights: --weights {start.path}"
        raise ValueError(
            f"training cannot continue from {start.path}, which has no {', '.join(missing)}: {hint}"
        )


def changes_between(old: Mapping[str, Any], now: FitSettings) -> dict[str, Pair]:
    """Return the settings of a command that differ from those of a run and have an effect, by full name.

    Arguments that only one of two classes has are skipped: the names of the classes differ already.

    Args:
        old: The values in the run's config.yaml, by full name.
        now: The settings of the command.
    """
    new = flat(now)
    common = [name for name in old if name in new and kind_of(name) != "free"]
    return {name: (old[name], new[name]) for name in common if old[name] != new[name]}


def kind_of(name: str) -> str:
    """Return what `--resume` does with a setting of this full name; see `About.resume`."""
    if name.startswith(("model.optimizer.", "model.scheduler.")):
        return "fixed"
    setting = find_setting(FitSettings, name)
    return "changes" if setting is None else setting.about.resume  # an argument of an own class


def check_fixed(changes: Changes) -> None:
    """Check that no setting differs that the checkpoint of the run decides.

    Raises:
        ValueError: One does.
    """
    hint = "may start from its weights: --model.weights LAST.CKPT"
    if fixed := _of_kind(changes, "fixed"):
        raise ValueError(
            f"the run cannot continue with {in_words(fixed)}; a new run {hint} without --resume"
        )


def check_classes(start: Start, data: ImageDataModule) -> None:
    """Check that images have the classes of the run to continue.

    Raises:
        ValueError: They have others.
    """
    names = start.content["hyper_parameters"]["class_names"]
    if names != data.class_names:
        raise ValueError(
            f"{Path(start.path).parents[1]} is of the classes {', '.join(names)}, and {data.root} has "
            f"{', '.join(data.class_names)}: begin a new run without --resume"
        )


def describe_changes(
    changes: Changes, has_other_images: bool, allow: bool | None, is_finished: bool = False
) -> str:
    """Return what has changed since a run began, in words; "" for nothing.

    Args:
        changes: The settings that differ.
        has_other_images: Whether the images that are trained and validated on differ.
        allow: Whether training may see the images in another order; None if it can never be allowed.
        is_finished: Whether the run has nothing left to train, so that settings of data and model have no effect.

    Raises:
        ValueError: Something has changed that must not change.
    """
    order = _of_kind(changes, "order")
    if has_other_images:
        order |= _of_kind(changes, "images")
    if (order or has_other_images) and not allow:
        what = "train or validate on other images, labels or groups: restore them"
        if order:
            what = f"train in another order with {in_words(order)}: keep the old value"
        or_allow = "" if allow is None else ", or continue with --allow_changes true"
        raise ValueError(f"the run would {what}, or begin a new run without --resume{or_allow}")
    changed = _of_kind(changes, "changes")
    trained = {name: pair for name, pair in changed.items() if name.startswith(("data.", "model."))}
    if is_finished and trained:
        raise ValueError(
            f"the run is finished, and was not trained with {in_words(trained)}: leave that as it was, or begin a new "
            "run without --resume"
        )
    if is_finished:
        changed = {name: pair for name, pair in changed.items() if name in _OF_TEST}
    changed |= order
    return f"changed: {in_words(changed)}" if changed else ""


def _of_kind(changes: Changes, kind: str) -> dict[str, Pair]:
    return {name: pair for name, pair in changes.items() if kind_of(name) == kind}


def in_words(changes: Changes) -> str:
    return ", ".join(
        f"{name} {json.dumps(now)} (was {json.dumps(before)})"
        for name, (before, now) in changes.items()
    )


def continue_run(trainer: pl.Trainer, run: Run, start: Start, message: str) -> None:
    """Prepare a run's folder and loggers for its next steps, and log what has changed.

    Args:
        trainer: The trainer, with the callbacks and loggers of the run.
        run: The run. Its folder is chosen already.
        start: Its last checkpoint.
        message: What has changed since the run began, in words; "" for nothing.

    Raises:
        ValueError: Another process continues this run, or has done so in the meantime.
    """
    if trainer.is_global_zero:
        hold(run.checkpoint("last").parents[1])
        start.check_unchanged()
        run.continue_upload()
    facts = start.content["finetune"]
    step = start.content["global_step"]
    run.began_from = facts.get("began_from")
    run.licence = facts.get("licence_of_the_weights")
    if trainer.is_global_zero:
        log.info("resuming %s from step %d%s", run.place, step, message and f"; {message}")
    for logger in trainer.loggers:
        if isinstance(logger, (MetricsCSV, RunLogger)):
            logger.rewind(step)


def restore_progress(trainer: pl.Trainer, start: Start) -> None:
    """Set a trainer's progress to that of a finished run, so that its test is logged at the last step."""
    trainer.fit_loop.load_state_dict(start.content["loops"]["fit_loop"])
    epochs: Any = trainer.fit_loop.epoch_progress.current
    epochs.completed = epochs.processed  # it is one less in a checkpoint at the end of an epoch
