"""The base of all data modules: what a loader gives, from which pictures, to which device."""

import math
import os
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from finetune.data.data_settings import (
    check_lists,
    check_mixing,
    check_shares,
    check_sizes,
    folder_of,
    is_without,
)
from finetune.data.dataset import Collate, ImageDataset
from finetune.data.device_copy import DeviceCopy
from finetune.data.image_cache import CacheOfSplits
from finetune.data.loader import (
    BATCHES_AHEAD,
    BatchesAhead,
    Devices,
    Loader,
    end_workers,
    is_pinned,
    loader_options,
)
from finetune.data.mixing import Mixing
from finetune.data.prediction_paths import unlabelled
from finetune.data.samplers import (
    EvalBatches,
    FitLimits,
    TrainBatches,
    check_limit,
    num_within,
    run_seed,
    spread,
)
from finetune.data.samples import Samples
from finetune.data.seen_record import Seen, joined
from finetune.data.size_schedule import ScheduledTransform, parse_sizes, scheduled
from finetune.data.train_loader import TrainLoader
from finetune.data.transforms import COLOUR_JITTER, CROP_SHARE, Interpolation, ResizeMode, pipelines
from finetune.distributed.signals import is_first_process

# the split that each stage evaluates
_EVALUATED = {"fit": "val", "validate": "val", "test": "test", "predict": "predict"}


def position(trainer: pl.Trainer | None) -> tuple[int, int]:
    """Return (epoch, batch) that training goes on with: (0, 0) for a new run, else what the checkpoint says.

    Lightning neither tells a loader that a run was resumed nor skips the batches that it has seen.
    """
    if trainer is None:
        return 0, 0
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    is_inside_epoch = epochs.started > epochs.processed
    # `processed`, not `completed`: that one still lags where a checkpoint is written.
    return epochs.processed, batches.processed if is_inside_epoch else 0


