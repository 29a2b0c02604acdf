"""bf16 or float32 on a CPU, by a few timed steps of the network itself.

A processor with instructions for bf16 multiplies large matrices faster with them, and depthwise convolutions
slower: ResNet-18 trains up to 3 times faster in bf16, EfficientNet-Lite0 2 times slower (benchmarks/NOTEBOOK.md). The
choice is made once per network, image size and machine, and kept in the cache folder: commands that are
repeated, and the other processes of a fit, read it there.
"""

import copy
import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.datamodule import ImageDataModule
from finetune.distributed.launch import count_devices, is_launched, num_machines
from finetune.models.size_check import check_first_pass
from finetune.profiling.step_timing import torch_threads
from finetune.system.cache_dir import MARK, PRECISIONS, cache_dir
from finetune.system.files import one_at_a_time, replacing
from finetune.system.machine import processor
from finetune.training.classifier import Classifier

log = logging.getLogger(__name__)

FLOAT32 = "32-true"
BF16 = "bf16-mixed"
_NUM_IMAGES = 4
_MOST_PAIRS = 3  # of timed steps
_ENOUGH = 5.0  # seconds of timed steps after which no further pair is begun
_IS_CLEAR = 1.3  # ratio of the times at which no further pair is needed
_MIN_GAIN = 1.05  # bf16 rounds more, so it has to be faster by more than the noise


def fit_precision(model: Classifier, data: ImageDataModule, trainer: Any) -> str:
    """Return the precision of a fit on this CPU, the same in all its processes.

    Args:
        model: As for `faster_precision`.
        data: The images that it will be trained on.
        trainer: The settings of the Trainer, of which `devices` and `num_nodes` matter.
    """
    if "train" not in data.splits:
        return BF16  # the fit will be refused
    if trainer["num_nodes"] != 1 or num_machines() > 1:
        return BF16  # machines do not see each other's choices
    has_peers = is_launched() or (count_devices(trainer["devices"]) or 1) > 1
    return faster_precision(model, data.image_size, has_peers)


def faster_precision(model: Classifier, image_size: int, has_peers: bool) -> str:
    """Return the precision in which the network trains faster on this CPU, `bf16-mixed` or `32-true`.

    Args:
        model: A network that is not trained yet; it is not changed.
        image_size: Side of the training images in pixels.
        has_peers: Whether other processes of this machine train with this one. All must choose the same, so where the
            choice cannot be written for them, the processor decides: `bf16-mixed`.

    Raises:
        ValueError: The network cannot take images of this size.
    """
    file = cache_dir() / PRECISIONS
    key = _key(model, image_size)
    try:
        if known := read_choices(file).get(key):
            return known
        with one_at_a_time(file):
            choices = read_choices(file)
            if key not in choices:
                _write(file, choices)  # an error comes before the trial, not after it
                choices[key] = _run_trial(model, image_size)
                _write(file, choices)
            return choices[key]
    except OSError as error:
        if has_peers:
            log.warning(
                "%s: %s. So no steps were timed, and every process trains in %s",
                file,
                error.strerror or error,
                BF16,
            )
            return BF16
        return _run_trial(model, image_size)


def read_choices(file: Path) -> dict[str, str]:
    """Return what was chosen before: precisions by network; empty if the file is missing or damaged."""
    try:
        mark, text = file.read_bytes().split(b"\n", 1)
        choices = json.loads(text)
    except (FileNotFoundError, ValueError):
        return {}
    if mark != MARK or not isinstance(choices, dict):
        return {}
    return {key: value for key, value in choices.items() if value in (FLOAT32, BF16)}


def _write(file: Path, choices: dict[str, str]) -> None:
    with replacing(file) as temporary:
        temporary.write_bytes(MARK + b"\n" + json.dumps(choices, indent=1).encode())


def _key(model: Classifier, image_size: int) -> str:
    """Return a hash of what the times depend on."""
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    shapes = [(name, *value.shape) for name, value in model.named_parameters()]
    about = [model.backbone, shapes, trained, image_size, torch.__version__, processor()]
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def _run_trial(model: Classifier, image_size: int) -> str:
    """Time steps of the network, log the precision in which it trains faster, and return that."""
    check_first_pass(model.image_classifier, model.backbone, image_size)
    ratio = time_ratio(model, image_size)
    chosen = BF16 if ratio >= _MIN_GAIN else FLOAT32
    times = f"{ratio:.1f} times faster" if ratio >= 1 else f"{1 / ratio:.1f} times slower"
    log.info(
        "precision %s: %s trains %s in bf16 than in float32 on this machine",
        chosen,
        model.backbone,
        times,
    )
    return chosen


def time_ratio(model: Classifier, image_size: int) -> float:
    """Return the time of a training step in float32 over that in bf16.

    The steps take turns, on one thread, by the processor's time: other programs on the machine hardly matter.
    """
    network = copy.deepcopy(model.image_classifier.members[0]).cpu().float().train()
    network.to(memory_format=torch.channels_last)
    shape = (_NUM_IMAGES, 3, image_size, image_size)
    with torch_threads(1), torch.random.fork_rng(devices=[]):
        images = torch.randn(shape).contiguous(memory_format=torch.channels_last)
        for is_bf16 in (False, True):  # compiles kernels
            _seconds(network, images, is_bf16)
        began = time.process_time()
        in_float32 = float("inf")
        in_bf16 = float("inf")
        for _ in range(_MOST_PAIRS):
            in_float32 = min(in_float32, _seconds(network, images, is_bf16=False))
            in_bf16 = min(in_bf16, _seconds(network, images, is_bf16=True))
            ratio = in_float32 / in_bf16
            is_clear = not 1 / _IS_CLEAR < ratio < _IS_CLEAR
            if is_clear or time.process_time() - began > _ENOUGH:
                break
    return ratio


def _seconds(network: nn.Module, images: Tensor, is_bf16: bool) -> float:
    """Return the processor's seconds of a forward and a backward pass."""
    began = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
        logits = network(images)
    logits.float().square().sum().backward()
    seconds = time.process_time() - began
    network.zero_grad()
    return seconds
