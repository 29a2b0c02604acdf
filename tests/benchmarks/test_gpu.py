"""`python -m benchmarks.gpu`: a small run of all it does, its plan and its time, and the tables of what it finds."""

import importlib
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from colours import draw_colours
from paths import ROOT


@pytest.fixture(scope="module")
def scripts():
    """The modules of benchmarks/gpu by name."""
    names = {"gpu": "__main__", "documents": "documents", "jobs": "jobs", "steps": "steps"}
    return SimpleNamespace(**{name: importlib.import_module(f"benchmarks.gpu.{names[name]}") for name in names})


def run_main(scripts, monkeypatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    with pytest.raises(SystemExit) as caught:
        scripts.gpu.main()
    return caught.value.code


def test_a_quick_run_goes_through_everything(scripts, tmp_path):
    output = tmp_path / "gpu.json"
    options = ["--root", draw_colours(tmp_path / "colours", train=8), "--device", "cpu", "--quick", "--output", output]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": scripts.jobs.python_path()}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text("utf-8"))
    assert (found["about"]["device"], found["about"]["num_pictures"], found["about"]["quick"]) == ("cpu", 32, True)
    records = found["measurements"]
    assert len(records) == len(scripts.gpu.quick_plan())
    for record in records:
        assert len(record.get("rates", [])) == (2 if record["kind"] == "job" else 5), record
        assert all(rate > 0 for rate in record["rates"] + record.get("printed", []))
    assert scripts.documents.document(records) in done.stdout
    assert done.stdout.count("- met: ") + done.stdout.count("- missed: ") == 2  # both can be told


def test_without_a_gpu_it_says_so(scripts, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_main(scripts, monkeypatch, "--root", str(tmp_path)) == 2
    assert capsys.readouterr().err == "no CUDA device here; --device cpu --quick shows that the script runs\n"
    # A CPU's numbers never get where a GPU's belong.
    for options in (["--device", "cpu"], ["--device", "cpu", "--quick"]):
        assert run_main(scripts, monkeypatch, "--root", str(tmp_path), *options) == 2
        assert "--device cpu only goes with --quick, and --quick with an --output" in capsys.readouterr().err


def test_the_plan_has_everything_once_and_what_matters_first(scripts):
    measurements = scripts.gpu.plan(cores=8)
    kinds = [m.kind for m in measurements]
    assert len(set(measurements)) == len(measurements)
    assert [kinds.count(kind) for kind in ("limit", "road", "job")] == [2 * 3 * 2 * 2 * 3, 2 * 4, 3 * 2]
    assert max(m.num_workers for m in measurements if m.kind == "road") == 8
    # What the targets need comes first, and the roads that tell a job's workers before the jobs.
    start = [(m.kind, getattr(m, "precision", "")) for m in measurements[:11]]
    assert start == [("limit", "bf16")] * 3 + [("road", "")] * 4 + [("job", "")] * 4


def test_late_is_not_reached_and_what_fails_stops_nothing(scripts, monkeypatch, tmp_path):
    gpu, limit = scripts.gpu, scripts.steps.Limit
    quick, slow = limit("train", "bf16", True, False, 64), limit("train", "bf16", True, True, 64)
    bad, ended = limit("train", "fp32", True, False, 1024), limit("train", "fp32", False, False, 1024)

    def measure(self, setup):
        if self == bad:
            raise RuntimeError("out of\nmemory")
        if self == ended:
            raise TimeoutError("ended")
        return {"rates": [1.0] * 5}

    monkeypatch.setattr(limit, "measure", measure)
    kept = []
    setup = scripts.steps.Setup("cpu", tmp_path, 0, tmp_path, None, 32, 3, 0.0, "eager")
    records = gpu.measure_all(
        [bad, ended, slow, quick], setup, time.monotonic() + slow.seconds - 1, lambda found: kept.append(len(found))
    )
    assert kept == [1, 2, 3, 4]  # each is on the disk before the next begins
    assert records[0]["error"] == "RuntimeError: out of memory" and "rates" not in records[0]
    assert all(r["not_reached"] and "rates" not in r and "error" not in r for r in records[1:3])
    assert records[3]["rates"]


def test_a_job_is_read_and_ended_in_time(scripts):
    epoch_lines, far = scripts.jobs.epoch_lines, time.monotonic() + 60
    program = "print('epoch 1/2  train/loss 0.5  109 pictures/s'); print('epoch 2/2  7 pictures/s'); print('done')"
    assert [rate for _, rate in epoch_lines([sys.executable, "-c", program], {}, far)] == [109, 7]
    with pytest.raises(RuntimeError, match="exit code 3: its last words"):
        epoch_lines([sys.executable, "-c", "print('its last words'); raise SystemExit(3)"], {}, far)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="when the time was up, after 0 epochs"):
        epoch_lines([sys.executable, "-c", "import time; time.sleep(60)"], {}, began + 0.5)
    assert time.monotonic() - began < 20
    no_cache = "print('the pictures of x are decoded anew in every epoch: no cache, disk full', flush=True)"
    with pytest.raises(RuntimeError, match="no cache: .*disk full"):
        epoch_lines([sys.executable, "-c", f"{no_cache}; import time; time.sleep(60)"], {}, far)


def test_links_make_an_epoch_long(scripts, colours, tmp_path):
    links = sorted((scripts.jobs.enlarge(colours, 130, tmp_path) / "train").rglob("*.png"))
    assert len(links) == 130 and len({link.resolve() for link in links}) == 60
    assert all(link.parent.name == link.resolve().parent.name for link in links)


def test_contiguous_or_not_it_is_one_network(scripts):
    """The layouts differ in speed alone; each has its pictures and weights in its own order."""
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    found = []
    for network, is_ours in ((scripts.steps.Classifier, True), (scripts.steps.ContiguousClassifier, False)):
        torch.manual_seed(0)
        model = network(["a", "b"], weights=None).eval()
        assert model.network.conv1.weight.is_contiguous() != is_ours
        assert model.normalized(images).is_contiguous() != is_ours
        found.append(model(images))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def limit_record(batch_size: int, *rates: float, **settings) -> dict:
    way = {"mode": "train", "precision": "bf16", "channels_last": True, "compiled": False, **settings}
    found = {"rates": list(rates), "first_step_seconds": 2.0, "peak_gb": 1.5} if rates else {"not_reached": True}
    return {"kind": "limit", **way, "batch_size": batch_size, **found}


def job_record(road: str, *rates: float) -> dict:
    found = {"rates": list(rates), "printed": [r + 10 for r in rates], "num_workers": 8} if rates else {"error": "x"}
    return {"kind": "job", "road": road, "batch_size": 256, **found}


def test_the_tables_say_what_was_found(scripts):
    records = [
        limit_record(256, 900, 1000, 2000),
        limit_record(1024),
        limit_record(256, 3000, mode="predict"),
        {"kind": "road", "cached": True, "num_workers": 8, "batch_size": 256, "rates": [5000.0, 5100.0, 5200.0]},
        job_record("ours, cache", 940, 950, 960),
        job_record("torchvision", 400),
    ]
    text = scripts.documents.document(records)
    assert "| train | bf16 | yes | no | 1,000 (900 to 2,000), 1.5 GB | not reached | 2.0 (2.0 to 2.0) |" in text
    assert "| predict | bf16 | yes | no | 3,000 (3,000 to 3,000), 1.5 GB | – | 2.0 (2.0 to 2.0) |" in text
    assert "| 8 | – | 5,100 (5,000 to 5,200) |" in text
    assert "| ours, cache | 256 | 8 | 950 (940 to 960) | 960 (950 to 970) | 0.95 |" in text
    assert "- met: batch 256, the job with the cache at least 0.95 times" in text
    assert "- missed: batch 256, the job with the cache at least 3 times" in text and text.endswith(": 2.38 times")
    # Where one of the two is missing nothing is claimed.
    targets = scripts.documents.targets([limit_record(256, 1000), job_record("ours, cache")])
    assert [t["met"] for t in targets] == [None, None]


def test_the_document_is_that_of_the_records(scripts):
    records = scripts.gpu.RECORDS
    found = json.loads(records.read_text("utf-8"))["measurements"] if records.exists() else []
    text = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    assert f"<!-- gpu -->\n{scripts.documents.document(found)}\n<!-- /gpu -->" in text
    # The control: another record is seen.
    assert scripts.documents.document([*found, limit_record(256, 1.0)]) not in text
