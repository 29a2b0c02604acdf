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

# Shapes: N images, D features, K classes; K' of the classes take part in a fit. F fits are solved together.

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.targets import MultiHot
from finetune.features.average_precision import average_precision, mean_average_precision

Array = NDArray[np.float64]

STRENGTHS = tuple(10.0 ** np.arange(0, -6.5, -0.5))
NUM_FOLDS = 5

# Gradient norm at which a fit counts as converged; the weights are then within norm / strength of the optimum. For the
# final fit this distance is 1e-10 at any strength, or as small as rounding allows. So runs that round differently find
# the same head. Fits for cross-validation are solved less precisely.
_TOLERANCE = 1e-12
_ROUNDING = 1e-13  # a gradient norm below it that no step reduces consists of rounding
_TOLERANCE_OF_FOLDS = 1e-8
_MAX_DISTANCE = 1e-10

_MAX_STEPS = 200  # of Newton's method; about five are needed
_MAX_ITERATIONS = 1000  # of conjugate gradients in a step
_MAX_ELEMENTS = 2**25  # of the logits or weights of fits that are solved together
_MAX_WORSE = 3  # strengths in a row that are worse than the best; weaker ones are not tried


@dataclass(frozen=True)
class Probe:
    """A fitted head for unscaled features, with the cross-validation that chose its strength.

    Attributes:
        weight: (K, D).
        bias: (K,).
        strength: Strength of the penalty.
        score: Cross-validated accuracy on the images of the fit, or the mean average precision of several labels; None
            without cross-validation.
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
    groups: NDArray[np.integer] | None = None,
) -> Probe:
    """Fit a head at the strength with the lowest cross-validated loss; on ties at the strongest.

    There are five stratified folds, which do not divide groups. Strengths are tried from the strongest to the weakest,
    because weak ones take longest, until three in a row are worse than the best. The head is then fitted on all images
    at the best strength.
    There is no cross-validation if each class has a single group, or if one fold has all images with a weight. The
    strength is then the middle one.

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
        groups: Group of each image, (N,), in any numbers; None if each image is a group of its own.

    Raises:
        ValueError: A strength is not positive, the features are empty or not finite, or all images have classes of
            weight 0.
    """
    if min(strengths) <= 0:
        raise ValueError(f"strengths must be above 0, not {min(strengths)}")
    y = np.asarray(labels)
    groups = np.arange(len(y)) if groups is None else groups
    of_classes = (
        np.ones(num_classes) if class_weights is None else np.asarray(class_weights, np.float64)
    )
    # Images of weight 0 change nothing. Without them, no fold has a total weight of 0.
    # With label smoothing, the loss of an image has the weights of all classes.
    is_used = np.ones(len(y), bool)
    if image_weights is not None:
        is_used &= image_weights > 0
    if y.ndim == 1 and label_smoothing == 0:
        is_used &= of_classes[y] > 0
    if not is_used.all():
        features = features[is_used]
        y = y[is_used]
        groups = groups[is_used]
        image_weights = None if image_weights is None else image_weights[is_used]
    if len(features) == 0:
        raise ValueError("there are no features")
    if not np.isfinite(features).all():
        raise ValueError("the features hold values that are not finite")
    strengths = sorted(map(float, strengths), reverse=True)
    x = np.asarray(features, np.float64)
    axes = _principal_axes(x)
    images = _Images.scaled(_product(x, axes), y, of_classes, label_smoothing, image_weights)
    uses_all = np.ones((1, len(y)), bool)
    if not images.have_loss(uses_all):
        raise ValueError("all images have classes of weight 0")
    table, best, out_of_fold = _cross_validate(images, groups, strengths)
    strength = strengths[best]
    tolerance = min(_TOLERANCE, _MAX_DISTANCE * strength)
    weights, biases = next(_path(images, uses_all, [strength], tolerance))
    loss, score = table[best][1:] if table else (None, None)
    return Probe(
        weight=_product(weights[0], axes.T),
        bias=biases[0],
        strength=strength,
        score=score,
        loss=loss,
        table=table,
        out_of_fold=out_of_fold,
    )


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
    images = _Images.scaled(features, np.asarray(labels), np.ones(num_classes), 0.0)
    is_used = np.ones((1, len(labels)), bool)
    weights, biases = next(_path(images, is_used, [strength], _TOLERANCE_OF_FOLDS))
    return weights[0], biases[0]


def deal_folds(labels: NDArray[np.integer], groups: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the fold of each image, (N,). Groups are assigned at random by a fixed seed, evenly in each class.

    Args:
        labels: Class index of each image, (N,). The class of a group is that of its first image.
        groups: Group of each image, (N,), in any numbers. A group is in one fold.
    """
    first, group_of = first_of_groups(groups)
    shuffled = np.random.default_rng(0).permutation(len(first))
    order = shuffled[np.argsort(labels[first][shuffled], kind="stable")]
    fold_of_group = np.empty(len(first), np.int64)
    fold_of_group[order] = np.arange(len(first)) % NUM_FOLDS
    return fold_of_group[group_of]


