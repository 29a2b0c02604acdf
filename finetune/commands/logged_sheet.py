"""Log a contact sheet of test images and their predictions, for loggers that take images."""

import logging
from pathlib import Path

import numpy as np
from PIL import Image
from pytorch_lightning import Trainer

from finetune.commands.sheet import (
    RIGHT,
    WRONG,
    caption_text,
    draw_sheet,
    labels_text,
)
from finetune.data.datamodule import ImageDataModule
from finetune.data.samplers import SHEET, draw_indices, run_seed
from finetune.runs.answers import Answers, LabelAnswers, read_answers, read_label_answers
from finetune.runs.run_logger import run_loggers

log = logging.getLogger(__name__)

NAME = "test_predictions"
_MISTAKES = 12
_NUM_IMAGES = 24
_COLUMNS = 8


def log_sheet(trainer: Trainer, data: ImageDataModule, class_names: list[str], table: Path) -> None:
    """Log the contact sheet, on rank 0.

    Args:
        trainer: The Trainer after the test.
        data: Its data module.
        class_names: The classes.
        table: The path of test_predictions.csv.
    """
    loggers = run_loggers(trainer.loggers)
    if not loggers or not trainer.is_global_zero:
        return
    try:
        read = read_label_answers if data.label_kind == "several" else read_answers
        sheet = prediction_sheet(data, read(table, class_names))
        if sheet is not None:
            for logger in loggers:
                logger.write_image(NAME, sheet, trainer.global_step)
    except Exception as error:  # from any library that draws or reads: the run itself is complete
        log.warning("no image of test predictions could be logged: %s", error)


def prediction_sheet(data: ImageDataModule, answers: Answers | LabelAnswers) -> Image.Image | None:
    """Return a sheet of the most confident mistakes, then of random other images; None if there are no images.

    A caption has the predicted class or labels with their probabilities. It is green if the prediction is right, else
    red with the true class or labels.
    """
    wrong = np.flatnonzero(~answers.is_right)
    mistakes = wrong[np.argsort(-_confidence_of_mistakes(answers)[wrong], kind="stable")][
        :_MISTAKES
    ]
    others = np.setdiff1d(np.arange(len(answers.paths)), mistakes)
    drawn = draw_indices(len(others), _NUM_IMAGES - len(mistakes), SHEET, run_seed())
    chosen = [*mistakes, *others[np.sort(drawn)]]
    index = {path: i for i, path in enumerate(data.splits["test"].paths)}
    dataset = data.image_dataset("test")
    shown: list[np.ndarray] = []
    captions: list[tuple[str, tuple[int, int, int]]] = []
    for i in chosen:
        image = dataset[index[answers.paths[i]]]["image"]
        if image is None:  # the file was removed after the test
            continue
        text, true = caption_of(answers, i)
        is_right = answers.is_right[i]
        captions.append((text if is_right else f"{text}, is {true}", RIGHT if is_right else WRONG))
        shown.append(image)
    return draw_sheet(np.stack(shown), captions, _COLUMNS) if shown else None


def caption_of(answers: Answers | LabelAnswers, i: int) -> tuple[str, str]:
    """Return the caption of image `i`: what is predicted with its probability, and what is true."""
    names = answers.class_names
    if isinstance(answers, LabelAnswers):
        text = labels_text(names, answers.probabilities[i], answers.predicted[i])
        return text, ", ".join(answers.named(answers.labels[i])) or "no label"
    text = caption_text(names[answers.predicted[i]], answers.confidence[i])
    return text, names[answers.labels[i]]


def _confidence_of_mistakes(answers: Answers | LabelAnswers) -> np.ndarray:
    """Return the confidence of the mistake in each image, (N,).

    If images have several labels, it is the highest probability of a wrong decision about a label; 0 without one.
    """
    if isinstance(answers, Answers):
        return answers.confidence
    p = answers.probabilities
    of_decision = np.where(answers.predicted, p, 1 - p)
    return np.where(answers.predicted != answers.labels, of_decision, 0.0).max(axis=1)
