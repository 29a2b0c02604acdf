"""Which run `--resume` continues: the newest one that has recorded the data and the network of the command."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.runs.folder import Run
from finetune.runs.identity import (
    KEY,
    Found,
    Identity,
    check_has_last,
    find_run,
    fold_runs,
    num_folds,
    read_identity,
)
from finetune.runs.run_search import read_about, write_about
from finetune.system.messages import WrongUsage

PHOTOS = Identity("/photos", "finetune.ImageFolderData", "resnet18", "resnet18")
ANY = Identity()


def write_run(folder: Path, identity: Identity = PHOTOS, **about: object) -> Path:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints/last.ckpt").touch()
    write_about(folder, {KEY: identity.as_plain(), **about})
    return folder


def test_it_is_the_newest_of_the_same_data_and_network(tmp_path):
    assert find_run(tmp_path, ANY) == Found(None, None, {})
    Run(tmp_path, "fit").choose()  # it has not begun
    first = write_run(tmp_path / "fit/version_2")
    for i, other in ((9, {"chosen": "resnet50", "network": "auto"}), (10, {"place": "/trash"})):
        write_run(tmp_path / f"fit/version_{i}", replace(PHOTOS, **other))
    assert find_run(tmp_path, ANY).run == tmp_path / "fit/version_10"
    found = find_run(tmp_path, Identity(place="/photos", network="resnet18"))
    assert found.run == first
    assert found.passed_in_words() == (
        f"{tmp_path}/fit/version_10 is of other data (/trash, not /photos), and 1 older of others, too "
        "(--resume RUN continues it)"
    )
    # a network that was chosen is found by its name, and as it was asked for
    for network in ("auto", "resnet50"):
        assert find_run(tmp_path, Identity(network=network)).run == tmp_path / "fit/version_9"
    assert find_run(tmp_path, Identity(data_class="finetune.Hotdog")).run is None


def test_folds_are_found_by_their_number_or_until_they_have_ended(tmp_path):
    single = write_run(tmp_path / "fit/version_0")
    folds = write_run(tmp_path / "fit/version_1", replace(PHOTOS, folds=2))
    assert num_folds(folds) == 2 and num_folds(single) is None
    assert [run.name for run in fold_runs(folds)] == ["fold_1", "fold_2"]
    assert find_run(tmp_path, ANY).run == find_run(tmp_path, Identity(folds=2)).run == folds
    assert find_run(tmp_path, Identity(folds=3)).run is None
    write_about(folds, {**read_about(folds), "ended": "now"})
    assert find_run(tmp_path, ANY).run == single
    assert find_run(tmp_path, Identity(folds=2)).run == folds


def test_what_has_not_ended_goes_on_before_what_has(tmp_path):
    unfinished, finished, killed = (tmp_path / f"fit/version_{i}" for i in range(3))
    write_run(finished, ended="now")
    assert find_run(tmp_path, ANY) == Found(finished, None, {})
    (write_run(killed) / "checkpoints/last.ckpt").unlink()
    assert find_run(tmp_path, ANY) == Found(finished, killed, {})
    write_run(unfinished)
    assert find_run(tmp_path, ANY) == Found(unfinished, None, {})


@pytest.mark.parametrize(
    "text",
    ["[", "{}", '{"identity": {"folds": "x"}}', '{"identity": 3}', '{"identity": {"place": []}}'],
)
def test_a_run_without_a_readable_identity_is_none_of_any_data_and_is_named(tmp_path, text):
    run = write_run(tmp_path / "fit/version_0")
    (run / "about.json").write_text(text)
    found = find_run(tmp_path, ANY)
    assert read_identity(run) is None and found.run is None
    assert found.passed_in_words().startswith(
        f"{run} is without a readable about.json (--resume RUN"
    )


@pytest.mark.parametrize(
    ("about", "has_result", "is_lost"),
    [
        ({"ended": "2026-01-01T10:00:00+00:00"}, False, True),
        ({}, True, True),  # what has been tested has ended
        ({}, False, False),  # killed inside its first epoch, with `val_check_interval` below 1
    ],
)
def test_a_run_that_keeps_only_its_best_cannot_continue(tmp_path, about, has_result, is_lost):
    run = write_run(tmp_path / "fit/version_1", **about)
    os.rename(run / "checkpoints/last.ckpt", run / "checkpoints/best.ckpt")
    if has_result:
        (run / "test.json").write_text("{}")
    if not is_lost:
        check_has_last(run)
        return
    with pytest.raises(WrongUsage, match=r"version_1 cannot be resumed: its last\.ckpt"):
        check_has_last(run)
