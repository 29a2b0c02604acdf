"""A package of Core ML: the program before the conversion, and the description of the package. Nothing here runs it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from extras import needs_coremltools
from networks import few_blocks

from finetune.inference.coreml_package import (
    COREML_FILES,
    check_package,
    exported_program,
    import_coremltools,
    runner,
    write_package,
)
from finetune.inference.predictor import Predictor
from finetune.models.image_classifier import ImageClassifier

pytestmark = needs_coremltools


@pytest.fixture(scope="module")
def package(small, tmp_path_factory) -> Path:
    """The calibrated checkpoint as a package."""
    predictor = Predictor(small)
    path = tmp_path_factory.mktemp("coreml") / "some.mlpackage"
    write_package(exported_program(predictor), predictor, '{"a": "about"}', path)
    return path


def test_the_program_that_is_converted_predicts_as_the_checkpoint(small):
    predictor = Predictor(small)
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 3), np.uint8)
    run = runner(exported_program(predictor))
    # float32: torch adds up in another order for one image than for three
    np.testing.assert_allclose(run(images), predictor.classify(images), rtol=0, atol=1e-5)
    # the control: other pixels
    assert np.abs(run(images[::-1].copy()) - predictor.classify(images)).max() > 1e-4


def test_another_size_class_or_normalisation_is_found(small, package):
    predictor = Predictor(small)
    check_package(package, predictor)
    model = predictor.model
    parts = {
        "image_size": predictor.image_size,
        "class_names": predictor.class_names,
        "label_kind": "single",
        "model": model,
    }
    for other, message in (
        ({"image_size": 29}, "does not take RGB images of 29 pixels"),
        ({"class_names": predictor.class_names[::-1]}, "its classes are not those"),
        ({"label_kind": "several"}, "its classes are not those"),
        ({"model": ImageClassifier(model.network, model.mean + 1, model.std)}, "not normalise"),
        ({"model": ImageClassifier(model.network, model.mean, model.std + 1)}, "not normalise"),
    ):
        with pytest.raises(ValueError, match=message):
            check_package(package, SimpleNamespace(**parts | other))


def test_a_package_has_our_metadata_and_nothing_of_this_machine(package):
    model = import_coremltools().models.MLModel(str(package), skip_model_load=True)
    assert model.user_defined_metadata["finetune"] == '{"a": "about"}'
    for name in COREML_FILES:
        content = (package / name).read_bytes()
        for place in (Path(__file__).parents[2], package.parent, Path(torch.__path__[0])):
            assert str(place).encode() not in content
        assert b".py" not in content


def test_several_labels_have_no_class_but_the_probability_of_each(small, tmp_path):
    """Core ML's classifiers predict one class."""
    own = Predictor(small)
    predictor = SimpleNamespace(
        model=own.model,
        calibration=own.calibration,
        image_size=own.image_size,
        class_names=own.class_names,
        label_kind="several",
    )
    path = tmp_path / "some.mlpackage"
    write_package(exported_program(predictor), predictor, "about", path)
    description = import_coremltools().models.MLModel(str(path), skip_model_load=True).get_spec()
    assert [each.name for each in description.description.output] == ["probabilities"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet", 64), ("mobilenet", 64), ("efficientnet", 64), ("convnext", 64), ("vit", 32)],
)
def test_every_kind_of_network_is_converted(small, tmp_path, name, size):
    own = Predictor(small)
    predictor = SimpleNamespace(
        model=ImageClassifier(few_blocks(name), own.model.mean, own.model.std).eval(),
        calibration=own.calibration,
        image_size=size,
        class_names=own.class_names,
        label_kind="single",
    )
    write_package(exported_program(predictor), predictor, "about", tmp_path / "some.mlpackage")
