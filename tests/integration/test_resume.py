"""Interrupted equals uninterrupted, bit for bit: weights, optimizer, schedule, Lightning's counters and metrics.

The control, an epoch that begins again, is in test_promises.py. With another number of processes, the weights agree up
to rounding. test_elastic.py has all sources of randomness, and wrong variants, without the command.
"""

import json
from typing import Any

import pytest
from colours import draw_colours
from processes import launch
from promise import promise

pytestmark = pytest.mark.slow

EVERYTHING = ("weights", "optimizer", "scheduler", "loops", "steps", "epochs")
STEPS_PER_EPOCH = 7


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("killed")
    data = draw_colours(root / "data", train=30, test=4)
    out = launch("kill_scenarios.py", root / "out", 1, data)
    return json.loads((out / "results.json").read_text())


def differences(result: dict[str, Any]) -> list[str]:
    return [what for what in EVERYTHING if not result[what]]


@promise("resume")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_killed_inside_an_epoch(results, world_size):
    """At any moment: tests/nightly/test_kills.py."""
    result = results[f"killed{world_size}"]
    assert result["killed"] == [-9] * world_size
    assert result["resumed"] == [0] * world_size
    assert differences(result) == []
    assert result["step"] % STEPS_PER_EPOCH != 0


def test_the_buckets_of_ddp_would_round_other_than_before(results):
    """The control on three processes; sums of two have the same rounding in any order."""
    result = results["control3"]
    assert result["resumed"] == [0, 0, 0]
    assert "weights" in differences(result)


def test_killed_while_a_checkpoint_was_written(results):
    result = results["cut_off"]
    assert result["killed"] == [-9]
    assert result["step"] == 3  # the first checkpoint; half of the second lay next to it
    assert len(result["leftovers"]) == 1
    assert result["gone"] == []
    assert differences(result) == []


@promise("stop")
def test_a_closed_terminal_stops_all_processes_after_the_step(results):
    """SIGINT: test_promises.py; that it leaves what SIGTERM does: test_stop_signals.py."""
    result = results["sighup"]
    assert result["stopped"] == [129, 129]
    assert result["step"] % 3 != 0 or result["step"] % STEPS_PER_EPOCH == 0, (
        "no checkpoint of its own was written"
    )
    assert differences(result) == []


def test_checkpoints_that_wait_are_written_at_a_signal_and_made_again_after_a_kill(results):
    """The signal is a SIGTERM that reaches the first of two processes alone, inside an epoch."""
    killed, stopped = results["waiting_killed"], results["waiting_stopped"]
    # the first epoch's, two behind
    assert killed["killed"] == [-9] and killed["step"] == STEPS_PER_EPOCH
    assert stopped["stopped"] == [143, 143] and stopped["step"] > 2 * STEPS_PER_EPOCH
    assert differences(killed) == [] and differences(stopped) == []


@promise("resume")
def test_a_fit_on_several_labels_that_is_killed_ends_as_an_uninterrupted_one(results):
    assert results["labels_reference"]["codes"] == [0]
    killed = results["labels_killed"]
    assert killed["killed"] == [-9] and killed["resumed"] == [0] and killed["step"] >= 9
    assert differences(killed) == []


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_the_command_continues_with_another_number_of_processes(results, before, after):
    result = results[f"moved{before}to{after}"]
    assert result["stopped"] == [143] * before and result["resumed"] == [0] * after
    assert result["step"] == STEPS_PER_EPOCH + 3  # inside an epoch
    for output, num in zip(result["said"], (before, after), strict=True):
        assert f"training: {num} x cpu, precision 64-true" in output
        assert "changed" not in output
    assert f"from step {result['step']}\n" in result["said"][1]
    stopped_at, end = result["distances"]
    assert stopped_at > 1e-3  # else there was nothing to do
    assert end <= 1e-10  # float64: rounding over 21 steps, far below any mistake
    assert results["moved_control"]["resumed"] == [0]
    assert results["moved_control"]["distances"][1] > 1e-4  # the epoch begun again
