"""Order of the images, shares of the devices, resume position and random streams: functions of (seed, epoch) alone."""

from itertools import chain, product

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from promise import control, promise
from torch.utils.data import DistributedSampler

from finetune.data.loader import EveryEpoch
from finetune.data.mixing import Mixing
from finetune.data.samplers import (
    ESTIMATE,
    SHEET,
    EvalBatches,
    TrainBatches,
    augmentation_seed,
    draw_indices,
    evenly_spaced,
    rank_range,
    run_seed,
    step_seed,
    train_order,
)

NUMS = st.integers(1, 40)
DEVICES = st.integers(1, 8)
SEEDS = st.integers(0, 2**32 - 1)
EPOCHS = st.integers(0, 3)


@given(num=st.integers(0, 100), world_size=DEVICES)
def test_shares_of_devices_are_contiguous_parts_of_nearly_equal_size(num, world_size):
    shares = [rank_range(num, rank, world_size) for rank in range(world_size)]
    sizes = [len(part) for part in shares]
    assert list(chain(*shares)) == list(range(num))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@promise("random-numbers")
@given(num=NUMS, seed=SEEDS, epoch=EPOCHS)
def test_order_of_an_epoch_is_a_permutation_of_its_own(num, seed, epoch):
    order = train_order(num, seed, epoch)
    np.random.seed(epoch)  # the global generators, which other code moves, must not matter
    torch.manual_seed(epoch)
    np.testing.assert_array_equal(order, train_order(num, seed, epoch))
    assert sorted(order.tolist()) == list(range(num))
    for other in (seed + 1, epoch), (seed, epoch + 1):
        assert num < 20 or not np.array_equal(order, train_order(num, *other))


@given(num=NUMS, batch_size=st.integers(1, 12), world_size=DEVICES, seed=SEEDS, epoch=EPOCHS)
@example(num=13, batch_size=4, world_size=3, seed=7, epoch=0)
@example(num=1, batch_size=4, world_size=8, seed=7, epoch=1)
def test_batches_of_all_devices_joined_are_those_of_one(num, batch_size, world_size, seed, epoch):
    order = train_order(num, seed, epoch).tolist()
    expected = [order[i : i + batch_size] for i in range(0, num, batch_size)]
    devices = [TrainBatches(num, batch_size, seed, rank, world_size) for rank in range(world_size)]
    for device in devices:
        device.set_epoch(epoch)
    # strict: all devices make the same number of steps
    steps = list(zip(*devices, strict=True))
    assert [[index for _, index in chain(*parts)] for parts in steps] == expected
    assert {e for parts in steps for e, _ in chain(*parts)} == {epoch}
    assert {len(device) for device in devices} == {len(expected)}
    assert all(max(map(len, parts)) - min(map(len, parts)) <= 1 for parts in steps)


@control("each-image-once")
def test_control_distributed_sampler_counts_images_twice():
    devices = [DistributedSampler(range(13), num_replicas=3, rank=rank) for rank in range(3)]
    assert sorted(chain(*devices)) != list(range(13))


