"""The LightningModule: a pretrained network with a new head. Its results do not depend on the number of devices."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from finetune import lightning_private
from finetune.data.class_weights import (
    BALANCED,
    check_weighted,
    parse_class_weights,
    weights_of_classes,
)
from finetune.data.samplers import run_seed
from finetune.data.samples import Samples
from finetune.distributed.global_loss import GlobalLoss, set_ddp_arguments, zero_loss
from finetune.distributed.sync_batch_norm import share_statistics
from finetune.features.familiarity import (
    BELOW,
    Familiarity,
    logits_and_familiarity,
    read_familiarity,
)
from finetune.models import stages
from finetune.models.image_classifier import build_image_classifier
from finetune.models.weights import load_pretrained, read_weights
from finetune.runs.checkpoint_facts import check_fits, origin
from finetune.settings.fields import check_section, own_arguments
from finetune.settings.schema import HeadInit, LabelKind, ModelSettings
from finetune.system.messages import as_wrong_usage
from finetune.training.calibration import Calibration, read_calibration
from finetune.training.compile import Compile
from finetune.training.dropout import Noise
from finetune.training.finite import check_evaluated
from finetune.training.fitted_head import FitHead, resolved_head_init
from finetune.training.groups import Groups, group_outputs
from finetune.training.loss import target_of
from finetune.training.lr_schedulers import WarmupCosine, scheduler_config
from finetune.training.measure import measure, measure_groups, measure_sets
from finetune.training.metrics import TrainMetrics, undecodable
from finetune.training.optimizers import (
    fuse,
    lay_out_gradients,
    param_groups,
    scale_learning_rates,
)
from finetune.training.outputs import Collector, Outputs
from finetune.training.prediction import DecisionRule, Scores
from finetune.training.task import Task
from finetune.training.threshold import Aim

DEFAULTS = ModelSettings()


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Draw torch's random numbers on the CPU from a seed within the context; None to leave them as they are."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Classifier(pl.LightningModule):
    """An image classifier from uint8 RGB images to logits, including the normalization.

    The other arguments are the settings of `finetune.settings.schema.ModelSettings`, which has their help, types and
    ranges.

    Args:
        class_names: The K classes, in the order of the logits.
        optimizer: Makes the optimizer of parameter groups.
        scheduler: Makes the scheduler of an optimizer; None for a constant rate.
        network_size: Side of the images in pixels, for networks with position embeddings.
        label_kind: Whether each image has exactly one class (`single`), or several labels or none (`several`). The data
            decide it.
        members: Number of networks that were trained one by one, and predict as an `Ensemble`. Only one can be trained.
    """

    # Shapes: B images of the per-rank batch, h and w pixels, K classes.
    class_weight: Tensor  # the weights in the loss, (K,); `class_weights` is the setting that they follow from

    def __init__(  # noqa: PLR0913 (an argument for each option)
        self,
        class_names: list[str],
        backbone: str = DEFAULTS.backbone,
        weights: str | None = DEFAULTS.weights,
        head_init: HeadInit = DEFAULTS.head_init,
        freeze: str | None = DEFAULTS.freeze,
        freeze_batch_norm: bool | None = DEFAULTS.freeze_batch_norm,
        head_lr_multiplier: float = DEFAULTS.head_lr_multiplier,
        decay_norm_and_bias: bool = DEFAULTS.decay_norm_and_bias,
        optimizer: Callable[[Any], Optimizer] = lambda params: AdamW(
            params, lr=1e-4, weight_decay=0.05
        ),
        scheduler: Callable[[Optimizer], LRScheduler] | None = lambda optimizer: WarmupCosine(
            optimizer, warmup=0.2
        ),
        scheduler_interval: Literal["step", "epoch"] = DEFAULTS.scheduler_interval,
        label_smoothing: float = DEFAULTS.label_smoothing,
        class_weights: dict[str, float] | str | None = DEFAULTS.class_weights,
        compile: bool = DEFAULTS.compile,
        network_size: int | None = None,
        init_seed: int | None = DEFAULTS.init_seed,
        label_kind: LabelKind = "single",
        head_stages: int = DEFAULTS.head_stages,
        members: int = 1,
    ) -> None:
        arguments = own_arguments(ModelSettings, locals())
        for name in ("optimizer", "scheduler"):  # functions here
            del arguments[name]
        check_section(ModelSettings, arguments, "model.")
        super().__init__()
        class_weights = parse_class_weights(class_weights)  # a checkpoint has no path of a file
        # config.yaml has the optimizer. A checkpoint has only plain values, for `weights_only=True`.
        self.save_hyperparameters(ignore=["optimizer", "scheduler", "compile"])
        self.hparams.pop("_instantiator", None)  # of a LightningCLI
        self.class_names = list(class_names)
        self.backbone = backbone
        self.weights = weights
        self.network_size = network_size
        self.class_weights = class_weights
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scheduler_interval = scheduler_interval
        self.is_compiled = compile
        self.head_init = resolved_head_init(head_init, weights)
        self.has_fixed_statistics = (
            self.head_init == "probe" if freeze_batch_norm is None else freeze_batch_norm
        )
        self.is_solved = freeze == "backbone"  # only the head is fitted, which needs no optimizer
        self.automatic_optimization = not self.is_solved
        self.trains_from_fitted_head = self.head_init == "probe" and not self.is_solved
        self.task = Task(label_kind, self.class_names, label_smoothing)
        with _seeded(init_seed):
            self.image_classifier = build_image_classifier(
                backbone,
                len(self.class_names),
                network_size,
                members=members,
                label_kind=label_kind,
                head_stages=head_stages,
            )
        # Before DDP wraps the module: DDP would not average gradients of parameters that are unfrozen later.
        self.frozen = self.image_classifier.freeze(freeze)
        self.always_eval = [
            *self.frozen,
            *(stages.batch_norms(self.network) if self.has_fixed_statistics else ()),
        ]
        self.register_buffer("class_weight", torch.ones(len(self.class_names)))
        if isinstance(class_weights, dict):
            self.class_weight.copy_(torch.tensor(weights_of_classes(class_weights, class_names)))
        self.train_metrics = TrainMetrics(label_kind)
        # what thresholds are chosen for; None for the default of the task
        self.aim: Aim | None = None
        # of `DecisionRule`, in test and predict
        self.coverage: float | None = None
        self.abstain_below = 0.0
        self.none_below = 0.0
        # of a checkpoint that is evaluated, and of a solved head
        self.familiarity: Familiarity | None = None
        self.calibration: Calibration = self.task.uncalibrated()  # of the current weights
        # value of the monitored metric before training; None if it is not measured
        self.start_score: float | None = None
        self._collector = Collector()
        # of the last evaluation outside of a fit: the outputs, on rank 0; and of each the tables behind its metrics
        self.outputs: Outputs | None = None
        self.groups: Groups | None = None  # of these images, if they have groups
        self.counts: dict[str, Any] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, K) of images (B, 3, h, w) uint8 RGB."""
        return self.image_classifier(images)

    @property
    def network(self) -> nn.Module:
        """The network or `Ensemble`. To replace it, assign to `image_classifier.network`."""
        return self.image_classifier.network

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override] # torch has overloads
        """Return the state with keys `network.…`, `mean`, `std` and `class_weight`, as checkpoints have them."""
        state = super().state_dict(*args, **kwargs)
        consume_prefix_in_state_dict_if_present(state, "image_classifier.")
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        self.class_weight.copy_(state_dict["class_weight"])
        return self.image_classifier.load_checkpoint_state(state_dict, strict, assign)

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        for module in self.always_eval:
            module.eval()
        return self

    def prepare_data(self) -> None:
        is_new = self.trainer.state.fn == "fit" and self.trainer.ckpt_path is None
        if is_new and self.weights is not None:
            read_weights(self.weights, self.backbone, self.network_size)  # downloads them

    def setup(self, stage: str) -> None:
        if stage == "fit" and self.hparams["members"] > 1:
            raise ValueError(
                "an ensemble is not trained as one network: finetune fit --members trains one after another"
            )
        set_ddp_arguments(self.trainer)
        self.train_metrics.reset()  # an earlier fit may have been interrupted
        if stage == "fit" and self.trainer.world_size > 1:
            share_statistics(self.network, self.always_eval)
        if stage == "fit" and self.trainer.ckpt_path is None:  # a checkpoint has weights and head
            torch.manual_seed(run_seed())
            if self.weights is not None:
                model = self.image_classifier
                load_pretrained(model, self.weights, self.backbone, self.network_size)
            self._weigh_classes()

    def _weigh_classes(self) -> None:
        """Set the class weights that follow from the training images, and check the others against the images."""
        splits = self.trainer.datamodule.splits  # type: ignore[attr-defined]
        if self.class_weights == BALANCED:
            train = splits["train"]
            self.class_weight.copy_(self.task.class_weights(train.targets, train.weights))
        elif isinstance(self.class_weights, dict) and self.task.label_kind == "single":
            counts = {name: split.targets.counts() for name, split in splits.items()}
            check_weighted(self.class_weights, self.class_names, counts)

    def configure_callbacks(self) -> list[pl.Callback]:
        callbacks: list[pl.Callback] = [Noise()]
        if self.is_compiled:
            callbacks.append(Compile())
        if self.head_init == "probe" or self.is_solved:
            callbacks.append(FitHead())
        return callbacks

    def on_fit_start(self) -> None:
        self.train()  # Lightning does not change the mode of modules

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
        # Nothing trains. The loop runs once for the hooks at the end of an epoch, such as validation.
        if self.is_solved:
            self.trainer.should_stop = True
            return None
        self.calibration = self.task.uncalibrated()  # this step changes the weights
        images = batch["image"]
        target = target_of(batch)
        weight = target.weight(self.class_weight)
        global_loss = GlobalLoss.of_ranks(weight, self.trainer.world_size)
        if len(images) == 0 and global_loss.total_weight == 0:
            # No image of the global batch could be decoded, so no rank has a loss to log.
            return zero_loss(self)
        if len(images) == 0 and not stages.batch_norms(self.network):
            loss = zero_loss(self)
        else:  # an empty batch too: batch norm waits for every rank
            logits = self(images)
            summed = self.task.loss_sum(logits, target, self.class_weight)
            loss = global_loss.loss(summed)
        if len(images):
            self.train_metrics.update(logits.detach(), target.labels, summed, weight)
        self.log("train/loss", global_loss.mean(loss))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.train_metrics.take(self.device, self.trainer.world_size))

    def on_validation_epoch_start(self) -> None:
        self._collector = Collector()
        self.groups = None

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        logits, familiar = self._logits(batch)
        self._collector.add(batch, logits, familiar)
        # in a fit the loss is checked, without waiting for the device
        if self.trainer.state.fn != "fit":
            p = self.calibration.probabilities(logits)
            check_evaluated(p, batch["index"], self.trainer)

    test_step = validation_step

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Scores:
        """Return the scores of the images that could be decoded; iterate over them for a `Prediction` of each."""
        logits, familiar = self._logits(batch)
        p = self.calibration.probabilities(logits)
        check_evaluated(p, batch["index"], self.trainer)
        if self._with_groups("predict") is not None:
            self._collector.add(batch, logits)
        return Scores(self.rule, p.cpu(), familiar.cpu(), batch["index"].tolist())

    @property
    def rule(self) -> DecisionRule:
        """How the current weights predict."""
        return DecisionRule(
            self.class_names,
            self.calibration,
            self.familiarity,
            self.coverage,
            self.abstain_below,
            self.none_below,
        )

    def _logits(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the logits of a batch in an evaluation (B, K), and the familiarity of its images (B,), or empty."""
        if not len(batch["image"]):
            return torch.empty(0, len(self.class_names), device=self.device), torch.empty(0)
        familiarity = None if self.trainer.state.fn == "fit" else self.familiarity
        return logits_and_familiarity(self, batch["image"], self.network, familiarity)

    def on_validation_epoch_end(self) -> None:
        self._end_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._end_evaluation("test")

    def on_predict_epoch_end(self) -> None:
        samples = self._with_groups("predict")
        outputs = None if samples is None else self._collector.gather(self.trainer)
        if samples is not None and outputs is not None and len(outputs.index):
            self.groups = group_outputs(outputs, self.calibration, samples)

    def _with_groups(self, split: str) -> Samples | None:
        """Return the images of a split; None if they have no groups, or are of another data module."""
        splits = getattr(getattr(self.trainer, "datamodule", None), "splits", {})
        samples = splits.get(split)
        return samples if isinstance(samples, Samples) and samples.groups is not None else None

    def _end_evaluation(self, split: str) -> None:
        """Measure the outputs of all ranks on rank 0, and log the metrics on all. A fit then fits a calibration.

        Raises:
            ValueError: No image could be decoded, or too few were validated for a coverage. All ranks raise it.
        """
        coverage = self.rule.coverage if split == "test" else None
        outputs = self._collector.gather(self.trainer)
        self._collector = Collector()
        is_fit = self.trainer.state.fn == "fit"
        found = None
        fitted = None
        if outputs is not None and len(outputs.index):
            is_test = split == "test"
            # no file has the tables of a validation within a fit, which may take gigabytes
            found = measure(
                outputs, self.task, self.calibration, self.class_weight, is_test, not is_fit
            )
            samples = None if is_fit else self._with_groups(split)
            if samples is not None:
                self.groups = group_outputs(outputs, self.calibration, samples)
                found[1]["groups"] = measure_groups(
                    self.groups, self.task, self.calibration, self.class_weight, split
                )
            if coverage is not None:
                found[1]["sets"] = measure_sets(outputs, self.calibration, coverage)
            if len(outputs.familiar):
                unfamiliar = (outputs.familiar < BELOW).double().mean()
                found[1]["unfamiliar"] = float(unfamiliar)
            if is_fit:
                fitted = Calibration.fit(outputs.logits, outputs.labels, self.aim)
        found, fitted = self.trainer.strategy.broadcast((found, fitted))
        if found is None:
            raise ValueError(undecodable(split))
        values, self.counts = found
        # as values of 4 bytes, in any precision of the network
        floats = {name: torch.tensor(v, dtype=torch.float32) for name, v in values.items()}
        self.log_dict({f"{split}/{name}": value for name, value in floats.items()})
        self.outputs = None if is_fit else outputs
        if fitted is not None:
            self.calibration = fitted
            if self.task.label_kind == "single":
                self.log("val/temperature", fitted.temperature)

    def param_groups(self) -> list[dict]:
        """Return the parameter groups of the optimizer."""
        return param_groups(
            self.network, self.hparams["head_lr_multiplier"], self.hparams["decay_norm_and_bias"]
        )

    @as_wrong_usage("model.optimizer or model.scheduler")
    def configure_optimizers(self) -> Any:
        if self.is_solved:
            return []
        optimizer = self.optimizer(self.param_groups())
        scale_learning_rates(fuse(optimizer))
        if self.scheduler is None:
            return optimizer
        return [optimizer], [
            scheduler_config(self.scheduler, optimizer, self.trainer, self.scheduler_interval)
        ]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        lay_out_gradients(optimizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # A checkpoint may be written within an epoch, so it has the sums of its metrics so far.
        state = {
            "train_metrics": self.train_metrics.sums(self.device, self.trainer.world_size),
            "calibration": self.calibration.as_plain(),
        }
        if self.is_solved and self.familiarity is not None:
            state["familiarity"] = self.familiarity.as_plain()
        checkpoint["finetune"] = {**origin(self.trainer), **state}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_fits(checkpoint, self.hparams, self.network)
        self.calibration = read_calibration(checkpoint)
        self.familiarity = None
        if not self.is_compiled:  # a compiled network ignores hooks
            self.familiarity = read_familiarity(checkpoint, self.network)
        if lightning_private.has_trainer(self):
            # Lightning converts the module after it has restored the weights, which would round float64 to float32.
            self.trainer.precision_plugin.convert_module(self)
            sums = checkpoint["finetune"]["train_metrics"]
            if sums is not None:  # an exported file has none
                self.train_metrics.restore(sums, self.trainer.is_global_zero)
