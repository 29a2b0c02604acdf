"""An .onnx of a float network in int8: a quarter of the size, faster on a CPU, and measured before it is trusted."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from finetune.data.decode import DecodeError
from finetune.data.samples import Samples
from finetune.inference.export_check import opened, timed
from finetune.inference.onnx_network import forbid_telemetry
from finetune.inference.predictor import Predictor
from finetune.system.progress import track

POINT = 0.01  # of accuracy that may be lost
_AT_ONCE = 25  # pictures
_PRODUCTS = ("Conv", "Gemm", "MatMul")


class Loss(NamedTuple):
    """What int8 costs and what it gives.

    Attributes:
        num_pictures: On how many it was measured.
        accuracy: The float file's, and that of int8.
        num_other: Of pictures of which int8 says another class.
        milliseconds: For one picture at a time, likewise: medians, taken in turns.
    """

    num_pictures: int
    accuracy: tuple[float, float]
    num_other: int
    milliseconds: tuple[float, float]

    @property
    def reason_against(self) -> str:
        """Why the file is of no use, in words; "" where it is."""
        (floats, ints), (slow, fast) = self.accuracy, self.milliseconds
        if floats - ints > POINT + 1e-9:
            return (
                f"it loses more than a point of accuracy: {ints:.4f}, where float has {floats:.4f}"
            )
        if fast >= slow:
            return f"it is no faster here: {fast:.1f} ms, where float takes {slow:.1f} ms"
        return ""


def quantize(source: Path, target: Path, batches: Iterable[np.ndarray]) -> None:
    """Write a copy of an .onnx whose convolutions and products are computed in int8.

    Static, with a scale for each channel of the weights. Activations are unsigned: twice as fast as signed ones on
    processors without instructions of their own for int8. Weights have 7 bits (`reduce_range`), for there 8 overflow in
    the middle of a sum: a probability of a network for hot dogs moved by 0.52 then (once seen), with 7 bits
    by 0.06 to 0.07 (three networks, `benchmarks/export`).

    Args:
        source: The file of a float network.
        target: The file to write, in a folder that may be written to.
        batches: Prepared training pictures (n, h, w, 3) uint8, by which the activations' ranges are found.
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
        options: dict[str, Any] = {
            "quant_format": QuantFormat.QDQ,
            "per_channel": True,
            "reduce_range": True,
        }
        nodes = [*onnx.load(prepared).graph.node]
        # What follows the last products stays in float: of 256 steps neither logits nor probabilities would be exact.
        tail = [
            *_behind_products(nodes),
            *(node.name for node in nodes if node.op_type == "Softmax"),
        ]
        options |= {
            "nodes_to_exclude": tail,
            "extra_options": {"OpTypesToExcludeOutputQuantization": ["Gemm"]},
        }
        types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        quantize_static(prepared, target, Reader(), **options, **types)
    prepared.unlink()
    model, floats = onnx.load(target), onnx.load(source)
    onnx.helper.set_model_props(model, {prop.key: prop.value for prop in floats.metadata_props})
    onnx.save_model(model, target)


def _behind_products(nodes: list[Any]) -> list[str]:
    """Return the names of the nodes that no convolution or product follows, of a graph in its order."""
    leading, names = set[str](), list[str]()  # tensors from which one is reached
    for node in reversed(nodes):
        if node.op_type in _PRODUCTS or not leading.isdisjoint(node.output):
            leading.update(node.input)
        else:
            names.append(node.name)
    return names


def readable(split: Samples, chosen: np.ndarray) -> np.ndarray:
    """Return those of the chosen pictures of a split that can be decoded.

    Raises:
        ValueError: None can.
    """

    def is_good(i: int) -> bool:
        try:
            split.read(i)
        except DecodeError:
            return False
        return True

    good = np.array([i for i in chosen.tolist() if is_good(i)], dtype=chosen.dtype)
    if not len(good):
        raise ValueError(f"--quantize int8: none of {len(chosen)} pictures could be decoded")
    return good


def in_batches(
    predictor: Predictor, split: Samples, chosen: np.ndarray, what: str
) -> Iterator[np.ndarray]:
    """Yield the chosen pictures of a split as the network sees them, (n, h, w, 3) uint8."""
    starts = range(0, len(chosen), _AT_ONCE)
    for start in track(starts, len(starts), what):
        yield np.stack(
            [predictor.prepare(split.read(int(i))) for i in chosen[start : start + _AT_ONCE]]
        )


def compare(
    predictor: Predictor, source: Path, target: Path, split: Samples, chosen: np.ndarray
) -> Loss:
    """Measure both files on the chosen pictures of a split."""
    said: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    runs, images = (opened(source), opened(target)), np.empty(0)
    for i, images in enumerate(in_batches(predictor, split, chosen, "measuring int8")):
        names = [split.paths[int(k)] for k in chosen[i * _AT_ONCE : (i + 1) * _AT_ONCE]]
        for run, answers in zip(runs, said, strict=True):
            answers.append(predictor.decide(run(images).astype(np.float64), names))
    floats, ints = (np.concatenate(answers) for answers in said)
    labels = split.targets.labels[chosen]
    accuracy = float((floats == labels).mean()), float((ints == labels).mean())
    return Loss(len(chosen), accuracy, int((floats != ints).sum()), timed(*runs, images))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep onnxruntime's advice, which it gives by the root logger, off the screen."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
