"""docs/parallelism.md: its tables are those of the records, its model's arithmetic, its drawings and its commands."""

import importlib
import json
import re
import shlex
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from command_lines import own_options, parse_typed
from parity_ways import WAYS
from paths import ROOT
from torch import nn

from finetune.cli import OWN
from finetune.commands import config_files
from finetune.parity import communication_volume

PAGE = (ROOT / "docs/parallelism.md").read_text("utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line]
IMAGES = re.findall(r"!\[[^]]+\]\((parallelism/\w+\.png)\)", PAGE)


@pytest.fixture(scope="module")
def scripts():
    """The modules of benchmarks/scaling by name."""
    names = {"scaling": "__main__", **{name: name for name in ("steps", "model", "documents", "timelines", "drawings")}}
    return SimpleNamespace(**{name: importlib.import_module(f"benchmarks.scaling.{names[name]}") for name in names})


def test_the_tables_are_those_of_the_records(scripts):
    scaling = scripts.scaling
    records = scaling.load()
    assert list(records) == [case.name for case in scaling.CASES]
    tables = scripts.documents.tables(scaling.CASES, records)
    for name, table in tables.items():
        assert f"<!-- {name} -->\n{table}\n<!-- /{name} -->" in PAGE, name
    # The control: a step that took longer, and an all-reduce that did, are seen.
    for name, setting, blocks in (("ddp, LeNet", "2", ("scaling", "model")), ("all-reduce", "2 1000", ("transport",))):
        changed = json.loads(json.dumps(records))
        changed[name]["seconds"][setting] = [3 * value for value in changed[name]["seconds"][setting]]
        other = scripts.documents.tables(scaling.CASES, changed)
        assert all(other[block] not in PAGE for block in blocks)


def test_every_setting_was_measured_as_often_as_the_page_says(scripts):
    for case in scripts.scaling.CASES:
        seconds = scripts.scaling.load()[case.name]["seconds"]
        assert list(seconds) == [scripts.steps.key(*setting) for setting in case.settings]
        assert {len(values) for values in seconds.values()} == {scripts.scaling.REPEATS} and scripts.scaling.REPEATS > 4


def test_what_is_recorded_is_not_measured_again(scripts, monkeypatch, tmp_path):
    scaling, measured = scripts.scaling, []
    cases = [scripts.steps.Transport(name, (1_000,)) for name in ("first", "second")]

    def spawn(function, args, nprocs):
        wanted, repeats, _, record = args
        for case in wanted:
            measured.append(case.name)
            record(case, {"2 1000": [0.5] * repeats, "4 1000": [0.7] * repeats})
            if len(measured) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    monkeypatch.setattr(scaling, "document", lambda: None)
    monkeypatch.setattr(scaling, "RECORDS", tmp_path / "scaling.json")
    monkeypatch.setattr(scaling, "CASES", cases)
    monkeypatch.setattr(sys, "argv", ["benchmarks.scaling"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(KeyboardInterrupt):
        scaling.main()
    scaling.main()
    scaling.main()
    assert measured == ["first", "second"]
    cases[0] = scripts.steps.Transport("first", (2_000,))
    scaling.main()
    assert measured == ["first", "second", "first"] and list(scaling.load()) == ["first", "second"]


def test_all_settings_run(scripts, tmp_path):
    case = scripts.steps.Case
    cases = [
        scripts.steps.Transport("all-reduce", (1_000,)),
        case("shared", "ddp", "resnet18", 8, 32, 1, "shared"),
        case("gpipe", "gpipe", "lenet", 8, 28, 1, num_micro_batches=4),
        case("1f1b", "1f1b", "lenet", 8, 28, 1, num_micro_batches=4),
        case("layer-wise", "layer-wise", "lenet", 8, 28, 1, num_classes=12),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        arguments = (cases, 1, str(tmp_path / "rendezvous"), partial(write, str(tmp_path)))
        torch.multiprocessing.spawn(scripts.steps.measure, arguments, nprocs=4)
    for case in cases:
        found = json.loads((tmp_path / f"{case.name}.json").read_text())
        assert list(found) == [scripts.steps.key(*setting) for setting in case.settings]
        assert all(len(values) == 1 and values[0] > 0 for values in found.values())


def write(folder: str, case, seconds) -> None:
    (Path(folder) / f"{case.name}.json").write_text(json.dumps(seconds))


def test_the_model_by_hand(scripts):
    model, case = scripts.model, scripts.steps.Case
    # 4 devices: 3 sends of a quarter, twice.
    assert model.all_reduce_bytes(100, 4) == 150
    # 2 devices send all bytes: 1 ms and 1 ns a byte.
    link = model.link_of({num: 1e-3 + 1e-9 * num for num in (1_000, 100_000, 50_000_000)}, 2)
    assert link == pytest.approx((1e-3, 1e9))
    # 10 s for the batch, 6 for half of it: 8 are shared out, 2 are not. Beside another process 9 instead of 6.
    ddp = case("", "ddp", "lenet", 8, 28, 1)
    work = model.work_of(ddp, {"1": 10, "1 half the batch": 6, "2 half the batch": 9}, 2)
    assert work == (8, 2, 1, 1.5)
    # 1.5 (8 / 2 + 2); four on two cores: 1.5 (8 + 4 x 2) / 2; four on four: 1.5 (8 / 4 + 2)
    assert [model.compute_seconds(work, *at) for at in ((2, 2), (4, 2), (4, 4))] == [9, 12, 6]
    # one message of 129,068 weights
    assert model.step_seconds(ddp, work, 2, 2, model.Link(0.5, 1e6)) == pytest.approx(9 + 0.5 + 4 * 129_068 / 1e6)
    # a head: all but the rest of the network is shared out
    head = case("", "layer-wise", "lenet", 8, 28, 1)
    assert model.work_of(head, {"1": 10, "1 10 classes": 4, "2 10 classes": 4}, 2) == (6, 4, 1, 1)
    # a pipeline of two: 4 micro-batches take 5 turns of the larger part
    pipeline = case("", "gpipe", "lenet", 8, 28, 1, num_micro_batches=4)
    work = model.work_of(pipeline, {"1": 10, "1 micro-batches": 12, "2 micro-batches": 12}, 2)
    share = max(model.part_shares(pipeline, 2))
    assert 0.5 <= share < 1 and sum(model.part_shares(pipeline, 2)) == pytest.approx(1)
    assert model.compute_seconds(work, 2, 2) == pytest.approx(12 * share * 5 / 4)
    # LeNet is cut behind conv2's pooling: (8, 50, 4, 4) forward by one device, back by the other
    assert model.messages_and_bytes(pipeline, 2) == (4, 8 * 800 * 4)


def test_buckets_are_those_of_torch(scripts):
    for name, num_classes in (("resnet18", 1000), ("lenet", 10), ("resnet18", 100_000), ("mobilenet_v3_small", 10)):
        parameters = list(scripts.model.untrained(name, num_classes).parameters())[::-1]
        real = [torch.empty(parameter.shape) for parameter in parameters]
        indices, _ = dist._compute_bucket_assignment_by_size(real, list(scripts.model.BUCKET_BYTES))
        expected = [sum(real[i].nbytes for i in bucket) for bucket in indices]
        assert scripts.model.buckets(scripts.model.untrained(name, num_classes)) == expected


def test_messages_of_batch_norm(scripts):
    # ResNet-18: 5 layers of 64, 128, 256 and 512 channels. Two devices: 2 C + 1 values to the other, then 2 C summed.
    network = scripts.model.untrained("resnet18", 10)
    assert scripts.model.statistics_sent(network, 2) == (40, 4 * (2 * 4_800 + 20) + 4 * 2 * 4_800)


def test_predictions_by_hand(scripts):
    machine = scripts.model.Machine("", pictures=1_000, nvlink=1e9, network=1e8)
    network = nn.Linear(249, 1_000)  # 1,000,000 bytes, in one bucket
    # NCCL's estimate: 8.4 + 2 x 4 µs for two GPUs, 8.4 + 2 (7 x 4 + 3 x 14) for 8 machines; small 6.8 + 2 (4.2 + 15)
    assert machine.latency(2, False) == pytest.approx(16.4e-6)
    assert machine.latency(64, False) == pytest.approx(148.4e-6)
    assert machine.latency(64, True) == pytest.approx(45.2e-6)
    assert machine.step(network, 1, 100, "frozen") == pytest.approx(0.1)
    assert machine.step(network, 2, 100, "frozen") == pytest.approx(0.05 + 16.4e-6 + 1e-3)
    assert machine.step(network, 64, 6_400, "frozen") == pytest.approx(0.1 + 148.4e-6 + 2 * 63 / 64 * 1e6 / 1e8)
    assert machine.efficiency(network, 2, 100, "frozen") == pytest.approx(0.05 / (0.05 + 1.0164e-3))
    resnet = scripts.model.untrained("resnet18", 1000)
    for machine in scripts.model.MACHINES:
        apart = machine.step(resnet, 8, 256, "frozen", overlap=False) - 256 / 8 / machine.pictures
        sent = communication_volume.data_parallel_bytes(resnet, 8)[0]
        assert apart == pytest.approx(sent / machine.nvlink + 3 * 64.4e-6)
        assert machine.step(resnet, 8, 256, "frozen") < machine.step(resnet, 8, 256, "frozen", overlap=False)
        assert machine.step(resnet, 8, 256, "shared") > machine.step(resnet, 8, 256, "frozen")


def test_the_claims_arithmetic(scripts):
    table = scripts.documents.claims_table()
    # 60,000 / 256 = 234.4 steps: 2.7 s and 3.6 s an epoch, 12.2 s, and 7.4 s in half as many steps
    for number in (2.7 / 234.375, 3.6 / 234.375, 12.2 / 234.375, 7.4 / 117.1875):
        assert f"{1000 * number:.1f}" in table
    # 2.27 million multiplications x 6 x 60,000 = 0.8 TFLOP; 2 x 0.52 MB over 15.75 GB/s; 2 x 44.7 MB likewise
    assert "0.8 TFLOP" in table and "are 0.07 ms" in table
    assert f"{1000 * (12.2 / 234.375 + 2 * 4 * 11_172_810 / 15.75e9):.1f} ms, 1.8" in table


@pytest.mark.parametrize(("k", "m"), [(2, 4), (4, 6), (3, 3)])
def test_timelines_are_those_of_the_schedules(scripts, k, m):
    timelines = scripts.timelines
    drawn = {name: timelines.timeline(order, k, m) for name, order in timelines.SCHEDULES.items()}
    for steps in drawn.values():
        ends = {(t.kind, t.number, i): t.start + t.width for i, tasks in enumerate(steps) for t in tasks}
        assert len(ends) == 2 * k * m
        for i, tasks in enumerate(steps):
            assert all(a.start + a.width <= b.start for a, b in pairwise(tasks))
            for task in tasks:
                if task.kind == "backward":
                    before = ("backward", task.number, i + 1) if i < k - 1 else ("forward", task.number, i)
                    assert ends[before] <= task.start
                elif i:
                    assert ends["forward", task.number, i - 1] <= task.start
        assert max(ends.values()) == 3 * (m + k - 1)  # forward 1, backward 2: only filling and draining is idle
    assert [timelines.held(tasks) for tasks in drawn["gpipe"]] == [m] * k
    assert [timelines.held(tasks) for tasks in drawn["1f1b"]] == [min(k - i, m) for i in range(k)]


def test_drawings_have_no_overlapping_text(scripts, monkeypatch, tmp_path):
    drawings = scripts.drawings
    monkeypatch.setattr(drawings, "FOLDER", tmp_path)
    drawn, close = [], drawings.plt.close
    monkeypatch.setattr(drawings.plt, "close", drawn.append)
    for drawing in drawings.DRAWINGS:
        drawing()
    for figure in drawn:
        figure.canvas.draw()
        axes = figure.axes[0]
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
        assert all(figure.bbox.x0 <= b.x0 and b.x1 <= figure.bbox.x1 for b in boxes)
        assert all(figure.bbox.y0 <= b.y0 and b.y1 <= figure.bbox.y1 for b in boxes)
        overlapping = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
        assert overlapping == []
    shown = {Path(image).name for image in IMAGES} - {"scaling.png"}
    assert {path.name for path in tmp_path.iterdir()} == shown
    # The control: a text laid over another one is seen.
    first = drawn[0].axes[0].texts[0]
    drawings.label(drawn[0].axes[0], first.get_position(), "over it")
    assert first.get_window_extent().overlaps(drawn[0].axes[0].texts[-1].get_window_extent())
    close("all")


def test_images_exist_and_are_small():
    assert len(IMAGES) == len(set(IMAGES)) == 7
    assert all(5_000 < (ROOT / "docs" / image).stat().st_size < 120_000 for image in IMAGES)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("finetune fit ")])
def test_fit_commands_parse(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    settings = parse_typed(words[1:])
    assert settings.trainer.devices == words[words.index("--devices") + 1]
    assert "FOLDER" in words or words[words.index("--config") + 1] in config_files.shipped()


def test_other_commands_exist_with_their_options():
    others = [shlex.split(line) for line in COMMANDS if not line.startswith("finetune fit ")]
    assert sorted(words[1] for words in others) == ["-m", "by-hand", "parity"]
    for program, command, *rest in others:
        if program == "python":
            assert (ROOT / rest[0].replace(".", "/") / "__main__.py").exists()
            continue
        assert command in OWN
        assert {word.removeprefix("--") for word in rest if word.startswith("--")} <= own_options(command)


def test_the_shown_parity_has_every_way_within_its_tolerance():
    (block,) = re.findall(r"^```\n(way .*?)^```", PAGE, re.M | re.S)
    rows = {way: re.search(rf"^{way}  .*$", block, re.M) for way in WAYS}
    assert None not in rows.values()
    differences = [float(rows[way][0].split()[-4]) for way in WAYS[1:]]
    assert max(differences) <= 1e-10
    assert re.search("at most\n1e-10", block)


def test_files_that_it_names_exist():
    named = re.findall(r"`((?:tests|finetune)/[\w/]+\.py)`", PAGE)
    named += [f"docs/{link}" for link in re.findall(r"\]\(((?!http|#)[^)]+)\)", PAGE)]
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
