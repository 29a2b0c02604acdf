"""The same checkpoint behind LitServe, as its documents show it: decode, batch, predict, encode."""

import sys

import litserve
import numpy as np
from fastapi import Request, UploadFile

from finetune.data.decode import decode
from finetune.inference.predictor import Predictor


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.predictor = Predictor(sys.argv[1], precision=None)

    def decode_request(self, request: Request) -> np.ndarray:
        image: UploadFile = request["image"]
        return self.predictor.prepare(decode(image.file.read()))

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.predictor.classify(x)

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> dict:
        names = self.predictor.class_names
        return {
            "label": names[int(output.argmax())],
            "probabilities": dict(zip(names, output.tolist(), strict=True)),
        }


if __name__ == "__main__":
    api = Api(max_batch_size=32, batch_timeout=0.0)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[2]), host="127.0.0.1", generate_client_file=False)
