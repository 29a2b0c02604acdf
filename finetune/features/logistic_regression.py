"""A linear head fitted on fixed features: logistic regression, solved to convergence in float64.

With features x scaled as described below, weights w (K, D) and biases b (K,), it minimises

    weighted mean over the images of cross_entropy(w x + b, target) + strength / 2 * sum of w ** 2

where targets and image weights are those of `torch.nn.functional.cross_entropy` with class weights and label smoothing.
Images may also have weights of their own: then a weight of 2 is the same as the image twice.
If images have several labels, each label has a binary logistic regression, all at the same strength: the loss is the
sum over labels of `binary_cross_entropy_with_logits`, whose `pos_weight` are the class weights.
The bias is not penalised. Features are centred and divided by a single number, so that the mean squared distance of an
image from the centre is 1. A strength then means the same for any network, and features keep their relative scale.
"""

# Shapes: N images, D features, K classes; K' of the classes take part in a fit.

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, cg
from scipy.special import expit, log_softmax, logsumexp, softmax

from finetune.data.targets import MultiHot

Array = NDArray[np.float64]

STRENGTHS = tuple(10.0 ** np.arange(0, -6.5, -0.5))
NUM_FOLDS = 5

# Gradient norm at which a fit counts as converged; the weights are then within norm / strength of the optimum. For the
# final fit this distance is 1e-10 at any strength, or ten times that if rounding does not allow less. So runs that
# round differently find the same head. Fits for cross-validation are solved less precisely.
_TOLERANCE = 1e-12
_TOLERANCE_OF_FOLDS = 1e-8
_MAX_DISTANCE = 1e-10

_MAX_STEPS = 200  # of Newton's method; about five are needed
_MAX_WORSE = 3


@dataclass(frozen=True)
class Probe:
    """A fitted head for unscaled features, with the cross-validation that chose its strength.

    Attributes:
        weight: (K, D).
        bias: (K,).
        strength: Strength of the penalty.
        score: Cross-validated accuracy on the images of the fit, or the mean average precision of several labels; None
            without cross-validation: one fold has all images with a weight, as with a single image.
        loss: Cross-validated loss; None without cross-validation.
        table: Strength, loss and score of each strength that was tried.
        out_of_fold: Logits of each image by a head that was fitted without its fold, at the chosen strength, (N, K).
            Images of weight 0, or of a class of weight 0, have none.
    """

    weight: Array
    bias: Array
    strength: float
    score: float | None
    loss: float | None
    table: list[tuple[float, float, float]]
    out_of_fold: Array


def fit_probe(
    features: Array,
    labels: NDArray[Any],
    num_classes: int,
    strengths: Sequence[float] = STRENGTHS,
    class_weights: Array | None = None,
    label_smoothing: float = 0.0,
    image_weights: Array | None = None,
) -> Probe:
    """Fit a head at the strength with the lowest cross-validated loss; on ties at the strongest.

    There are five stratified folds. Strengths are tried from the strongest to the weakest, because weak ones take
    longest, until three in a row are worse than the best. The head is then fitted on all images at the best strength.

    Without label smoothing, a class without images gets zero weights, and odds of 1 in N at the centre. So does a
    label that no image has; one that every image has gets odds of N to 1.

    Args:
        features: (N, D).
        labels: (N,), from 0 to K - 1. If images have several labels, (N, K), 0 or 1.
        num_classes: K.
        strengths: Strengths to try, all above 0.
        class_weights: Weight of each class in the fits and in the loss, (K,); None for 1 each. Of several labels only
            the positives have it.
        label_smoothing: Share of the target that is spread over all classes, in the fits and in the loss. Of several
            labels it is spread over present and absent.
        image_weights: Weight of each image in the fits and in the loss, (N,), at least 0; None for 1 each. The score
            counts each image once.

    Raises:
        ValueError: A strength is not positive, the features are empty or not finite, or all images have classes of
            weight 0.
    """
    if min(strengths) <= 0:
        raise ValueError(f"strengths must be above 0, not {min(strengths)}")
    y = np.asarray(labels)
    weights = (
        np.ones(num_classes) if class_weights is None else np.asarray(class_weights, np.float64)
    )
    # Images of weight 0 change nothing. Without them, no fold has a total weight of 0.
    # With label smoothing, the loss of an image has the weights of all classes.
    is_used = np.ones(len(y), bool)
    if image_weights is not None:
        is_used &= image_weights > 0
    if y.ndim == 1 and label_smoothing == 0:
        is_used &= weights[y] > 0
    if not is_used.all():
        features = features[is_used]
        y = y[is_used]
        image_weights = None if image_weights is None else image_weights[is_used]
    if len(features) == 0:
        raise ValueError("there are no features")
    if not np.isfinite(features).all():
        raise ValueError("the features hold values that are not finite")
    strengths = sorted(map(float, strengths), reverse=True)
    x = np.asarray(features, np.float64)
    cross_entropy: _CrossEntropy | _BinaryCrossEntropy
    if y.ndim == 1:
        cross_entropy = _CrossEntropy(weights, label_smoothing)
    else:
        cross_entropy = _BinaryCrossEntropy(weights, label_smoothing)
    if not cross_entropy.is_defined(y):
        raise ValueError("all images have classes of weight 0")
    axes = _principal_axes(x)
    x = _product(x, axes)
    images = _Images(x, y, image_weights)
    table, best, out_of_fold = _cross_validate(images, cross_entropy, strengths)
    strength = strengths[best]
    tolerance = min(_TOLERANCE, _MAX_DISTANCE * strength)
    weight, bias = next(_path(images, cross_entropy.problem(images), [strength], tolerance))
    loss, score = table[best][1:] if table else (None, None)
    return Probe(_product(weight, axes.T), bias, strength, score, loss, table, out_of_fold)


