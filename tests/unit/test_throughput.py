"""The text of a benchmark, on numbers worked out by hand."""

import pytest

from finetune.commands.benchmark import scaling, text


def result(*seconds: float, device_type: str = "cpu", num_devices: int = 1) -> dict:
    """Seconds of a batch of 32."""
    return {
        "device": "Some CPU",
        "device_type": device_type,
        "num_devices": num_devices,
        "cores": 2,
        "precision": "32-true",
        "batch_size": 32,
        "image_size": 128,
        "num_workers": 1,
        "seconds": [*seconds],
        "waited": [0.25],
    }


def test_the_text_gives_median_and_spread():
    shown = text(result(0.5, 0.4, 0.8))
    assert "64 (40 to 80) images/s, n = 3" in shown
    assert "waiting for data: 25.0 (25.0 to 25.0) %" in shown


@pytest.mark.parametrize(("device_type", "efficiency"), [("cpu", 0.9), ("cuda", 0.45)])
def test_efficiency_is_next_to_what_the_devices_could_do(device_type, efficiency):
    one = result(0.45, device_type=device_type)
    two = result(0.5, device_type=device_type, num_devices=2)
    rows = scaling([one, two])
    assert rows[1]["speed_up"] == pytest.approx(0.9)
    assert rows[1]["efficiency"] == pytest.approx(efficiency)
    assert rows[1]["rate"] == 64
