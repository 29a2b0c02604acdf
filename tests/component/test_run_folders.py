"""Run folders: their names and versions never collide, a run without a result leaves none, and runs are found."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from finetune.runs.facts import Facts
from finetune.runs.folder import Run
from finetune.runs.headline import validation_headline
from finetune.runs.run_dir import RunDir, check_name, find_runs, runs_of, versions
from finetune.system.messages import WrongUsage


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# Versions


def test_versions_count_on_from_the_highest_and_sort_as_numbers(tmp_path):
    for name in ("version_9", "version_10", "version_x", "version_", "version_3_old", "other"):
        (tmp_path / "fit" / name).mkdir(parents=True)
    (tmp_path / "fit/version_11").write_text("a file")
    (tmp_path / "fit/version_12").symlink_to(tmp_path / "gone")
    assert [path.name for path in versions(tmp_path, "fit")] == ["version_9", "version_10"]
    assert versions(tmp_path / "nowhere", "fit") == []
    assert Run(tmp_path, "fit").choose().name == "version_13"


def test_runs_that_begin_at_once_get_a_folder_each(tmp_path):
    with ThreadPoolExecutor(16) as threads:
        chosen = list(threads.map(lambda _: Run(tmp_path, "fit").choose(), range(32)))
    assert sorted(chosen) == sorted(tmp_path / f"fit/version_{i}" for i in range(32))


# Names


@pytest.mark.parametrize("name", ["Über 2", "version_x", "a_b+c,d"])
def test_a_run_may_have_a_name(tmp_path, name):
    check_name(name)
    assert Run(tmp_path, "fit", name=name).choose() == tmp_path / "fit" / name
    assert Run(tmp_path, "fit").choose() == tmp_path / "fit/version_0"


@pytest.mark.parametrize("name", ["", "..", ".a", "a\\b", "-a", "a ", "a" * 101])
def test_a_name_that_is_no_plain_component_of_a_path_is_refused(name):
    with pytest.raises(WrongUsage, match="--name"):
        check_name(name)


@pytest.mark.parametrize("name", [".lock", "run.json", "notes.txt"])
def test_a_name_is_free_unless_its_folder_has_a_file(tmp_path, name):
    run = tmp_path / "fit/mine"
    run.mkdir(parents=True)
    (run / name).write_text("{}")
    if name == ".lock":
        assert Run(tmp_path, "fit", name="mine").choose() == run
        assert names_in(run) == {".lock", ".finetune", "run.json"}
        return
    with pytest.raises(WrongUsage, match="fit/mine exists"):
        Run(tmp_path, "fit", name="mine").choose()
    assert names_in(run) == {name}
    (tmp_path / "fit/file").touch()
    with pytest.raises(WrongUsage, match="fit/file exists"):
        Run(tmp_path, "fit", name="file").choose()


# The record


def test_a_record_is_merged_and_a_failed_write_leaves_the_earlier_one(tmp_path):
    run = RunDir(tmp_path)
    assert run.facts == Facts() and not run.is_run and run.state == "no checkpoint"
    run.update(kind="fit", seconds=1.5, root=None)
    run.update(epochs=3, seconds=np.float64(2.5))
    assert (run.facts.kind, run.facts.seconds, run.facts.epochs) == ("fit", 2.5, 3)
    assert RunDir(tmp_path).facts == run.facts and run.is_run
    before = (tmp_path / "run.json").read_bytes()
    above = structs.asdict(validation_headline("accuracy", 1.0, 10, 10, "epoch 1"))
    wrong = {"seconds": -1.0, "test": above | {"value": 1.01}, "epochs": -1}
    for name in wrong:
        with pytest.raises(ValueError, match=name):
            run.update(lines=["a"], **{name: wrong[name]})
        assert (tmp_path / "run.json").read_bytes() == before
    run.update(epochs=None)
    assert run.facts.epochs == 0 and run.facts.lines == []


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", "[" * 2_000, '{"epochs": "two"}', '{"seconds": -5}'),
        *('{"test": {"value": 7}}', '{"identity": {"folds": "x"}}', '{"began": "today"}'),
        *('{"identity": {"folds": 1000000000}}', '{"seconds": Infinity}'),
        *('{"corrections": {"x": 1}}', '{"first_look": ["x"]}', '{"backbone_ranking": {}}'),
        *('{"splits": {"train": {"counts": {"a": "x"}}}}', '{"splits": {"train": {}}}'),
        f'{{"epochs": 1{"0" * 400}}}',
    ],
)
def test_a_damaged_record_is_named_and_never_overwritten(tmp_path, text):
    run = RunDir(tmp_path)
    (tmp_path / "run.json").write_text(text)
    for act in (lambda: run.facts, lambda: run.update(epochs=1)):
        with pytest.raises(ValueError, match=rf"{tmp_path}/run\.json is damaged"):
            act()
    assert (tmp_path / "run.json").read_text() == text and run.state == "damaged"


def test_threads_change_a_record_one_after_another(tmp_path):
    names = ["kind", "command", "ended", "folder", "data", "root", "network", "fingerprint"]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: RunDir(tmp_path).update(**{name: name}), names))
    facts = RunDir(tmp_path).facts
    assert [getattr(facts, name) for name in names] == names


# Runs that are found


def write(folder: Path, began: str | None = None, *checkpoints: str) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    for name in checkpoints:
        (folder / f"checkpoints/{name}.ckpt").touch()
    (folder / "config.yaml").write_text("{}")
    RunDir(folder).update(kind="fit", began=began)
    return folder


def test_named_runs_stand_between_numbered_ones_by_time(tmp_path):
    write(tmp_path / "fit/version_2", "2026-03-01T10:00:00+00:00")
    write(tmp_path / "fit/version_10", "2026-03-02T10:00:00+00:00")
    write(tmp_path / "fit/old", "2026-02-01T10:00:00+00:00")
    write(tmp_path / "fit/new", "2026-04-01T12:00:00+02:00")
    write(tmp_path / "fit/version_2 copy", "2026-03-01T10:00:00+00:00")
    (tmp_path / "fit/.hidden").mkdir()
    (tmp_path / "fit/notes").mkdir()  # no run has begun there
    names = [run.path.name for run in runs_of(tmp_path)]
    assert names == ["old", "version_2 copy", "version_2", "version_10", "new"]
    assert runs_of(tmp_path / "nowhere") == []


def test_runs_are_found_beneath_any_folder_but_not_through_links(tmp_path):
    places = ("runs/fit/version_0", "runs/fit/mine", "runs/demo/fit/version_0", "kept/good")
    runs = [write(tmp_path / place) for place in places]
    Run(tmp_path / "runs", "predict").choose()
    (tmp_path / "project/checkpoints").mkdir(parents=True)  # of another tool
    (tmp_path / "project/checkpoints/last.ckpt").touch()
    (tmp_path / "project/config.yaml").write_text("{}")
    (tmp_path / "project/run.json").write_text('{"began": "today"}')
    (tmp_path / "runs/run.json").write_text('{"command": ["python", "x.py"]}')
    (tmp_path / "kept/run.json").write_text("[]")
    (tmp_path / "runs/demo/run.json").write_text("{")  # damaged
    runs.append(tmp_path / "runs/demo")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    assert find_runs(tmp_path) == sorted(map(RunDir, runs))
    assert RunDir(tmp_path / "deleted meanwhile").began == 0
    assert find_runs(runs[0]) == [RunDir(runs[0])] and find_runs(tmp_path / "nowhere") == []
