"""Batches are copied to a GPU while it computes; other devices have nothing to overlap."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from finetune.data.device_copy import DeviceCopy


def move(batch: dict, device: torch.device) -> dict:
    return {
        k: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v
        for k, v in batch.items()
    }


def test_without_cuda_a_batch_is_just_moved():
    batch = {"image": torch.ones(2), "bad": []}
    assert DeviceCopy()(batch, torch.device("cpu"), lambda given, device: given) is batch


def test_what_computes_waits_for_the_copy_and_keeps_its_memory(monkeypatch):
    """The order of the CUDA calls, recorded without a GPU."""
    reported = []

    class Pixels(torch.Tensor):
        def record_stream(self, stream):
            reported.append(("keep until used by", stream.name))

    def stream(name):
        return SimpleNamespace(
            name=name, wait_stream=lambda other: reported.append((name, "waits for", other.name))
        )

    @contextmanager
    def on(stream):
        reported.append(("to", stream.name))
        yield
        reported.append(("from", stream.name))

    made = []
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device: made.append(device) or stream("copying")
    )
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream("computing"))
    transfer, device = DeviceCopy(), torch.device("cuda", 0)
    batch = {
        "image": torch.ones(2).as_subclass(Pixels),
        "label": torch.ones(1).as_subclass(Pixels),
        "bad": [(3, "x")],
    }
    for _ in range(2):
        assert (
            transfer(batch, device, lambda given, device: reported.append("copy") or given) is batch
        )
    once = [("to", "copying"), "copy", ("from", "copying"), ("computing", "waits for", "copying")]
    assert reported == [*once, *[("keep until used by", "computing")] * 2] * 2
    assert made == [device]  # one stream for all batches


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_whole_however_busy_the_device_is():
    device, transfer = torch.device("cuda", 0), DeviceCopy()
    busy, seen = torch.randn(4096, 4096, device=device), []
    for i in range(20):
        there = transfer(
            {"image": torch.full((64, 3, 224, 224), i, dtype=torch.uint8).pin_memory()},
            device,
            move,
        )
        for _ in range(5):
            busy = busy @ busy / 4096
        seen.append(there["image"].float().mean())
        del there
    assert torch.stack(seen).tolist() == list(range(20))
