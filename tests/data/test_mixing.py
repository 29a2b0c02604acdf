"""Partners, shares and boxes of mixup and CutMix: distributions, torchvision's arithmetic, and mixed images."""

from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch
from image_files import random_image
from promise import promise
from scipy import stats
from torchvision.transforms import v2

from finetune import ImageFolderData
from finetune.data.dataset import Collate, ImageDataset
from finetune.data.decode import DecodeError
from finetune.data.mixing import Mix, Mixing
from finetune.data.targets import ClassIndex
from finetune.data.transforms import eval_transform, train_transform

NUM = 4000
LEVEL = 1e-3  # the seeds are fixed, so these tests give the same numbers each time


def drawn(mixing: Mixing, num_images: int = 10, num: int = NUM) -> list[Mix]:
    return [mixing.draw(0, i // 40, i % 40, num_images) for i in range(num)]


# What is drawn


@promise("random-numbers")
def test_a_draw_is_a_function_of_seed_epoch_and_index():
    mixing, keys = Mixing(0.4, 1.0), list(product(range(3), range(3), range(3)))
    once = {key: mixing.draw(*key, 1000) for key in keys}
    assert once == {key: mixing.draw(*key, 1000) for key in reversed(keys)}
    assert len(set(once.values())) == len(keys)
    partner, share, _ = once[0, 1, 2]
    # another rule is another model
    assert (partner, share) == (54, pytest.approx(0.788632007637194))


def test_without_a_strength_nothing_is_drawn():
    assert Mixing().draw(0, 0, 0, 10) is None


@pytest.mark.parametrize("strength", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_shares_are_of_the_beta_distribution(name, strength):
    mixes = drawn(Mixing(**{name: strength}))
    shares = np.array([mix.share for mix in mixes])
    assert stats.kstest(shares, stats.beta(strength, strength).cdf).pvalue > LEVEL
    # the control
    assert stats.kstest(shares, stats.beta(1.3 * strength, strength).cdf).pvalue < LEVEL
    assert all((mix.centre is not None) == (name == "cutmix") for mix in mixes)


def test_a_partner_is_any_other_image_as_often():
    offsets = [(mix.partner - i % 40) % 40 for i, mix in enumerate(drawn(Mixing(mixup=1.0), 40))]
    counts = np.bincount(offsets, minlength=40)
    assert counts[0] == 0 and stats.chisquare(counts[1:]).pvalue > LEVEL
    assert {Mixing(mixup=1.0).draw(0, i, 1, 2).partner for i in range(9)} == {0}
    assert Mixing(mixup=1.0).draw(0, 0, 0, 1).partner == 0  # there is no other


def test_with_both_each_image_draws_which_and_nothing_else_depends_on_it():
    mixes = drawn(Mixing(1.0, 1.0))
    is_box = np.array([mix.centre is not None for mix in mixes])
    assert stats.binomtest(int(is_box.sum()), NUM).pvalue > LEVEL
    share, offset = (
        np.array([mix.share for mix in mixes]),
        [(mix.partner - i) % 10 for i, mix in enumerate(mixes)],
    )
    assert stats.chi2_contingency(stats.contingency.crosstab(is_box, offset).count).pvalue > LEVEL
    assert stats.ks_2samp(share[is_box], share[~is_box]).pvalue > LEVEL
    y, x = np.array([mix.centre for mix in mixes if mix.centre]).T
    for values in (y, x):
        assert stats.kstest(values, stats.uniform.cdf).pvalue > LEVEL
    assert abs(np.corrcoef(y, x)[0, 1]) < 4 / np.sqrt(len(x))
    # Each is what it is without the other: only the draw of which differs.
    assert all(
        mix.partner == alone.partner
        for mix, alone in zip(mixes, drawn(Mixing(mixup=1.0)), strict=True)
    )


# Two images as one


@pytest.mark.parametrize("share", [0.0, 1.0, 0.5, 0.123, 0.9])
def test_a_blend_is_torchvision_s_rounded_to_a_grey_level(share):
    a, b = random_image(40, 50), random_image(40, 50)[::-1]
    for image in (a, b):
        image.flags.writeable = False  # as a cache's are
    blend, kept = Mix(1, share, None).apply(a, b)
    share = max(share, 1 - share)  # the own part is the larger one
    assert kept == share and blend.dtype == np.uint8
    reference = v2.MixUp(num_classes=2)
    # It mixes the batch with itself, rolled by one: the first with the last.
    batch = torch.from_numpy(np.stack([a, b]).astype(np.float64))
    expected = reference.transform(
        batch, {"lam": share, "labels": None, "batch_size": 2, "num_classes": 2}
    )[0].numpy()
    # Half a level, and what OpenCV's float32 adds.
    np.testing.assert_allclose(blend, expected, rtol=0, atol=0.5 + 1e-4)
    if share == 1:
        np.testing.assert_array_equal(blend, a)
    else:  # the control
        assert np.abs(blend - (share * b + (1 - share) * a)).max() > 1 or share == 0.5


def test_boxes_are_torchvision_s():
    rng = np.random.default_rng(0)
    for height, width in ((32, 32), (33, 50)):
        a, b = np.zeros((height, width, 3), np.uint8), np.full((height, width, 3), 255, np.uint8)
        for _ in range(200):
            share, y, x = rng.random(3)
            place = (int(y * height), int(x * width))
            mix = Mix(1, share, ((place[0] + 0.5) / height, (place[1] + 0.5) / width))
            result, kept = mix.apply(a, b)
            # the share is what is there to see
            assert kept >= 0.5 and result.mean() / 255 == pytest.approx(1 - kept)
            expected = torchvision_box(share, place, height, width)
            if expected["lam_adjusted"] < 0.5:  # then its own part is in the box
                result, kept = 255 - result, 1 - kept
            left, top, right, bottom = expected["box"]
            assert mix.box(height, width) == (top, left, bottom, right)
            assert kept == pytest.approx(expected["lam_adjusted"])
            assert result[top:bottom, left:right].min(initial=255) == 255
            assert a.max() == 0 and b.min() == 255


def torchvision_box(share: float, place: tuple[int, int], height: int, width: int) -> dict:
    places = iter([torch.tensor([place[1]]), torch.tensor([place[0]])])  # x, then y
    reference = v2.CutMix(num_classes=2)
    with (
        patch("torch.randint", lambda *_, **__: next(places)),
        patch.object(
            reference._dist, "sample", lambda *_: torch.tensor(share, dtype=torch.float64)
        ),
    ):
        return reference.make_params([torch.empty(2, 3, height, width)])


# Images of an epoch


def images(
    num: int = 6, mixing: Mixing | None = None, bad: tuple[int, ...] = (), **options
) -> ImageDataset:
    def read(index: int) -> np.ndarray:
        if index in bad:
            raise DecodeError(f"image {index} is truncated")
        return np.roll(random_image(40, 60), 7 * index, axis=1)

    more = {} if mixing is None else {"mixing": mixing}
    return ImageDataset(
        read, ClassIndex(np.arange(num) % 3, 3), train_transform(32), 0, **options, **more
    )


@pytest.mark.parametrize("mixing", [Mixing(mixup=1.0), Mixing(cutmix=1.0), Mixing(1.0, 1.0)])
def test_both_are_as_they_stand_alone_in_that_epoch(mixing):
    mixed, plain = images(mixing=mixing), images()
    for key in [(0, 0), (3, 5), (0, 0), (1, 2)]:
        mix, item = mixing.draw(0, *key, 6), mixed[key]
        partner = plain[key[0], mix.partner]
        image, share = mix.apply(plain[key]["image"], partner["image"])
        np.testing.assert_array_equal(item["image"], image)
        assert (item["label"], item["partner_label"], item["share"]) == (
            key[1] % 3,
            partner["label"],
            share,
        )
        assert item["index"] == key[1] and item["error"] == ""
    assert not np.array_equal(mixed[0, 0]["image"], plain[0, 0]["image"])


def test_each_image_is_seen_in_each_epoch():
    for mixing in (Mixing(mixup=0.2), Mixing(cutmix=1.0)):
        mixed = images(40, mixing)
        shares = np.array([mixed[epoch, i]["share"] for epoch in range(5) for i in range(40)])
        assert 0.5 <= shares.min() < 0.6 and shares.max() > 0.9
    # Control: as they are drawn, half of them are below.
    assert np.mean([Mixing(mixup=0.2).draw(0, 0, i, 40).share < 0.5 for i in range(200)]) > 0.4


def test_evaluation_mixes_nothing():
    alone = ImageDataset(
        lambda i: random_image(40, 60),
        ClassIndex(np.arange(3), 3),
        eval_transform(32),
        mixing=Mixing(1.0, 1.0),
    )
    assert set(alone[1]) == {"index", "label", "image", "error"}


def test_a_partner_that_cannot_be_decoded_leaves_the_image_as_it_is_or_ends_the_run():
    mixing = Mixing(mixup=1.0)
    epoch = next(e for e in range(99) if mixing.draw(0, e, 0, 6).partner == 4)
    item = images(mixing=mixing, bad=(4,), on_bad_image="skip")[epoch, 0]
    np.testing.assert_array_equal(item["image"], images()[epoch, 0]["image"])
    assert (item["share"], item["error"]) == (1.0, "")
    assert images(mixing=mixing, bad=(0,), on_bad_image="skip")[epoch, 0]["image"] is None
    for bad in (0, 4):
        with pytest.raises(
            DecodeError, match=f"image {bad} is truncated; --data.on_bad_image skip"
        ):
            images(mixing=mixing, bad=(bad,))[epoch, 0]


def test_a_batch_has_both_labels_and_the_shares():
    mixed = images(mixing=Mixing(1.0, 1.0))
    items = [mixed[0, i] for i in range(3)]
    bad = {"index": 7, "label": 0, "image": None, "error": "torn"}
    batch = Collate(32)([bad, *items])
    assert batch["partner_label"].tolist() == [item["partner_label"] for item in items]
    assert batch["partner_label"].dtype == torch.int64 and batch["share"].dtype == torch.float32
    assert batch["share"].tolist() == pytest.approx([item["share"] for item in items], rel=1e-6)
    assert batch["bad"] == [(7, "torn")] and len(batch["image"]) == 3
    assert not {"share", "partner_label"} & set(Collate(32)([bad]))


def test_each_class_has_on_average_the_share_that_it_has_of_the_images():
    mixed, labels = images(9, Mixing(0.4, 1.0)), np.array([0, 0, 0, 0, 0, 0, 1, 1, 2])
    mixed.targets = ClassIndex(labels, 3)
    sums = np.zeros(3)
    for key in product(range(60), range(9)):
        item = mixed[key]
        sums[item["label"]] += item["share"]
        sums[item["partner_label"]] += 1 - item["share"]
    # The standard error of a class is below 0.5 / sqrt(540): less is drawn than that, most of an image is its own.
    np.testing.assert_allclose(
        sums / sums.sum(), np.bincount(labels) / 9, atol=4 * 0.5 / np.sqrt(540)
    )


# The data module


def data(root, **options) -> ImageFolderData:
    options = {
        "image_size": 24,
        "batch_size": 7,
        "num_workers": 0,
        "val_fraction": 0,
        "mixup": 0.4,
        **options,
    }
    return ImageFolderData(str(root), cutmix=1.0, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # on two cores
def test_any_number_of_workers_gives_the_same_batches(colours):
    alone, shared = (data(colours, num_workers=n).train_dataloader() for n in (0, 3))
    for expected, batch in zip(alone, shared, strict=True):
        assert (
            set(batch)
            == set(expected)
            == {"image", "label", "index", "bad", "partner_label", "share"}
        )
        for name in set(batch) - {"bad"}:
            assert torch.equal(batch[name], expected[name]), name


def test_a_probe_sees_images_that_are_not_mixed(colours):
    plain = next(iter(data(colours).loader("train")))
    assert "share" not in plain
