"""An exported file with the network in place of a checkpoint."""

import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from extras import needs_openvino
from onnx import TensorProto, helper

from finetune.inference.any_size import prepend
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.exported_network import ExportedNetwork
from finetune.inference.exporters import write_onnx, write_openvino
from finetune.inference.onnx_session import open_session
from finetune.inference.openvino_model import open_model
from finetune.inference.predictor import Predictor
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import packed
from finetune.system.messages import WrongUsage


def write(checkpoint: Path, path: Path, kind: str = "network_size") -> None:
    own = Predictor(checkpoint)
    full = EndToEnd(own.model, own.calibration).eval()
    writer = write_openvino if path.suffix == ".xml" else write_onnx
    writer(full, 28, packed(read_checkpoint(checkpoint), kind), path)


@pytest.fixture(scope="module")
def exported(small, tmp_path_factory) -> Path:
    """The calibrated checkpoint as a file for images of the network's size."""
    path = tmp_path_factory.mktemp("exported") / "some.onnx"
    write(small, path)
    return path


@pytest.fixture(scope="module")
def openvino_file(small, tmp_path_factory) -> Path:
    """The calibrated checkpoint as a model of OpenVINO. The .onnx that is written first is deleted."""
    folder = tmp_path_factory.mktemp("openvino")
    write(small, folder / "some.xml")
    assert sorted(path.name for path in folder.iterdir()) == ["some.bin", "some.xml"]
    return folder / "some.xml"


@pytest.mark.parametrize(
    "fixture", ["exported", pytest.param("openvino_file", marks=needs_openvino)]
)
def test_a_predictor_of_the_file_says_what_that_of_the_checkpoint_says(small, fixture, request):
    exported = request.getfixturevalue(fixture)
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
    with pytest.raises(
        WrongUsage, match="precision 'bf16-mixed': an exported network computes as it was exported"
    ):
        Predictor(exported, precision="bf16-mixed")


def test_onnxruntime_takes_as_many_threads_as_torch(exported):
    options = open_session(str(exported)).get_session_options()
    assert options.intra_op_num_threads == torch.get_num_threads()


@pytest.mark.slow
def test_what_takes_any_size_takes_prepared_images_here(small, tmp_path):
    own = Predictor(small)
    write(small, tmp_path / "source.onnx", "any_size")
    prepend(tmp_path / "source.onnx", tmp_path / "some.onnx", 28, own.preparation["resize"])
    of_file = Predictor(tmp_path / "some.onnx")
    images = [
        np.random.default_rng(i).integers(0, 256, (40 + i, 50, 3), np.uint8) for i in range(4)
    ]
    np.testing.assert_allclose(of_file(images), own(images), rtol=0, atol=1e-5)
    session = open_session(str(tmp_path / "some.onnx"))
    alone = [session.run(["probabilities"], {"images": image[None]})[0][0] for image in images]
    np.testing.assert_allclose(alone, own(images), rtol=0, atol=1e-5)
    prepared = np.stack([own.prepare(image) for image in images])
    again = session.run(["probabilities"], {"images": prepared})[0]  # the control: prepared twice
    assert np.abs(again - own(images)).max() > 1e-3
    network = of_file.model.network
    pixels = torch.from_numpy(prepared).permute(0, 3, 1, 2)
    assert pickle.loads(pickle.dumps(network))(pixels).equal(network(pixels))


def test_any_size_of_another_make_is_reported(tmp_path):
    value = helper.make_tensor_value_info("images", TensorProto.UINT8, ["n", "h", "w", 3])
    logits = helper.make_tensor_value_info("logits", TensorProto.UINT8, ["n", "h", "w", 3])
    graph = helper.make_graph(
        [helper.make_node("Identity", ["images"], ["logits"])], "g", [value], [logits]
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "a.onnx",
    )
    with pytest.raises(
        ValueError, match=r"a\.onnx' takes images of any size, but was not written by"
    ):
        ExportedNetwork(str(tmp_path / "a.onnx"), 3)


