"""Warm-up and cosine decay."""

import math

import pytest
import torch

from finetune.training.lr_schedulers import WarmupCosine


def two_groups() -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(2, requires_grad=True)], "lr": lr} for lr in (0.1, 1.0)]
    return torch.optim.SGD(groups, momentum=0.9)


def rates(
    optimizer: torch.optim.Optimizer, scheduler: WarmupCosine, num_steps: int
) -> list[list[float]]:
    """Learning rates of the groups at each optimizer step."""
    seen = []
    for _ in range(num_steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def test_by_hand():
    optimizer = two_groups()
    seen = rates(optimizer, WarmupCosine(optimizer, total_steps=10, warmup=0.4, final=0.1), 12)
    # 4 steps of warm-up; then cos(0, 30, 60, 90, 120 and 150 degrees) between 1 and 0.1; 0.1 after the end.
    factors = [0.25, 0.5, 0.75, 1.0]
    factors += [0.55 + 0.45 * c for c in (1, math.sqrt(3) / 2, 1 / 2, 0, -1 / 2, -math.sqrt(3) / 2)]
    factors += [0.1, 0.1]
    for step, factor in enumerate(factors):
        assert seen[step] == pytest.approx([0.1 * factor, factor], rel=1e-12)


@pytest.mark.parametrize("total_steps", [1, 2, 7, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.99])
def test_no_step_is_wasted_and_the_full_rate_is_reached(total_steps, warmup):
    optimizer = two_groups()
    seen = [
        rate
        for _, rate in rates(optimizer, WarmupCosine(optimizer, total_steps, warmup), total_steps)
    ]
    assert min(seen) > 0 and max(seen) == 1.0
    assert optimizer.param_groups[1]["lr"] == 0.0


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    optimizer = two_groups()
    full = rates(optimizer, WarmupCosine(optimizer, 100, 0.13, 0.01), 100)
    optimizer = two_groups()
    scheduler = WarmupCosine(optimizer, 100, 0.13, 0.01)
    rates(optimizer, scheduler, 37)
    torch.save(
        {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()},
        tmp_path / "state.pt",
    )
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    optimizer = two_groups()
    scheduler = WarmupCosine(optimizer, 100, 0.13, 0.01)
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    assert rates(optimizer, scheduler, 63) == full[37:]
    assert full[37:] != full[36:-1]


def test_a_longer_run_follows_its_own_arguments():
    state = WarmupCosine(two_groups(), 10).state_dict()
    optimizer = two_groups()
    scheduler = WarmupCosine(optimizer, 20, warmup=0.0)
    scheduler.load_state_dict(state)
    # half way of 20, not at the end of 10
    assert rates(optimizer, scheduler, 20)[10][1] == pytest.approx(0.5)


def test_arguments_out_of_range():
    with pytest.raises(ValueError, match="total_steps must be at least 1, not 0"):
        WarmupCosine(two_groups(), 0)
    for warmup in (1.0, -0.1):
        with pytest.raises(
            ValueError, match=f"warmup must be at least 0 and below 1, not {warmup}"
        ):
            WarmupCosine(two_groups(), 9, warmup)
    with pytest.raises(ValueError, match=r"final must be from 0 to 1, not 1\.1"):
        WarmupCosine(two_groups(), 9, final=1.1)
