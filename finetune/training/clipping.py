"""Gradients that are clipped by their norm: each network's by its own, also where several learn in one fit."""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import GradClipAlgorithmType
from torch.optim.optimizer import Optimizer

from finetune.models.image_classifier import ImageClassifier


class ClipsEach(pl.LightningModule):
    """A module of one network, or of several each of which is clipped as it would be alone.

    Lightning takes the norm over all that an optimizer updates, by which a member's step would depend on the others'.
    """

    image_classifier: ImageClassifier

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        networks, is_norm = (
            self.image_classifier.members,
            gradient_clip_algorithm != GradClipAlgorithmType.VALUE,
        )
        has_scaler = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        # Lightning refuses that
        is_scaled = has_scaler and getattr(optimizer, "_step_supports_amp_scaling", False)
        if len(networks) == 1 or not is_norm or (gradient_clip_val or 0) <= 0 or is_scaled:
            return self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        for network in networks:
            torch.nn.utils.clip_grad_norm_(network.parameters(), gradient_clip_val)
        return None
