"""An exported file with the network in place of a checkpoint."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from promise import promise

from finetune.inference.end_to_end import EndToEnd
from finetune.inference.exported_network import ExportedNetwork
from finetune.inference.exporters import write_onnx
from finetune.inference.onnx_session import open_session
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import packed
from finetune.system.messages import WrongUsage


@pytest.fixture(scope="module")
def exported(small, tmp_path_factory) -> Path:
    """The calibrated checkpoint as an .onnx."""
    path = tmp_path_factory.mktemp("exported") / "some.onnx"
    own = Predictor(small)
    full = EndToEnd(own.model, own.calibration).eval()
    write_onnx(full, 28, packed(read_checkpoint(small)), path)
    return path


def test_a_predictor_of_the_file_says_what_that_of_the_checkpoint_says(small, exported):
    own, of_file = Predictor(small), Predictor(exported)
    assert isinstance(of_file.model.network, ExportedNetwork) and not list(
        of_file.model.network.parameters()
    )
    assert (of_file.class_names, of_file.image_size, of_file.preparation) == (
        own.class_names,
        28,
        own.preparation,
    )
    assert of_file.calibration == own.calibration and of_file.versions == own.versions
    images = [
        np.random.default_rng(i).integers(0, 256, (40 + i, 50, 3), np.uint8) for i in range(4)
    ]
    # float32: two runtimes add up in different orders; 1.8e-6 was seen
    np.testing.assert_allclose(of_file(images), own(images), rtol=0, atol=1e-5)
    assert (
        of_file.activation(np.stack([of_file.prepare(image) for image in images]), [0] * 4) is None
    )
    # whatever a checkpoint would take
    assert Predictor(exported, precision=None).precision == "32-true"
    with pytest.raises(WrongUsage, match="bf16-mixed"):
        Predictor(exported, precision="bf16-mixed")


def test_onnxruntime_takes_as_many_threads_as_torch(exported):
    options = open_session(str(exported)).get_session_options()
    assert options.intra_op_num_threads == torch.get_num_threads()


def test_a_graph_of_other_classes_than_it_names_is_reported(exported):
    pixels = torch.zeros(2, 3, 28, 28)
    assert ExportedNetwork(str(exported), 3)(pixels).shape == (2, 3)
    with pytest.raises(
        ValueError,
        match="describes 2 classes",
    ):
        ExportedNetwork(str(exported), 2)(pixels)
    network = pickle.loads(pickle.dumps(ExportedNetwork(str(exported), 3)))
    assert network(pixels).shape == (2, 3)


@promise("nothing-sent")
@pytest.mark.slow  # an interpreter, which waits
def test_onnxruntime_writes_nothing_of_its_own(exported, tmp_path):
    """It has telemetry (1.32), which puts an identifier of the machine into the user's folders."""
    assert not written_by_a_predictor(exported, tmp_path)


def written_by_a_predictor(exported: Path, tmp_path: Path) -> list[str]:
    """Return the paths in the user's folder that a runtime has written."""
    home = tmp_path / "home"
    home.mkdir()
    places = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TMPDIR": str(tmp_path)}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "ORT_DISABLE_TELEMETRY"  # the conftest sets it
    } | places
    code = "import sys, time; from finetune.inference.predictor import Predictor; Predictor(sys.argv[1]); time.sleep(2)"
    command = [sys.executable, "-c", code, str(exported)]
    subprocess.run(command, env=environment, check=True)
    written = [str(path.relative_to(home)) for path in home.rglob("*")]
    return [path for path in written if re.search("microsoft|onnx", path.lower())]
