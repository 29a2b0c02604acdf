"""Orders, shares and seeds: permutations, partitions and exact continuation, in all small cases."""

from itertools import chain, product

import numpy as np
import pytest
import torch
from lightning_fabric.utilities.data import _set_sampler_epoch
from promise import control, promise
from torch.utils.data import DataLoader, DistributedSampler

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

# Images and global batch: whole batches, a last one of 1, one batch only, fewer images than most device counts.
SIZES = [(12, 4), (11, 5), (13, 4), (5, 8), (3, 2), (1, 4)]


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("num", [0, 1, 2, 7, 8, 9, 100])
def test_shares_are_contiguous_parts_of_nearly_equal_size(num, world_size):
    shares = [rank_range(num, rank, world_size) for rank in range(world_size)]
    sizes = [len(part) for part in shares]
    assert list(chain(*shares)) == list(range(num))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@promise("random-numbers")
def test_order_is_a_permutation_that_depends_on_seed_and_epoch_alone():
    orders = {}
    for seed, epoch in product(range(3), range(3)):
        np.random.seed(epoch)  # the global generators, which other code moves, must not matter
        torch.manual_seed(epoch)
        order = train_order(50, seed, epoch)
        np.random.seed(99)
        np.testing.assert_array_equal(order, train_order(50, seed, epoch))
        np.testing.assert_array_equal(np.sort(order), np.arange(50))
        orders[tuple(order)] = seed, epoch
    assert len(orders) == 9


def test_every_place_of_the_order_is_equally_likely():
    # Image 0 over 2,000 epochs of 10 images: 200 times at each place, deviation 13.4; 5 deviations are allowed.
    places = [int(np.flatnonzero(train_order(10, 0, epoch) == 0)[0]) for epoch in range(2000)]
    assert np.abs(np.bincount(places, minlength=10) - 200).max() < 5 * 13.4


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize(("num_images", "batch_size"), SIZES)
def test_shares_of_all_devices_joined_are_the_global_batches(num_images, batch_size, world_size):
    devices = [
        TrainBatches(num_images, batch_size, 7, rank, world_size) for rank in range(world_size)
    ]
    for epoch in range(2):
        order = train_order(num_images, 7, epoch).tolist()
        expected = [order[i : i + batch_size] for i in range(0, num_images, batch_size)]
        for device in devices:
            device.set_epoch(epoch)
        # strict: all devices make the same number of steps
        steps = list(zip(*devices, strict=True))
        assert [[index for _, index in chain(*parts)] for parts in steps] == expected
        assert {e for parts in steps for e, _ in chain(*parts)} == {epoch}
        assert {len(device) for device in devices} == {len(expected)}
        for parts in steps:
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@control("each-image-once")
def test_control_distributed_sampler_counts_images_twice():
    devices = [DistributedSampler(range(13), num_replicas=3, rank=rank) for rank in range(3)]
    assert sorted(chain(*devices)) != list(range(13))


@pytest.mark.parametrize(("num_images", "batch_size"), SIZES)
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (2, 3)])
def test_started_anywhere_the_sequence_continues_as_it_would_have(
    num_images, batch_size, rank, world_size
):
    def passes(batches: TrainBatches, epochs: range) -> list:
        sequence = []
        for epoch in epochs:
            # as Lightning does before each epoch, the first one of a resumed run included
            batches.set_epoch(epoch)
            sequence += list(batches)
        return sequence

    full = passes(TrainBatches(num_images, batch_size, 3, rank, world_size), range(3))
    num_batches = len(full) // 3
    for epoch, batch in product(range(3), range(num_batches)):
        resumed = TrainBatches(num_images, batch_size, 3, rank, world_size, epoch, batch)
        # Lightning counts on: the length is that of a full epoch
        assert len(resumed) == num_batches
        assert passes(resumed, range(epoch, 3)) == full[epoch * num_batches + batch :]


@control("resume")
def test_control_epoch_begun_again_differs():
    batches = TrainBatches(12, 4, 0, 0, 1, epoch=1, batch=2)
    assert (
        list(batches)
        == list(TrainBatches(12, 4, 0, 0, 1, epoch=1))[2:]
        != list(TrainBatches(12, 4, 0, 0, 1))[2:]
    )


def test_lightning_sets_the_epoch_through_the_loader():
    batches = TrainBatches(12, 4, 0, 0, 1)
    loader = DataLoader(range(12), batch_sampler=batches, collate_fn=list)
    _set_sampler_epoch(loader, 5)
    assert batches.epoch == 5 and [epoch for epoch, _ in next(iter(batches))] == [5] * 4


@promise("random-numbers")
def test_augmentation_seeds_differ_between_all_images_and_epochs():
    seeds = [augmentation_seed(*key) for key in product(range(3), range(10), range(100))]
    # 3,000 draws of 2**32 meet with a chance of 0.1 %, and they are the same at each run: none do.
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert (
        len({augmentation_seed(1, 2, 3), augmentation_seed(3, 2, 1), augmentation_seed(2, 1, 3)})
        == 3
    )


def test_step_seeds_differ_between_steps_and_ranks_and_suit_torch():
    seeds = [step_seed(*key) for key in product(range(2), range(100), range(8))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.manual_seed(max(seeds))
    first = torch.rand(3)
    torch.manual_seed(max(seeds))
    assert torch.equal(torch.rand(3), first)


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
    assert draw_indices(9, 20, SHEET).shape == (9,) and draw_indices(9, 3, SHEET).shape == (3,)


def test_orders_and_augmentations_are_what_they_were():
    """Their seeds decide every result: another rule is another model."""
    assert train_order(8, 3, 1).tolist() == [7, 3, 4, 0, 6, 2, 5, 1]
    assert augmentation_seed(1, 2, 3) == 101756326


def test_the_run_seed_is_lightnings(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert run_seed() == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "42")
    assert run_seed() == 42


@promise("each-image-once")
@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_gives_every_image_once_in_order(world_size, batch_size):
    for num_images in range(14):
        devices = [
            EvalBatches(num_images, batch_size, rank, world_size) for rank in range(world_size)
        ]
        batches = [list(device) for device in devices]
        assert list(chain(*chain(*batches))) == list(range(num_images))
        # Devices speak to each other after each batch, so one that has no more images must go along.
        assert {len(part) for part in batches} == {len(device) for device in devices}
        assert len({len(device) for device in devices}) == 1
        assert all(len(batch) <= batch_size for batch in chain(*batches))


@pytest.mark.parametrize(
    ("num", "num_images"), [(1, 1), (1, 9), (3, 10), (8, 30), (29, 30), (30, 30)]
)
def test_images_that_a_limit_leaves_lie_evenly(num, num_images):
    places = evenly_spaced(np.arange(num), num, num_images)
    assert places.tolist() == [evenly_spaced(i, num, num_images) for i in range(num)]
    assert places[0] == 0 and places[-1] < num_images
    assert set(np.diff([*places, num_images])) <= {num_images // num, -(-num_images // num)}


@control("each-image-once")
def test_control_distributed_sampler_pads_evaluation():
    devices = [
        DistributedSampler(range(11), num_replicas=3, rank=rank, shuffle=False) for rank in range(3)
    ]
    assert sum(len(list(device)) for device in devices) == 12
