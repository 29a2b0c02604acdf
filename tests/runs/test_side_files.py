"""A damaged side file of a run is named, and a run is not resumed without it."""

import pytest
from colours import QUICKEST


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seconds.json", "steps.csv", "metrics.csv"])
def test_a_run_is_not_resumed_with_a_damaged_file(colours, cli, tmp_path, name):
    fit = ("fit", colours, *QUICKEST, "--test_after_fit", "false")
    cli(*fit)
    run = tmp_path / "runs/fit/version_0"
    content = (run / name).read_bytes()
    (run / name).write_bytes(b"\xff\xfe\n")
    for path in ("last.ckpt", "best.ckpt"):
        assert (run / "checkpoints" / path).exists()
    with pytest.raises(ValueError, match=f"{name} is damaged: "):
        cli(*fit, "--trainer.max_epochs", "2", "--resume")
    (run / name).write_bytes(content)
    cli(*fit, "--trainer.max_epochs", "2", "--resume")
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