def _principal_axes(x: Array) -> Array:
    """Return the principal axes (D, R) of the images, with R = min(N, D).

    The optimum is the same in these coordinates. Fits are 1.5 to 7 times as fast (2,000 and 400 images with 1,280
    features): there are at most as many coordinates as images, and the diagonal of the Hessian is a better
    preconditioner.
    """
    centred = torch.from_numpy(x - x.mean(axis=0))
    basis = None
    if len(centred) < centred.shape[1]:
        basis = torch.linalg.qr(centred.T)[0]
        centred = centred @ basis
    axes = torch.linalg.eigh(centred.T @ centred)[1]
    return (axes if basis is None else basis @ axes).numpy()


def principal_coordinates(x: Array) -> Array:
    """Return features (N, D) along their principal axes, (N, min(N, D)). The fits are the same, and faster."""
    return _product(x, _principal_axes(x))


def fit_head(
    features: Array, labels: NDArray[np.integer], num_classes: int, strength: float
) -> tuple[Array, Array]:
    """Return weight (K, D) and bias (K,) at one strength, with the precision of cross-validation.

    Args:
        features: (N, D).
        labels: (N,), from 0 to K - 1. If images have several labels, (N, K), 0 or 1.
        num_classes: K.
        strength: Strength of the penalty.
    """
    kind = _CrossEntropy if labels.ndim == 1 else _BinaryCrossEntropy
    images = _Images(features, np.asarray(labels))
    problem = kind(np.ones(num_classes), label_smoothing=0.0).problem(images)
    return next(_path(images, problem, [strength], _TOLERANCE_OF_FOLDS))


