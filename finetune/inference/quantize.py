"""Static int8 quantization of an .onnx: a quarter of the size, and faster on a CPU.

Accuracy and time are measured on test images before the file is accepted.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from finetune.data.decode import DecodeError
from finetune.data.samples import Samples
from finetune.inference.export_check import load_exported, time_in_turns
from finetune.inference.onnx_session import forbid_telemetry
from finetune.inference.predictor import Predictor
from finetune.system.progress import track
from finetune.training.logit_histogram import (
    average_precision,
    histogram,
    mean_average_precision,
)

MAX_ACCURACY_LOSS = 0.01
_BATCH_SIZE = 25
_PRODUCTS = ("Conv", "Gemm", "MatMul")


class QuantizationResult(NamedTuple):
    """Accuracy and speed of an int8 file next to those of its float file.

    Attributes:
        num_images: Number of test images.
        accuracy: Accuracy of the float file and of the int8 file; of several labels the mean average precision.
        num_other: Number of images for which the int8 file predicts another class, or other labels.
        milliseconds: Median time for one image, of the float file and of the int8 file.
        metric: What `accuracy` is: `accuracy` or `mAP`.
    """

    num_images: int
    accuracy: tuple[float, float]
    num_other: int
    milliseconds: tuple[float, float]
    metric: str = "accuracy"

    def as_plain(self) -> dict[str, Any]:
        """Return plain values for the description of the file."""
        plain = self._asdict()
        keys = {"accuracy": plain.pop("metric"), "num_images": "num_pictures"}
        return {keys.get(name, name): value for name, value in plain.items()}

    @property
    def reason_against(self) -> str:
        """Why the int8 file should not be used, in words; "" if it may be used."""
        floats, ints = self.accuracy
        slow, fast = self.milliseconds
        if floats - ints > MAX_ACCURACY_LOSS + 1e-9:
            return f"it loses more than a point of {self.metric}: {ints:.4f}, where float has {floats:.4f}"
        if fast >= slow:
            return f"it is not faster on this machine: {fast:.1f} ms, and float {slow:.1f} ms"
        return ""


def quantize(source: Path, target: Path, batches: Iterable[np.ndarray]) -> None:
    """Write a copy of an .onnx that computes convolutions and matrix products in int8.

    Quantization is static, with one scale for each output channel of the weights. Activations are
    unsigned: that is twice as fast as signed on processors without int8 instructions. Weights have
    7 bits (`reduce_range`), since 8 bits overflow within a sum on such processors. With 8 bits a
    probability of a hot dog classifier changed by 0.52 (seen once), with 7 bits by 0.06 to 0.07
    (three networks, `benchmarks/export`).

    Args:
        source: The file of the float network.
        target: The file to write, in a writable folder.
        batches: Batches of prepared training images (n, h, w, 3) uint8. They give the ranges of the activations.
    """
    forbid_telemetry()
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._batches = iter(batches)

        def get_next(self) -> Any:
            batch = next(self._batches, None)
            return None if batch is None else {"images": batch}

    prepared = target.with_name(f"{target.name}.prepared")
    with _quiet():
        quant_pre_process(source, prepared, skip_symbolic_shape=True)
        nodes = [*onnx.load(prepared).graph.node]
        softmaxes = [node.name for node in nodes if node.op_type == "Softmax"]
        quantize_static(
            prepared,
            target,
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            # Nodes after the last products stay in float: 256 steps are too coarse for logits and probabilities.
            nodes_to_exclude=[*_nodes_after_products(nodes), *softmaxes],
            extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm"]},
        )
    prepared.unlink()
    model = onnx.load(target)
    floats = onnx.load(source)
    onnx.helper.set_model_props(model, {prop.key: prop.value for prop in floats.metadata_props})
    onnx.save_model(model, target)


def _nodes_after_products(nodes: list[Any]) -> list[str]:
    """Return the names of the nodes after the last convolution or product, for nodes in topological order."""
    leading = set[str]()  # tensors from which a product is reached
    names = list[str]()
    for node in reversed(nodes):
        if node.op_type in _PRODUCTS or not leading.isdisjoint(node.output):
            leading.update(node.input)
        else:
            names.append(node.name)
    return names


def readable(split: Samples, chosen: np.ndarray) -> np.ndarray:
    """Return the indices of the chosen images of a split that can be decoded.

    Raises:
        ValueError: None of them can be decoded.
    """

    def is_good(i: int) -> bool:
        try:
            split.read(i)
        except DecodeError:
            return False
        return True

    good = np.array([i for i in chosen.tolist() if is_good(i)], dtype=chosen.dtype)
    if not len(good):
        raise ValueError(f"--quantize int8: none of {len(chosen)} images could be decoded")
    return good


def prepared_batches(
    predictor: Predictor, split: Samples, chosen: np.ndarray, what: str
) -> Iterator[np.ndarray]:
    """Yield the chosen images of a split in prepared batches, (n, h, w, 3) uint8."""
    starts = range(0, len(chosen), _BATCH_SIZE)
    for start in track(starts, len(starts), what):
        yield np.stack(
            [predictor.prepare(split.read(int(i))) for i in chosen[start : start + _BATCH_SIZE]]
        )


def compare(
    predictor: Predictor, source: Path, target: Path, split: Samples, chosen: np.ndarray
) -> QuantizationResult:
    """Measure the float file and the int8 file on the chosen images of a split."""
    probabilities: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    runs = (load_exported(source), load_exported(target))
    images = np.empty(0)  # after the loop: the last batch, which is timed
    for i, images in enumerate(prepared_batches(predictor, split, chosen, "measuring int8")):
        names = [split.paths[int(k)] for k in chosen[i * _BATCH_SIZE : (i + 1) * _BATCH_SIZE]]
        for run, parts in zip(runs, probabilities, strict=True):
            parts.append(run(images).astype(np.float64))
            predictor.check(parts[-1], names)
    floats, ints = (np.concatenate(parts) for parts in probabilities)
    labels = split.targets.labels[chosen]
    is_other = predictor.decide(floats) != predictor.decide(ints)
    if predictor.label_kind == "several":
        is_other = is_other.any(axis=1)
    return QuantizationResult(
        num_images=len(chosen),
        accuracy=(_score(predictor, floats, labels), _score(predictor, ints, labels)),
        num_other=int(is_other.sum()),
        milliseconds=time_in_turns(*runs, images),
        metric="mAP" if predictor.label_kind == "several" else "accuracy",
    )


def _score(predictor: Predictor, probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return the accuracy of probabilities (N, K); of several labels the mean average precision."""
    if predictor.label_kind == "single":
        return float((predictor.decide(probabilities) == labels).mean())
    # the average precision depends only on the order of the images, which is the same for log odds
    counts = histogram(torch.from_numpy(probabilities).logit(1e-12), torch.from_numpy(labels))
    return float(mean_average_precision(average_precision(counts)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress onnxruntime's advice, which goes to the root logger."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