def test_a_file_that_is_no_model_is_reported_in_a_line(tmp_path):
    (tmp_path / "some.onnx").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"some\.onnx' cannot be run by onnxruntime: [^\n]+$"):
        open_session(str(tmp_path / "some.onnx"))


def test_a_graph_of_other_classes_than_it_names_is_reported(exported):
    pixels = torch.zeros(2, 3, 28, 28)
    assert ExportedNetwork(str(exported), 3)(pixels).shape == (2, 3)
    with pytest.raises(
        ValueError,
        match=r"describes 2 classes, but its logits of 2 images have the shape \(2, 3\): export",
    ):
        ExportedNetwork(str(exported), 2)(pixels)
    network = pickle.loads(pickle.dumps(ExportedNetwork(str(exported), 3)))
    assert network(pixels).shape == (2, 3)


@needs_openvino
def test_openvino_computes_in_float32_on_every_processor(small, openvino_file):
    """By default it takes bf16 where the processor has it, which moves probabilities by more than 1e-4."""
    own = Predictor(small)
    images = np.random.default_rng(0).integers(0, 256, (8, 28, 28, 3), np.uint8)
    run = open_model(str(openvino_file), "probabilities")
    # float32: two runtimes add up in different orders
    np.testing.assert_allclose(run(images), own.classify(images), rtol=0, atol=1e-5)
    np.testing.assert_allclose(run(images[:3]), run(images)[:3], rtol=0, atol=1e-6)
    # the control: other pixels
    assert np.abs(run(images[::-1].copy()) - own.classify(images)).max() > 1e-4
    with pytest.raises(ValueError, match=r"some\.xml' cannot be run by OpenVINO: [^\n]+$"):
        open_model(str(openvino_file), "another")


@needs_openvino
@pytest.mark.parametrize("spoil", ["no weights", "short weights", "short", "no model"])
def test_a_damaged_model_of_openvino_is_reported_in_a_line(openvino_file, tmp_path, spoil):
    for name in ("some.xml", "some.bin"):
        shutil.copy(openvino_file.with_name(name), tmp_path)
    path = tmp_path / "some.xml"
    if spoil == "no weights":
        path.with_suffix(".bin").unlink()
    elif spoil == "short weights":
        os.truncate(path.with_suffix(".bin"), 100)
    elif spoil == "short":
        os.truncate(path, 3000)
    else:
        path.write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"some\.xml' (is damaged|cannot be run)[^\n]+$"):
        Predictor(path)


@needs_openvino
@pytest.mark.slow  # interpreters
@pytest.mark.parametrize("closing", ["models.pop(0); models.pop(0)", "in_thread(models.clear)"])
def test_a_signal_is_handled_after_models_of_openvino_were_closed(openvino_file, closing):
    """Two cores would leave the stack of one, which is unmapped, for signals: a segmentation fault."""
    code = f"""
import os, signal, sys, threading
from finetune.inference.openvino_model import open_model

def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

models = [open_model(sys.argv[1], "logits") for _ in range(2)]
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
{closing}
os.kill(os.getpid(), signal.SIGTERM)
"""
    command = [sys.executable, "-c", code, str(openvino_file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


@needs_openvino
@pytest.mark.slow  # an interpreter, which waits
def test_openvino_writes_nothing_of_its_own(openvino_file, tmp_path):
    """Its package writes an identifier of the machine into the user's folder, and sends it with each import."""
    assert not written_by_a_predictor(openvino_file, tmp_path)


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
        # the conftest sets the first; OpenVINO's package sends nothing where it sees CI
        if name not in ("ORT_DISABLE_TELEMETRY", "CI")
    } | places
    code = "import sys, time; from finetune.inference.predictor import Predictor; Predictor(sys.argv[1]); time.sleep(2)"
    command = [sys.executable, "-c", code, str(exported)]
    subprocess.run(command, env=environment, check=True)
    written = [str(path.relative_to(home)) for path in home.rglob("*")]
    return [path for path in written if re.search("microsoft|onnx|intel|openvino", path.lower())]