def deal_folds(labels: NDArray[np.integer], groups: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the fold of each image, (N,). Groups are assigned at random by a fixed seed, evenly in each class.

    Args:
        labels: Class index of each image, (N,). The class of a group is that of its first image.
        groups: Index of the group of each image, (N,). A group is in one fold.
    """
    ids, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    shuffled = np.random.default_rng(0).permutation(len(ids))
    order = shuffled[np.argsort(labels[first][shuffled], kind="stable")]
    fold_of_group = np.empty(len(ids), np.int64)
    fold_of_group[order] = np.arange(len(ids)) % NUM_FOLDS
    return fold_of_group[group_of]


@dataclass(frozen=True)
class _Images:
    """Images with their labels.

    Attributes:
        x: Their features, (N, D).
        y: Their labels, (N,) or (N, K).
        weights: Their weights, (N,), all above 0; None for 1 each.
    """

    x: Array
    y: NDArray[Any]
    weights: Array | None = None

    def take(self, rows: NDArray[Any]) -> "_Images":
        """Return some of the images."""
        weights = None if self.weights is None else self.weights[rows]
        return _Images(self.x[rows], self.y[rows], weights)

    def weighted(self, values: Array) -> Array:
        """Return values of the images (N, ...) times their weights, which are scaled to a mean of 1."""
        if self.weights is None:
            return values
        scaled = self.weights / self.weights.mean()
        return scaled.reshape(-1, *[1] * (values.ndim - 1)) * values


@dataclass(frozen=True)
class _CrossEntropy:
    """The settings of `torch.nn.CrossEntropyLoss`: class weights (K,) and label smoothing."""

    class_weights: Array
    label_smoothing: float

    def targets(self, images: _Images) -> Array:
        """Return the weighted target probabilities, (N, K). The loss is the mean of -(targets * log p).sum(1).

        Source: the formula in torch's documentation, where smoothing uses the weight of each class.
        """
        y = images.y
        num_classes = len(self.class_weights)
        targets = np.zeros((len(y), num_classes))
        targets[np.arange(len(y)), y] = (1 - self.label_smoothing) * self.class_weights[y]
        targets += self.label_smoothing / num_classes * self.class_weights
        return images.weighted(targets) / images.weighted(self.class_weights[y]).mean()

    def problem(self, images: _Images) -> "_Softmax":
        """Return what is minimised for images whose labels are (N,)."""
        return _Softmax(self.targets(images))

    def loss(self, logits: Array, images: _Images) -> float:
        """Return the mean loss of logits (N, K)."""
        return float(-(self.targets(images) * log_softmax(logits, axis=1)).sum(axis=1).mean())

    def is_defined(self, y: NDArray[np.integer]) -> bool:
        """Return whether images with labels (N,) have a loss: the weights of their classes are not all 0."""
        return bool((self.class_weights[y] > 0).any())

    def score(self, logits: Array, y: NDArray[np.integer]) -> float:
        """Return the accuracy of logits (N, K)."""
        return float((logits.argmax(axis=1) == y).mean())

    def strata(self, y: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return the stratum of each image for the folds, (N,)."""
        return y


@dataclass(frozen=True)
class _BinaryCrossEntropy:
    """The settings of `torch.nn.BCEWithLogitsLoss`: weights of the positives (K,), and label smoothing."""

    class_weights: Array
    label_smoothing: float

    def problem(self, images: _Images) -> "_Sigmoids":
        """Return what is minimised for images whose labels are (N, K)."""
        y = np.asarray(images.y, np.float64)
        wanted = y * (1 - self.label_smoothing) + self.label_smoothing / 2
        positives = self.class_weights * wanted
        varies = (positives != positives[:1]).any(axis=0)
        importance = positives + 1 - wanted
        return _Sigmoids(images.weighted(positives), images.weighted(importance), varies)

    def loss(self, logits: Array, images: _Images) -> float:
        """Return the loss of logits (N, K), its mean over images and labels."""
        return self.problem(images).loss(logits) / logits.shape[1]

    def is_defined(self, y: NDArray[np.number]) -> bool:
        """Return whether images with labels (N, K) have a loss: there are images."""
        return len(y) > 0

    def score(self, logits: Array, y: NDArray[np.number]) -> float:
        """Return the mean average precision of logits (N, K), over the labels that images have; NaN if there are none.

        It is that of scikit-learn, but for equal logits.
        """
        each = []
        for k in np.flatnonzero(y.any(axis=0)):
            is_positive = y[np.argsort(-logits[:, k], kind="stable"), k] > 0
            precision = np.cumsum(is_positive) / np.arange(1, len(y) + 1)
            each.append(float(precision[is_positive].mean()))
        return float(np.mean(each)) if each else math.nan

    def strata(self, y: NDArray[np.number]) -> NDArray[np.integer]:
        """Return the stratum of each image for the folds, (N,)."""
        return MultiHot(y.astype(np.uint8)).strata()


@dataclass(frozen=True)
class _Softmax:
    """Cross entropy as a function of logits (N, K').

    Attributes:
        targets: The weighted target probabilities, (N, K'), of `_CrossEntropy`.
    """

    targets: Array

    def solvable(self) -> NDArray[np.integer]:
        """Return the indices of the classes that take part in a fit: those that a target names."""
        return np.flatnonzero(self.targets.any(axis=0))

    def of_classes(self, classes: NDArray[np.integer]) -> "_Softmax":
        """Return the same for some of the classes."""
        return _Softmax(self.targets[:, classes])

    def biases(self, fitted: Array, classes: NDArray[np.integer]) -> Array:
        """Return the bias of each class at the centre, (K,), from those of the classes of the fit, (K',)."""
        # Adding a constant to all biases changes no probability. Make their mean 0.
        centred = fitted - fitted.mean()
        # log odds at the centre: 1 in N
        biases = np.full(self.targets.shape[1], logsumexp(centred) - np.log(len(self.targets)))
        biases[classes] = centred
        return biases

    @cached_property
    def importance(self) -> Array:
        """The weight of each image, (N,)."""
        return self.targets.sum(axis=1)

    def loss(self, logits: Array) -> float:
        """Return the mean over images of the loss."""
        losses = self.importance * logsumexp(logits, axis=1) - (self.targets * logits).sum(axis=1)
        return float(losses.mean())

    def probabilities(self, logits: Array) -> Array:
        return softmax(logits, axis=1)

    def residual(self, p: Array) -> Array:
        """Return the derivative of each image's loss by its logits, (N, K'), at probabilities p (N, K')."""
        return self.importance[:, None] * p - self.targets

    def curvature(self, p: Array, change: Array) -> Array:
        """Return the second derivative of each image's loss, times a change of its logits (N, K')."""
        u = p * change
        u -= p * u.sum(axis=1, keepdims=True)
        u *= self.importance[:, None]
        return u

    def diagonal(self, p: Array) -> Array:
        """Return the diagonal of the second derivative of each image's loss, (N, K')."""
        return self.importance[:, None] * p * (1 - p)


@dataclass(frozen=True)
class _Sigmoids:
    """Binary cross entropy of each label as a function of logits (N, K'), summed over labels.

    Attributes:
        positives: The weighted target of each label, (N, K').
        importance: The weight of each pair of image and label, (N, K').
        varies: Whether some images have a label and others have not, (K',).
    """

    positives: Array
    importance: Array
    varies: NDArray[np.bool_]

    def solvable(self) -> NDArray[np.integer]:
        """Return the indices of the labels that take part in a fit: those that some images have and others have not."""
        return np.flatnonzero(self.varies)

    def of_classes(self, classes: NDArray[np.integer]) -> "_Sigmoids":
        """Return the same for some of the labels."""
        return _Sigmoids(
            self.positives[:, classes], self.importance[:, classes], self.varies[classes]
        )

    def biases(self, fitted: Array, classes: NDArray[np.integer]) -> Array:
        """Return the bias of each label at the centre, (K,), from those of the labels of the fit, (K',)."""
        num = len(self.positives)
        share = self.positives.mean(axis=0) / self.importance.mean(axis=0)
        share = share.clip(1 / (num + 1), num / (num + 1))  # of a label that no image has: 1 in N
        biases = np.log(share) - np.log1p(-share)
        biases[classes] = fitted
        return biases

    def loss(self, logits: Array) -> float:
        """Return the mean over images of the sum over labels."""
        losses = self.importance * np.logaddexp(0, logits) - self.positives * logits
        return float(losses.sum(axis=1).mean())

    def probabilities(self, logits: Array) -> Array:
        return expit(logits)

    def residual(self, p: Array) -> Array:
        """Return the derivative of each image's loss by its logits, (N, K'), at probabilities p (N, K')."""
        return self.importance * p - self.positives

    def curvature(self, p: Array, change: Array) -> Array:
        """Return the second derivative of each image's loss, times a change of its logits (N, K')."""
        return self.diagonal(p) * change

    def diagonal(self, p: Array) -> Array:
        """Return the second derivative of each image's loss by each logit, (N, K')."""
        return self.importance * p * (1 - p)


_Problem = _Softmax | _Sigmoids


def _cross_validate(
    images: _Images,
    cross_entropy: _CrossEntropy | _BinaryCrossEntropy,
    strengths: Sequence[float],
) -> tuple[list[tuple[float, float, float]], int, Array]:
    """Return the table of strengths, the index of the best, and its out-of-fold logits, as in `Probe`."""
    x, y = images.x, images.y
    folds = deal_folds(cross_entropy.strata(y), np.arange(len(y)))
    held_out = [folds == fold for fold in np.unique(folds)]
    best = 0
    best_logits = np.zeros((len(y), len(cross_entropy.class_weights)))
    # not for a single image, or if one fold has all images with a weight
    if not all(cross_entropy.is_defined(y[~rows]) for rows in held_out):
        return [], best, best_logits
    paths = [
        _path(rest, cross_entropy.problem(rest), strengths, _TOLERANCE_OF_FOLDS)
        for rest in (images.take(~rows) for rows in held_out)
    ]
    table: list[tuple[float, float, float]] = []
    for i, fits in enumerate(zip(*paths, strict=True)):
        logits = np.empty(best_logits.shape)
        for rows, (weight, bias) in zip(held_out, fits, strict=True):
            logits[rows] = _product(x[rows], weight.T) + bias
        loss = cross_entropy.loss(logits, images)
        table.append((strengths[i], loss, cross_entropy.score(logits, y)))
        if i == 0 or loss < table[best][1] - 1e-9:  # on ties up to rounding the strongest
            best = i
            best_logits = logits
        if i - best == _MAX_WORSE:
            break
    return table, best, best_logits


def _path(
    images: _Images, problem: _Problem, strengths: Sequence[float], tolerance: float
) -> Iterator[tuple[Array, Array]]:
    """Yield weight (K, D) and bias (K,) for each strength. Each fit starts from the previous solution."""
    centre = images.weighted(images.x).mean(axis=0)
    x = images.x - centre
    squares = images.weighted((x**2).sum(axis=1))
    del images  # frees its features: each fold has its own
    scale = np.sqrt(squares.mean()) or 1.0  # 1 if all images are equal
    # (N, D + 1): the bias is the weight of a constant
    x = np.column_stack([x / scale, np.ones(len(x))])
    classes = problem.solvable()
    solved = problem.of_classes(classes)
    fitted = np.zeros((len(classes), x.shape[1]))
    for strength in strengths:
        if len(classes):
            fitted = _solve(x, solved, strength, fitted, tolerance)
        bias = problem.biases(fitted[:, -1], classes)
        weight = np.zeros((len(bias), x.shape[1] - 1))
        weight[classes] = fitted[:, :-1] / scale
        yield weight, bias - weight @ centre


def _solve(
    x: Array, problem: _Problem, strength: float, w: Array, tolerance: float = _TOLERANCE
) -> Array:
    """Minimise the loss over w (K', D + 1) by Newton's method, from an initial w.

    It is twice as fast as scikit-learn's newton-cg, and much faster with label smoothing, for which scikit-learn needs
    one row per image and class. L-BFGS (SciPy, torch, scikit-learn) is as fast, but stops at a gradient norm of 1e-9,
    because the loss no longer changes in float64 (benchmarks/NOTEBOOK.md).

    Source: Nocedal and Wright, Numerical Optimization, algorithm 7.1 (line search Newton-CG).
    """
    penalty = np.full(x.shape[1], strength)
    penalty[-1] = 0.0  # the bias is not penalised

    def loss(logits: Array, w: Array) -> float:
        return float(problem.loss(logits) + (penalty * w**2).sum() / 2)

    logits = _product(x, w.T)  # (N, K')
    value = loss(logits, w)
    norm = float("inf")
    for _ in range(_MAX_STEPS):
        p = problem.probabilities(logits)
        gradient = _product(problem.residual(p).T, x) / len(x) + penalty * w
        before = norm
        norm = float(np.linalg.norm(gradient))
        # converged, or limited by rounding
        if norm <= tolerance or before / 2 < norm <= 10 * tolerance:
            return w
        step = _newton_step(x, p, problem, penalty, gradient, tolerance)
        change = _product(x, step.T)
        slope = float((gradient * step).sum())
        # Halve the step until the loss decreases. Differences below rounding count as a decrease, because otherwise the
        # last steps would be rejected.
        for t in 0.5 ** np.arange(40):
            trial = loss(logits + t * change, w + t * step)
            if trial <= value + 1e-4 * t * slope + 1e-14 * max(1.0, value):
                break
        w = w + t * step
        logits = logits + t * change
        value = trial
    raise RuntimeError(f"no head found at strength {strength}: the gradient is still {norm:.1e}")


def _newton_step(
    x: Array, p: Array, problem: _Problem, penalty: Array, gradient: Array, tolerance: float
) -> Array:
    """Solve Hessian @ step = -gradient by conjugate gradients, without forming the Hessian of (K' D)**2 numbers.

    It stops at a tenth of the tolerance of the fit. Below that is rounding: the Hessian of a softmax is singular, since
    a constant that is added to all biases changes nothing. The gradient's rounding in that direction has no solution.
    """

    def hessian(v: Array) -> Array:
        v = v.reshape(gradient.shape)
        u = problem.curvature(p, _product(x, v.T))
        return (_product(u.T, x) / len(x) + penalty * v).ravel()

    def precondition(v: Array) -> Array:
        return v / diagonal

    diagonal = (_product(problem.diagonal(p).T, x**2) / len(x) + penalty).ravel()
    size = (gradient.size, gradient.size)
    step, _ = cg(
        LinearOperator(size, hessian, dtype=np.float64),
        -gradient.ravel(),
        # the smaller the gradient, the more precise the step
        rtol=min(0.1, float(np.linalg.norm(gradient)) ** 0.5),
        atol=tolerance / 10,
        maxiter=1000,  # an unfinished step is still a descent direction
        M=LinearOperator(size, precondition, dtype=np.float64),
    )
    return step.reshape(gradient.shape)


def _product(a: Array, b: Array) -> Array:
    """Return a @ b by torch. NumPy's threads spin while they wait, which is slow when other programs are running."""
    return (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
