"""The conclusions of a benchmark, on numbers worked out by hand."""

import pytest

from finetune.profiling.summary import advice, scaling, text


def result(**seconds: list[float]) -> dict:
    """Seconds of a batch of 32."""
    about = {
        "device": "Some CPU",
        "device_type": "cpu",
        "num_devices": 1,
        "cores": 2,
        "precision": "32-true",
    }
    about |= {
        "batch_size": 32,
        "image_size": 128,
        "num_workers": 1,
        "cache": "nothing",
        "compiled": False,
    }
    parts = {
        "forward": [0.1],
        "backward": [0.2],
        "optimizer": [0.02],
        "whole": [0.32],
    }
    return {
        "about": about,
        "seconds": {**parts, **seconds},
        "waited": [0.0],
        "other": {},
    }


def test_the_table_gives_median_spread_and_images_per_second():
    shown = text(result(whole=[0.5, 0.4, 0.6]))
    assert "500.0 (400.0 to 600.0), 3" in shown
    # 32 / 0.5
    assert next(line for line in shown.splitlines() if line.startswith("whole")).split()[-1] == "64"


def test_advice_names_the_bottleneck_and_what_was_measured_to_help():
    assert advice(result())[0] == "bottleneck: the network, its backward most, 62 % of a step"
    faster = {**result(), "other": {"bf16-mixed": 0.16}}
    assert "would help: --trainer.precision bf16-mixed, measured 2.0 times as fast" in advice(
        faster
    )
    assert not any(
        "precision" in line for line in advice({**result(), "other": {"bf16-mixed": 0.31}})
    )
    slow = {**result(decode=[0.3], augment=[0.1], whole=[0.8]), "waited": [0.5]}
    assert advice(slow)[0] == "bottleneck: reading images"
    assert "decoding is 75 % of it" in advice(slow)[1]
    slow["about"] |= {"cache": "pictures", "cores": 8}
    assert advice(slow)[1:] == ["would help: --data.num_workers 7, as many as cores are free"]
    slow["about"] |= {"cores": 2}
    assert "smaller --data.image_size" in advice(slow)[1]


@pytest.mark.parametrize(("device_type", "efficiency"), [("cpu", 0.9), ("cuda", 0.45)])
def test_efficiency_is_next_to_what_the_devices_could_do(device_type, efficiency):
    one, two = result(whole=[0.45]), result(whole=[0.5])
    for found, num in ((one, 1), (two, 2)):
        found["about"] |= {"device_type": device_type, "num_devices": num}
    rows = scaling([one, two])
    assert rows[1]["speed_up"] == pytest.approx(0.9)
    assert rows[1]["efficiency"] == pytest.approx(efficiency)
    assert rows[1]["rate"] == 64
