"""A linear head fitted on fixed features: multinomial logistic regression, solved to convergence in float64.

With features x scaled as said below, weights w (K, D) and biases b (K,), it minimises

    weighted mean over the pictures of cross_entropy(w x + b, label) + strength / 2 * sum of w ** 2

where a picture's weight is that of its class, 1 unless they are given. The bias is free. Features are centred and
divided by one number for all, so that a picture lies at a mean squared distance of 1 from the centre: a strength then
means the same for any network, and no feature gains weight.
"""

# Shapes: N pictures, D features, K classes; K' of the classes have pictures.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg
from scipy.special import log_softmax, logsumexp, softmax

Array = NDArray[np.float64]

STRENGTHS = tuple(10.0 ** np.arange(0, -6.5, -0.5))

# Gradient norm at which a fit is taken as solved; the weights are then within norm / strength of the optimum. For the
# fit that is kept this distance is 1e-10 at any strength, or ten times that where rounding leaves no less, so that runs
# that round differently find the same head. Fits that are only compared are solved less far.
_TOLERANCE, _TOLERANCE_OF_FOLDS, _MAX_DISTANCE = 1e-12, 1e-8, 1e-10

_MAX_STEPS = 200  # of Newton's method; about five are needed
_NUM_FOLDS = 5
_MAX_WORSE = 3


@dataclass(frozen=True)
class Probe:
    """A fitted head for the features as they were given, and how its strength was chosen."""

    weight: Array  # (K, D)
    bias: Array  # (K,)
    strength: float
    val_accuracy: float | None  # on the pictures held out; None where none could be
    table: list[tuple[float, float, float]]  # strength, log loss and accuracy on the pictures held out


def fit_probe(
    features: Array,
    labels: NDArray[np.integer],
    num_classes: int,
    val_features: Array | None = None,
    val_labels: NDArray[np.integer] | None = None,
    strengths: Sequence[float] = STRENGTHS,
    class_weights: Array | None = None,
) -> Probe:
    """Fit a head at the strength with the least log loss on held-out pictures; of equal ones the strongest.

    Strengths are tried from the strongest on, until three in a row did worse than the best: weak ones cost most.

    Held out are the validation pictures, which never enter the fit. Without them, five stratified folds of the training
    pictures take turns, and the fit at the chosen strength is then made on all. The result depends neither on the order
    of the pictures nor on chance. A class without pictures gets a zero row and odds of 1 in N at the centre.

    Args:
        features: (N, D).
        labels: (N,), from 0 to K - 1.
        num_classes: K.
        val_features: Like `features`; None or empty for folds.
        val_labels: Like `labels`.
        strengths: All above 0.
        class_weights: (K,), by which pictures count in the fit and in the log loss on those held out; None for 1 each.
    """
    if min(strengths) <= 0:
        raise ValueError(f"strengths must be above 0, not {min(strengths)}")
    if len(features) == 0 or not np.isfinite(features).all():
        raise ValueError("the features hold values that are not finite" if len(features) else "there are no features")
    strengths = sorted(map(float, strengths), reverse=True)
    x, y = np.asarray(features, np.float64), np.asarray(labels)
    weights = np.ones(num_classes) if class_weights is None else np.asarray(class_weights, np.float64)
    has_val = val_features is not None and val_labels is not None and len(val_features) > 0
    held_out: list[tuple[Any, Any, Any]] = [(slice(None), val_features, val_labels)]
    if not has_val:
        folds = _folds(x, y)
        held_out = [(folds != k, x[folds == k], y[folds == k]) for k in range(_NUM_FOLDS) if k in folds]
    paths = [
        _path(x[rows], y[rows], weights, strengths, _TOLERANCE if has_val else _TOLERANCE_OF_FOLDS)
        for rows, _, _ in held_out
    ]
    table: list[tuple[float, float, float]] = []
    best = 0
    for i, fits in enumerate(zip(*paths, strict=True)):
        scores = [
            _score(fit, np.asarray(a, np.float64), np.asarray(b), weights)
            for fit, (_, a, b) in zip(fits, held_out, strict=True)
        ]
        loss, weight, right, total = np.sum(scores, axis=0)
        table.append((strengths[i], float(loss / (weight or 1)), float(right / max(total, 1))))
        if i == 0 or table[i][1] < table[best][1] - 1e-9:  # the strongest of those equal up to rounding
            best = i
        if i - best == _MAX_WORSE:
            break
    strength = strengths[best]
    head, bias = next(_path(x, y, weights, [strength], min(_TOLERANCE, _MAX_DISTANCE * strength)))
    return Probe(head, bias, strength, table[best][2] if table else None, table)


def fit_head(features: Array, labels: NDArray[np.integer], num_classes: int, strength: float) -> tuple[Array, Array]:
    """Return weight (K, D) and bias (K,) at one strength, solved as far as fits that are only compared."""
    return next(_path(features, labels, np.ones(num_classes), [strength], _TOLERANCE_OF_FOLDS))


def _score(
    fit: tuple[Array, Array], x: Array, y: NDArray[np.integer], class_weights: Array
) -> tuple[float, float, int, int]:
    """Log loss summed by weight, the weights' sum, right answers, pictures."""
    logits = x @ fit[0].T + fit[1]  # (N, K)
    loss = -(class_weights[y] * log_softmax(logits, axis=1)[np.arange(len(y)), y]).sum()
    return float(loss), float(class_weights[y].sum()), int((logits.argmax(axis=1) == y).sum()), len(y)


