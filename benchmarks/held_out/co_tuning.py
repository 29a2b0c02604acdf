"""`finetune fit` with Co-Tuning, a candidate for the defaults: on one device, with one label per image.

    python -m benchmarks.held_out.co_tuning fit FOLDER --backbone NAME --weights TIMM_FOLDER ...

Co-Tuning (You et al., NeurIPS 2020) keeps the source classifier next to the new head. Its output on an image should be
the mean output of the pretrained network on the images of the same class. The authors also train the source
classifier; here it does not change.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from finetune.cli import main
from finetune.features.linear_probe import head_inputs
from finetune.models.stages import head
from finetune.training.classifier import Classifier

WEIGHT = 2.3  # of the added loss, by the authors

# Shapes: B images, S classes of the source, K classes.

_fit_head = Classifier._fit_head
_training_step = Classifier.training_step


def fit_head(model: Any) -> None:
    """Compute the mean source probabilities (K, S) of the training images of each class; then fit the new head."""
    folder = Path(model.hparams["weights"])
    state = load_file(folder / "model.safetensors")
    linear = head(model.network)
    model.eval()
    features, labels, _ = head_inputs(model.trainer, model, linear, model._data.loader("train"))
    # kept in a function, so that they are no part of the checkpoint
    model.source_logits = lambda x: F.linear(
        x, state["classifier.weight"], state["classifier.bias"]
    )
    probabilities = model.source_logits(torch.from_numpy(features).float()).softmax(dim=1)
    of_class = [probabilities[torch.from_numpy(labels == k)] for k in range(labels.max() + 1)]
    model.expected = [rows.mean(dim=0) for rows in of_class]
    linear.register_forward_pre_hook(lambda module, inputs: setattr(model, "head_input", inputs[0]))
    _fit_head(model)


def training_step(model: Any, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
    """Return the loss (scalar) with the cross entropy of the source classifier."""
    loss = _training_step(model, batch, batch_idx)
    expected = torch.stack([model.expected[k] for k in batch["label"].tolist()])
    return loss + WEIGHT * F.cross_entropy(model.source_logits(model.head_input), expected)


if __name__ == "__main__":
    Classifier._fit_head = fit_head  # type: ignore[method-assign]
    Classifier.training_step = training_step  # type: ignore[method-assign,assignment]
    main()
