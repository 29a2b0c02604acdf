"""Average precision from a histogram of logits, compared with scikit-learn's from the logits."""

import numpy as np
import pytest
import torch
from metric_parts import put_together
from sklearn.metrics import average_precision_score

from finetune.runs.best_epoch import standard_error
from finetune.training.logit_histogram import (
    NUM_BINS,
    LogitHistogram,
    average_precision,
    bin_centres,
    histogram,
    logit_at,
    mean_average_precision,
)
from finetune.training.task import task_for


def drawn(
    seed: int, num: int, num_classes: int = 8, margin: float = 2.0, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and labels of images that a network separates by this margin."""
    rng = np.random.default_rng(seed)
    share = rng.uniform(0.02, 0.5, num_classes)
    labels = (rng.random((num, num_classes)) < share).astype(np.float32)
    labels[:2] = 1.0
    logits = scale * (rng.normal(size=labels.shape) + margin * (labels - 0.5) - 1)
    return torch.from_numpy(logits), torch.from_numpy(labels)


def exact(logits: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    pairs = zip(labels.T.numpy(), logits.T.numpy(), strict=True)
    return np.array([average_precision_score(y, z) for y, z in pairs])


@pytest.mark.parametrize("num", [500, 1000, 5000])
@pytest.mark.parametrize(("margin", "scale"), [(0.0, 1.0), (2.0, 1.0), (2.0, 4.0), (5.0, 3.0)])
def test_the_mean_average_precision_is_that_of_the_exact_order(num, margin, scale):
    for seed in range(5):
        logits, labels = drawn(seed, num, margin=margin, scale=scale)
        found = average_precision(histogram(logits, labels))
        expected = exact(logits, labels)
        assert abs(float(mean_average_precision(found)) - expected.mean()) <= 1e-3


def test_control_twenty_bins_are_too_few():
    logits, labels = drawn(0, 1000)
    counts = histogram(logits, labels)
    # all images of 50 bins have the same logit
    coarse = torch.zeros_like(counts)
    coarse[:, :, ::50] = counts.view(2, -1, NUM_BINS // 50, 50).sum(dim=3)
    found = float(mean_average_precision(average_precision(coarse)))
    assert abs(found - exact(logits, labels).mean()) > 1e-3


def test_equal_logits_count_in_the_mean_of_their_orders():
    labels = torch.tensor([[1.0], [0.0], [1.0], [0.0], [0.0]])
    logits = torch.tensor([[5.0], [1.0], [1.0], [1.0], [-3.0]])
    # the second positive is at rank 2, 3 or 4
    each = [(1 + 2 / rank) / 2 for rank in (2, 3, 4)]
    found = average_precision(histogram(logits, labels))
    assert float(found[0]) == pytest.approx(np.mean(each), abs=1e-12)


def test_a_perfect_order_has_an_average_precision_of_at_most_one():
    """Rounding must not carry it above: a fit takes the root of m (1 - m) for the standard error."""
    logits = torch.linspace(6, -6, 200)[:, None]
    for num in range(1, 150):
        labels = (torch.arange(200) < num).float()[:, None]
        score = task_for("several", ["cat"]).score(logits, labels)
        assert 1 - 1e-12 < score <= 1 and standard_error(score, num) < 1e-6


def test_a_label_without_images_is_undefined_and_does_not_count():
    logits, labels = drawn(0, 300, num_classes=3)
    labels[:, 1] = 0
    found = average_precision(histogram(logits, labels))
    assert found.isnan().tolist() == [False, True, False]
    assert mean_average_precision(found) == found[[0, 2]].mean()
    assert mean_average_precision(found[1:2]).isnan()


def test_counts_of_devices_add_up_to_those_of_one():
    logits, labels = drawn(1, 100)
    parts = [(logits[rows], labels[rows]) for rows in (slice(0, 30), slice(30, 30), slice(30, 100))]
    summed = put_together(lambda: LogitHistogram(8), parts)
    assert torch.equal(summed, histogram(logits, labels))
    assert summed.sum() == 800 and summed[1].sum(dim=1).tolist() == labels.sum(dim=0).tolist()


def test_every_logit_has_a_bin_and_lies_within_its_edges():
    logits = torch.cat(
        [torch.linspace(-40.13, 40.31, 3001), torch.tensor([-1e30, 1e30, np.inf, -np.inf])]
    )
    counts = histogram(logits[:, None], torch.ones(len(logits), 1))[1, 0]
    assert counts.sum() == len(logits) and counts[0] >= 2 and counts[-1] >= 2
    edges = logit_at(np.arange(NUM_BINS + 1))
    assert (np.diff(edges) > 0).all() and np.isfinite(edges).all()
    assert counts.tolist() == np.histogram(logits.nan_to_num().clamp(-1e6, 1e6), edges)[0].tolist()
    assert ((edges[:-1] < bin_centres()) & (bin_centres() < edges[1:])).all()
