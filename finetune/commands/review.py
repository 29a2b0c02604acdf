"""`finetune review`: a page on which people correct the labels of a data set."""

import errno
import getpass
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.corrections import CorrectionsFile
from finetune.system.files import check_target
from finetune.system.messages import NotFound, WrongUsage, be_quiet, counted, install, shown

if TYPE_CHECKING:
    from finetune.review.ranking_job import Network
    from finetune.review.review_images import ReviewImages

_FILE = "corrections.csv"
_BACKBONE = "resnet18"
_IMAGE_SIZE = 96  # pixels
_SECONDS_TO_STOP = 5.0


def review(
    folder: str,
    run: str | None = None,
    output: str | None = None,
    weights: str | None = None,
    port: int = 0,
) -> None:
    """Correct labels on a page on this machine, the most doubtful ones first.

    Decisions are appended to corrections.csv; no image is changed, moved or deleted. `finetune fit FOLDER
    --data.corrections corrections.csv` trains with them.

    Args:
        folder: Folder or table of the data set, as `fit` takes it.
        run: Folder of a run: its mistakes in the test come early.
        output: The file to append to. By default corrections.csv in the folder.
        weights: Weights of a ResNet-18, as `--model.weights` takes them, for similar images and doubtful labels. By
            default the network of the run, or published weights that an earlier command has downloaded.
        port: Port to listen at; 0 takes one that is free.
    """
    be_quiet()
    if not os.path.exists(folder):
        raise NotFound(f"{folder!r} does not exist: name a folder of images, or a table")
    place = Path(folder) if os.path.isdir(folder) else Path(folder).parent
    path = Path(output or place / _FILE)
    try:
        check_target(path, "--output")
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_writable(path)
    except OSError as error:
        raise WrongUsage(
            f"cannot write {path}: {error.strerror or error}. --out FILE writes it elsewhere"
        ) from error
    file = CorrectionsFile(path)
    try:
        from finetune.serving.http_server import address_of, listen, serve_until_stopped
    except ImportError as error:
        raise ValueError(f"finetune review needs {error.name}: {install('serve')}") from error
    with listen("127.0.0.1", port) as listener:
        from finetune.review.ranking_job import RankingJob
        from finetune.review.review_app import make_review_app
        from finetune.review.review_images import list_images
        from finetune.review.review_session import ReviewSession

        images = list_images(folder)
        network, mistakes = _evidence(images, run, weights)
        session = ReviewSession(images, file, _user(), mistakes)
        job = RankingJob(
            images=session.at_start,
            network=network,
            mistakes=mistakes,
            on_ready=session.put_ranking,
        )
        token = secrets.token_urlsafe(24)
        app = make_review_app(session, job, token, f"Review of {Path(folder).resolve().name}")

        def announce() -> None:
            num = len(images)
            print(f"{shown(folder)}: {counted(num, 'image')} in {len(images.class_names)} classes")
            if network is None:
                print("without --weights or a run, only copies are looked for, no doubtful labels")
            print(f"open {address_of(listener)}/{token}/ in a browser; Ctrl-C stops", flush=True)
            job.start()

        serve_until_stopped(app, listener, _SECONDS_TO_STOP, announce, job.stop)
        job.join(_SECONDS_TO_STOP)
    if file.path.exists():
        print(
            f"train with the corrections: finetune fit {shown(folder)} --data.corrections {shown(path)}"
        )


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


def _evidence(
    images: "ReviewImages", run: str | None, weights: str | None
) -> tuple["Network | None", dict[int, tuple[int, float]]]:
    """Return the network for features, and the mistakes of a run."""
    from finetune.commands.check import label_network
    from finetune.review.doubts import find_mistakes
    from finetune.review.ranking_job import Network
    from finetune.runs.record import read_run
    from finetune.runs.run_checkpoint import checkpoint_of, run_of

    mistakes: dict[int, tuple[int, float]] = {}
    ckpt_path = None
    if run is not None:
        place = run_of(run)
        if not place:
            raise WrongUsage(f"{run!r} is not the folder of a run")
        answers = read_run(Path(place)).answers
        if answers is not None:
            listing = images.listing
            index_of = {os.path.realpath(path): i for i, path in enumerate(listing.paths)}
            of_answers = {path: index_of.get(os.path.realpath(path), -1) for path in answers.paths}
            of_answers = {path: i for path, i in of_answers.items() if i >= 0}
            mistakes = find_mistakes(answers, of_answers, listing.class_of, images.class_names)
        print(f"{counted(len(mistakes), 'mistake')} of {run} among these images", file=sys.stderr)
        if weights is None:
            ckpt_path = checkpoint_of(place)[0]
    if weights is None and ckpt_path is None and _is_cached(_BACKBONE):
        weights = "DEFAULT"
    network: Any = label_network(weights, _BACKBONE, _IMAGE_SIZE, ckpt_path)
    return network and Network(network.features, network.preparation), mistakes


def _is_cached(backbone: str) -> bool:
    """Return whether the published weights of a network are on this machine, so that nothing is downloaded."""
    import torch
    from torchvision import models

    url: str = models.get_model_weights(backbone)["DEFAULT"].url
    return Path(torch.hub.get_dir(), "checkpoints", url.rsplit("/", 1)[-1]).is_file()