class ImageDataModule(pl.LightningDataModule):
    """Pictures with labels, split in train, val and test; the batch is the same for any number of devices.

    Args:
        root: Folder of the data set.
        batch_size: Pictures in a batch, over all devices. A limit of batches leaves pictures from all over val or test.
        image_size: Side in pixels of what the network sees.
        eval_image_size: The same where nothing trains, in validation, test and predictions; null for `image_size`.
        image_size_schedule: Sizes of the training pictures, such as 96,128, each for an equal share of the epochs; the
            last one is `image_size`. A size depends on the epoch and `trainer.max_epochs` alone.
        resize: How evaluation brings a picture to size: `shorter_side` keeps its proportions, `squash` does not (the
            book); the centre is then cropped. `whole` squashes and crops nothing.
        interpolation: How pictures are brought to size: `bilinear`, or `bicubic` as for many of timm's weights.
        crop_share: Share of the resized side that evaluation's crop has, from 0.1 to 1.
        crop_and_flip: Crops and flips at random in training; without it pictures are prepared as in evaluation.
        min_crop: Smallest share of a picture's area that a random crop in training keeps, in (0, 1].
        augmentations: Training transforms after crop and flip by class_path and init_args, also `TrivialAugment`.
        mixup: Blends each training picture with another, in shares of Beta(mixup, mixup), and both classes are the
            target; 0 for none. Train accuracy then counts the class of the larger part.
        cutmix: The same by pasting a box of the other picture. With both, each picture draws which, at even odds.
        val_fraction: Share of the training pictures set apart for validation where there is no val folder; 0 for none.
        test_fraction: Share set apart for testing where the folder has no splits at all.
        split_seed: Seed of these splits. The order of training has the run's seed, `--seed_everything`.
        num_workers: Processes that read pictures for each device, at most 4 for each core; `auto` looks at the machine.
        cache_limit_gb: Most gigabytes of disk that the decoded pictures of train and val may take; 0 decodes them
            anew in every epoch. The results are the same.
        cache_size: Shorter side, in pixels, to which larger images of train and val are first resized: they cost less.
            Random crops hold less detail; at 8/7 of image_size val differs by 7 grey levels (mean), else by up to 20.
        on_bad_image: `error` ends the run at a picture or folder that can't be read; `skip` leaves it out and lists it.
        class_names: The classes in order, if not sorted by name; every class folder must be one of them.
        exclude: Class folders to leave out, one or several, by name.
        predict: Picture, folder, glob or text file with a path on each line, or several, for `finetune predict`.
    """

    default_root: ClassVar[str | None] = None

    def __init__(
        self,
        root: str | None = None,
        batch_size: int = 32,
        image_size: int = 224,
        eval_image_size: int | None = None,
        image_size_schedule: list[int] | str | None = None,
        resize: ResizeMode = "shorter_side",
        interpolation: Interpolation = "bilinear",
        crop_share: float = CROP_SHARE,
        crop_and_flip: bool = True,
        min_crop: float = 0.35,
        augmentations: list[dict[str, Any]] | None = COLOUR_JITTER,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        split_seed: int = 0,
        num_workers: int | Literal["auto"] = "auto",
        cache_limit_gb: float = 8.0,
        cache_size: int | None = None,
        on_bad_image: Literal["error", "skip"] = "error",
        class_names: list[str] | None = None,
        exclude: list[str] | str | None = None,
        predict: list[str] | str | None = None,
    ) -> None:
        root = root and os.path.expanduser(root)
        super().__init__()
        sizes = parse_sizes(image_size_schedule, image_size)
        check_sizes(
            batch_size=batch_size,
            image_size=image_size,
            cache_size=cache_size,
            cache_limit_gb=cache_limit_gb,
            num_workers=num_workers,
            schedule=sizes,
            eval_image_size=eval_image_size,
            crop_share=crop_share,
        )
        check_shares(val_fraction, test_fraction, min_crop)
        check_mixing(mixup, cutmix)
        self.save_hyperparameters(
            ignore=["predict", "num_workers", "cache_limit_gb", "class_names"]
        )
        self.root = root or self.default_root
        self.exclude = [exclude] if isinstance(exclude, str) else exclude or []
        check_lists(augmentations, self.exclude)
        self.batch_size = batch_size
        self.image_size = image_size
        self.sizes = sizes
        self.eval_image_size = eval_image_size or image_size
        self.num_workers = num_workers
        self.on_bad_image = on_bad_image
        self.cache_limit_gb = cache_limit_gb
        self.cache_size = cache_size
        self.train_transforms, self.eval_transform = pipelines(
            {image_size, *sizes},
            self.eval_image_size,
            resize=resize,
            interpolation=interpolation,
            crop_share=crop_share,
            is_random=crop_and_flip,
            extra=augmentations or (),
            min_crop=min_crop,
        )
        self.mixing = Mixing(mixup, cutmix)
        self.collate = Collate(image_size, self.eval_image_size, *sizes)
        self.splits: dict[str, Samples] = {}
        self.folder = Path()  # of the images
        self._cache = CacheOfSplits()
        self._transfer = DeviceCopy()
        self._ahead = BatchesAhead()
        self.class_names = class_names or []
        self.fingerprint = ""
        self.is_fitted = False
        self.seen: Seen | None = None  # what training sees
        # what was trained on before the checkpoint that a fit continues from
        self.seen_before: Seen | None = None
        if predict is not None:
            self.splits["predict"] = unlabelled(predict, on_bad_image == "skip", is_first_process())
        else:
            self.folder = self.obtain(folder_of(self.root))
            self.scan(self.folder, val_fraction, test_fraction, split_seed)

    def obtain(self, root: Path) -> Path:
        """Return the folder of the images, after making or downloading the data set if it is missing.

        Of several processes one does it, and the others wait.
        """
        return root

    @classmethod
    def is_in(cls, root: Path) -> bool:
        """Return whether a folder holds the data set, so that `obtain` neither makes nor fetches anything."""
        return root.exists()

    @abstractmethod
    def scan(self, root: Path, val_fraction: float, test_fraction: float, split_seed: int) -> None:
        """Set `class_names`, `splits`, `seen` and `fingerprint`."""

    def take_whole(self, split: str) -> None:
        """Measure all pictures as `split` where none are set apart by folder: these are not the training data."""

    def setup(self, stage: str) -> None:
        self.is_fitted |= stage == "fit"
        if stage == "fit" and self.seen and self.seen_before:
            self.seen = joined(self.seen, self.seen_before)
        # those of another fit, perhaps
        self._cache = CacheOfSplits()
        self._ahead = BatchesAhead()
        if self.trainer is not None and _EVALUATED[stage] in self.splits:
            self._count_limit(_EVALUATED[stage])

    def _count_limit(self, split: str) -> None:
        """Replace the Trainer's limit of a split by a number of global batches, if it is a share of them.

        Lightning would take the share of each rank's batches, which hold other images on another number of devices.

        Raises:
            ValueError: It is less than one batch.
        """
        name = f"limit_{split}_batches"
        limit = getattr(self.trainer, name)
        num_images = len(self.splits[split])
        check_limit(limit, split, num_images, self.batch_size)
        if isinstance(limit, float) and limit != 1.0:
            num = num_within(limit, num_images, self.batch_size)
            setattr(self.trainer, name, math.ceil(num / self.batch_size))

    def teardown(self, stage: str) -> None:
        end_workers()

    def on_exception(self, exception: BaseException) -> None:
        end_workers()

    def loader(
        self, split: str, train: bool = False, is_limited: bool = False, is_alone: bool = False
    ) -> DataLoader:
        """Return the batches of this device: of one epoch from where the run stands, or of a split in order.

        Args:
            split: train, val, test or predict.
            train: Whether to train on it, not to evaluate.
            is_limited: Whether the trainer's limit of batches to evaluate cuts the split.
            is_alone: Whether this process reads all batches, not its share of them.

        Raises:
            ValueError: There is no such split.
        """
        if split not in self.splits:
            raise ValueError(is_without(self.root, split))
        trainer = self.trainer
        rank, world_size = (
            (0, 1) if trainer is None or is_alone else (trainer.global_rank, trainer.world_size)
        )
        num = len(self.splits[split])
        if train:
            is_same, place = getattr(self.trainer, "overfit_batches", 0) > 0, position(self.trainer)
            batches: Any = TrainBatches(
                num, self.batch_size, run_seed(), rank, world_size, *place, is_same=is_same
            )
        else:
            left = num
            if is_limited and trainer is not None:
                limit = getattr(trainer, f"limit_{split}_batches")
                left = num_within(limit, num, self.batch_size)
            key = (
                partial(spread, num=left, num_images=num)
                if left < num and split != "predict"
                else None
            )
            batches = EvalBatches(
                left, math.ceil(self.batch_size / world_size), rank, world_size, key
            )
        if split in ("train", "val"):
            self.use_cache()
        dataset = self.pictures(split, train)
        is_validated = "val" in self.splits and getattr(trainer, "limit_val_batches", 0) != 0
        ahead = self._ahead(split, train, is_validated, is_pinned(self._devices()))
        options = self.worker_options(math.ceil(self.batch_size / world_size), ahead)
        if train and options["num_workers"]:
            return TrainLoader(dataset, batches, self._fit_limits(), **options)
        options["persistent_workers"] = split == "val" and options["num_workers"] > 0
        return Loader(dataset, batch_sampler=batches, **options).started()

    def use_cache(self, reads: float | None = None) -> None:
        """Read the images of train and val from a cache from now on, if there is one, and build it where that pays.

        Args:
            reads: How often each training image will be read; by default as often as the trainer's command does.
        """
        if self.trainer is None:
            return
        self.splits |= self._cache.take(
            self.splits,
            root=self.root or "",
            limit_gb=self.cache_limit_gb,
            reads=self._num_reads(reads),
        )

    def pictures(self, split: str, train: bool = False) -> ImageDataset:
        """Return the images of a split as training sees them, or evaluation."""
        samples = self.splits[split]
        return ImageDataset(
            samples.read,
            samples.targets,
            self.train_transforms[self.image_size] if train else self.eval_transform,
            seed=run_seed(),
            on_bad_image="skip" if split == "predict" else self.on_bad_image,
            mixing=self.mixing,
            by_epoch=self._transforms_by_epoch() if train else None,
        )

    def _num_reads(self, reads: float | None) -> float:
        """Return how many training images are read, given how often each is; None for the Trainer's command."""
        num = len(self.splits["train"]) if "train" in self.splits else 0
        if reads is not None:
            return reads * num
        limits = self._fit_limits() if self.trainer and self.trainer.state.fn == "fit" else None
        return num if limits is None else limits.num_reads(num, self.batch_size)

    def _fit_limits(self) -> FitLimits | None:
        """Return the limits of the Trainer, None without one.

        Steps are counted as if no callback changed how many batches they accumulate.
        """
        trainer = self.trainer
        if trainer is None:
            return None
        return FitLimits(
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            batches_per_step=trainer.accumulate_grad_batches,
            limit_train_batches=trainer.limit_train_batches,
        )

    def _devices(self) -> Devices | None:
        """Return the devices of the Trainer on this machine, None without a Trainer."""
        if self.trainer is None:
            return None
        return Devices(self.trainer.strategy.root_device.type, self.trainer.num_devices)

    def _transforms_by_epoch(self) -> ScheduledTransform | None:
        max_epochs = getattr(self.trainer, "max_epochs", None)
        is_try = bool(getattr(self.trainer, "fast_dev_run", False))
        return scheduled(self.train_transforms, self.sizes, max_epochs, is_try)

    @property
    def num_batches(self) -> int:
        """Batches of an epoch of training, over all devices."""
        return math.ceil(len(self.splits["train"]) / self.batch_size)

    def worker_options(self, num_at_once: int, num_ahead: int = BATCHES_AHEAD) -> dict[str, Any]:
        """Return a loader's options for reading this many pictures at once, on this device."""
        batch_bytes = 3 * num_at_once * max(self.collate.sizes) ** 2
        return {
            "collate_fn": self.collate,
            **loader_options(self._devices(), self.num_workers, batch_bytes, num_ahead),
        }

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        return self._transfer(
            batch, device, partial(super().transfer_batch_to_device, dataloader_idx=dataloader_idx)
        )

    def train_dataloader(self) -> DataLoader:
        return self.loader("train", train=True)

    def val_dataloader(self) -> DataLoader | list:
        is_asked_for = self.trainer is not None and self.trainer.state.fn == "validate"
        return self.loader("val", is_limited=True) if "val" in self.splits or is_asked_for else []

    def test_dataloader(self) -> DataLoader:
        return self.loader("test", is_limited=True)

    def predict_dataloader(self) -> DataLoader:
        return self.loader("predict", is_limited=True)
