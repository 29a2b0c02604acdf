"""The arithmetic behind published claims: each expected number is worked out by hand."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.baseline import baseline_accuracies
from benchmarks.peers import __main__ as peers
from benchmarks.peers import documents as peer_documents
from benchmarks.peers.measure import Failed, step_times
from benchmarks.peers.tools import IMAGE_SIZE
from benchmarks.quality import commands, targets
from benchmarks.quality import documents as quality_documents
from benchmarks.quality.plan import IMAGENET, IMAGENET_SETTINGS, SMALL, plan
from benchmarks.quality.points import Point, mean_sets, of_one_machine, over_sets
from benchmarks.recipes import __main__ as recipes
from benchmarks.scaling import communication_volume, model
from benchmarks.scaling.steps import Case
from benchmarks.techniques import __main__ as techniques

ABOUT = {"machine": "a processor, 2 cores", "date": "2026-11-23", "versions": {"torch": "2.15"}}


def test_two_recipes_are_compared_on_the_same_images_by_mcnemar():
    assert [recipes.as_text(right) for right in ([1, 0, 1, 0], [1], [0, 0, 0, 1, 1, 1, 1, 1])] == [
        "a",
        "8",
        "1f",
    ]
    rights = {
        ("a", 0): [1, 1, 1, 0, 0, 1],
        ("b", 0): [1, 0, 0, 0, 1, 0],
        ("a", 1): [1, 1],
        ("b", 1): [1, 0],
    }
    common = {"data": "hotdog", "image_size": 128}
    records = [
        {"name": n, "seed": s, "right": recipes.as_text(r), **common}
        for (n, s), r in rights.items()
    ]
    assert recipes.paired(records, ["a", "b"], "hotdog", 128).splitlines() == [
        "seed 0: only a right 3, only b right 1, p = 0.625",  # 2 * (1 + 4) / 16
        "seed 1: only a right 1, only b right 0, p = 1.000",
        "all seeds: only a right 4, only b right 1, p = 0.375",  # 2 * (1 + 5) / 32
    ]


def test_step_times_become_seconds_of_epochs():
    # Two epochs of 3 batches, 64 + 64 + 32 images: the second ends 5 s after the first.
    found = step_times([10, 12, 14, 16, 17, 19], 2, 160, 64)
    assert found == {"first_step": 10, "later_seconds": 5}
    # Without the last part of a batch: epochs after the first take 4, 12 and 8 s.
    found = step_times([10, 12, 14, 16, 20, 28, 30, 36], 4, 160, 64)
    assert found == {"first_step": 10, "later_seconds": 8}
    # None, half an epoch too many, gradients gathered over two batches: no number.
    for stamps, epochs in (([], 1), ([1, 2, 3, 4, 5, 6, 7], 2), ([1, 2], 2)):
        with pytest.raises(Failed, match="optimizer steps"):
            step_times(stamps, epochs, 160, 64)


def test_the_fastest_peer_is_that_of_the_complete_job_on_our_machine():
    first = {"experiment": "job", "setting": "default", "repeat": 0, **ABOUT}
    ours = {**first, "tool": "finetune", "seconds": 1}
    timm = {**first, "tool": "timm", "seconds": 60}
    fastai = {**first, "tool": "fastai", "seconds": 70}
    later = {**fastai, "repeat": 1, "seconds": 50}  # a round that timm has not
    faster = {**first, "tool": "plain", "experiment": "predict", "seconds": 2}
    assert peers.fastest_peers([ours, timm, fastai, later, faster])[0] == ("timm", "default")
    assert peers.fastest_peers([ours, {**timm, "machine": "another"}, fastai]) == [
        ("fastai", "default")
    ]


def test_peers_are_compared_by_medians_and_on_one_machine():
    ours = [{**ABOUT, "seconds": seconds} for seconds in (38, 40, 45)]
    theirs = {**ABOUT, "seconds": 20}
    assert peer_documents.ratio(ours, [theirs]) == "2.00"
    assert peer_documents.ratio(ours, [{**theirs, "machine": "another"}]) == "–"


def measured(name, tool, setting, accuracy, seconds, seed=0, **more) -> dict:
    about = {"set": name, "tool": tool, "setting": setting, "seed": seed, **ABOUT}
    return {**about, "accuracy": accuracy, "seconds": seconds, "num_test": 100, **more}


def ours(minutes: str, seconds: float, *accuracies: float) -> Point:
    return Point("finetune", f"minutes_{minutes}", seconds, accuracies)


def test_means_are_over_the_sets_that_most_points_are_on():
    records = [measured(name, "plain", "epochs_5", 0.6, 50) for name in SMALL]
    records += [measured(name, "fastai", "epochs_5", 0.7, 60) for name in SMALL]
    records += [measured("hotdog", "plain", "epochs_5", 0.9, 300)]
    records += [measured(name, "timm", "epochs_5", 0.1, 9) for name in SMALL[:2]]
    records += [measured("satellite", "ultralytics", "epochs_100", 0.9, 999)]
    # hotdog has one point of three, the long run does not count
    assert mean_sets(records) == list(SMALL)
    assert over_sets(records) == [
        Point("plain", "epochs_5", 50, (0.6,)),
        Point("fastai", "epochs_5", 60, (0.7,)),
    ]
    # A seed counts where all sets have it; the seconds are those of the fastest seed of each set.
    records = [
        measured("trash", "plain", "epochs_5", 0.5 + seed / 10, 10 + seed, seed)
        for seed in range(3)
    ]
    records += [
        measured("flowers", "plain", "epochs_5", 0.7 + seed / 10, 30 - seed, seed)
        for seed in range(2)
    ]
    (point,) = over_sets(records)
    assert point.accuracies == pytest.approx((0.6, 0.7))
    assert point.seconds == pytest.approx((10 + 29) / 2)


def test_the_comparison_from_imagenet_weights_has_processor_seconds():
    records = [
        measured(name, "plain", "epochs_5", 0.6, 99, cpu_seconds=50 + i, machine="this one")
        for i, name in enumerate(SMALL)
    ]
    block = quality_documents.imagenet_blocks(records)["quality_imagenet"]
    cells = [f"0.600 (n = 1), {seconds} s" for seconds in (50, 51, 52, 53, "52")]
    assert f"| plain PyTorch, 5 epochs | {' | '.join(cells)} |" in block
    # The regression is that from the same weights, not that from the weaker ones.
    strong = baseline_accuracies(IMAGE_SIZE, IMAGENET)
    weak = baseline_accuracies(IMAGE_SIZE)
    row = block.splitlines()[-1]
    assert all(f" {strong[name]:.3f} |" in row for name in SMALL)
    assert not any(f" {weak[name]:.3f} |" in row for name in SMALL)
    # One set has no mean.
    some = quality_documents.imagenet_blocks(records[:1])
    assert some["quality_imagenet"].splitlines()[0] == "|  | satellite, 100 |"
    assert "means" in quality_documents.imagenet_blocks(records)["quality_imagenet_about"]
    assert "means" not in some["quality_imagenet_about"]


def test_from_imagenet_weights_each_tool_but_one_has_the_same_lengths():
    runs = {run[:3] for run in plan([], "this one", IMAGENET_SETTINGS)}
    everything = {run[:3] for run in plan([], "this one")}
    assert runs < everything
    assert {(tool, setting) for name, tool, setting in everything - runs if name == "trash"} == {
        *(("ultralytics", f"epochs_{n}") for n in (5, 20)),
        *(("finetune", f"epochs_{n}") for n in (3, 20)),
        *(("finetune", f"minutes_{n}") for n in ("0.5", "0.75", "1", "2", "4", "5", "10")),
    }


def test_results_of_another_machine_are_kept_apart():
    here = [measured(name, "plain", "epochs_5", 0.6, 50) for name in SMALL]
    there = [measured("trash", "plain", "epochs_5", 0.9, 5, machine="another")]
    assert of_one_machine(here + there) == here


def test_in_which_part_of_its_seconds_a_peer_is_reached():
    line = [ours("0.5", 30, 0.7), ours("1", 60, 0.8)]
    early = Point("plain", "epochs_5", 100, (0.7,))
    late = Point("fastai", "epochs_5", 100, (0.75,))
    never = Point("timm", "epochs_5", 100, (0.81,))
    assert dict(targets.reached([*line, early, late, never])) == {
        early: 0.3,
        late: 0.6,
        never: math.inf,
    }
    # Any of our settings may be the one.
    assert dict(targets.reached([*line, Point("finetune", "epochs_5", 20, (0.9,)), never])) == {
        never: 0.2
    }


def test_errors_at_equal_time_are_those_of_the_longest_budget_that_is_over():
    line = [ours("0.5", 31, 0.8), ours("1", 61, 0.7)]
    early = Point("fastai", "epochs_5", 30, (0.5,))
    good = Point("plain", "epochs_5", 60, (0.6,))
    worse = Point("timm", "epochs_5", 65, (0.55,))  # another is better sooner
    best = Point("plain", "epochs_20", 70, (0.9,))
    rivals = targets.at_equal_time(
        [*line, best, worse, good, early, Point("finetune", "epochs_5", 20, (0.99,))]
    )
    assert [(r.peer, r.ours) for r in rivals] == [(early, None), (good, line[0]), (best, line[1])]
    assert [r.error_ratio for r in rivals] == pytest.approx([math.inf, 0.2 / 0.4, 0.3 / 0.1])


def test_budgets_are_compared_with_their_minutes():
    runs = [("minutes_0.5", 60.0), ("minutes_1", 65.0), ("minutes_2", 107.0), ("epochs_5", 900.0)]
    records = [measured("trash", "finetune", setting, 0.7, seconds) for setting, seconds in runs]
    # Less than a minute is no promise; 65 of 60 s are within a tenth, 107 of 120 s are not.
    assert targets.punctuality(records) == "missed. 1 of 2 runs; not 2 min, trash, 107 s."


def test_calibration_is_next_to_what_chance_would_give(tmp_path):
    run = tmp_path / "fit/version_0"
    run.mkdir(parents=True)
    (run / "test.json").write_text('{"test/calibration_error": 0.07}')
    (run / "test_predictions.csv").write_text("probability\n0.5\n0.5\n0.8\n1.0\n")
    # Both or none of the two with 0.5 are right in half of the cases: |sum| 0.5 on average. 0.8 has a bin of its own:
    # 2 * 0.8 * 0.2 = 0.32 on average. (0.5 + 0.32) / 4 = 0.205; in one bin it would be 0.165.
    # One draw varies by sqrt(0.5² + 0.24²) / 4 = 0.14, the mean of 1,000 by 0.0044; 0.01 is 2.3 of them.
    found = commands.calibration(tmp_path)
    assert found == {
        "calibration_error": 0.07,
        "calibration_error_if_true": pytest.approx(0.205, abs=0.01),
    }
    # The verdict is that of the error before scaling.
    for before, reported in (
        (0.04, "met. 0.040, after scaling 0.070 (n = 1); "),
        (0.06, "missed. 0.060"),
    ):
        record = measured(
            "trash", "finetune", "default", 0.5, 9, calibration_error_before_scaling=before, **found
        )
        assert targets.calibration([record]).startswith(reported)


def trained(technique, on, seed, *epochs, **others) -> dict:
    """A run on 40 images or more: digits of four are repeated."""
    right = {f"epoch {i + 1}": digits for i, digits in enumerate(epochs)} | others
    right = {name: digits * 10 if len(digits) == 4 else digits for name, digits in right.items()}
    return {"technique": technique, "set": on, "seed": seed, "right": right, **ABOUT}


def test_differences_are_those_of_runs_with_the_same_split():
    records = [
        trained("default", "flowers", 0, "0000", "1100", flip="1110"),
        trained("default", "flowers", 1, "0000", "1111", flip="1111"),
        trained("cutmix 1", "flowers", 0, "1111", "1000") | {"confidence": 0.35},
        trained("cutmix 1", "flowers", 1, "1111", "1110"),
        trained("cutmix 1", "trash", 1, "1111", "1111"),  # no default next to it
    ]
    lines = techniques.blocks(records)["techniques"].splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines[2:]}
    assert "| 0.750 |" in rows["default, the last epoch"]  # of 0.5 and 1
    assert "-0.250 ± 0.000 (n = 2)" in rows["cutmix 1"]  # 0.25 - 0.5 and 0.75 - 1
    assert "| +0.100 (n = 1) |" in rows["cutmix 1"]  # confidence 0.35, accuracy 0.25
    # 0.25 and 0: their standard deviation is 0.25 / sqrt(2), the standard error 0.25 / 2.
    assert "+0.125 ± 0.125 (n = 2)" in rows["with mirrored images"]


def test_the_kept_epoch_is_judged_by_other_images_than_chose_it():
    rng = np.random.default_rng(0)
    true = np.linspace(0.5, 0.8, 12)
    digits = ["".join(map(str, row)) for row in rng.binomial(1, true[:, None], (12, 400))]
    found = techniques.choices(trained("default", "flowers", 0, *digits), num_draws=200)
    # 400 images, p = 0.8: a standard error of 0.02 between epochs; draws of 370 of them differ by far less than 0.005.
    assert found["the highest"] < found["kept"] - 0.005 < found["the last"]
    assert found["patience"] < found["kept"]
    assert 0.5 < found["epochs"] < 1
    # A mean of 200 draws of 370 of 400 images: sqrt(0.16 / 370 * 30 / 400 / 200) = 0.0004; 0.003 is seven of them.
    assert found["the last"] == pytest.approx(techniques.right(digits[-1]).mean(), abs=0.003)


@pytest.mark.parametrize(
    ("accuracies", "num"),
    [([5, 6, 6, 6], 4), ([5, 6, 4, 7, 8, 9], 6), ([9, 1, 9, 9], 3), ([5], 1), ([5, 4, 6, 6, 5], 5)],
)
def test_patience_ends_a_run_after_so_many_that_are_no_higher(accuracies, num):
    assert techniques.ended(np.array(accuracies) / 10, patience=2) == num


def test_the_model_by_hand():
    # 4 devices: 3 sends of a quarter, twice.
    assert model.all_reduce_bytes(100, 4) == 150
    # 2 devices send all bytes: 1 ms and 1 ns a byte.
    link = model.link_of({num: 1e-3 + 1e-9 * num for num in (1_000, 100_000, 50_000_000)}, 2)
    assert link == pytest.approx((1e-3, 1e9))
    # 10 s for the batch, 6 for half of it: 8 are shared out, 2 are not. Next to another process 9 instead of 6.
    ddp = Case("", "ddp", "lenet", 8, 28, 1)
    work = model.work_of(ddp, {"1": 10, "1 half the batch": 6, "2 half the batch": 9}, 2)
    assert work == (8, 2, 1, 1.5)
    # 1.5 (8 / 2 + 2); four on two cores: 1.5 (8 + 4 x 2) / 2; four on four: 1.5 (8 / 4 + 2)
    assert [model.compute_seconds(work, *at) for at in ((2, 2), (4, 2), (4, 4))] == [9, 12, 6]
    # one message of 129,068 weights
    assert model.step_seconds(ddp, work, 2, 2, model.Link(0.5, 1e6)) == pytest.approx(
        9 + 0.5 + 4 * 129_068 / 1e6
    )
    # a head: all but the rest of the network is shared out
    head = Case("", "layer-wise", "lenet", 8, 28, 1)
    assert model.work_of(head, {"1": 10, "1 10 classes": 4, "2 10 classes": 4}, 2) == (6, 4, 1, 1)
    # a pipeline of two: 4 micro-batches take 5 turns of the larger part
    pipeline = Case("", "gpipe", "lenet", 8, 28, 1, num_micro_batches=4)
    work = model.work_of(pipeline, {"1": 10, "1 micro-batches": 12, "2 micro-batches": 12}, 2)
    share = max(model.part_shares(pipeline, 2))
    assert 0.5 <= share < 1
    assert model.compute_seconds(work, 2, 2) == pytest.approx(12 * share * 5 / 4)
    # LeNet is cut behind the pooling of conv2: (8, 50, 4, 4) forward by one device, back by the other
    assert model.messages_and_bytes(pipeline, 2) == (4, 8 * 800 * 4)


def test_buckets_are_those_of_torch_and_messages_of_batch_norm_by_hand():
    for name, num_classes in (
        ("resnet18", 1000),
        ("lenet", 10),
        ("resnet18", 100_000),
        ("mobilenet_v3_small", 10),
    ):
        network = model.untrained(name, num_classes)
        real = [torch.empty(parameter.shape) for parameter in reversed(list(network.parameters()))]
        indices, _ = dist._compute_bucket_assignment_by_size(real, list(model.BUCKET_BYTES))
        assert model.buckets(network) == [sum(real[i].nbytes for i in bucket) for bucket in indices]
    # ResNet-18: 5 layers of 64, 128, 256 and 512 channels. Two devices: 2 C + 1 values to the other, then 2 C summed.
    network = model.untrained("resnet18", 10)
    assert model.statistics_sent(network, 2) == (40, 4 * (2 * 4_800 + 20) + 4 * 2 * 4_800)


def test_predictions_by_hand():
    machine = model.Machine("", images_per_second=1_000, nvlink=1e9, network=1e8)
    network = nn.Linear(249, 1_000)  # 1,000,000 bytes, in one bucket
    # NCCL's estimate: 8.4 + 2 x 4 µs for two GPUs, 8.4 + 2 (7 x 4 + 3 x 14) for 8 machines; small 6.8 + 2 (4.2 + 15)
    assert machine.latency(2, False) == pytest.approx(16.4e-6)
    assert machine.latency(64, False) == pytest.approx(148.4e-6)
    assert machine.latency(64, True) == pytest.approx(45.2e-6)
    assert machine.step(network, 1, 100, "frozen") == pytest.approx(0.1)
    assert machine.step(network, 2, 100, "frozen") == pytest.approx(0.05 + 16.4e-6 + 1e-3)
    assert machine.step(network, 64, 6_400, "frozen") == pytest.approx(
        0.1 + 148.4e-6 + 2 * 63 / 64 * 1e6 / 1e8
    )
    assert machine.efficiency(network, 2, 100, "frozen") == pytest.approx(0.05 / (0.05 + 1.0164e-3))
    # Three buckets of ResNet-18: three latencies of 8.4 + 2 x 7 x 4 µs where nothing overlaps.
    resnet = model.untrained("resnet18", 1000)
    apart = model.A100.step(resnet, 8, 256, "frozen", overlap=False)
    sent = communication_volume.data_parallel_bytes(resnet, 8)[0]
    assert apart == pytest.approx(256 / 8 / 5_500 + sent / 200e9 + 3 * 64.4e-6)
    assert model.A100.step(resnet, 8, 256, "frozen") < apart
