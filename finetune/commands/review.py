"""`finetune review`: a page on which people correct the labels of a data set."""

import getpass
import os
import secrets
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from finetune.data.addresses import is_address
from finetune.data.corrections import EXCLUDED, CorrectionsFile
from finetune.data.listing import ScanOptions
from finetune.data.splits import data_set_name
from finetune.data.tables.table_columns import parse_columns
from finetune.settings.all_commands import ReviewSettings
from finetune.settings.schema import LabelsOfTable
from finetune.system.file_names import composed
from finetune.system.files import check_target
from finetune.system.messages import (
    NotFound,
    WrongUsage,
    as_wrong_usage,
    be_quiet,
    counted,
    fault_of_names,
    shown,
)

if TYPE_CHECKING:
    from finetune.data.data_set import DataSet

_KINDS: tuple[LabelsOfTable, ...] = get_args(LabelsOfTable)
_MARKS = ";|[{"  # of several labels in a table
_SECONDS_TO_STOP = 5.0
_AS_FOUND = ScanOptions()


def review(options: ReviewSettings) -> None:
    """Correct labels on a page on this machine, the most doubtful ones first, or label images that have none.

    Decisions are appended to corrections.csv or labels.csv; no image is changed, moved or deleted. `finetune fit FOLDER
    --data.corrections corrections.csv` or `finetune fit labels.csv` trains with them.
    """
    be_quiet()
    class_names = parse_class_names(options.labels)
    if class_names and (options.root or options.columns or options.label_separator):
        raise WrongUsage(
            "--root, --columns and --label_separator are for tables, --labels CLASS,CLASS for a folder"
        )
    if not is_address(options.folder) and not os.path.exists(options.folder):
        raise NotFound(
            f"{options.folder!r} does not exist: pass a folder of images, or a table of them"
        )
    place = Path(options.folder) if os.path.isdir(options.folder) else Path(options.folder).parent
    if is_address(options.folder):
        place = Path()
    output = Path(options.output or place / ("labels.csv" if class_names else "corrections.csv"))
    check_target(output, "--out")
    output.parent.mkdir(parents=True, exist_ok=True)
    file = CorrectionsFile(output)
    from finetune.serving.http_server import address_of, listen, serve_until_stopped

    with listen("127.0.0.1", options.port) as listener:
        from finetune.commands.check import label_network
        from finetune.models.library import DEFAULT
        from finetune.review.ranking_job import RankingJob
        from finetune.review.review_app import make_review_app
        from finetune.review.review_session import ReviewSession
        from finetune.runs.run_checkpoint import checkpoint_of

        if class_names:
            images = list_unlabelled(options.folder, class_names)
        else:
            how = ScanOptions(
                root=options.root,
                columns=parse_columns(options.columns),
                separator=options.label_separator,
                labels=next(kind for kind in _KINDS if kind == options.labels),
            )
            images = list_images(options.folder, how)
        mistakes = {}
        ckpt_path = None
        weights = options.weights
        if options.run is not None:
            place_of_run = _folder_of_run(options.run)
            if images.is_labelled:
                mistakes = _mistakes(images, place_of_run)
            if weights == DEFAULT:
                ckpt_path = checkpoint_of(place_of_run)[0]
                weights = None
        with as_wrong_usage("--weights"):
            network = label_network(weights, options.backbone, options.image_size, ckpt_path)
        session = ReviewSession(images, file, _user(), mistakes)
        job = RankingJob(
            data=images,
            labels_now=session.labels_now,
            network=network,
            on_ready=session.put_ranking,
            outdated=session.outdated,
        )
        token = secrets.token_urlsafe(24)
        app = make_review_app(session, job, token, f"Review of {data_set_name(options.folder)}")

        def announce() -> None:
            num = len(images)
            kinds = f"{len(images.class_names)} classes"
            what = f"in {kinds}" if images.is_labelled else f"to label, of {kinds}"
            print(f"{shown(options.folder)}: {counted(num, 'image')} {what}")
            print(f"open {address_of(listener)}/{token}/ in a browser; Ctrl-C stops", flush=True)
            job.start()

        serve_until_stopped(app, listener, _SECONDS_TO_STOP, announce, lambda: None)
    if not images.is_labelled and file.lines:
        root = None if output.parent == place else options.folder
        print(f"train with the labels: {_fit_command(str(output), {'root': root})}", flush=True)
    elif file.path.exists():
        flags = {
            "root": options.root,
            "columns": options.columns,
            "labels": options.labels if options.labels != "auto" else None,
            "label_separator": options.label_separator,
            "corrections": str(file.path),
        }
        print(f"train with the corrections: {_fit_command(options.folder, flags)}", flush=True)
    # All is saved. Python would wait for threads in which the job reads images, and for its network.
    os._exit(0)


