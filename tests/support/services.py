"""A service in a test: its limits, its client in this process, and images to send."""

import io

import numpy as np
from PIL import Image
from starlette.testclient import TestClient

from finetune.serving.app import make_app
from finetune.serving.service import Service
from finetune.serving.uploads import Limits

LIMITS = Limits(max_bytes=200_000, max_images=4, max_pixels=10_000, max_waiting=8, seconds=20)


def client_of(
    service: Service,
    token: str | None = None,
    host: str = "127.0.0.1",
    logged_model: str | None = None,
) -> TestClient:
    app = make_app(service, token, host, logged_model)
    return TestClient(app, "http://127.0.0.1", raise_server_exceptions=False)


def image_bytes(number: int = 0, size: tuple[int, int] = (48, 40), kind: str = "PNG") -> bytes:
    """Return an image of noise; other numbers give other images."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()
