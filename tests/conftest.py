"""Fixtures of all tests: small folders of images, finished runs, and the command line in this process."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import promise
import pytest
import trials

# also where the environment says otherwise: pytest rewrites the asserts of all files, for many seconds
sys.dont_write_bytecode = False
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # of the onnxruntime that tests compare with
# Images are tiny, here and in the programs that tests start: more threads only wait for one another.
os.environ["OMP_NUM_THREADS"] = "1"
# Live bars, colours and times of lines depend on these, and a service of continuous integration sets them.
for name in ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm"
# `nohup` ignores SIGHUP and a background job SIGINT; tested programs would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

SECONDS = Path(__file__).with_name("seconds.json")  # per test file: [quick, slow]
# fixtures of runs that are fitted once a session, and of reviews
pytest_plugins = ["runs", "review_fixtures"]
LONG = 5.0  # seconds after which a test of the default tier is named at the end


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests; one that only distributes them imports nothing, and so starts at once."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    # Imported before a warning is an error: some of their imports warn.
    import pytorch_lightning  # noqa: F401
    from hypothesis import Phase, settings

    # Without shrinking, which would take minutes where a control fails; HYPOTHESIS_PROFILE=nightly shrinks.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "push", derandomize=True, max_examples=25, deadline=None, database=None, phases=phases
    )
    settings.register_profile("nightly", max_examples=500, deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "push"))
    # Lightning's advice, which the command line silences, too. Here, since pytest imports what a filter names.
    config.addinivalue_line(
        "filterwarnings", "ignore::lightning_fabric.utilities.warnings.PossibleUserWarning"
    )


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(promise)
    pluginmanager.register(trials)
    parser.addoption(
        "--record-seconds", action="store_true", help=f"of a run of all tests: write {SECONDS.name}"
    )


NIGHTLY = Path(__file__).with_name("nightly")


@pytest.hookimpl(tryfirst=True)  # before -m deselects tests
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of the folder nightly/ as slow."""
    if NIGHTLY in item.path.parents:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # after -m and -k have deselected tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first; otherwise one process is left with one of them at the end."""
    recorded = json.loads(SECONDS.read_text())
    total: dict[str, float] = {}
    tiers = {(file_of(item.nodeid), "slow" in item.keywords) for item in items}
    for file, is_slow in tiers:
        total[file] = total.get(file, 0.0) + recorded.get(file, [0.0, 0.0])[is_slow]
    items.sort(key=lambda item: (-total[file_of(item.nodeid)], file_of(item.nodeid)))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """List long tests of the default tier, and record how long each file takes."""
    seconds: dict[str, list[float]] = {}
    tests: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            is_slow = "slow" in report.keywords
            seconds.setdefault(file_of(report.nodeid), [0.0, 0.0])[is_slow] += report.duration
            if not is_slow:
                tests[report.nodeid] = tests.get(report.nodeid, 0.0) + report.duration
    if long := {name: duration for name, duration in tests.items() if duration > LONG}:
        terminalreporter.section(
            f"over {LONG:.0f} s in the default tier: make them quicker, or mark them slow"
        )
        for name, duration in sorted(long.items(), key=lambda pair: -pair[1]):
            terminalreporter.write_line(f"{duration:6.1f} s  {name}")
    if config.getoption("--record-seconds"):
        rounded = {
            file: [round(each, 1) for each in both]
            for file, both in sorted(seconds.items())
            if sum(both) >= 1
        }
        rows = [f"{json.dumps(file)}: {json.dumps(both)}" for file, both in rounded.items()]
        SECONDS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of cached images, separate from that of the user."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("caches")
        patch.setenv("FINETUNE_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def no_seed_of_another_run() -> None:
    """Forget the seed that a `fit` in this process left in the environment, be it a fixture's of a whole module."""
    os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.fixture(scope="session")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three easy classes: 20 images of each in train, 10 in test."""
    from colours import draw_colours

    return draw_colours(tmp_path_factory.mktemp("data") / "colours", train=20, test=10)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`finetune` in this process, in an empty folder."""
    from finetune.cli import run

    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield lambda *arguments: run([str(argument) for argument in arguments])
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group in this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
