"""Rows, columns and order of predictions, from one device and several, in each of the three kinds of file."""

import csv
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data_files import nowhere
from promise import promise

from finetune.data.samplers import rank_range
from finetune.data.targets import MultiHot
from finetune.runs import predictions
from finetune.runs.answers import read_label_answers
from finetune.runs.folder import Run
from finetune.runs.predictions import PredictionWriter
from finetune.system import files

NAMES = ["hot dog", 'the "other", one', "größe", "=1+1"]  # as folders may be called


def probabilities(num: int, num_classes: int = len(NAMES)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, num_classes, generator=generator, dtype=torch.float64).softmax(dim=1)


def outputs_of(
    index: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor | None = None
) -> dict[str, Any]:
    """The output of a step for readable images; the most probable class is predicted unless `chosen` is another."""
    return {
        "index": index,
        "probabilities": probs,
        "class": probs.argmax(dim=1) if chosen is None else chosen,
        "bad": [],
    }


def trainer_of(paths: list[str], rank: int = 0, world_size: int = 1) -> Any:
    data = SimpleNamespace(splits={"predict": replace(nowhere(len(paths)), paths=paths)})
    which = {"global_rank": rank, "world_size": world_size, "is_global_zero": rank == 0}
    return SimpleNamespace(strategy=None, datamodule=data, predicting=True, **which)


def model_of(names: list[str], kind: str = "single", **values: Any) -> Any:
    return SimpleNamespace(class_names=names, task=SimpleNamespace(label_kind=kind), **values)


def predict(  # noqa: PLR0913
    run: Run,
    probs: torch.Tensor,
    paths: list[str],
    bad: dict[int, str] | None = None,
    output: str | Path | None = None,
    top_k: int | None = None,
    world_size: int = 1,
    batch_size: int = 3,
    names: list[str] | None = None,
    monkeypatch: pytest.MonkeyPatch | None = None,
    abstain_below: float | None = None,
    chosen: torch.Tensor | None = None,
) -> Path:
    """Write the predictions of a network; each rank writes its part, the last rank first."""
    bad = bad or {}
    model = model_of(names or NAMES)
    counts = {}

    def all_gather_object(gathered: list, mine: Any) -> None:
        counts[trainer.global_rank] = mine
        gathered[:] = [counts.get(rank) for rank in range(world_size)]

    if monkeypatch:
        monkeypatch.setattr(predictions.dist, "all_gather_object", all_gather_object)
        monkeypatch.setattr(
            predictions.dist, "broadcast_object_list", lambda token: token.__setitem__(0, "token")
        )
    for rank in reversed(range(world_size)):
        trainer = trainer_of(paths, rank, world_size)
        writer = PredictionWriter(run, str(output) if output else None, top_k, abstain_below)
        writer.on_predict_start(trainer, model)
        indices = rank_range(len(paths), rank, world_size)
        # the last batches may be empty
        for start in range(0, len(rank_range(len(paths), 0, world_size)), batch_size):
            batch = list(indices[start : start + batch_size])
            good = [i for i in batch if i not in bad]
            index = torch.tensor(good, dtype=torch.int64)
            outputs = outputs_of(index, probs[good], None if chosen is None else chosen[good])
            outputs["bad"] = [(i, bad[i]) for i in batch if i in bad]
            writer.on_predict_batch_end(trainer, model, outputs, None, 0)
        writer.on_predict_end(trainer, model)
    return writer.target


@pytest.fixture
def run(tmp_path) -> Run:
    run = Run(tmp_path, "predict")
    run.choose()
    return run