@st.composite
def positions(draw) -> tuple[int, int, int, int, int, int]:
    """Images, batch size, rank, devices, and the epoch and batch at which a run of three epochs is resumed."""
    num, batch_size, world_size = draw(NUMS), draw(st.integers(1, 12)), draw(DEVICES)
    batch = draw(st.integers(0, -(-num // batch_size) - 1))
    return (
        num,
        batch_size,
        draw(st.integers(0, world_size - 1)),
        world_size,
        draw(EPOCHS) % 3,
        batch,
    )


@promise("resume")
@given(position=positions(), seed=SEEDS)
def test_resume_at_any_batch_continues_the_sequence(position, seed):
    num, batch_size, rank, world_size, epoch, batch = position

    def passes(batches: TrainBatches, epochs: range) -> list:
        sequence = []
        for number in epochs:
            # as Lightning does before each epoch, the first one of a resumed run included
            batches.set_epoch(number)
            sequence += list(batches)
        return sequence

    full = passes(TrainBatches(num, batch_size, seed, rank, world_size), range(3))
    first = epoch * len(full) // 3 + batch
    resumed = TrainBatches(num, batch_size, seed, rank, world_size, epoch, batch)
    assert len(resumed) == len(full) // 3  # Lightning counts on: the length is that of a full epoch
    # the prefetching of later epochs gives the same
    ahead = EveryEpoch(resumed, len(resumed), 3)
    assert list(ahead) == full[first:] and (resumed.epoch, resumed.batch) == (epoch, batch)
    assert passes(resumed, range(epoch, 3)) == full[first:]


def pad_the_shares(monkeypatch):
    def padded(num: int, rank: int, world_size: int) -> range:
        return rank_range(-(-num // world_size) * world_size, rank, world_size)

    monkeypatch.setattr("finetune.data.samplers.rank_range", padded)


@promise("each-image-once", controls=[pad_the_shares])
@given(num=st.integers(0, 30), batch_size=st.integers(1, 6), world_size=DEVICES)
def test_evaluation_gives_every_image_once_in_order(num, batch_size, world_size):
    devices = [EvalBatches(num, batch_size, rank, world_size) for rank in range(world_size)]
    batches = [list(device) for device in devices]
    assert list(chain(*chain(*batches))) == list(range(num))
    # Devices speak to each other after each batch, so one that has no more images must go along.
    assert len({len(part) for part in batches} | {len(device) for device in devices}) == 1
    assert all(len(batch) <= batch_size for batch in chain(*batches))


@control("each-image-once")
def test_control_distributed_sampler_pads_evaluation():
    devices = [
        DistributedSampler(range(11), num_replicas=3, rank=rank, shuffle=False) for rank in range(3)
    ]
    assert sum(len(list(device)) for device in devices) == 12


@given(num_images=NUMS, num=NUMS)
def test_images_that_a_limit_of_evaluation_leaves_lie_evenly(num_images, num):
    num = min(num, num_images)
    places = evenly_spaced(np.arange(num), num, num_images)
    assert places.tolist() == [evenly_spaced(i, num, num_images) for i in range(num)]
    assert places[0] == 0 and places[-1] < num_images
    assert set(np.diff([*places, num_images])) <= {num_images // num, -(-num_images // num)}


@promise("random-numbers")
def test_seeds_of_augmentation_and_dropout_differ_for_all_images_epochs_steps_and_ranks():
    seeds = [augmentation_seed(*key) for key in product(range(3), range(10), range(100))]
    # 3,000 draws of 2**32 meet with a chance of 0.1 %, and they are the same at each run: none do.
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds)
    seeds = [step_seed(*key) for key in product(range(2), range(100), range(8))]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    torch.manual_seed(max(seeds))


def test_no_two_streams_meet():
    """Of all small seeds: each seeds a generator once, whatever it is for; torch's seeds are hashes of 63 bits."""
    asked, small = [], range(4)

    def keep(entropy: tuple[int, ...]) -> np.random.Generator:
        asked.append(np.random.SeedSequence(entropy))
        return np.random.Generator(np.random.PCG64(asked[-1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "default_rng", keep)
        for seed in small:
            for kind in (SHEET, ESTIMATE):
                draw_indices(9, 3, kind, seed)
            for epoch in small:
                train_order(9, seed, epoch)
                for index in small:
                    Mixing(mixup=1.0).draw(seed, epoch, index, 9)
            for name in ("cat", "dog"):
                keep((*name.encode(), seed, 0, 0))  # as the drawn sample does
    asked += [
        np.random.SeedSequence((kind, *key))
        for kind in (1, 2)
        for key in product(small, small, small)
    ]
    states = {tuple(sequence.generate_state(4).tolist()) for sequence in asked}
    assert len(states) == len(asked)
    # Control: as splits were drawn before, by (split_seed, class), they met the order of training.
    before = np.random.SeedSequence((0, 3)).generate_state(4)
    assert tuple(before.tolist()) in states


def test_orders_augmentations_and_partners_are_what_they_were():
    """Their seeds decide every result: another rule is another model."""
    assert train_order(8, 3, 1).tolist() == [7, 3, 4, 0, 6, 2, 5, 1]
    assert augmentation_seed(1, 2, 3) == 101756326
    partner, share, _ = Mixing(0.4, 1.0).draw(0, 1, 2, 1000)
    assert (partner, share) == (54, pytest.approx(0.788632007637194))


def test_the_run_seed_is_lightnings(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert run_seed() == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "42")
    assert run_seed() == 42
