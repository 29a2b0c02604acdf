"""A linear head fitted on fixed features: multinomial logistic regression, solved to convergence in float64.

With features x scaled as described below, weights w (K, D) and biases b (K,), it minimises

    weighted mean over the images of cross_entropy(w x + b, target) + strength / 2 * sum of w ** 2

where the target and an image's weight are those of `torch.nn.functional.cross_entropy` with class weights and label
smoothing. The bias is free. Features are centred and divided by one number for all, so that an image lies at a mean
squared distance of 1 from the centre: a strength then means the same for any network, and no feature gains weight.
"""

# Shapes: N images, D features, K classes; K' of the classes take part in a fit.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg
from scipy.special import log_softmax, logsumexp, softmax

Array = NDArray[np.float64]

STRENGTHS = tuple(10.0 ** np.arange(0, -6.5, -0.5))
NUM_FOLDS = 5

# Gradient norm at which a fit is taken as solved; the weights are then within norm / strength of the optimum. For the
# fit that is kept this distance is 1e-10 at any strength, or ten times that where rounding leaves no less, so that runs
# that round differently find the same head. Fits that are only compared are solved less far.
_TOLERANCE = 1e-12
_TOLERANCE_OF_FOLDS = 1e-8
_MAX_DISTANCE = 1e-10

_MAX_STEPS = 200  # of Newton's method; about five are needed
_MAX_WORSE = 3


@dataclass(frozen=True)
class Probe:
    """A fitted head for features that are not scaled, and how its strength was chosen.

    Attributes:
        weight: (K, D).
        bias: (K,).
        strength: Of the penalty.
        accuracy: Cross-validated accuracy on the images of the fit; None for a single image.
        loss: Cross-validated loss; None for a single image.
        table: Strength, loss and accuracy of each strength that was tried.
        out_of_fold: Logits (N, K) of each image at the chosen strength, by a head that was fitted without its fold.
    """

    weight: Array
    bias: Array
    strength: float
    accuracy: float | None
    loss: float | None
    table: list[tuple[float, float, float]]
    out_of_fold: Array


def fit_probe(
    features: Array,
    labels: NDArray[np.integer],
    num_classes: int,
    strengths: Sequence[float] = STRENGTHS,
    class_weights: Array | None = None,
    label_smoothing: float = 0.0,
) -> Probe:
    """Fit a head at the strength with the lowest cross-validated loss; of equal ones the strongest.

    There are five stratified folds. Strengths are tried from the strongest on, until three in a row are worse than the
    best: weak ones take longest. The head at the best strength is then fitted on all images.

    Without label smoothing a class without images gets a zero row and odds of 1 in N at the centre.

    Args:
        features: (N, D).
        labels: (N,), from 0 to K - 1.
        num_classes: K.
        strengths: All above 0.
        class_weights: (K,), by which images count, in the fits and in the loss; None for 1 each.
        label_smoothing: Share of the target spread over all classes, in the fits and in the loss.
    """
    if min(strengths) <= 0:
        raise ValueError(f"strengths must be above 0, not {min(strengths)}")
    if len(features) == 0:
        raise ValueError("there are no features")
    if not np.isfinite(features).all():
        raise ValueError("the features hold values that are not finite")
    strengths = sorted(map(float, strengths), reverse=True)
    x = np.asarray(features, np.float64)
    y = np.asarray(labels)
    weights = (
        np.ones(num_classes) if class_weights is None else np.asarray(class_weights, np.float64)
    )
    cross_entropy = _CrossEntropy(weights, label_smoothing)
    axes = _principal_axes(x)
    x = _product(x, axes)
    table, best, out_of_fold = _cross_validate(x, y, cross_entropy, strengths)
    strength = strengths[best]
    tolerance = min(_TOLERANCE, _MAX_DISTANCE * strength)
    weight, bias = next(_path(x, cross_entropy.targets(y), [strength], tolerance))
    loss, accuracy = table[best][1:] if table else (None, None)
    return Probe(_product(weight, axes.T), bias, strength, accuracy, loss, table, out_of_fold)