def read(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows of a file; numbers as numbers, nothing as None."""
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, strict=True)
        rows = [{name: text or None for name, text in row.items()} for row in reader]
    is_number = [name for name in reader.fieldnames if name.startswith(("p_", "probability"))]
    return list(reader.fieldnames), [
        row | {n: float(row[n]) for n in is_number if row[n]} for row in rows
    ]


PATHS = [
    *(
        "b.png",
        "a.png",
        "with, comma.png",
        'a "b".png',
        "写真.png",
        "line\nbreak.png",
        "\r.png",
        "\r\n.png",
        "b.png",
    ),
    *("z/y.jpg", "=2.png"),
]


@promise("each-image-once")
def test_one_row_an_image_in_the_order_of_the_input(run):
    probs = probabilities(len(PATHS))
    bad = {
        2: "with, comma.png: cannot be decoded: torn",
        10: "=2.png: cannot be decoded: the file is empty",
    }
    columns, rows = read(predict(run, probs, PATHS, bad, output=run.root / "out.csv"))
    assert columns == ["path", "class", "probability", *(f"p_{name}" for name in NAMES), "error"]
    assert [row["path"] for row in rows] == PATHS
    for i, (row, expected) in enumerate(zip(rows, probs.numpy(), strict=True)):
        if i in bad:
            assert row == {**dict.fromkeys(columns), "path": PATHS[i], "error": bad[i]}
            continue
        assert row["class"] == NAMES[expected.argmax()] and row["error"] is None
        # Seven digits after the point are written.
        np.testing.assert_allclose([row[f"p_{name}"] for name in NAMES], expected, atol=5.1e-8)
        assert row["probability"] == max(row[f"p_{name}"] for name in NAMES)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_most_probable_classes_best_first(run, top_k):
    probs = probabilities(20)
    columns, rows = read(predict(run, probs, [f"{i}.png" for i in range(20)], top_k=top_k))
    more = [f"{what}_{i}" for i in range(2, top_k + 1) for what in ("class", "probability")]
    assert columns == ["path", "class", "probability", *more, "error"]
    for row, expected in zip(rows, probs.tolist(), strict=True):
        best = sorted(zip(expected, NAMES, strict=True), reverse=True)[:top_k]
        keys = [
            ("probability", "class"),
            *((f"probability_{i}", f"class_{i}") for i in range(2, top_k + 1)),
        ]
        assert [row[name] for _, name in keys] == [name for _, name in best]
        np.testing.assert_allclose(
            [row[value] for value, _ in keys], [value for value, _ in best], atol=5.1e-8
        )


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_folder_and_a_file_the_prediction_is_only_printed(
    tmp_path, capsys, monkeypatch, world_size
):
    run = Run(tmp_path / "runs", "predict")
    with pytest.raises(AssertionError, match="not chosen"):  # the target has no place
        predict(run, probabilities(1), ["a.png"], world_size=world_size, monkeypatch=monkeypatch)
    answer, others = capsys.readouterr().out.splitlines()
    assert answer.startswith("a.png: ") and others.startswith("other classes: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("top_k", [None, 2])
def test_below_a_probability_it_abstains_and_keeps_the_numbers(run, capsys, top_k):
    probs, paths = probabilities(20), [f"{i}.png" for i in range(20)]
    bad = {3: "3.png: cannot be decoded: torn"}
    limit = float(probs.max(dim=1).values.sort().values[8])  # one image lies on it, and is sure
    _, sure = read(predict(run, probs, paths, bad, run.root / "sure.csv", top_k))
    capsys.readouterr()
    _, rows = read(
        predict(run, probs, paths, bad, run.root / "out.csv", top_k, abstain_below=limit)
    )
    is_unsure = [i not in bad and float(probs[i].max()) < limit for i in range(20)]
    assert 7 <= sum(is_unsure) <= 8
    for row, other, unsure in zip(rows, sure, is_unsure, strict=True):
        assert row == (other | {"class": "unsure"} if unsure else other)
    assert f"{sum(is_unsure)} unsure" in capsys.readouterr().out.splitlines()[0]


def test_devices_abstain_as_one_does(run, monkeypatch, capsys):
    probs, paths = probabilities(13), [f"{i}.png" for i in range(13)]
    files = []
    for k in (1, 2, 3):
        target = run.root / f"{k}.csv"
        predict(
            run,
            probs,
            paths,
            output=target,
            world_size=k,
            monkeypatch=monkeypatch,
            abstain_below=0.6,
        )
        files.append((target.read_bytes(), capsys.readouterr().out.splitlines()[0]))
    assert b",unsure," in files[0][0] and files[0] == files[1] == files[2]


def test_abstaining_from_0_on_never_does_and_at_1_always(run):
    for limit, expected in ((0.0, set(NAMES)), (1.0, {"unsure"})):
        _, rows = read(
            predict(run, probabilities(20), [f"{i}.png" for i in range(20)], abstain_below=limit)
        )
        assert {row["class"] for row in rows} <= expected


def test_it_abstains_by_the_class_that_a_threshold_says(run):
    probs, chosen = torch.tensor([[0.95, 0.05], [0.4, 0.6]]).double(), torch.tensor([1, 1])
    path = predict(
        run, probs, ["a.png", "b.png"], names=["no", "yes"], chosen=chosen, abstain_below=0.5
    )
    assert [row["class"] for row in read(path)[1]] == ["unsure", "yes"]


def test_a_class_called_unsure_leaves_no_word_for_abstaining(run):
    names = ["sure", "unsure"]
    with pytest.raises(ValueError, match="unsure"):
        predict(run, probabilities(2, 2), ["a", "b"], names=names, abstain_below=0.9)
    _, rows = read(predict(run, probabilities(2, 2), ["a", "b"], names=names))
    assert {row["class"] for row in rows} <= set(names)


@pytest.mark.parametrize("top_k", [None, 2])
def test_the_class_that_a_threshold_says_comes_first(run, top_k):
    probs = torch.tensor([[0.3, 0.7], [0.9, 0.1]], dtype=torch.float64)
    target = predict(
        run, probs, ["a", "b"], top_k=top_k, names=["x", "y"], chosen=torch.tensor([0, 0])
    )
    _, rows = read(target)
    assert [(row["class"], row["probability"]) for row in rows] == [("x", 0.3), ("x", 0.9)]
    if top_k:
        assert [(row["class_2"], row["probability_2"]) for row in rows] == [("y", 0.7), ("y", 0.1)]
    else:
        assert [(row["p_x"], row["p_y"]) for row in rows] == [(0.3, 0.7), (0.9, 0.1)]


def test_equal_probabilities_go_to_the_first_class(run):
    _, (row,) = read(
        predict(run, torch.full((1, 4), 0.25, dtype=torch.float64), ["a.png"], top_k=4)
    )
    assert [row["class"], row["class_2"], row["class_3"], row["class_4"]] == NAMES


@pytest.mark.parametrize("num", [1, 2, 11, 12, 13])
def test_parts_of_devices_join_to_the_same_bytes(run, monkeypatch, capsys, num):
    paths = [f"{i}.png" for i in range(num)]
    probs = probabilities(num)
    bad = {num // 2: "torn"}
    contents, summaries = set(), set()
    for world_size in 1, 2, 3, 8:
        output = run.root / "out.csv"
        with pytest.raises(ValueError, match="none of the images") if num == 1 else nullcontext():
            predict(run, probs, paths, bad, output, world_size=world_size, monkeypatch=monkeypatch)
        assert [row["path"] for row in read(output)[1]] == paths
        contents.add(output.read_bytes())
        summaries.add(capsys.readouterr().out)
        # no parts are left
        assert [path.name for path in run.root.iterdir() if path.is_file()] == [output.name]
        output.unlink()
    assert len(contents) == len(summaries) == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_one_image_is_reported_with_its_class_and_probability(run, monkeypatch, capsys, devices):
    probs = torch.tensor([[0.1, 0.9]])
    predict(run, probs, ["a.jpg"], names=["x", "y"], world_size=devices, monkeypatch=monkeypatch)
    assert capsys.readouterr().out.splitlines()[0] == "a.jpg: y, probability 0.9000"
    with pytest.raises(ValueError, match="none of the images"):
        predict(run, probs, ["a.jpg"], names=["x", "y"], bad={0: "broken"})
    assert capsys.readouterr().out.splitlines()[0] == "a.jpg: unreadable"


def test_the_summary_counts_each_class(run, capsys):
    probs = torch.eye(4, dtype=torch.float64)[[2, 0, 2, 2, 0, 1]]
    target = predict(run, probs, [f"{i}.png" for i in range(6)], {5: "torn"})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "6 images: 3 größe, 2 hot dog, 1 unreadable"
    assert second == f"predictions in {target}" and target == run.path / "predictions.csv"


def test_a_header_is_quoted_as_the_csv_module_would(run):
    names = ["a,b", 'c"d', "e\nf", "g h", "'i'"]
    target = predict(run, probabilities(1, 5), ["a.png"], names=names)
    assert read(target)[0] == [
        "path",
        "class",
        "probability",
        *(f"p_{name}" for name in names),
        "error",
    ]
    expected = run.root / "expected.csv"
    with open(expected, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(read(target)[0])
    assert target.read_bytes().startswith(expected.read_bytes())


def test_file_names_that_are_no_utf8(run):
    name = os.fsdecode(b"caf\xe9.png")
    paths, output = [name, "b.png"], run.root / "out.csv"
    predict(run, probabilities(2), paths, {0: f"{name}: cannot be decoded: torn"}, output)
    assert output.read_bytes().count(b"caf\xe9.png") == 2  # the very bytes of the name


def test_memory_does_not_grow_with_the_rows(run):
    writer, model = PredictionWriter(run), model_of(["a", "b"])
    trainer = trainer_of([f"{i}.png" for i in range(1000)])
    writer.on_predict_start(trainer, model)
    for i in range(0, 1000, 10):
        index = torch.arange(i, i + 10)
        writer.on_predict_batch_end(
            trainer, model, outputs_of(index, probabilities(10, 2)), None, 0
        )
    assert sorted(writer.counts) == ["a", "b"]
    assert not any(
        isinstance(value, (list, dict)) and len(value) > 10 for value in vars(writer).values()
    )
    writer.on_predict_end(trainer, model)


def test_two_that_write_one_file_at_once_leave_one_of_both_whole(run, tmp_path):
    model, target = model_of(NAMES), run.root / "out.csv"
    writers = [PredictionWriter(run, str(target)) for _ in range(2)]
    trainers = [trainer_of([f"{name}{i}.png" for i in range(3)]) for name in "ab"]
    for writer, trainer in zip(writers, trainers, strict=True):
        writer.on_predict_start(trainer, model)
        writer.on_predict_batch_end(
            trainer, model, outputs_of(torch.arange(3), probabilities(3)), None, 0
        )
    for name, writer, trainer in zip("ab", writers, trainers, strict=True):
        writer.on_predict_end(trainer, model)
        assert [row["path"] for row in read(target)[1]] == [f"{name}{i}.png" for i in range(3)]
    assert [path.name for path in run.root.iterdir() if path.is_file()] == ["out.csv"]


def test_what_a_killed_one_left_goes_after_a_day(run):
    old, new = (
        run.path / ".predictions.csv.12345678.part0",
        run.path / ".predictions.csv.87654321.part0",
    )
    for part in (old, new):
        part.touch()
    os.utime(old, (0, 0))
    target = predict(run, probabilities(2), ["a.png", "b.png"])
    assert {*run.path.iterdir()} == {target, new}  # another one may be writing that


def test_a_run_that_fails_leaves_no_part_and_keeps_the_file_of_before(run):
    target = predict(run, probabilities(2), ["a.png", "b.png"])
    before = target.read_bytes()
    writer, model = PredictionWriter(run), model_of(NAMES)
    trainer = trainer_of(["a.png"])
    writer.on_predict_start(trainer, model)
    assert len(list(run.path.iterdir())) == 2
    writer.on_exception(trainer, model, RuntimeError("torn"))
    assert [path.name for path in run.path.iterdir()] == [
        "predictions.csv"
    ] and target.read_bytes() == before


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: what a full disk does, without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_at_the_end_keeps_the_parts_and_the_file_of_before(run, monkeypatch):
    paths, output = [f"{i}.png" for i in range(40)], run.root / "out.csv"
    predict(run, probabilities(2), ["a.png", "b.png"], output=output)
    before = output.read_bytes()
    with (
        file_size_limit(2000),  # each part has room, all together have not
        pytest.raises(OSError, match="could not be written") as e,
    ):
        predict(run, probabilities(40), paths, output=output, world_size=2, monkeypatch=monkeypatch)
    parts = [run.root / f".out.csv.token.part{rank}" for rank in range(2)]
    assert str(e.value).endswith(f"are in {parts[0]} {parts[1]}")
    assert output.read_bytes() == before
    assert sorted(path for path in run.root.iterdir() if path.is_file()) == [*parts, output]
    # What was kept is what would have been joined.
    predict(run, probabilities(40), paths, output=run.root / "whole.csv", world_size=1)
    kept = b"".join(part.read_bytes() for part in parts)
    assert kept == (run.root / "whole.csv").read_bytes()


def test_a_disk_that_fills_up_before_keeps_the_rows_so_far(run):
    writer, model = (
        PredictionWriter(run, str(run.root / "out.csv")),
        model_of(NAMES),
    )
    trainer = trainer_of([f"{i}.png" for i in range(1000)])
    writer.on_predict_start(trainer, model)
    outputs = outputs_of(torch.arange(1000), probabilities(1000))
    with file_size_limit(20_000), pytest.raises(OSError, match="rows so far are in") as caught:
        writer.on_predict_batch_end(trainer, model, outputs, None, 0)
    writer.on_exception(trainer, model, caught.value)
    (part,) = [path for path in run.root.iterdir() if path.is_file()]
    assert str(part) in str(caught.value) and part.stat().st_size == 20_000
    assert not (run.root / "out.csv").exists()


def test_a_part_that_is_whole_becomes_the_file_and_is_never_copied(run, monkeypatch):
    monkeypatch.setattr(files.shutil, "copyfileobj", None)
    target = predict(run, probabilities(2), ["a.png", "b.png"])
    assert len(read(target)[1]) == 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_link_and_a_mode_are_kept(run, monkeypatch, world_size):
    disk = run.root / "disk"
    disk.mkdir()
    file, output = disk / "real.csv", run.root / "link.csv"
    file.touch(0o600)
    output.symlink_to(file)
    paths = ["a.png", "b.png", "c.png"]
    predict(
        run, probabilities(3), paths, output=output, world_size=world_size, monkeypatch=monkeypatch
    )
    assert output.is_symlink() and [row["path"] for row in read(file)[1]] == paths
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(disk.iterdir()) == [file]  # the parts lay next to it, and are gone


def test_the_parts_of_a_private_file_are_private(run):
    target = run.root / "private.csv"
    target.touch(0o600)
    writer, model = PredictionWriter(run, str(target)), model_of(NAMES)
    writer.on_predict_start(trainer_of(["a.png"]), model)
    (part,) = run.root.glob(".private.csv.*")
    assert stat.S_IMODE(part.stat().st_mode) == 0o600
    writer.on_exception(trainer_of(["a.png"]), model)


def test_images_of_which_none_can_be_read_are_a_failure_with_all_its_rows(run, capsys):
    with pytest.raises(
        ValueError,
        match="none of the images",
    ):
        predict(run, probabilities(3), ["a.png", "b.png", "c.png"], dict.fromkeys(range(3), "torn"))
    assert capsys.readouterr().out.startswith("3 images: 3 unreadable\n")
    assert [row["error"] for row in read(run.path / "predictions.csv")[1]] == ["torn"] * 3
    # The control: a class may be called so.
    predict(
        run,
        torch.ones(3, 1, dtype=torch.float64),
        ["a.png", "b.png", "c.png"],
        names=["unreadable"],
    )


def test_the_suffix_may_be_written_in_capitals_and_the_folder_is_made(run):
    images = ["a.png", "b.png"]
    target = predict(run, probabilities(2), images, output=run.root / "new/folder/out.CSV")
    same = predict(run, probabilities(2), images, output=run.root / "same.csv")
    assert target.read_bytes() == same.read_bytes() and target.suffix == ".CSV"


THRESHOLDS = (0.6, 0.3, 0.5, 0.2)


def predict_labels(
    run: Run,
    probs: torch.Tensor,
    paths: list[str],
    bad: dict[int, str] | None = None,
    names: list[str] = NAMES,
    **options: Any,
) -> PredictionWriter:
    bad = bad or {}
    calibration = SimpleNamespace(thresholds=THRESHOLDS)
    model = model_of(names, "several", calibration=calibration)
    trainer = trainer_of(paths)
    writer = PredictionWriter(run, **options)
    writer.on_predict_start(trainer, model)
    good = [i for i in range(len(paths)) if i not in bad]
    outputs = outputs_of(torch.tensor(good), probs[good], probs[good] >= torch.tensor(THRESHOLDS))
    outputs["bad"] = list(bad.items())
    writer.on_predict_batch_end(trainer, model, outputs, None, 0)
    with nullcontext() if len(good) else pytest.raises(ValueError):
        writer.on_predict_end(trainer, model)
    return writer


def test_labels_are_written_next_to_their_probabilities(run, capsys):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(len(PATHS), 4, generator=generator, dtype=torch.float64)
    probs[3] = 0.01  # no label
    bad = {2: "with, comma.png: cannot be decoded: torn"}
    target = predict_labels(run, probs, PATHS, bad, output=str(run.root / "out.csv")).target
    columns, rows = read(target)
    assert columns == ["path", "labels", *(f"p_{name}" for name in NAMES), "error"]
    assert [row["path"] for row in rows] == PATHS
    counts = dict.fromkeys(NAMES, 0)
    for i, (row, expected) in enumerate(zip(rows, probs.tolist(), strict=True)):
        if i in bad:
            assert row == {**dict.fromkeys(columns), "path": PATHS[i], "error": bad[i]}
            continue
        labels = [n for n, p, t in zip(NAMES, expected, THRESHOLDS, strict=True) if p >= t]
        found = (row["labels"] or "").split(";")  # None for an empty field
        assert [name for name in found if name] == labels
        np.testing.assert_allclose([row[f"p_{name}"] for name in NAMES], expected, atol=5.1e-8)
        for name in labels:
            counts[name] += 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"{len(PATHS)} images: ")
    for text in (*(f"{num} {name}" for name, num in counts.items()), "1 without labels"):
        assert text in first
    assert "1 unreadable" in first


def test_labels_that_contain_the_separator_have_another_one(run):
    names = ["a;b", "c", "d", "e"]
    target = predict_labels(run, torch.ones(1, 4).double(), ["x.png"], names=names).target
    assert read(target)[1][0]["labels"] == "a;b|c|d|e"


def test_a_single_image_with_several_labels_is_printed(run, tmp_path, capsys):
    alone = Run(tmp_path, "predict")
    p = torch.tensor([[0.7, 0.25, 0.51, 0.1]], dtype=torch.float64)
    predict_labels(alone, p, ["x.png"])
    assert capsys.readouterr().out.splitlines() == [
        "x.png: hot dog 0.7000 (threshold 0.6000), größe 0.5100 (threshold 0.5000)",
        'not predicted: the "other", one 0.2500 (threshold 0.3000), =1+1 0.1000 (threshold 0.2000)',
    ]
    predict_labels(alone, p / 100, ["x.png"])
    assert capsys.readouterr().out.splitlines()[0] == "x.png: no label"
    predict_labels(alone, p, ["x.png"], {0: "torn"})
    assert capsys.readouterr().out.splitlines()[0] == "x.png: unreadable"


def test_the_test_writes_true_and_predicted_labels(run):
    model = model_of(NAMES, "several", calibration=SimpleNamespace(thresholds=THRESHOLDS))
    labels = np.array([[1, 0, 1, 0], [0, 0, 0, 0]], np.uint8)
    samples = replace(nowhere(2), paths=["a.png", "b.png"], targets=MultiHot(labels))
    trainer = trainer_of(["a.png", "b.png"])
    trainer.datamodule.splits["test"] = samples
    writer = PredictionWriter(run)
    writer.on_test_start(trainer, model)
    probs = torch.tensor([[0.7, 0.25, 0.51, 0.1], [0.0, 0.9, 0.0, 0.0]]).double()
    outputs = outputs_of(torch.arange(2), probs, probs >= torch.tensor(THRESHOLDS))
    writer.on_test_batch_end(trainer, model, outputs, None, 0)
    writer.on_test_end(trainer, model)
    answers = read_label_answers(writer.target, NAMES)
    np.testing.assert_array_equal(answers.labels, labels)
    np.testing.assert_array_equal(answers.predicted, probs >= torch.tensor(THRESHOLDS))
