"""How many steps the limits of a Trainer leave; test_classifier.py has the steps that schedulers get."""

import pytest
import pytorch_lightning as pl

from finetune.training.run_limits import fit_limits, total_steps

OPTIONS = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


def trainer(**options) -> pl.Trainer:
    return pl.Trainer(**OPTIONS, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_epochs": 3}, 30),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 15),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"max_epochs": -1, "max_steps": 40, "accumulate_grad_batches": 2}, 80),
        ({"max_epochs": -1}, float("inf")),
    ],
)
def test_a_fit_reads_as_many_batches_as_its_limits_leave(options, expected):
    assert fit_limits(trainer(**options)).num_reads(10, batch_size=1) == expected


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        ({"max_epochs": 3}, 30, 3),
        ({"max_epochs": 3, "max_steps": 12}, 12, 2),
        ({"max_epochs": -1, "max_steps": 10}, 10, 1),
        ({"max_epochs": 3, "accumulate_grad_batches": 4}, 9, 3),
    ],
)
def test_steps_and_epochs_of_a_run(options, steps, epochs):
    limited = trainer(**options)
    assert total_steps(limited, 10) == steps
    assert total_steps(limited, 10, "epoch") == epochs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_epochs": -1}, "needs total_steps in a run without"),
        ({"max_epochs": 0}, "nothing to train: trainer.max_epochs is 0"),
        ({"max_epochs": 1, "limit_train_batches": 0}, "limit_train_batches is 0"),
    ],
)
def test_a_run_without_an_end_or_without_steps_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        total_steps(trainer(**options), 10)