def _principal_axes(x: Array) -> Array:
    """Return orthonormal axes (D, R) of the space in which the images differ, R at most N and D.

    The optimum is the same in these coordinates. Fits are 1.5 to 7 times as fast there (2,000 and 400 images with 1,280
    features): there are at most as many coordinates as images, and the Hessian's diagonal preconditions them better.
    """
    centred = torch.from_numpy(x - x.mean(axis=0))
    basis = None
    if len(centred) < centred.shape[1]:
        basis = torch.linalg.qr(centred.T)[0]
        centred = centred @ basis
    axes = torch.linalg.eigh(centred.T @ centred)[1]
    return (axes if basis is None else basis @ axes).numpy()


def fit_head(
    features: Array, labels: NDArray[np.integer], num_classes: int, strength: float
) -> tuple[Array, Array]:
    """Return weight (K, D) and bias (K,) at one strength, solved as far as fits that are only compared."""
    targets = _CrossEntropy(np.ones(num_classes), label_smoothing=0.0).targets(np.asarray(labels))
    return next(_path(features, targets, [strength], _TOLERANCE_OF_FOLDS))


def deal_folds(labels: NDArray[np.integer], groups: NDArray[np.integer]) -> NDArray[np.integer]:
    """Deal groups of images to folds at random, by a fixed seed, evenly for each class, (N,).

    Args:
        labels: (N,); a group's class is that of its first image.
        groups: Number of each image's group, (N,).
    """
    ids, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    shuffled = np.random.default_rng(0).permutation(len(ids))
    order = shuffled[np.argsort(labels[first][shuffled], kind="stable")]
    fold_of_group = np.empty(len(ids), np.int64)
    fold_of_group[order] = np.arange(len(ids)) % NUM_FOLDS
    return fold_of_group[group_of]


@dataclass(frozen=True)
class _CrossEntropy:
    """What `torch.nn.CrossEntropyLoss` takes besides the labels: class weights (K,) and label smoothing."""

    class_weights: Array
    label_smoothing: float

    def targets(self, y: NDArray[np.integer]) -> Array:
        """Return weighted probabilities of each class, (N, K): the loss is the mean of -(targets * log p).sum(1).

        Source: the formula in torch's documentation, where smoothing counts each class by its own weight.
        """
        num_classes = len(self.class_weights)
        targets = np.zeros((len(y), num_classes))
        targets[np.arange(len(y)), y] = (1 - self.label_smoothing) * self.class_weights[y]
        targets += self.label_smoothing / num_classes * self.class_weights
        return targets / self.class_weights[y].mean()


def _cross_validate(
    x: Array, y: NDArray[np.integer], cross_entropy: _CrossEntropy, strengths: Sequence[float]
) -> tuple[list[tuple[float, float, float]], int, Array]:
    """Return the table of strengths, the row of the best, and the logits out of fold at that one, as in `Probe`."""
    targets = cross_entropy.targets(y)
    folds = deal_folds(y, np.arange(len(y)))
    held_out = [folds == fold for fold in np.unique(folds)]
    best = 0
    best_logits = np.zeros(targets.shape)
    if len(held_out) == 1:  # of a single image
        return [], best, best_logits
    paths = [
        _path(x[~rows], cross_entropy.targets(y[~rows]), strengths, _TOLERANCE_OF_FOLDS)
        for rows in held_out
    ]
    table: list[tuple[float, float, float]] = []
    for i, fits in enumerate(zip(*paths, strict=True)):
        logits = np.empty(targets.shape)
        for rows, (weight, bias) in zip(held_out, fits, strict=True):
            logits[rows] = _product(x[rows], weight.T) + bias
        loss = float(-(targets * log_softmax(logits, axis=1)).sum(axis=1).mean())
        table.append((strengths[i], loss, float((logits.argmax(axis=1) == y).mean())))
        if i == 0 or loss < table[best][1] - 1e-9:  # the strongest of those equal up to rounding
            best = i
            best_logits = logits
        if i - best == _MAX_WORSE:
            break
    return table, best, best_logits


