"""Batches are copied to a GPU while it computes."""

import pytest
import torch

from finetune.data.loader import DeviceCopy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_whole_however_busy_the_device_is():
    device, transfer = torch.device("cuda", 0), DeviceCopy()
    busy, seen = torch.randn(4096, 4096, device=device), []
    for i in range(20):
        pixels = torch.full((64, 3, 224, 224), i, dtype=torch.uint8).pin_memory()
        there = transfer(
            {"image": pixels, "bad": []},
            device,
            lambda batch, to: {"image": batch["image"].to(to, non_blocking=True), "bad": []},
        )
        for _ in range(5):
            busy = busy @ busy / 4096
        seen.append(there["image"].float().mean())
        del there
    assert torch.stack(seen).tolist() == list(range(20))
