"""A run's folder stands for its best checkpoint."""

from pathlib import Path

from finetune.runs.run_checkpoint import checkpoint_of


def run(folder: Path, *names: str) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    for name in names:
        (folder / "checkpoints" / f"{name}.ckpt").touch()
    return folder


def test_the_best_is_taken_the_last_where_there_is_no_best_and_that_is_reported(tmp_path):
    both, last = run(tmp_path / "both", "best", "last"), run(tmp_path / "last", "last")
    assert checkpoint_of(str(both)) == (str(both / "checkpoints/best.ckpt"), "")
    assert checkpoint_of(str(both / "checkpoints")) == (str(both / "checkpoints/best.ckpt"), "")
    path, reported = checkpoint_of(str(last))
    assert (
        path == str(last / "checkpoints/last.ckpt")
        and reported == f"{last} has no best checkpoint: taking {path}"
    )


def test_anything_else_is_returned_as_it_is(tmp_path):
    (tmp_path / "a.ckpt").touch()
    for path in (str(tmp_path / "a.ckpt"), str(tmp_path / "absent")):
        assert checkpoint_of(path) == (path, "")
