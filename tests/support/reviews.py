"""A review in a test: its token, the wrong labels of its folder, and the job that finds them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from starlette.testclient import TestClient
from torch import Tensor, nn

from finetune.commands.review import list_images, list_unlabelled
from finetune.data.corrections import CorrectionsFile
from finetune.features.image_features import FeatureNetwork
from finetune.review.ranking_job import RankingJob
from finetune.review.review_app import make_review_app
from finetune.review.review_session import ReviewSession

TOKEN = "word"
MOVED = ("red/00.png", "red/01.png", "green/02.png")  # by the folder of another class


def copy_with_wrong_labels(colours: Path, root: Path) -> Path:
    """Copy the 20 training images of each class, three of them to the folder of another class."""
    shutil.copytree(colours / "train", root)
    for name in MOVED:
        (root / name).rename(root / "blue" / name.replace("/", "_"))
    return root


def begin_review(root: Path, by: str = "me") -> ReviewSession:
    """Begin a review of a folder, with its file next to it."""
    file = CorrectionsFile(root.parent / "corrections.csv")
    return ReviewSession(list_images(root), file, by, {})


def begin_labelling(root: Path, *names: str) -> ReviewSession:
    """Begin a review of images that have no labels, with its file in their folder."""
    file = CorrectionsFile(root / "labels.csv")
    return ReviewSession(list_unlabelled(str(root), list(names)), file, "me", {})


def client_of(session: ReviewSession) -> TestClient:
    """Return a client of a review whose labels were ranked."""
    job = job_of(session)
    job.rank()
    assert not job.error
    app = make_review_app(session, job, TOKEN, "Review")
    headers = {"Origin": "http://127.0.0.1:8000"}
    return TestClient(app, f"http://127.0.0.1:8000/{TOKEN}/", headers=headers)


class MeanColours(nn.Module):
    """A network whose features are the mean colours, which tell the classes apart."""

    def forward(self, images: Tensor) -> Tensor:
        return images.float().mean(dim=(2, 3))


def job_of(session: ReviewSession, has_network: bool = True) -> RankingJob:
    torch.manual_seed(0)
    features: Any = MeanColours()
    network = FeatureNetwork("", features, {"image_size": 28}) if has_network else None
    return RankingJob(
        data=session.images,
        labels_now=session.labels_now,
        network=network,
        on_ready=session.put_ranking,
        outdated=session.outdated,
    )
