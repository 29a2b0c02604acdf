"""Which run `--resume` continues: the newest one that has recorded the data and the network of the command."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from finetune.fitting.resume import check_has_last, find_run
from finetune.runs.facts import Identity
from finetune.runs.folder import Run
from finetune.runs.run_dir import RunDir
from finetune.system.messages import WrongUsage

PHOTOS = Identity("/photos", "finetune.ImageFolderData", "resnet18", "resnet18")
ANY = Identity()


def write_run(folder: Path, identity: Identity = PHOTOS, **facts: object) -> Path:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints/last.ckpt").touch()
    RunDir(folder).update(kind="fit", identity=identity, **facts)
    return folder


def found(root: Path, wanted: Identity) -> Path | None:
    return find_run(root, wanted)[0]


def test_it_is_the_newest_of_the_same_data_and_network(tmp_path):
    assert found(tmp_path, ANY) is None
    Run(tmp_path, "fit").choose()  # it has not begun
    first = write_run(tmp_path / "fit/version_2")
    for i, other in ((9, {"chosen": "resnet50", "network": "auto"}), (10, {"place": "/trash"})):
        write_run(tmp_path / f"fit/version_{i}", replace(PHOTOS, **other))
    assert found(tmp_path, ANY) == tmp_path / "fit/version_10"
    run, note = find_run(tmp_path, Identity(place="/photos", network="resnet18"))
    assert run == first
    assert note == (
        f"passed over: {tmp_path}/fit/version_10 is of other data (/trash, not /photos) (--resume RUN continues it)"
    )
    # a network that was chosen is found by its name, and as it was asked for
    for network in ("auto", "resnet50"):
        assert found(tmp_path, Identity(network=network)) == tmp_path / "fit/version_9"
    assert found(tmp_path, Identity(data_class="finetune.Hotdog")) is None


def test_folds_are_found_by_their_number_or_until_they_have_ended(tmp_path):
    single = write_run(tmp_path / "fit/version_0")
    folds = write_run(tmp_path / "fit/version_1", replace(PHOTOS, folds=2))
    assert [run.path.name for run in RunDir(folds).fits] == ["fold_1", "fold_2"]
    assert RunDir(single).fits == []
    assert found(tmp_path, ANY) == found(tmp_path, Identity(folds=2)) == folds
    assert found(tmp_path, Identity(folds=3)) is None
    RunDir(folds).update(ended="now")
    assert found(tmp_path, ANY) == single
    assert found(tmp_path, Identity(folds=2)) == folds


def test_what_has_not_ended_goes_on_before_what_has(tmp_path):
    unfinished, finished, killed = (tmp_path / f"fit/version_{i}" for i in range(3))
    write_run(finished, ended="now")
    assert found(tmp_path, ANY) == finished
    write_run(unfinished)
    assert found(tmp_path, ANY) == unfinished
    (write_run(killed) / "checkpoints/last.ckpt").unlink()
    run, why = find_run(tmp_path, ANY)
    assert run == unfinished
    assert why == f"passed over: {killed} ended before its first checkpoint"
    RunDir(unfinished).update(ended="now")
    run, why = find_run(tmp_path, ANY)
    assert run is None and why == f"that {killed} ended before its first checkpoint"


@pytest.mark.parametrize(
    "text",
    [
        "[",
        '{"finetune": "1"}',
        '{"finetune": "1", "identity": {"folds": "x"}}',
        '{"finetune": "1", "identity": 3}',
    ],
)
def test_a_run_without_a_readable_identity_is_none_of_any_data_and_is_named(tmp_path, text):
    run = write_run(tmp_path / "fit/version_0")
    (run / "run.json").write_text(text)
    found_run, why = find_run(tmp_path, ANY)
    assert found_run is None
    assert f"since {run} is without a readable run.json (--resume RUN" in why


@pytest.mark.parametrize(
    ("facts", "is_lost"),
    [
        ({"ended": "2026-01-01T10:00:00+00:00"}, True),
        ({}, False),  # killed inside its first epoch, with `val_check_interval` below 1
    ],
)
def test_a_run_that_keeps_only_its_best_cannot_continue(tmp_path, facts, is_lost):
    run = write_run(tmp_path / "fit/version_1", **facts)
    os.rename(run / "checkpoints/last.ckpt", run / "checkpoints/best.ckpt")
    if not is_lost:
        check_has_last(run)
        return
    with pytest.raises(WrongUsage, match=r"version_1 cannot be resumed: its last\.ckpt"):
        check_has_last(run)
