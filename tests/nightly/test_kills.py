"""Commands that are killed, paused or cannot write, and then started again, end as commands that nothing disturbs."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from colours import draw_colours
from processes import run_script
from promise import promise

SCRIPT = Path(__file__).parents[1] / "support/kill_moments.py"
SECONDS = 3000.0  # of the long part


@promise("kills")
@pytest.mark.timeout(SECONDS)
def test_a_disturbed_command_that_is_started_again_ends_as_any_other(tmp_path, trials, record_row):
    data = draw_colours(tmp_path / "data", train=30, test=4)
    out = tmp_path / "out"
    out.mkdir()
    number = str(trials(1, 8))
    done = run_script(SCRIPT, out, data, "1", number, cwd=tmp_path, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    check_results(out / "results.json", record_row)


def check_results(path: Path, record_row: Callable[[str, int, str], None]) -> None:
    results = json.loads(path.read_text())
    assert results
    wrong_of = {}
    for command, faults in results.items():
        wrong = [fault for fault in faults if fault]
        if wrong:
            wrong_of[command] = wrong
        record_row(command, len(faults), f"{len(wrong)} faults")
    assert wrong_of == {}


# a small disk in a mount namespace, and a command on it
ON_SMALL_DISK = 'mount -t tmpfs -o size=64m tmpfs "$0" && "$@" && cp "$0/results.json" "$0.json"'
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def can_mount() -> bool:
    try:
        command = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:  # not on macOS
        return False


@pytest.mark.timeout(SECONDS)
def test_a_fit_on_a_full_disk_ends_in_one_line_and_continues(tmp_path, trials, record_row):
    if not can_mount():
        pytest.skip("this system lets no user mount a disk in a namespace")
    data = draw_colours(tmp_path / "data", train=30, test=4)
    out = tmp_path / "out"
    out.mkdir()
    command = [*UNSHARE, "sh", "-c", ON_SMALL_DISK, out, sys.executable, SCRIPT, out, data, "1"]
    done = subprocess.run(
        [*command, str(trials(1, 8)), "a full disk"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_results(out.with_suffix(".json"), record_row)
