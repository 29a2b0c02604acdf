"""The output of a run: a line for each epoch, a bar on terminals only, the result on its own lines."""

import io
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from rich.console import Console
from tiny_module import QUIET, Tiny, loader, trainer

from finetune.training import progress_bar
from finetune.training.progress_bar import ImageProgressBar

# Lightning speaks to torch of yesterday, advises more workers for twelve numbers, and doubts what is meant here.
pytestmark = QUIET


def bar(is_terminal: bool) -> tuple[ImageProgressBar, io.StringIO]:
    shown = ImageProgressBar()
    text = io.StringIO()
    shown.console = Console(file=text, force_terminal=is_terminal, width=120)
    return shown, text


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The clock, which only the test moves."""
    now = [100.0]
    monkeypatch.setattr(progress_bar.time, "perf_counter", lambda: now[0])
    return now


class Takes(pl.Callback):
    """Moves the clock by the seconds of an epoch."""

    def __init__(self, now: list[float], seconds: Callable[[pl.Trainer], float]) -> None:
        self.now = now
        self.seconds = seconds

    def on_train_epoch_end(self, trainer, pl_module):
        self.now[0] += self.seconds(trainer)


def test_elsewhere_than_on_a_terminal_there_is_a_line_for_each_epoch(tmp_path):
    shown, text = bar(is_terminal=False)
    trainer(tmp_path, shown).fit(Tiny(), loader(), loader())
    lines = text.getvalue().splitlines()
    assert len(lines) == 2
    for i, line in enumerate(lines):
        numbers = rf"epoch {i + 1}/2  train/loss {0.5 + i:.4f}  val/loss 0.2500  val/accuracy 0.7500  \d+ images/s"
        assert re.fullmatch(numbers, line), line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"max_epochs": 4}, ["", "about 2.5 minutes left", "", ""]),
        ({"max_epochs": 2}, ["about 50 s left", ""]),
        ({"max_epochs": 1}, [""]),
        ({"max_epochs": 4, "max_steps": 12}, [""] * 4),
        ({"max_epochs": 2, "callbacks": [EarlyStopping("train/loss_epoch", patience=9)]}, [""] * 2),
    ],
)
def test_how_long_the_others_take_is_reported_once(options, reported, tmp_path, now):
    """A minute of each epoch in which nothing else moves the clock. The first of four takes only a second."""

    def seconds(trainer: pl.Trainer) -> float:
        is_first_of_four = trainer.max_epochs == 4 and trainer.current_epoch == 0
        return 1 if is_first_of_four else 50 if trainer.max_epochs == 2 else 75

    shown, text = bar(is_terminal=False)
    callbacks = [Takes(now, seconds), *options.pop("callbacks", [])]
    trainer(tmp_path, shown, *callbacks, **options).fit(Tiny(), loader(), loader())
    assert [line.partition(", ")[2] for line in text.getvalue().splitlines()] == reported


def test_numbers_that_are_not_there_are_not_shown(tmp_path):
    shown, text = bar(is_terminal=False)
    trainer(tmp_path, shown).fit(Tiny(), loader())
    assert re.fullmatch(
        r"epoch 1/2  train/loss 0.5000  \d+ images/s", text.getvalue().splitlines()[0]
    )


def test_an_epoch_without_validation_does_not_repeat_that_of_another(tmp_path):
    shown, text = bar(is_terminal=False)
    trainer(tmp_path, shown, check_val_every_n_epoch=2, max_epochs=3).fit(
        Tiny(), loader(), loader()
    )
    assert ["val/loss" in line for line in text.getvalue().splitlines()] == [False, True, False]


def test_a_terminal_gets_a_bar_with_images_per_second_and_the_loss(tmp_path, monkeypatch):
    updates = []
    update = progress_bar.Progress.update

    def spy(self, task, **fields):
        updates.append(fields)
        update(self, task, **fields)

    monkeypatch.setattr(progress_bar.Progress, "update", spy)
    shown, text = bar(is_terminal=True)
    train = trainer(tmp_path, shown)
    train.fit(Tiny(), loader(), loader())
    # Twice three batches of training; validation within fit has no bar of its own.
    assert [fields["advance"] for fields in updates] == [1] * 6
    assert [fields["note"] for fields in updates] == ["loss 0.1250"] * 6
    assert all(fields["rate"] > 0 for fields in updates)
    assert "epoch 1/2" in text.getvalue() and "images/s" in text.getvalue()
    updates.clear()
    train.test(Tiny(), loader(), verbose=False)
    train.predict(Tiny(), loader())
    train.validate(Tiny(), loader(), verbose=False)
    assert len(updates) == 9 and {fields["note"] for fields in updates} == {""}
    for what in ("testing", "predicting", "validating"):
        assert what in text.getvalue()
    # the cursor is there again
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") > 0


def test_the_loss_is_that_of_a_step_and_seldom_asked_for(tmp_path, monkeypatch, now):
    """On a GPU it waits for the device."""
    notes = []
    monkeypatch.setattr(
        progress_bar.Progress, "update", lambda self, task, **fields: notes.append(fields["note"])
    )

    class Steps(Tiny):
        def training_step(self, batch, batch_idx):
            now[0] += 0.15
            self.log("train/loss", float(self.trainer.fit_loop.total_batch_idx))
            return self.layer(batch["label"].float()[:, None]).mean()

    shown, _ = bar(is_terminal=True)
    trainer(tmp_path, shown, accumulate_grad_batches=2).fit(Steps(), loader())
    assert notes == [f"loss {i}.0000" for i in (0, 0, 2, 2, 4, 4)]


def test_a_terminal_is_left_in_order_after_an_error(tmp_path):
    class Broken(Tiny):
        def training_step(self, batch, batch_idx):
            raise KeyError("a mistake of ours")

    shown, text = bar(is_terminal=True)
    with pytest.raises(KeyError):
        trainer(tmp_path, shown).fit(Broken(), loader())
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") > 0
    assert shown._progress is None


def test_a_disabled_bar_says_nothing(tmp_path):
    shown, text = bar(is_terminal=True)
    shown.disable()
    train = trainer(tmp_path, shown)
    shown.disable()  # Lightning enables it on rank 0 when the trainer is made
    train.fit(Tiny(), loader(), loader())
    assert text.getvalue() == ""


@pytest.mark.slow
def test_the_rate_counts_all_devices_and_no_validation(now):
    shown, _ = bar(is_terminal=False)
    shown._trainer = SimpleNamespace(strategy=None, global_rank=0, world_size=4)
    fit = SimpleNamespace(state=SimpleNamespace(fn="fit"))
    shown._begin("epoch", 10)
    now[0] += 2
    shown._advance({"label": torch.zeros(8)})
    assert shown._rate() == pytest.approx(16)  # 4 devices of 8 images in 2 s
    shown.on_validation_start(fit)
    now[0] += 50
    shown.on_validation_end(fit)
    now[0] += 2
    shown._advance({"label": torch.zeros(8)})
    assert shown._rate() == pytest.approx(16)


def test_a_terminal_gets_a_table_of_epochs(tmp_path):
    shown, text = bar(is_terminal=True)
    trainer(tmp_path, shown, check_val_every_n_epoch=2).fit(Tiny(), loader(), loader())
    lines = [line.split("\r")[-1] for line in text.getvalue().split("\n")]
    kept = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in lines]
    rows = [line for line in kept if re.match(r" *(epoch  |1/2 |2/2 )", line)]
    assert rows[0].split() == [
        "epoch",
        "train/loss",
        "val/loss",
        "val/accuracy",
        "images/s",
        "time",
    ]
    assert [row.split()[:4] for row in rows[1:]] == [
        ["1/2", "0.5000", "-", "-"],
        ["2/2", "1.5000", "0.2500", "0.7500"],
    ]
    assert len({len(row) for row in rows}) == 1


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"max_epochs": 4}, "0:55 left"),  # two of three batches of 5 s, then three epochs of 15 s
        ({"max_epochs": 4, "max_steps": 3}, "0:10 left"),
        ({"max_epochs": -1}, ""),
        ({"max_epochs": 4, "callbacks": [EarlyStopping("train/loss_epoch")]}, "at most 0:55"),
    ],
)
def test_the_bar_has_the_time_that_is_left_of_the_complete_fit(
    options, left, tmp_path, monkeypatch, now
):
    found = []
    update = progress_bar.Progress.update

    def spy(self, task, **fields):
        found.append(fields["left"])
        update(self, task, **fields)

    class Steps(Tiny):
        def training_step(self, batch, batch_idx):
            now[0] += 5
            if self.trainer.global_step == 4:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(progress_bar.Progress, "update", spy)
    shown, _ = bar(is_terminal=True)
    callbacks = [shown, *options.pop("callbacks", [])]
    trainer(tmp_path, *callbacks, **options).fit(Steps(), loader())
    assert re.fullmatch(left, found[0])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_epoch_that_a_resumed_run_continues_with_has_a_rate(tmp_path, monkeypatch, is_terminal):
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:  # of three an epoch
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    trainer(tmp_path, Stop()).fit(Tiny(), loader())
    completed = []
    add_task = progress_bar.Progress.add_task
    monkeypatch.setattr(
        progress_bar.Progress,
        "add_task",
        lambda self, *a, **k: completed.append(k["completed"]) or add_task(self, *a, **k),
    )
    shown, text = bar(is_terminal)
    trainer(tmp_path, shown).fit(Tiny(), loader(), ckpt_path=tmp_path / "inside.ckpt")
    row = (
        r" 2/2 +1.5000 +(\d+) +-"
        if is_terminal
        else r"epoch 2/2  train/loss 1.5000  (\d+) images/s"
    )
    assert int(re.search(row, text.getvalue())[1]) > 0
    # the bar continues after the finished batch
    assert completed == ([1] if is_terminal else [])


def test_a_notebook_gets_the_bar_too_and_loses_it_at_the_end(tmp_path, monkeypatch):
    drawn = []

    class Handle:
        def update(self, content, raw=False):
            drawn.append(content if raw else content._repr_mimebundle_((), ())["text/plain"])

    monkeypatch.setattr(
        "IPython.display.display", lambda shown, display_id: Handle() if display_id else None
    )
    # the lines of epochs
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: drawn.append(text))
    monkeypatch.setattr(progress_bar, "_EVERY", 0.0)
    shown = ImageProgressBar()
    shown.console = Console(force_jupyter=True)
    assert not shown.console.is_terminal
    trainer(tmp_path, shown).fit(Tiny(), loader(), loader())
    assert any(re.search(r"epoch 2/2 .*step 1/\d .*loss \d\.\d{4}", str(text)) for text in drawn)
    assert sum(str(text).startswith("epoch 2/2  train/loss 1.5000") for text in drawn) == 1
    assert drawn[-1] == {"text/plain": ""} and shown._cell is None
