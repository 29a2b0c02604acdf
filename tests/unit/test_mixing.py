"""What --data.mixup and --data.cutmix draw and mix: distributions, torchvision's arithmetic, images of an epoch."""

from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_files import random_image
from promise import promise
from scipy import stats
from torchvision.transforms import v2

from finetune.data.dataset import ImageDataset
from finetune.data.decode import DecodeError
from finetune.data.mixing import Mix, Mixing
from finetune.data.targets import ClassIndex
from finetune.data.transforms import train_transform

NUM = 2000
LEVEL = 1e-3  # the seeds are fixed, so these tests give the same numbers each time
UNIT = st.floats(0, 1)


def drawn(mixing: Mixing, num_images: int = 10) -> list[Mix]:
    return [mixing.draw(0, i // 40, i % 40, num_images) for i in range(NUM)]


def forget_the_epoch(monkeypatch):
    draw = Mixing.draw

    def of_no_epoch(mixing, seed, epoch, index, num_images):
        return draw(mixing, seed, 0, index, num_images)

    monkeypatch.setattr(Mixing, "draw", of_no_epoch)


@promise("random-numbers", controls=[forget_the_epoch])
def test_a_draw_is_a_function_of_seed_epoch_and_index():
    mixing, keys = Mixing(0.4, 1.0), list(product(range(3), range(3), range(3)))
    once = {key: mixing.draw(*key, 1000) for key in keys}
    assert once == {key: mixing.draw(*key, 1000) for key in reversed(keys)}
    assert len(set(once.values())) == len(keys)
    assert Mixing().draw(0, 0, 0, 10) is None


@pytest.mark.parametrize("strength", [0.1, 3.0])
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


@given(share=UNIT)
def test_a_blend_is_torchvisions_rounded_to_a_grey_level(share):
    a, b = random_image(40, 50), random_image(40, 50)[::-1]
    for image in (a, b):
        image.flags.writeable = False  # as a cache's are
    blend, kept = Mix(1, share, None).apply(a, b)
    share = max(share, 1 - share)  # the own part is the larger one
    assert kept == share and blend.dtype == np.uint8
    # It mixes the batch with itself, rolled by one: the first with the last.
    batch = torch.from_numpy(np.stack([a, b]).astype(np.float64))
    options = {"lam": share, "labels": None, "batch_size": 2, "num_classes": 2}
    expected = v2.MixUp(num_classes=2).transform(batch, options)[0].numpy()
    # Half a level, and what OpenCV's float32 adds.
    np.testing.assert_allclose(blend, expected, rtol=0, atol=0.5 + 1e-4)


@given(share=UNIT, y=st.integers(0, 31), x=st.integers(0, 49), height=st.sampled_from([32, 33]))
def test_boxes_are_torchvisions(share, y, x, height):
    a, b = np.zeros((height, 50, 3), np.uint8), np.full((height, 50, 3), 255, np.uint8)
    mix = Mix(1, share, ((y + 0.5) / height, (x + 0.5) / 50))
    result, kept = mix.apply(a, b)
    # the share is what is there to see
    assert kept >= 0.5 and result.mean() / 255 == pytest.approx(1 - kept)
    expected = torchvision_box(share, y, x, height, 50)
    if expected["lam_adjusted"] < 0.5:  # then its own part is in the box
        result, kept = 255 - result, 1 - kept
    left, top, right, bottom = expected["box"]
    assert mix.box(height, 50) == (top, left, bottom, right)
    assert kept == pytest.approx(expected["lam_adjusted"])
    assert result[top:bottom, left:right].min(initial=255) == 255
    assert a.max() == 0 and b.min() == 255


def torchvision_box(share: float, y: int, x: int, height: int, width: int) -> dict:
    places = iter([torch.tensor([x]), torch.tensor([y])])
    reference = v2.CutMix(num_classes=2)
    beta = SimpleNamespace(sample=lambda *_: torch.tensor(share, dtype=torch.float64))
    with (
        patch("torch.randint", lambda *_, **__: next(places)),
        patch.object(reference, "_dist", beta),
    ):
        return reference.make_params([torch.empty(2, 3, height, width)])


# Images of an epoch


def images(num: int = 6, mixing: Mixing | None = None, bad: tuple = (), **options) -> ImageDataset:
    def read(index: int) -> np.ndarray:
        if index in bad:
            raise DecodeError(f"image {index} is truncated")
        return np.roll(random_image(40, 60), 7 * index, axis=1)

    more = {} if mixing is None else {"mixing": mixing}
    targets = ClassIndex(np.arange(num) % 3, 3)
    return ImageDataset(read, targets, train_transform(32), 0, **options, **more)


def test_both_images_are_as_they_stand_alone_in_that_epoch():
    mixing = Mixing(1.0, 1.0)
    mixed, plain = images(mixing=mixing), images()
    for key in [(0, 0), (3, 5), (0, 0), (1, 2)]:
        mix, item = mixing.draw(0, *key, 6), mixed[key]
        partner = plain[key[0], mix.partner]
        image, share = mix.apply(plain[key]["image"], partner["image"])
        np.testing.assert_array_equal(item["image"], image)
        assert (item["label"], item["partner_label"]) == (key[1] % 3, partner["label"])
        assert item["share"] == share and item["index"] == key[1] and item["error"] == ""
    assert not np.array_equal(mixed[0, 0]["image"], plain[0, 0]["image"])


def test_a_partner_that_cannot_be_decoded_leaves_the_image_as_it_is_or_ends_the_run():
    mixing = Mixing(mixup=1.0)
    epoch = next(e for e in range(99) if mixing.draw(0, e, 0, 6).partner == 4)
    item = images(mixing=mixing, bad=(4,), on_bad_image="skip")[epoch, 0]
    np.testing.assert_array_equal(item["image"], images()[epoch, 0]["image"])
    assert (item["share"], item["error"]) == (1.0, "")
    assert images(mixing=mixing, bad=(0,), on_bad_image="skip")[epoch, 0]["image"] is None
    for bad in (0, 4):
        with pytest.raises(DecodeError, match=f"image {bad} .*on_bad_image"):
            images(mixing=mixing, bad=(bad,))[epoch, 0]