def parse_class_names(labels: str) -> list[str]:
    """Return the classes in the text of `--labels`; none if it is the kind of labels of a table.

    Raises:
        WrongUsage: They are not at least two different names, as a table can have them.
    """
    if labels in _KINDS:
        return []
    names = [composed(name.strip()) for name in labels.split(",")]
    if fault := fault_of_names(names):
        raise WrongUsage(f"has {fault}: pass cat,dog, or of a table single or several", "labels")
    for name in names:
        if name in (*_KINDS, EXCLUDED) or any(mark in name for mark in _MARKS):
            raise WrongUsage(f"cannot be {name!r}, which is no name of a class", "labels")
    return names


def list_unlabelled(folder: str, class_names: list[str]) -> "DataSet":
    """Return the images of a folder and its subfolders, which have no labels yet.

    Args:
        folder: The folder, or its address.
        class_names: The classes that they will have.

    Raises:
        WrongUsage: It is not a folder.
        OSError: The folder cannot be read, or has no images that a table can list.
    """
    import numpy as np

    from finetune.data.image_files import kind_of, normal_path
    from finetune.data.local_folders import local_folder
    from finetune.data.prediction_paths import unlabelled_data
    from finetune.data.tables.table_rows import unlistable

    root = normal_path(local_folder(folder))
    if kind_of(root) != "folder":
        raise WrongUsage(f"{folder} is not a folder: --labels CLASS,CLASS labels those of a folder")
    data = unlabelled_data(root, class_names, skip=True, is_logged=True, columns={}, group_by=None)
    names = [*data.names()]
    left_out = unlistable(names)
    if left_out:
        example = shown(repr(names[left_out[0]]))
        line = f"{counted(len(left_out), 'image')} left out, whose names a table cannot have: rename {example}"
        if len(left_out) == len(names):
            raise FileNotFoundError(f"{shown(folder)}: {line}")
        print(line, file=sys.stderr)
    kept = np.delete(np.arange(len(names)), left_out)
    samples = data.splits["predict"].take(kept)
    return replace(data, folder=root, splits={"predict": samples})


def list_images(folder: str | Path, options: ScanOptions = _AS_FOUND) -> "DataSet":
    """Return the images of a folder or a table, of all its splits.

    Args:
        folder: The folder or the table.
        options: How to read a table.

    Raises:
        ValueError: It is not a data set, or a class has a reserved name.
        OSError: The folder cannot be read.
    """
    from finetune.data.datasets.scan import scan
    from finetune.data.faults import refuse_faults

    data = scan(str(folder), options, prefix="")
    refuse_faults(data.faults, skip=True)
    if EXCLUDED in map(composed, data.class_names):
        raise WrongUsage(
            f"{folder} has a class {EXCLUDED!r}, which means an excluded image in a file of corrections: rename it"
        )
    return data


def _fit_command(folder: str, flags: dict[str, str | None]) -> str:
    """Return the command that trains on a data set with these flags of the data; None is not written."""
    words = ["finetune", "fit", folder]
    for name, value in flags.items():
        if value is not None:
            words += [f"--data.{name}", value]
    return shown(shlex.join(words))


def _user() -> str:
    """Return the name of the user, for the file; "" if the system knows none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # as in a container
        return ""


def _folder_of_run(run: str) -> str:
    from finetune.runs.run_checkpoint import run_of

    place = run_of(run)
    if not place:
        raise WrongUsage(f"{run!r} is not the folder of a run")
    return place


def _mistakes(images: "DataSet", place: str) -> dict[int, tuple[str, float]]:
    """Print how many mistakes a run has made among the images, and return them as in `Evidence`."""
    from finetune.review.doubts import find_mistakes
    from finetune.runs.record import read_run

    record = read_run(Path(place))
    predictions = record.predictions
    mistakes = {}
    if predictions is not None and predictions.is_single == (images.label_kind == "single"):
        indices = {os.path.realpath(path): i for i, path in enumerate(images.paths)}
        # relative to the folder in which the run began
        paths = [os.path.join(record.begun_in, path) for path in predictions.paths]
        tested = [indices.get(os.path.realpath(path)) for path in paths]
        mistakes = find_mistakes(predictions, tested, images.targets.labels, images.class_names)
    print(f"{counted(len(mistakes), 'mistake')} of {place} among these images", file=sys.stderr)
    return mistakes
