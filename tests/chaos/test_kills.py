"""Commands that are killed, paused or cannot write, and then started again, end as commands that nothing disturbs."""

import json

import pytest
from colours import draw_colours
from processes import launch

pytestmark = pytest.mark.slow


@pytest.mark.timeout(3600)
def test_a_disturbed_command_that_is_started_again_ends_as_any_other(tmp_path, trials, record_row):
    data = draw_colours(tmp_path / "data", train=30, test=4)
    out = launch("kill_moments.py", tmp_path / "out", 1, data, str(trials(1, 8)))
    results = json.loads((out / "results.json").read_text())
    wrong_of = {}
    for command, faults in results.items():
        wrong = [fault for fault in faults if fault]
        if wrong:
            wrong_of[command] = wrong
        record_row(command, len(faults), f"{len(wrong)} faults")
    assert wrong_of == {}
