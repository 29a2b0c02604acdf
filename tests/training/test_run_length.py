"""The default length of a fit depends on its number of images; an explicit length is kept."""

import pytest

from finetune.training.run_length import settle_length, usual_epochs

UNSET = {
    **dict.fromkeys(("max_epochs", "limit_train_batches")),
    **{
        "max_steps": -1,
        "accumulate_grad_batches": 1,
        "overfit_batches": 0.0,
    },
}


def test_few_images_are_seen_more_often_within_limits():
    sizes = (0, 1, 100, 160, 161, 320, 534, 2000, 10_000, 10_001, 20_000, 30_000, 30_001, 10**7)
    epochs = [usual_epochs(num) for num in sizes]
    assert epochs == [50, 50, 50, 50, 50, 25, 15, 15, 15, 14, 7, 5, 5, 5]
    assert epochs == sorted(epochs, reverse=True)


@pytest.mark.parametrize("num_images", range(161, 571, 41))
def test_small_sets_have_the_same_number_of_images_in_all(num_images):
    seen = usual_epochs(num_images) * num_images
    assert 8_000 <= seen < 8_000 + num_images


@pytest.mark.parametrize(
    ("given", "epochs", "words"),
    [
        (
            {},
            15,
            "15 epochs, 480 steps, as is usual for 1,000 training images; --epochs sets another number",
        ),
        # 11 of 32 batches, the last of two
        ({"accumulate_grad_batches": 3}, 15, "15 epochs, 165 steps, as"),
        ({"limit_train_batches": 10}, 25, "25 epochs, 250 steps, as is usual for 320 training"),
        # whole batches
        ({"limit_train_batches": 0.5}, 16, "16 epochs, 256 steps, as is usual for 512 training"),
        ({"limit_train_batches": 0.1}, 50, "50 epochs, 150 steps, as is usual for 96 training"),
        (
            {"overfit_batches": 2, "limit_train_batches": 10},
            50,
            "50 epochs, 100 steps, as is usual for 64 training",
        ),
    ],
)
def test_without_a_length_the_usual_one_is_reported(given, epochs, words):
    limits = UNSET | given
    reported = settle_length(limits, 1000, 32)
    assert limits["max_epochs"] == epochs and reported.startswith(words)


@pytest.mark.parametrize("given", [{"max_epochs": 3}, {"max_epochs": -1}, {"max_steps": 7}])
def test_who_says_it_is_not_overruled(given):
    limits = UNSET | given
    assert settle_length(limits, 1000, 32) == "" and limits == UNSET | given
