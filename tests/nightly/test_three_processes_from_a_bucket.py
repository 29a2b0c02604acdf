"""A fit from a bucket on three processes, killed and continued, ends as one on the folder that was left alone."""

import signal
from pathlib import Path

import pytest
from colours import QUICKEST
from object_server import object_server
from promise import promise
from stopped_fits import differing, fitted, state

RUN = "runs/fit/version_0"
# 60 images in batches of 12: five steps an epoch, a checkpoint after every two
FIT = [*QUICKEST, "--batch", 12, "--trainer.max_epochs", 3, "--trainer.log_every_n_steps", 1]
FIT += ["--workers", 1, "--test_after_fit", "false", "--checkpoint_every_n_steps", 2]


@promise("places")
@promise("any-number-of-devices")
@pytest.mark.timeout(900)
def test_three_processes_killed_and_resumed_from_a_bucket_end_as_on_the_folder(colours, tmp_path):
    alone = tmp_path / "folder"
    assert fitted(alone, "fit", colours, *FIT, num_processes=3) == [0, 0, 0]
    there = tmp_path / "bucket"
    with object_server() as server:
        place = server.put_folder(colours, "set")
        killed = fitted(there, "fit", place, *FIT, num_processes=3, step=8)
        assert killed == [-signal.SIGKILL] * 3
        server.requests.clear()
        resumed = fitted(there, "fit", place, *FIT, "--resume", RUN, num_processes=3)
        assert resumed == [0, 0, 0]
        assert server.requests["LIST"] == 3  # each process lists the folder
        assert server.requests["GET"] <= 3 * 90  # at most as many as there are images for each
    own, other = (state(folder / RUN) for folder in (there, alone))
    assert not differing(own, other)
    assert len(Path(alone, RUN, "steps.csv").read_text().splitlines()) > 8  # the control