def first_of_groups(
    groups: NDArray[np.integer],
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Return the index of the first image of each group, sorted, (G,), and the place there of each image's, (N,)."""
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], np.argsort(order)[group_of]


@dataclass(frozen=True)
class _Images:
    """Images with their labels and weights.

    Attributes:
        x: Their scaled features and a constant, (N, D + 1): the bias is the weight of the constant.
        single: The same in float32, for the steps of a fit.
        y: Their labels, (N,) or (N, K).
        weights: Their weights, (N,), all above 0.
        targets: The weighted targets of an image for all classes, (N, K).
        importance: What probabilities are multiplied by in the loss: the sum of an image's targets, (N, 1); of several
            labels the weight of each pair of image and label, (N, K).
        shares: The weight of each image's class in the mean over images, (N,).
        centre: The centre of the unscaled features, (D,).
        scale: The number that the features were divided by.
    """

    x: Tensor
    single: Tensor
    y: NDArray[Any]
    weights: Array
    targets: Array
    importance: Array
    shares: Array
    centre: Array
    scale: float

    @classmethod
    def scaled(
        cls,
        features: Array,
        y: NDArray[Any],
        class_weights: Array,
        label_smoothing: float,
        weights: Array | None = None,
    ) -> "_Images":
        """Return images with features (N, D) and weights (N,), None for 1 each.

        Targets are those of `torch.nn.CrossEntropyLoss`, where smoothing uses the weight of each class, and of
        `torch.nn.BCEWithLogitsLoss`, where the class weights are those of the positives.
        """
        weights = np.ones(len(y)) if weights is None else np.asarray(weights, np.float64)
        centre = np.average(features, axis=0, weights=weights)
        centred = features - centre
        scale = math.sqrt(np.average((centred**2).sum(axis=1), weights=weights)) or 1.0
        x = torch.ones(len(y), len(centre) + 1, dtype=torch.float64)
        x[:, :-1] = torch.from_numpy(centred).div_(scale)
        if y.ndim == 1:
            shares = class_weights[y]
            targets = np.zeros((len(y), len(class_weights)))
            targets[np.arange(len(y)), y] = (1 - label_smoothing) * shares
            targets += label_smoothing / len(class_weights) * class_weights
            importance = targets.sum(axis=1, keepdims=True)
        else:
            shares = np.ones(len(y))
            wanted = np.asarray(y, np.float64) * (1 - label_smoothing) + label_smoothing / 2
            targets = class_weights * wanted
            importance = targets + 1 - wanted
        return cls(x, x.float(), y, weights, targets, importance, shares, centre, scale)

    @property
    def is_single(self) -> bool:
        """Whether each image has one class."""
        return self.y.ndim == 1

    def have_loss(self, is_used: NDArray[np.bool_]) -> bool:
        """Return whether the images of each fit, (F, N), have a loss: some have a class of a weight above 0."""
        return bool(((self.shares > 0) & is_used).any(axis=1).all())

    def solvable(self, is_used: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which classes take part in a fit of some of the images, (N,).

        Those with a target above 0, or the labels that some images have and others have not, (K,).
        """
        targets = self.targets[is_used]
        return (targets != (0.0 if self.is_single else targets[:1])).any(axis=0)

    def loss(self, is_used: NDArray[np.bool_]) -> "_Loss":
        """Return the losses of fits that each use some of the images, (F, N)."""
        weights = self.weights * is_used
        rows = len(self.y) * weights / (weights * self.shares).sum(axis=1, keepdims=True)
        return _Loss(
            torch.from_numpy(self.targets[:, None]),
            torch.from_numpy(self.importance[:, None]),
            torch.from_numpy(rows.T[:, :, None]),
            self.is_single,
        )


@dataclass(frozen=True)
class _Loss:
    """Cross entropy, or binary cross entropy summed over labels, as a function of the logits of F fits, (N, F, K').

    Attributes:
        targets: The weighted targets, (N, 1, K').
        importance: What probabilities are multiplied by, (N, 1, 1) or (N, 1, K').
        rows: The weight of each image in each fit, (N, F, 1); 0 if the fit does not use it.
        is_single: Whether each image has one class.
    """

    targets: Tensor
    importance: Tensor
    rows: Tensor
    is_single: bool

    def of_classes(self, classes: Tensor) -> "_Loss":
        """Return the same for some of the classes."""
        importance = self.importance if self.is_single else self.importance[:, :, classes]
        return _Loss(self.targets[:, :, classes], importance, self.rows, self.is_single)

    def biases(self, fitted: Tensor, classes: Tensor) -> Tensor:
        """Return the bias of each class at the centre, (F, K), from those of the classes of the fit, (F, K').

        Other classes have odds of 1 in N there; a label that all images have, of N to 1.
        """
        num = (self.rows > 0).sum(dim=0).double()  # (F, 1)
        if self.is_single:
            # Adding a constant to all biases changes no probability. Make their mean 0.
            fitted = fitted - fitted.mean(dim=1, keepdim=True)
            odds = fitted.logsumexp(dim=1, keepdim=True) - num.log()
            biases = odds.repeat(1, self.targets.shape[2])
        else:
            total = (self.rows * self.importance).mean(dim=0)
            share = (self.rows * self.targets).mean(dim=0) / total
            biases = share.clamp(1 / (num + 1), num / (num + 1)).logit()
        biases[:, classes] = fitted
        return biases

    def value(self, logits: Tensor) -> Tensor:
        """Return the mean over images of the loss of each fit, (F,)."""
        if self.is_single:
            losses = self.importance[:, :, 0] * logits.logsumexp(dim=2)
        else:
            softplus = torch.logaddexp(logits, torch.zeros_like(logits))
            losses = (self.importance * softplus).sum(dim=2)
        losses -= (self.targets * logits).sum(dim=2)
        return (self.rows[:, :, 0] * losses).mean(dim=0)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=2) if self.is_single else logits.sigmoid()

    def residual(self, p: Tensor) -> Tensor:
        """Return the derivative of each image's loss by its logits, (N, F, K'), at probabilities p (N, F, K')."""
        return self.rows * (self.importance * p - self.targets)

    def curvature(self, p: Tensor, change: Tensor) -> Tensor:
        """Return the second derivative of each image's loss, times a change of its logits (N, F, K')."""
        u = p * change
        u -= p * (u.sum(dim=2, keepdim=True) if self.is_single else u)
        u *= self.rows * self.importance
        return u

    def diagonal(self, p: Tensor) -> Tensor:
        """Return the diagonal of the second derivative of each image's loss, (N, F, K')."""
        return self.rows * self.importance * p * (1 - p)


def _cross_validate(
    images: _Images, groups: NDArray[np.integer], strengths: Sequence[float]
) -> tuple[list[tuple[float, float, float]], int, Array]:
    """Return the table of strengths, the index of the best, and its out-of-fold logits, as in `Probe`."""
    y = images.y
    folds = deal_folds(y if images.is_single else MultiHot(y.astype(np.uint8)).strata(), groups)
    held_out = np.stack([folds == fold for fold in np.unique(folds)])  # (F, N)
    best_logits = np.zeros(images.targets.shape)
    # If each class has a single group, no held-out image has a class of the fit, and the strongest penalty would win.
    # A fold that is held out may be all images that have a weight.
    if _has_single_groups(y, groups) or not images.have_loss(~held_out):
        return [], len(strengths) // 2, best_logits
    best = 0
    batches = _batches(images, ~held_out)
    paths = [_path(images, ~held_out[batch], strengths, _TOLERANCE_OF_FOLDS) for batch in batches]
    loss_of_all = images.loss(np.ones((1, len(y)), bool))
    x = images.x[:, :-1].numpy()
    table: list[tuple[float, float, float]] = []
    for i, fits in enumerate(zip(*paths, strict=True)):
        logits = np.empty(best_logits.shape)
        for batch, (weights, biases) in zip(batches, fits, strict=True):
            for fold, weight, bias in zip(batch, weights, biases, strict=True):
                rows = held_out[fold]
                at_centre = weight @ images.centre + bias
                logits[rows] = _product(x[rows], images.scale * weight.T) + at_centre
        loss = float(loss_of_all.value(torch.from_numpy(logits[:, None])))
        if images.is_single:
            score = float((logits.argmax(axis=1) == y).mean())
        else:
            loss /= images.targets.shape[1]
            score = mean_average_precision(average_precision(logits, y))
        table.append((strengths[i], loss, score))
        if i == 0 or loss < table[best][1] - 1e-9:  # on ties up to rounding the strongest
            best = i
            best_logits = logits
        if i - best == _MAX_WORSE:
            break
    return table, best, best_logits


def _has_single_groups(y: NDArray[Any], groups: NDArray[np.integer]) -> bool:
    """Return whether each class has the images of a single group, and images have one class each."""
    return y.ndim == 1 and all(len(np.unique(groups[y == k])) == 1 for k in np.unique(y))


def _batches(images: _Images, is_used: NDArray[np.bool_]) -> list[list[int]]:
    """Return the indices of fits that are solved together: they have the same classes, and fit into memory."""
    num_elements = max(images.x.shape) * images.targets.shape[1]
    most = max(1, _MAX_ELEMENTS // num_elements)
    batches: dict[bytes, list[list[int]]] = {}
    for fit, rows in enumerate(is_used):
        same = batches.setdefault(images.solvable(rows).tobytes(), [[]])
        if len(same[-1]) == most:
            same.append([])
        same[-1].append(fit)
    return [batch for same in batches.values() for batch in same]


def _path(
    images: _Images,
    is_used: NDArray[np.bool_],
    strengths: Sequence[float],
    tolerance: float,
) -> Iterator[tuple[Array, Array]]:
    """Yield weights (F, K, D) and biases (F, K) for each strength. Each fit starts from the previous solution.

    Args:
        images: The images.
        is_used: Which of the images each of the fits uses, (F, N). All fits have the same classes.
        strengths: Strengths, strongest first.
        tolerance: Norm of the gradient at which a fit has converged.
    """
    centres = []  # of the scaled features that a fit uses
    spreads = []
    for rows in is_used:
        x = images.x[torch.from_numpy(rows), :-1]  # a copy
        weights = torch.from_numpy(images.weights[rows] / images.weights[rows].sum())
        centre = weights @ x
        centres.append(centre)
        x.sub_(centre).square_()
        spreads.append(float(weights @ x.sum(dim=1)) or 1.0)  # 1 if all images are equal
    centre = torch.stack(centres)[:, None]  # (F, 1, D)
    loss = images.loss(is_used)
    classes = torch.from_numpy(np.flatnonzero(images.solvable(is_used[0])))
    solved = loss.of_classes(classes)
    fitted = torch.zeros(len(is_used), len(classes), images.x.shape[1], dtype=torch.float64)
    for strength in strengths:
        if len(classes):
            penalty = strength * torch.tensor(spreads, dtype=torch.float64)
            fitted = _solve(images, solved, penalty, fitted, tolerance)
        at_centre = fitted[:, :, -1] + (fitted[:, :, :-1] * centre).sum(dim=2)
        biases = loss.biases(at_centre, classes)
        weights = torch.zeros(*biases.shape, images.x.shape[1] - 1, dtype=torch.float64)
        weights[:, classes] = fitted[:, :, :-1]
        biases -= (weights * centre).sum(dim=2)
        weights /= images.scale
        yield weights.numpy(), (biases - weights @ torch.from_numpy(images.centre)).numpy()


def _solve(images: _Images, loss: _Loss, strengths: Tensor, w: Tensor, tolerance: float) -> Tensor:
    """Minimise the losses of F fits over w (F, K', D + 1) by Newton's method, from an initial w.

    The features are read once for all fits, and most often in float32: the steps need no more digits, since the
    gradient that they solve for is in float64. L-BFGS (SciPy, torch) stops at a gradient norm of 1e-9, because the loss
    no longer changes in float64 (docs/decisions.md).

    Source: Nocedal and Wright, Numerical Optimization, algorithm 7.1 (line search Newton-CG).
    """
    penalty = strengths[:, None, None].repeat(1, 1, w.shape[2])  # (F, 1, D + 1)
    penalty[:, :, -1] = 0.0  # the bias is not penalised

    def losses(logits: Tensor, w: Tensor) -> Tensor:
        return loss.value(logits) + (penalty * w.square()).sum(dim=(1, 2)) / 2

    logits = _logits(images.x, w)
    values = losses(logits, w)
    best = w
    norms = torch.full_like(values, math.inf)  # of the best
    for _ in range(_MAX_STEPS):
        p = loss.probabilities(logits)
        gradient = _sums(loss.residual(p), images.x) + penalty * w
        is_better = gradient.flatten(1).norm(dim=1) < norms
        best = torch.where(is_better[:, None, None], w, best)
        norms = torch.where(is_better, gradient.flatten(1).norm(dim=1), norms)
        # converged, or limited by rounding
        is_done = (norms <= tolerance) | (~is_better & (norms <= max(10 * tolerance, _ROUNDING)))
        if is_done.all():
            return best
        gradient[is_done] = 0.0  # their steps are 0
        hessian = _Hessian(images, loss, p, penalty)
        step = _newton_step(hessian, gradient, tolerance)
        change = _logits(images.x, step)
        slope = (gradient * step).sum(dim=(1, 2))
        # Halve the step until the loss decreases. Differences below rounding count as a decrease, because otherwise the
        # last steps would be rejected.
        t = torch.ones_like(values)
        for _ in range(40):
            trials = losses(logits + t[:, None] * change, w + t[:, None, None] * step)
            is_worse = trials > values + 1e-4 * t * slope + 1e-14 * values.clamp(min=1.0)
            if not is_worse.any():
                break
            t = torch.where(is_worse, t / 2, t)
        w = w + t[:, None, None] * step
        logits = logits + t[:, None] * change
        values = trials
    raise RuntimeError(
        f"no head found at strength {float(strengths[0])}: the gradient is still {float(norms.max()):.1e}"
    )


@dataclass(frozen=True)
class _Hessian:
    """The second derivatives of the losses of F fits by their weights, without their matrices of (K' D)**2 numbers.

    Attributes:
        images: The images.
        loss: The losses.
        p: Probabilities, (N, F, K').
        penalty: Strength of the penalty of each weight, (F, 1, D + 1).
    """

    images: _Images
    loss: _Loss
    p: Tensor
    penalty: Tensor

    def times(self, v: Tensor) -> Tensor:
        """Return the product with a change of the weights (F, K', D + 1)."""
        change = _logits(self.images.single, v.float()).double()
        u = self.loss.curvature(self.p, change)
        return _sums(u.float(), self.images.single).double() + self.penalty * v

    def diagonal(self) -> Tensor:
        """Return the diagonal, (F, K', D + 1), above 0."""
        u = self.loss.diagonal(self.p)
        diagonal = _sums(u.float(), self.images.single.square()).double() + self.penalty
        return diagonal.clamp(min=1e-30)  # if no image has a curvature


def _newton_step(hessian: _Hessian, gradient: Tensor, tolerance: float) -> Tensor:
    """Solve Hessian @ step = -gradient of each fit by conjugate gradients.

    It stops at a tenth of the tolerance of the fit. Below that is rounding: the Hessian of a softmax is singular, since
    a constant that is added to all biases changes nothing. The gradient's rounding in that direction has no solution.
    """

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(dim=(1, 2), keepdim=True)  # (F, 1, 1)

    diagonal = hessian.diagonal()
    norm = dot(gradient, gradient).sqrt()
    # the smaller the gradient, the more precise the step, as far as float32 allows
    limit = (norm * norm.sqrt().clamp(1e-5, 0.1)).clamp(min=tolerance / 10)
    step = torch.zeros_like(gradient)
    rest = -gradient
    direction = rest / diagonal
    size = dot(rest, direction)
    for _ in range(_MAX_ITERATIONS):  # an unfinished step is still a descent direction
        is_active = dot(rest, rest).sqrt() > limit
        if not is_active.any():
            break
        product = hessian.times(direction)
        length = torch.where(is_active, size / dot(direction, product), 0.0)
        step += length * direction
        rest -= length * product
        scaled = rest / diagonal
        before = size
        size = dot(rest, scaled)
        direction = scaled + torch.where(is_active, size / before, 0.0) * direction
    return step


def _logits(x: Tensor, w: Tensor) -> Tensor:
    """Return the logits (N, F, K') of features x (N, D + 1) and weights w (F, K', D + 1)."""
    return (x @ w.flatten(0, 1).T).unflatten(1, w.shape[:2])


def _sums(u: Tensor, x: Tensor) -> Tensor:
    """Return the mean over images of values u (N, F, K') times features x (N, D + 1), (F, K', D + 1)."""
    return (u.flatten(1).T @ x).unflatten(0, u.shape[1:]) / len(x)


def _product(a: Array, b: Array) -> Array:
    """Return a @ b by torch. NumPy's threads spin while they wait, which is slow when other programs are running."""
    return (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