def _path(
    x: Array, targets: Array, strengths: Sequence[float], tolerance: float
) -> Iterator[tuple[Array, Array]]:
    """Yield weight (K, D) and bias (K,) for each strength, each solved from where the one before it ended."""
    centre = x.mean(axis=0)
    x = x - centre
    scale = np.sqrt((x**2).sum(axis=1).mean()) or 1.0  # all images alike: nothing to scale
    # (N, D + 1): the bias is the weight of a constant
    x = np.column_stack([x / scale, np.ones(len(x))])
    present = np.flatnonzero(targets.any(axis=0))
    fitted = np.zeros((len(present), x.shape[1]))
    for strength in strengths:
        fitted = _solve(x, targets[:, present], strength, fitted, tolerance)
        weight = np.zeros((targets.shape[1], x.shape[1] - 1))
        weight[present] = fitted[:, :-1] / scale
        # Adding one number to all biases changes no probability: fix it.
        centred = fitted[:, -1] - fitted[:, -1].mean()
        # log odds at the centre: 1 in N
        bias = np.full(targets.shape[1], logsumexp(centred) - np.log(len(x)))
        bias[present] = centred
        yield weight, bias - weight @ centre


def _solve(
    x: Array, targets: Array, strength: float, w: Array, tolerance: float = _TOLERANCE
) -> Array:
    """Minimise over w (K', D + 1), from an initial value, by Newton's method; `targets` (N, K') as of `_CrossEntropy`.

    Twice as fast as scikit-learn's newton-cg, and far more where label smoothing gives each image all classes, which
    scikit-learn can only take as so many rows. L-BFGS (SciPy's, torch's, scikit-learn's) is as fast, and stops at a
    gradient norm of 1e-9, where the loss no longer changes in float64 (docs/benchmarks.md).

    Source: Nocedal and Wright, Numerical Optimization, algorithm 7.1 (line search Newton-CG).
    """
    penalty = np.full(x.shape[1], strength)
    penalty[-1] = 0.0  # the bias is free
    importance = targets.sum(axis=1)  # (N,)

    def loss(logits: Array, w: Array) -> float:
        losses = importance * logsumexp(logits, axis=1) - (targets * logits).sum(axis=1)
        return float(losses.mean() + (penalty * w**2).sum() / 2)

    logits = _product(x, w.T)  # (N, K')
    value = loss(logits, w)
    norm = float("inf")
    for _ in range(_MAX_STEPS):
        p = softmax(logits, axis=1)
        residual = importance[:, None] * p - targets
        gradient = _product(residual.T, x) / len(x) + penalty * w
        before = norm
        norm = float(np.linalg.norm(gradient))
        # solved, or as far as rounding lets it
        if norm <= tolerance or before / 2 < norm <= 10 * tolerance:
            return w
        step = _newton_step(x, p, importance, penalty, gradient)
        change = _product(x, step.T)
        slope = float((gradient * step).sum())
        # Halved until the loss falls; differences below rounding count as a fall, or the last steps would be refused.
        for t in 0.5 ** np.arange(40):
            trial = loss(logits + t * change, w + t * step)
            if trial <= value + 1e-4 * t * slope + 1e-14 * max(1.0, value):
                break
        w = w + t * step
        logits = logits + t * change
        value = trial
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
        # closer to the end, closer to Newton's own step
        rtol=min(0.1, float(np.linalg.norm(gradient)) ** 0.5),
        maxiter=1000,  # a step that is cut off still goes downhill
        M=LinearOperator(size, precondition, dtype=np.float64),
    )
    return step.reshape(gradient.shape)


def _product(a: Array, b: Array) -> Array:
    """Return a @ b by torch: NumPy's threads spin while one waits for the other, and beside other programs it does."""
    return (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
