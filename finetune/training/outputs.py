"""What a network computes for the images of a split, on rank 0 and in the order of the images.

Rank 0 computes all metrics from it. So they do not depend on the number of devices, nor on the batches. It holds N * K
numbers of 4 bytes: 200 MB for 50,000 images and 1,000 classes.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finetune.distributed.collectives import gather_on_rank_zero
from finetune.settings.schema import LabelKind
from finetune.system.messages import bytes_text
from finetune.training.loss import precise

# Shapes: N images that could be decoded, B of them in a batch, K classes or labels.

# Measured bytes of a logit, with its label and what is computed of it in float64; and of a pair of classes in a table.
_BYTES: dict[LabelKind, int] = {"single": 16, "several": 76}
_OF_PAIR: dict[LabelKind, int] = {"single": 2 * 8, "several": 3 * 8}
_UNKNOWN = torch.empty(0)
_Batch = tuple[Tensor, ...]  # index, logits, labels and familiarity
_OPTIONS = {"val": "--trainer.limit_val_batches", "test": "--trainer.limit_test_batches"}


@dataclass(frozen=True)
class Outputs:
    """The outputs for a split.

    Attributes:
        index: The index of each image in its split, (N,), ascending.
        logits: (N, K), float32 or float64, on the CPU.
        labels: Class indices (N,), or whether each image has each label (N, K).
        bad: Index and error of each image that could not be decoded, by index.
        familiar: The familiarity of each image, (N,); empty if it is not known.
    """

    index: Tensor
    logits: Tensor
    labels: Tensor
    bad: list[tuple[int, str]]
    familiar: Tensor = _UNKNOWN


class Collector:
    """Collects the outputs of the batches of this rank."""

    def __init__(self) -> None:
        self._batches: list[_Batch] = []
        self._bad: list[tuple[int, str]] = []

    def add(self, batch: Mapping[str, Any], logits: Tensor, familiar: Tensor = _UNKNOWN) -> None:
        """Add a batch.

        Args:
            batch: A batch of `Collate`.
            logits: (B, K).
            familiar: The familiarity of the images, (B,); empty if it is not known.
        """
        self._bad += batch["bad"]
        if not len(logits):
            return
        # A device has finished the batch before this one. To copy this one now would be to wait for the device.
        self._batches[-1:] = [_on_cpu(last) for last in self._batches[-1:]]
        self._batches.append((batch["index"], precise(logits.detach()), batch["label"], familiar))

    def gather(self, trainer: Any) -> Outputs | None:
        """Return the outputs of all ranks on rank 0, None on the others. Every rank must call this at the same point.

        Args:
            trainer: The Trainer.
        """
        of_ranks = gather_on_rank_zero(self._own(), trainer)
        return _joined(of_ranks) if trainer.is_global_zero else None

    def own(self) -> Outputs:
        """Return the outputs of this rank."""
        return _joined([self._own()])

    def _own(self) -> tuple[list[_Batch], list[tuple[int, str]]]:
        self._batches[-1:] = [_on_cpu(last) for last in self._batches[-1:]]
        return self._batches, self._bad


def _on_cpu(batch: _Batch) -> _Batch:
    return tuple(column.cpu() for column in batch)


def _joined(of_ranks: Iterable[tuple[list[_Batch], list[Any]]]) -> Outputs:
    batches: list[_Batch] = []
    bad: list[tuple[int, str]] = []
    for own, own_bad in of_ranks:
        batches += own
        bad += own_bad
    bad.sort()
    if not batches:
        none = torch.empty(0)
        return Outputs(none.long(), none, none, bad)
    index, logits, labels, familiar = (torch.cat(column) for column in zip(*batches, strict=True))
    order = index.argsort(stable=True)
    familiar = familiar[order] if len(familiar) else familiar
    return Outputs(index[order], logits[order], labels[order], bad, familiar)


@torch.no_grad()
def collect(
    trainer: Any, forward: Callable[[Tensor], Tensor], batches: Iterable[Mapping[str, Any]]
) -> Collector:
    """Return the outputs of this rank for some batches, in the precision and on the device of a Trainer.

    Args:
        trainer: The Trainer.
        forward: Computes the logits (B, K) of images.
        batches: The batches of this rank.
    """
    collector = Collector()
    for batch in batches:
        logits = torch.empty(0)
        if len(batch["image"]):
            with trainer.precision_plugin.forward_context():
                logits = forward(batch["image"].to(trainer.strategy.root_device))
        collector.add(batch, logits)
    return collector


def check_memory(
    split: str, num_images: int, num_classes: int, label_kind: LabelKind, has_pairs: bool = True
) -> None:
    """Check that the outputs for a split, and tables of pairs of classes, fit into the memory of this machine.

    Raises:
        ValueError: They do not.
    """
    needed = num_images * num_classes * _BYTES[label_kind]
    if has_pairs:
        needed += num_classes**2 * _OF_PAIR[label_kind]
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ValueError(
            f"to measure {num_images:,} {split} images of {num_classes:,} classes takes {bytes_text(needed)} of "
            f"memory, and this machine has {bytes_text(memory)}: pass a smaller {_OPTIONS[split]}"
        )
