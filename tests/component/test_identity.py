"""Which run `--resume` continues: the newest one that has recorded the data and the network of the command."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from finetune.fitting.resume import Found, Identity, check_has_last, find_run, read_identity
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
    assert [run.path.name for run in RunDir(folds).fits] == ["fold_1", "fold_2"]
    assert RunDir(single).fits == []
    assert find_run(tmp_path, ANY).run == find_run(tmp_path, Identity(folds=2)).run == folds
    assert find_run(tmp_path, Identity(folds=3)).run is None
    RunDir(folds).update(ended="now")
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
    found = find_run(tmp_path, ANY)
    assert read_identity(run) is None and found.run is None
    assert found.passed_in_words().startswith(f"{run} is without a readable run.json (--resume RUN")


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
