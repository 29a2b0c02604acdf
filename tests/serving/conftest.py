"""A small checkpoint to serve, and images to send."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from small_fits import data, fit
from starlette.testclient import TestClient

from finetune import Classifier
from finetune.inference.predictor import Predictor
from finetune.serving.app import make_app
from finetune.serving.service import Service
from finetune.serving.uploads import Limits

LIMITS = Limits(max_bytes=200_000, max_images=4, max_pixels=10_000, max_waiting=8, seconds=20)


@pytest.fixture(scope="session")
def checkpoint(colours, tmp_path_factory):
    images = data(colours, resize="squash")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("checkpoint") / "some.ckpt"
    fit(Classifier(images.class_names, "resnet18_small", weights=None), images).save_checkpoint(
        path
    )
    return path


@pytest.fixture(scope="module")  # tests of a module change it
def predictor(checkpoint):
    return Predictor(checkpoint)


@pytest.fixture
def service(predictor):
    return Service(predictor, LIMITS, max_batch=4)


@pytest.fixture
def client(service):
    with TestClient(
        make_app(service, None, "127.0.0.1"), "http://127.0.0.1", raise_server_exceptions=False
    ) as client:
        yield client


@pytest.fixture(scope="session")
def png_image():
    """Return the bytes of an image of noise; other numbers give other images."""

    def drawn(number: int = 0, size: tuple[int, int] = (48, 40), format: str = "PNG") -> bytes:
        pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, format)
        return content.getvalue()

    return drawn
