"""`finetune review`: a page on which people correct the labels of a data set."""

import errno
import getpass
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.addresses import is_address
from finetune.data.corrections import CorrectionsFile
from finetune.data.listing import ScanOptions
from finetune.data.tables.table_columns import parse_columns
from finetune.settings.all_commands import ReviewSettings
from finetune.system.file_names import composed
from finetune.system.files import check_target
from finetune.system.messages import (
    NotFound,
    WrongUsage,
    as_wrong_usage,
    be_quiet,
    counted,
    install,
    shown,
)

if TYPE_CHECKING:
    from finetune.data.data_set import DataSet
    from finetune.runs.record import RunRecord

_FILE = "corrections.csv"
_BACKBONE = "resnet18"
_IMAGE_SIZE = 96  # pixels
_SECONDS_TO_STOP = 5.0


def review(options: ReviewSettings) -> None:
    """Correct labels on a page on this machine, the most doubtful ones first.

    Decisions are appended to corrections.csv; no image is changed, moved or deleted. `finetune fit FOLDER
    --data.corrections corrections.csv` trains with them.
    """
    be_quiet()
    how = ScanOptions(
        root=options.root,
        columns=parse_columns(options.columns),
        separator=options.label_separator,
        labels=options.labels,
    )
    if not is_address(options.folder) and not os.path.exists(options.folder):
        raise NotFound(
            f"{options.folder!r} does not exist: pass a folder of images, or a table of them"
        )
    place = Path(options.folder) if os.path.isdir(options.folder) else Path(options.folder).parent
    if is_address(options.folder):
        place = Path()
    file = _corrections_file(Path(options.output or place / _FILE))
    try:
        from finetune.serving.http_server import address_of, listen, serve_until_stopped
    except ImportError as error:
        raise ValueError(f"finetune review needs {error.name}: {install('serve')}") from error
    with listen("127.0.0.1", options.port) as listener:
        from finetune.commands.check import label_network
        from finetune.review.ranking_job import RankingJob
        from finetune.review.review_app import make_review_app
        from finetune.review.review_images import list_images
        from finetune.review.review_session import ReviewSession
        from finetune.runs.run_checkpoint import checkpoint_of

        images = list_images(options.folder, how)
        place_of_run = None if options.run is None else _folder_of_run(options.run)
        mistakes = {} if place_of_run is None else _mistakes(images, place_of_run)
        ckpt_path = None
        weights = options.weights
        if weights is None and place_of_run is not None:
            ckpt_path = checkpoint_of(place_of_run)[0]
        elif weights is None and _is_cached(_BACKBONE):
            weights = "DEFAULT"
        with as_wrong_usage("--weights"):
            network = label_network(weights, _BACKBONE, _IMAGE_SIZE, ckpt_path)
        session = ReviewSession(images, file, _user(), mistakes)
        job = RankingJob(
            data=images,
            labels_now=session.labels_now,
            network=network,
            on_ready=session.put_ranking,
            outdated=session.outdated,
        )
        token = secrets.token_urlsafe(24)
        app = make_review_app(
            session, job, token, f"Review of {Path(options.folder).resolve().name}"
        )

        def announce() -> None:
            num = len(images)
            print(
                f"{shown(options.folder)}: {counted(num, 'image')} in {len(images.class_names)} classes"
            )
            if network is None:
                print("without --weights or a run, the page shows only copies, not doubtful labels")
            print(f"open {address_of(listener)}/{token}/ in a browser; Ctrl-C stops", flush=True)
            job.start()

        serve_until_stopped(app, listener, _SECONDS_TO_STOP, announce, job.stop)
        job.join(_SECONDS_TO_STOP)
    if file.path.exists():
        flags = {
            "root": options.root,
            "columns": options.columns,
            "labels": options.labels if options.labels != "auto" else None,
            "label_separator": options.label_separator,
            "corrections": str(file.path),
        }
        print(f"train with the corrections: {_fit_command(options.folder, flags)}")


def _corrections_file(path: Path) -> CorrectionsFile:
    """Return the file of corrections, with the decisions that it has already. Its folder is created.

    Raises:
        OSError: The file cannot be written.
        ValueError: It is not a file of corrections.
    """
    try:
        check_target(path, "--out")
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_writable(path)
    except OSError as error:
        what = f"cannot write {path}: {error.strerror}" if error.strerror else str(error)
        raise OSError(f"{what}. --out FILE writes it elsewhere") from error
    return CorrectionsFile(path)


def _fit_command(folder: str, flags: dict[str, str | None]) -> str:
    """Return the command that trains on a data set with these flags of the data; None is not written."""
    words = ["finetune", "fit", folder]
    for name, value in flags.items():
        if value is not None:
            words += [f"--data.{name}", value]
    return shown(shlex.join(words))


def _check_writable(path: Path) -> None:
    """Make sure that lines can be appended to a file, also on a disk that is read-only. Nothing is created.

    Raises:
        OSError: They cannot.
    """
    if path.exists():
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
    elif os.statvfs(path.parent).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


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
    """Print how many mistakes a run has made among the images, and return them."""
    from finetune.runs.record import read_run

    mistakes = _find_mistakes(images, read_run(Path(place)))
    print(f"{counted(len(mistakes), 'mistake')} of {place} among these images", file=sys.stderr)
    return mistakes


def _find_mistakes(images: "DataSet", record: "RunRecord") -> dict[int, tuple[str, float]]:
    """Return the mistakes of a run among the images, as in `Evidence`; none if it has other classes or labels."""
    from finetune.review.doubts import find_mistakes
    from finetune.runs.tested_images import tested_names

    by_name = {composed(name): i for i, name in enumerate(images.names())}
    by_real_path = {os.path.realpath(path): i for i, path in enumerate(images.paths)}

    def index_of(paths: Sequence[str]) -> dict[str, int]:
        """Return the indices of test images; by their paths in the data folder if this is another folder."""
        real = {path: os.path.realpath(path) for path in paths}
        same = {path: by_real_path[name] for path, name in real.items() if name in by_real_path}
        named = zip(paths, map(composed, tested_names(record)), strict=True)
        return same or {path: by_name[name] for path, name in named if name in by_name}

    predictions = record.predictions
    if predictions is None or predictions.is_single != (images.label_kind == "single"):
        return {}
    if not predictions.is_single and predictions.names != images.class_names:
        return {}
    labels = images.targets.labels
    return find_mistakes(predictions, index_of(predictions.paths), labels, images.class_names)


def _is_cached(backbone: str) -> bool:
    """Return whether the published weights of a network are on this machine, so that nothing is downloaded."""
    import torch
    from torchvision import models

    url: str = models.get_model_weights(backbone)["DEFAULT"].url
    return Path(torch.hub.get_dir(), "checkpoints", url.rsplit("/", 1)[-1]).is_file()
