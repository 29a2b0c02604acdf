"""A review in a test: its token, the wrong labels of its folder, and the job that finds them."""

import torch
from torch import Tensor, nn

from finetune.review.ranking_job import Network, RankingJob
from finetune.review.review_session import ReviewSession

TOKEN = "word"
MOVED = ("red/00.png", "red/01.png", "green/02.png")  # by the folder of another class


class MeanColours(nn.Module):
    """A network whose features are the mean colours, which tell the classes apart."""

    def forward(self, images: Tensor) -> Tensor:
        return images.float().mean(dim=(2, 3))


def job_of(session: ReviewSession, has_network: bool = True) -> RankingJob:
    torch.manual_seed(0)
    network = Network(MeanColours(), {"image_size": 28}) if has_network else None  # type: ignore[arg-type]
    return RankingJob(
        listing=session.images.listing,
        labels_now=session.labels_now,
        network=network,
        on_ready=session.put_ranking,
        outdated=session.outdated,
    )
