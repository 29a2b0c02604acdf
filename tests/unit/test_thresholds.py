"""Decision thresholds: of two classes compared with trying all of them, of several labels with scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.metrics import f1_score, precision_score, recall_score
from torch import Tensor

from finetune.system.messages import WrongUsage
from finetune.training.calibration import LEAST_TO_CHOOSE, Calibration
from finetune.training.threshold import Aim, Choice, choose, parse_aim


def measured(p: np.ndarray, is_positive: np.ndarray, threshold: float) -> dict[str, float]:
    """The four metrics, by counting images one by one."""
    counts = {(predicted, true): 0 for predicted in (False, True) for true in (False, True)}
    for probability, true in zip(p, is_positive, strict=True):
        counts[bool(probability >= threshold), bool(true)] += 1
    right = counts[True, True]
    predicted = counts[True, True] + counts[True, False]
    true = int(is_positive.sum())
    return {
        "accuracy": (right + counts[False, False]) / len(p),
        "precision": right / predicted if predicted else 0.0,
        "recall": right / true,
        "f1": 2 * right / (predicted + true),
    }


def all_thresholds(p: np.ndarray) -> np.ndarray:
    """One in each gap between neighbouring probabilities, and below and above all."""
    known = np.unique([0.0, *p, 1.0])
    return np.unique([0.0, *(known[:-1] + known[1:]) / 2, *p, 1.0])


PROBABILITIES = st.floats(0, 1) | st.sampled_from(np.linspace(0, 1, 6).tolist())  # with ties
IMAGES = st.lists(st.tuples(PROBABILITIES, st.booleans()), min_size=2, max_size=40)
AIMS = st.sampled_from(["accuracy", "f1"]).map(lambda measure: (measure, None)) | st.tuples(
    st.sampled_from(["precision", "recall"]), st.floats(0.1, 1)
)
NEIGHBOURS = [[(p, False), (float(np.nextafter(p, 2.0)), True)] for p in (0.5, 1 - 2**-53, 5e-324)]


@given(images=IMAGES, aim=AIMS, seed=st.integers(0, 99))
@example(NEIGHBOURS[0], ("accuracy", None), 0)
@example(NEIGHBOURS[1], ("accuracy", None), 0)
@example(NEIGHBOURS[2], ("accuracy", None), 0)
@example([(0.0, True), (0.0, False)], ("recall", 1.0), 0)
def test_the_best_of_all_thresholds_is_found(images, aim, seed):
    measure, least = aim
    other = {"precision": "recall", "recall": "precision"}.get(measure, measure)
    p, is_positive = (np.array(values) for values in zip(*images, strict=True))
    choice = choose(Aim(measure, least, 0), p, is_positive)
    order = np.random.default_rng(seed).permutation(len(p))
    assert choose(Aim(measure, least, 0), p[order], is_positive[order]) == choice
    if is_positive.all() or not is_positive.any():
        assert choice == Choice(None, None)
        return
    tried = [measured(p, is_positive, t) for t in all_thresholds(p)]
    met = [m for m in tried if least is None or m[measure] >= least]
    if not met:
        assert choice == Choice(None, max(m[measure] for m in tried))
        return
    assert choice.value is not None and 0 <= choice.value <= 1
    found = measured(p, is_positive, choice.value)
    assert found[measure] == choice.reached and (least is None or choice.reached >= least)
    assert found[other] == max(m[other] for m in met)


NAMES = ["hotdog", "not-hotdog"]


def test_aims_as_threshold_takes_them():
    assert parse_aim("accuracy", NAMES) == Aim("accuracy", None, 0)
    assert parse_aim("f1", NAMES) == Aim("f1", None, 0)
    assert parse_aim("f1:not-hotdog", NAMES) == Aim("f1", None, 1)
    assert parse_aim("precision:0.95", NAMES) == Aim("precision", 0.95, 0)
    assert parse_aim("recall:.99:hotdog", NAMES) == Aim("recall", 0.99, 0)
    assert parse_aim("recall:1:not-hotdog", NAMES) == Aim("recall", 1.0, 1)
    assert parse_aim("recall:0.9:a:b", ["a", "a:b"]) == Aim("recall", 0.9, 1)  # a colon in a name
    assert parse_aim("recall:0.95", NAMES, "several") == Aim("recall", 0.95)
    assert parse_aim("f1", NAMES, "several") == Aim("f1")


WRONG = ["", "F1", "precision", "precision:1.5", "precision:0"]
WRONG += ["recall:nan", "recall:99%", "recall::hotdog"]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_threshold_is_wrong_usage(text):
    for kind in ("single", "several"):
        with pytest.raises(WrongUsage, match="recall:P"):
            parse_aim(text, NAMES, kind)


def test_an_aim_of_several_labels_names_none_of_them():
    for text in ("recall:0.9:a", "f1:a"):
        with pytest.raises(WrongUsage, match="each label"):
            parse_aim(text, NAMES, "several")


def drawn() -> tuple[Tensor, Tensor]:
    """Return logits and labels: those of `a` are right, of `b` too sure, of `c` shifted, and `d` is rare."""
    rng = np.random.default_rng(0)
    true = rng.normal(size=(2000, 4)) * 2 - [0, 1, 1, 5]
    labels = rng.random((2000, 4)) < expit(true)
    logits = true * [1, 3, 1, 1] + [0, 0, 2, 0]
    return torch.from_numpy(logits), torch.from_numpy(labels.astype(np.float32))


def fitted(logits: Tensor, labels: Tensor, aim: Aim | None = None) -> Calibration:
    return Calibration.fit(logits, labels, aim)


GRID = np.linspace(0, 1, 40)  # quantiles


def test_the_default_threshold_of_a_label_has_the_highest_f1():
    logits, labels = drawn()
    calibration = fitted(logits, labels)
    p = calibration.probabilities(logits).numpy()
    predicted = calibration.decide(torch.from_numpy(p)).numpy()
    for k in range(4):
        y = labels[:, k].numpy()
        best = max(f1_score(y, p[:, k] >= t) for t in np.quantile(p[:, k], GRID))
        assert f1_score(y, predicted[:, k]) >= best
    half = f1_score(labels[:, 3].numpy(), p[:, 3] >= 0.5)
    assert f1_score(labels[:, 3].numpy(), predicted[:, 3]) > half + 0.05  # control


def test_a_threshold_of_each_label_reaches_the_recall_with_the_highest_precision():
    logits, labels = drawn()
    calibration = fitted(logits, labels, Aim("recall", 0.95))
    p = calibration.probabilities(logits).numpy()
    predicted = calibration.decide(torch.from_numpy(p)).numpy()
    for k in range(4):
        y = labels[:, k].numpy()
        assert recall_score(y, predicted[:, k]) >= 0.95
        tried = np.quantile(p[:, k], GRID)
        enough = [t for t in tried if recall_score(y, p[:, k] >= t) >= 0.95]
        best = max(precision_score(y, p[:, k] >= t) for t in enough)
        assert precision_score(y, predicted[:, k]) >= best
    assert calibration.unreached == () and calibration.describe_unreached_aim("abcd") == ""


def test_labels_whose_aim_is_not_reached_are_named():
    logits, labels = drawn()
    logits[:, 3] = 0.0
    calibration = fitted(logits, labels, Aim("precision", 0.9))
    assert calibration.unreached == (3,)
    assert calibration.thresholds[3] == fitted(logits, labels).thresholds[3]
    named = calibration.describe_unreached_aim("abcd")
    assert named.endswith("for d") and any(named in line for line in calibration.describe("abcd"))
    # `a` has too few images for a threshold of its own, and two of six have the lowest logits of all
    logits, labels = drawn()
    labels[:, 0] = 0
    labels[:6, 0] = 1
    logits[:, 0] = -6.0
    logits[:6, 0] = 6.0
    assert fitted(logits, labels, Aim("recall", 0.9)).unreached == ()  # the control
    logits[:2, 0] = -9.0
    calibration = fitted(logits, labels, Aim("recall", 0.9))
    decided = calibration.decide(calibration.probabilities(logits))[:, 0].numpy()
    assert recall_score(labels[:, 0].numpy(), decided) == pytest.approx(4 / 6)
    assert calibration.unreached == (0,)


def test_labels_with_few_images_share_the_best_common_threshold():
    logits, labels = drawn()
    for k, num in ((2, LEAST_TO_CHOOSE - 1), (3, 0)):
        labels[:, k] = 0
        labels[:num, k] = 1
    calibration = fitted(logits, labels)
    assert calibration.thresholds[2] == calibration.thresholds[3]
    assert len(set(calibration.thresholds)) == 3
    p = calibration.probabilities(logits).flatten()
    y = labels.flatten().numpy()
    found = f1_score(y, (p >= calibration.thresholds[2]).numpy())
    assert found >= max(f1_score(y, (p >= t).numpy()) for t in np.linspace(0.02, 0.98, 49))
