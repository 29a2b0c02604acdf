"""`finetune review`: a page on which people correct the labels of a data set."""

import errno
import getpass
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finetune.data.addresses import is_address
from finetune.data.corrections import CorrectionsFile
from finetune.data.listing import ScanOptions
from finetune.data.tables.table_columns import parse_columns
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
    from finetune.review.ranking_job import Network
    from finetune.runs.record import RunRecord

_FILE = "corrections.csv"
_BACKBONE = "resnet18"
_IMAGE_SIZE = 96  # pixels
_SECONDS_TO_STOP = 5.0


def review(  # noqa: PLR0913 (an argument for each option)
    folder: str,
    run: str | None = None,
    output: str | None = None,
    weights: str | None = None,
    port: int = 0,
    root: str | None = None,
    columns: str | None = None,
    labels: Literal["auto", "single", "several"] = "auto",
    label_separator: str | None = None,
) -> None:
    """Correct labels on a page on this machine, the most doubtful ones first.

    Decisions are appended to corrections.csv; no image is changed, moved or deleted. `finetune fit FOLDER
    --data.corrections corrections.csv` trains with them.

    Args:
        folder: Folder or table of the data set, as `fit` takes it.
        run: Folder of a run: images that it classified wrongly in its test are shown early.
        output: The file to append to. By default corrections.csv in the folder.
        weights: Weights of a ResNet-18, as `--model.weights` takes them, for similar images and doubtful labels. By
            default the network of the run, of any kind, or published weights that an earlier command has downloaded.
        port: Port to listen at; 0 takes a free one.
        root: Folder that paths in a table are relative to.
        columns: Columns of a table whose names are not the usual ones, such as path:photo,label:breed.
        labels: Whether an image of a table has one label (`single`) or several; `auto` decides by the table.
        label_separator: Character between several labels of an image in a table.
    """
    be_quiet()
    options = ScanOptions(
        root=root,
        columns=parse_columns(columns),
        separator=label_separator,
        labels=labels,
    )
    if not is_address(folder) and not os.path.exists(folder):
        raise NotFound(f"{folder!r} does not exist: pass a folder of images, or a table of them")
    place = Path(folder) if os.path.isdir(folder) else Path(folder).parent
    if is_address(folder):
        place = Path()
    file = _corrections_file(Path(output or place / _FILE))
    try:
        from finetune.serving.http_server import address_of, listen, serve_until_stopped
    except ImportError as error:
        raise ValueError(f"finetune review needs {error.name}: {install('serve')}") from error
    with listen("127.0.0.1", port) as listener:
        from finetune.review.ranking_job import RankingJob
        from finetune.review.review_app import make_review_app
        from finetune.review.review_images import list_images
        from finetune.review.review_session import ReviewSession
        from finetune.runs.run_checkpoint import checkpoint_of

        images = list_images(folder, options)
        place_of_run = None if run is None else _folder_of_run(run)
        mistakes = {} if place_of_run is None else _mistakes(images, place_of_run)
        ckpt_path = None
        if weights is None and place_of_run is not None:
            ckpt_path = checkpoint_of(place_of_run)[0]
        elif weights is None and _is_cached(_BACKBONE):
            weights = "DEFAULT"
        network = _network(weights, ckpt_path)
        session = ReviewSession(images, file, _user(), mistakes)
        job = RankingJob(
            data=images,
            labels_now=session.labels_now,
            network=network,
            on_ready=session.put_ranking,
            outdated=session.outdated,
        )
        token = secrets.token_urlsafe(24)
        app = make_review_app(session, job, token, f"Review of {Path(folder).resolve().name}")

        def announce() -> None:
            num = len(images)
            print(f"{shown(folder)}: {counted(num, 'image')} in {len(images.class_names)} classes")
            if network is None:
                print("without --weights or a run, the page shows only copies, not doubtful labels")
            print(f"open {address_of(listener)}/{token}/ in a browser; Ctrl-C stops", flush=True)
            job.start()

        serve_until_stopped(app, listener, _SECONDS_TO_STOP, announce, job.stop)
        job.join(_SECONDS_TO_STOP)
    if file.path.exists():
        flags = {
            "root": root,
            "columns": columns,
            "labels": labels if labels != "auto" else None,
            "label_separator": label_separator,
            "corrections": str(file.path),
        }
        print(f"train with the corrections: {_fit_command(folder, flags)}")


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


def _network(weights: str | None, ckpt_path: str | None) -> "Network | None":
    """Return the network for features, with weights for a ResNet-18 or that of a checkpoint; None without either."""
    from finetune.commands.check import label_network
    from finetune.review.ranking_job import Network

    with as_wrong_usage("--weights"):
        network = label_network(weights, _BACKBONE, _IMAGE_SIZE, ckpt_path)
    return network and Network(network.features, network.preparation)


def _mistakes(images: "DataSet", place: str) -> dict[int, tuple[str, float]]:
    """Print how many mistakes a run has made among the images, and return them."""
    from finetune.runs.record import read_run

    mistakes = _find_mistakes(images, read_run(Path(place)))
    print(f"{counted(len(mistakes), 'mistake')} of {place} among these images", file=sys.stderr)
    return mistakes


def _find_mistakes(images: "DataSet", record: "RunRecord") -> dict[int, tuple[str, float]]:
    """Return the mistakes of a run among the images, as in `Evidence`; none if it has other classes or labels."""
    from finetune.review.doubts import find_label_mistakes, find_mistakes
    from finetune.runs.tested_images import tested_names

    by_name = {composed(name): i for i, name in enumerate(images.names())}
    by_real_path = {os.path.realpath(path): i for i, path in enumerate(images.paths)}

    def index_of(paths: Sequence[str]) -> dict[str, int]:
        """Return the indices of test images; by their paths in the data folder if this is another folder."""
        real = {path: os.path.realpath(path) for path in paths}
        same = {path: by_real_path[name] for path, name in real.items() if name in by_real_path}
        named = zip(paths, map(composed, tested_names(record)), strict=True)
        return same or {path: by_name[name] for path, name in named if name in by_name}

    labels = images.targets.labels
    single = record.answers
    several = record.label_answers
    if images.label_kind == "single" and single is not None:
        return find_mistakes(single, index_of(single.paths), labels, images.class_names)
    if (
        images.label_kind == "several"
        and several is not None
        and several.class_names == images.class_names
    ):
        return find_label_mistakes(several, index_of(several.paths), labels)
    return {}


def _is_cached(backbone: str) -> bool:
    """Return whether the published weights of a network are on this machine, so that nothing is downloaded."""
    import torch
    from torchvision import models

    url: str = models.get_model_weights(backbone)["DEFAULT"].url
    return Path(torch.hub.get_dir(), "checkpoints", url.rsplit("/", 1)[-1]).is_file()