def _folds(x: Array, y: NDArray[np.integer]) -> NDArray[np.integer]:
    """Deal the pictures of each class to the folds; -1 for a class's only picture, which is never held out.

    They are dealt in the order of their features, so that the order of the rows has no part in it.
    """
    folds = np.full(len(y), -1)
    order = np.lexsort(x.T[::-1])
    for first, label in enumerate(np.unique(y)):  # each class begins at another fold, so that none gets all the rests
        rows = order[y[order] == label]
        if len(rows) > 1:
            folds[rows] = (first + np.arange(len(rows))) % _NUM_FOLDS
    return folds


def _path(
    x: Array, y: NDArray[np.integer], class_weights: Array, strengths: Sequence[float], tolerance: float
) -> Iterator[tuple[Array, Array]]:
    """Yield weight (K, D) and bias (K,) for each strength, each solved from where the one before it ended."""
    centre = x.mean(axis=0)
    x = x - centre
    scale = np.sqrt((x**2).sum(axis=1).mean()) or 1.0  # all pictures alike: nothing to scale
    x = np.column_stack([x / scale, np.ones(len(x))])  # (N, D + 1): the bias is the weight of a constant
    present, targets = np.unique(y, return_inverse=True)
    importance = class_weights[y] / class_weights[y].mean()  # (N,), 1 on their average
    fitted = np.zeros((len(present), x.shape[1]))
    for strength in strengths:
        fitted = _solve(x, targets, strength, fitted, tolerance, importance)
        weight, bias = np.zeros((len(class_weights), x.shape[1] - 1)), np.zeros(len(class_weights))
        weight[present] = fitted[:, :-1] / scale
        # Adding one number to all biases changes no probability: fix it.
        centred = fitted[:, -1] - fitted[:, -1].mean()
        bias[:] = logsumexp(centred) - np.log(len(x))  # log odds at the centre; for the classes without pictures
        bias[present] = centred
        yield weight, bias - weight @ centre


def _solve(
    x: Array,
    y: NDArray[np.integer],
    strength: float,
    w: Array,
    tolerance: float = _TOLERANCE,
    importance: Array | None = None,
) -> Array:
    """Minimise over w (K', D + 1), from the one given, by Newton's method; pictures count by `importance` (N,).

    Source: Nocedal and Wright, Numerical Optimization, algorithm 7.1 (line search Newton-CG).
    """
    rows, penalty = np.arange(len(x)), np.full(x.shape[1], strength)
    penalty[-1] = 0.0  # the bias is free
    importance = np.ones(len(x)) if importance is None else importance

    def loss(logits: Array, w: Array) -> float:
        losses = importance * (logsumexp(logits, axis=1) - logits[rows, y])
        return float(losses.mean() + (penalty * w**2).sum() / 2)

    logits = _product(x, w.T)  # (N, K')
    value, norm = loss(logits, w), float("inf")
    for _ in range(_MAX_STEPS):
        p = softmax(logits, axis=1)
        residual = p.copy()
        residual[rows, y] -= 1
        residual *= importance[:, None]
        gradient = _product(residual.T, x) / len(x) + penalty * w
        norm, before = float(np.linalg.norm(gradient)), norm
        if norm <= tolerance or before / 2 < norm <= 10 * tolerance:  # solved, or as far as rounding lets it
            return w
        step = _newton_step(x, p, importance, penalty, gradient)
        change, slope = _product(x, step.T), float((gradient * step).sum())
        # Halved until the loss falls; differences below rounding count as a fall, or the last steps would be refused.
        for t in 0.5 ** np.arange(40):
            trial = loss(logits + t * change, w + t * step)
            if trial <= value + 1e-4 * t * slope + 1e-14 * max(1.0, value):
                break
        w, logits, value = w + t * step, logits + t * change, trial
    raise RuntimeError(f"no head found at strength {strength}: the gradient is still {norm:.1e}")


def _newton_step(x: Array, p: Array, importance: Array, penalty: Array, gradient: Array) -> Array:
    """Solve Hessian @ step = -gradient by conjugate gradients: the Hessian, (K' D) squared numbers, is never formed."""

    def hessian(v: Array) -> Array:
        v = v.reshape(gradient.shape)
        u = p * _product(x, v.T)
        u -= p * u.sum(axis=1, keepdims=True)
        u *= importance[:, None]
        return (_product(u.T, x) / len(x) + penalty * v).ravel()

    def precondition(v: Array) -> Array:
        return v / diagonal

    diagonal = (_product((importance[:, None] * p * (1 - p)).T, x**2) / len(x) + penalty).ravel()
    size = (gradient.size, gradient.size)
    step, _ = cg(
        LinearOperator(size, hessian, dtype=np.float64),
        -gradient.ravel(),
        rtol=min(0.1, float(np.linalg.norm(gradient)) ** 0.5),  # closer to the end, closer to Newton's own step
        maxiter=1000,  # a step that is cut off still goes downhill
        M=LinearOperator(size, precondition, dtype=np.float64),
    )
    return step.reshape(gradient.shape)


def _product(a: Array, b: Array) -> Array:
    """Return a @ b by torch: NumPy's threads spin while one waits for the other, and beside other programs it does."""
    return (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
