"""The base class of all data modules: splits, loaders, workers and the image cache."""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from msgspec.structs import asdict
from torch.utils.data import DataLoader

from finetune.data.addresses import is_address
from finetune.data.batch_limits import FitLimits, check_limit, num_within
from finetune.data.data_place import is_archive
from finetune.data.data_set import DataSet
from finetune.data.data_settings import missing_split_message, parse_merge, required_folder
from finetune.data.dataset import Collate, ImageDataset
from finetune.data.drawn_splits import check_group_by
from finetune.data.image_cache import is_worthwhile, read_from_cache
from finetune.data.image_files import kind_of
from finetune.data.loader import (
    BATCHES_AHEAD,
    PREFETCHED,
    DeviceCopy,
    Devices,
    Loader,
    TrainLoader,
    end_workers,
    loader_options,
)
from finetune.data.mixing import Mixing
from finetune.data.prediction_paths import unlabelled_data
from finetune.data.samplers import EvalBatches, TrainBatches, evenly_spaced, run_seed
from finetune.data.samples import Samples
from finetune.data.seen import SeenRecord, build_record
from finetune.data.tables.table_columns import parse_columns
from finetune.data.transforms import eval_transform, train_transform
from finetune.distributed.signals import is_rank_zero
from finetune.settings.fields import ClassSettings, check_section, own_arguments
from finetune.settings.schema import (
    Data,
    DataSettings,
    Interpolation,
    LabelKind,
    LabelsOfTable,
    ResizeMode,
)
from finetune.system.messages import WrongUsage, as_wrong_usage

DEFAULTS = DataSettings()
# the split that each stage evaluates
_EVALUATED = {"fit": "val", "validate": "val", "test": "test", "predict": "predict"}


def position(trainer: pl.Trainer | None) -> tuple[int, int]:
    """Return the (epoch, batch) at which training continues: (0, 0) for a new run, else as in the checkpoint.

    Lightning does not pass this to a loader, and does not skip the batches that were trained on before.
    """
    if trainer is None:
        return 0, 0
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    is_inside_epoch = epochs.started > epochs.processed
    # `processed`, because `completed` still lags when a checkpoint is written.
    return epochs.processed, batches.processed if is_inside_epoch else 0


class ImageDataModule(pl.LightningDataModule):
    """Labelled images, split in train, val and test. The global batches are the same for any number of devices.

    The constructor reads no files. `read` finds the images. So does the first use of `splits` and similar properties.

    The arguments are the settings of `finetune.settings.schema.DataSettings`, which has their help, types and ranges.
    """

    default_root: ClassVar[str | None] = None
    # Whether a class with a `default_root` accepts a table instead.
    reads_tables: ClassVar[bool] = False
    # The classes of a data set whose class folders are not in the order of their names.
    default_class_names: ClassVar[tuple[str, ...]] = ()

    def __init__(  # noqa: PLR0913 (an argument for each option)
        self,
        root: str | None = DEFAULTS.root,
        batch_size: int = DEFAULTS.batch_size,
        image_size: int = DEFAULTS.image_size,
        resize: ResizeMode = DEFAULTS.resize,
        interpolation: Interpolation = DEFAULTS.interpolation,
        crop_share: float = DEFAULTS.crop_share,
        crop_and_flip: bool = DEFAULTS.crop_and_flip,
        min_crop: float = DEFAULTS.min_crop,
        augmentations: list[dict[str, Any]] | None = DEFAULTS.augmentations,
        mixup: float = DEFAULTS.mixup,
        cutmix: float = DEFAULTS.cutmix,
        val_fraction: float = DEFAULTS.val_fraction,
        test_fraction: float = DEFAULTS.test_fraction,
        split_seed: int = DEFAULTS.split_seed,
        group_by: str | None = DEFAULTS.group_by,
        num_folds: int | None = DEFAULTS.num_folds,
        fold: int | None = DEFAULTS.fold,
        num_workers: int | Literal["auto"] = DEFAULTS.num_workers,
        cache_limit_gb: float = DEFAULTS.cache_limit_gb,
        on_bad_image: Literal["error", "skip"] = DEFAULTS.on_bad_image,
        class_names: list[str] | None = DEFAULTS.class_names,
        exclude: list[str] | str | None = DEFAULTS.exclude,
        merge: list[str] | str | None = DEFAULTS.merge,
        table: str | None = DEFAULTS.table,
        columns: dict[str, str | list[str]] | str | None = DEFAULTS.columns,
        labels: LabelsOfTable = DEFAULTS.labels,
        label_separator: str | None = DEFAULTS.label_separator,
        corrections: str | None = DEFAULTS.corrections,
        correct_test: bool = DEFAULTS.correct_test,
        predict: list[str] | str | None = DEFAULTS.predict,
    ) -> None:
        settings = check_section(DataSettings, own_arguments(DataSettings, locals()), "data.")
        root = settings.root
        table = settings.table
        corrections = settings.corrections
        check_group_by(group_by)
        super().__init__()
        self.settings = settings
        self.save_hyperparameters(
            ignore=["predict", "num_workers", "cache_limit_gb", "class_names"]
        )
        self.hparams.pop("_instantiator", None)  # of a LightningCLI
        if table is not None and self.default_root is not None and not self.reads_tables:
            raise WrongUsage(f"--data.table is for your own images, not for {type(self).__name__}")
        self.table = table
        self.root = table or root or self.default_root  # the folder or table of the data set
        self.merge = parse_merge(settings.merge)
        self.columns = parse_columns(columns)
        self.corrections = corrections
        if correct_test and corrections is None:
            raise WrongUsage("needs a file: --data.corrections FILE", "data.correct_test")
        self.batch_size = batch_size
        self.image_size = image_size
        self.num_workers = num_workers
        self.on_bad_image = on_bad_image
        self.cache_limit_gb = cache_limit_gb
        self.eval_transform = eval_transform(image_size, resize, interpolation, crop_share)
        self.train_transform = train_transform(
            image_size,
            augmentations or (),
            min_crop,
            None if crop_and_flip else self.eval_transform,
            interpolation,
            is_padded=resize == "pad",
        )
        self._transfer = DeviceCopy()
        # the classes in order; None for those of the training images
        self.expected_classes = class_names or list(self.default_class_names) or None
        self.predict = predict
        if predict is None and table is None:
            required_folder(self.root)
        self.is_fitted = False
        # images of the run that wrote the checkpoint from which this fit continues
        self.seen_before: SeenRecord | None = None

    def read(self) -> None:
        """Find the images, their classes and their splits. Later calls do nothing.

        A missing data set is created or downloaded first.

        Raises:
            OSError: A file or folder cannot be read.
            ValueError: The data set has a fault, or settings do not fit it.
        """
        _ = self.scanned

    @cached_property
    def scanned(self) -> DataSet:
        """The images and their classes. The first use finds them; see `read`. A change replaces the complete value."""
        if self.predict is not None:
            return unlabelled_data(
                self.predict,
                self.expected_classes or [],
                skip=self.on_bad_image == "skip",
                is_logged=is_rank_zero(),
                columns=self.columns,
                group_by=self.settings.group_by,
            )
        return self.scan()

    @property
    def class_names(self) -> list[str]:
        """The classes, in the order of their indices. The first use reads the data set."""
        return self.scanned.class_names

    @property
    def label_kind(self) -> LabelKind:
        """Whether each image has exactly one class, or several labels. The first use reads the data set."""
        return self.scanned.label_kind

    @property
    def splits(self) -> dict[str, Samples]:
        """The images of each split. The first use reads the data set."""
        return self.scanned.splits

    @property
    def seen(self) -> SeenRecord | None:
        """The record of the images of this fit, on rank 0, which writes it into checkpoints; None before the fit.

        The first use reads 12 kB of each image.
        """
        if self.is_fitted and self.scanned.seen is None and is_rank_zero():
            splits = {
                split: replace(samples, facts=samples.look())
                for split, samples in self.splits.items()
                if split in ("train", "val")
            }
            record = build_record(splits["train"], splits.get("val"))
            seen = record if self.seen_before is None else record.after(self.seen_before)
            self.scanned = replace(self.scanned, splits=self.splits | splits, seen=seen)
        return self.scanned.seen

    @property
    def fingerprint(self) -> str:
        """A hash of the training and validation images and their targets. The first use reads the data set."""
        return self.scanned.fingerprint

    @classmethod
    def is_in(cls, root: str) -> bool:
        """Return whether a folder holds the data set, so that nothing has to be created or downloaded."""
        return is_address(root) or is_archive(root) or kind_of(root) not in (None, "link")

    @abstractmethod
    def scan(self) -> DataSet:
        """Return the images of the data set. A missing one is created or downloaded first. Use `read` to call it."""

    def use_all_images(self, split: str) -> None:
        """Evaluate all images as `split`, if the place has no splits of its own."""

    def setup(self, stage: str) -> None:
        self.read()
        self._check_equal_on_ranks()
        self.is_fitted |= stage == "fit"
        # Images in a bucket are read for the first checkpoint: by its end an epoch has copied them.
        if stage == "fit" and not self.splits["train"].has_remote_files():
            _ = self.seen
        if stage in ("fit", "validate"):
            self.use_cache()
        if self.trainer is not None and _EVALUATED[stage] in self.splits:
            self._count_limit(_EVALUATED[stage])

    def _check_equal_on_ranks(self) -> None:
        """Check that all ranks have found the same images and labels.

        Each rank reads them itself. They differ if files change during the start, such as a file of corrections.

        Raises:
            ValueError: The images or labels differ. All ranks raise it.
        """
        if self.trainer is None or self.trainer.world_size == 1 or not dist.is_initialized():
            return
        digest = hashlib.sha256(self.fingerprint.encode())
        for split, samples in sorted(self.splits.items()):
            digest.update(f"{split} {len(samples)}".encode() + samples.targets.fingerprint())
        mine = digest.hexdigest()
        of_ranks = [mine] * self.trainer.world_size
        dist.all_gather_object(of_ranks, mine)
        if len(set(of_ranks)) > 1:
            raise ValueError(
                f"the processes found different images or labels in {self.table or self.root}: a file changed during "
                "the start, for example that of --data.corrections. Start again when nothing changes it"
            )

    def _count_limit(self, split: str) -> None:
        """Convert the Trainer's limit of a split from a share to a number of global batches.

        Lightning would apply the share to each rank's batches, whose images depend on the number of devices.

        Raises:
            ValueError: The limit is less than one batch.
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
        self,
        split: str,
        train: bool = False,
        is_limited: bool = False,
        only: Sequence[int] | None = None,
    ) -> DataLoader:
        """Return the loader of this rank's batches.

        In training it starts at the batch where the run continues. In evaluation it reads the split in order.

        Args:
            split: train, val, test or predict.
            train: Load for training, not for evaluation.
            is_limited: Apply the Trainer's limit of evaluation batches.
            only: Indices of the images to read in an evaluation, all on this rank; None for its share of all.

        Raises:
            ValueError: There is no such split.
        """
        if split not in self.splits:
            raise ValueError(missing_split_message(self.root, split))
        trainer = self.trainer
        rank = 0
        world_size = 1
        if trainer is not None and only is None:
            rank = trainer.global_rank
            world_size = trainer.world_size
        num = len(self.splits[split])
        if train:
            epoch, batch = position(trainer)
            batches: Any = TrainBatches(
                num_images=num,
                batch_size=self.batch_size,
                seed=run_seed(),
                rank=rank,
                world_size=world_size,
                epoch=epoch,
                batch=batch,
            )
        else:
            num_evaluated = num
            if is_limited and trainer is not None:
                limit = getattr(trainer, f"limit_{split}_batches")
                num_evaluated = num_within(limit, num, self.batch_size)
            key: Callable[[int], Any] | None = None
            if only is not None:
                num_evaluated = len(only)
                key = only.__getitem__
            elif num_evaluated < num and split != "predict":
                key = partial(evenly_spaced, num=num_evaluated, num_images=num)
            batches = EvalBatches(
                num_evaluated, math.ceil(self.batch_size / world_size), rank, world_size, key
            )
        samples = self.splits[split]
        dataset = self.image_dataset(split, train)
        ahead = self._num_ahead(train)
        options = self.worker_options(math.ceil(self.batch_size / world_size), ahead)
        options["collate_fn"] = Collate(self.image_size, samples.targets.collate)
        if samples.has_remote_files():
            options["files_of"] = lambda keys: samples.files_to_read(dataset.indices_of(keys))
        if train and options["num_workers"]:
            limits = None if trainer is None else FitLimits.of(trainer)
            return TrainLoader(dataset, batches, limits, **options)
        options["persistent_workers"] = split == "val" and options["num_workers"] > 0
        return Loader(dataset, batch_sampler=batches, **options).start_persistent_workers()

    def _num_ahead(self, train: bool) -> int:
        """Return how many batches per worker a new loader may hold in shared memory.

        The training loader reserves the memory for validation, too: when that starts, training batches already occupy
        some of the memory, so the free memory could not be checked then. Pinned batches leave shared memory at once.
        """
        is_fit = self.trainer is not None and self.trainer.state.fn == "fit"
        if is_fit and not train:
            return 0
        is_validated = "val" in self.splits and getattr(self.trainer, "limit_val_batches", 0) != 0
        devices = self._devices()
        is_pinned = devices is not None and devices.is_pinned
        return BATCHES_AHEAD + (PREFETCHED if train and is_validated and not is_pinned else 0)

    def use_cache(self, reads: float | None = None) -> None:
        """Read the images of train and val from the cache from now on. Build it if that saves time.

        `setup` does this for a fit and a validation.

        Args:
            reads: How often each training image will be read; by default computed from the Trainer's settings.
        """
        if self.trainer is None:
            return
        num = len(self.splits["train"]) if "train" in self.splits else 0
        cached = read_from_cache(
            self.splits,
            root=self.scanned.folder or self.root or "",
            limit_gb=self.cache_limit_gb,
            build=num > 0 and is_worthwhile(self._num_reads(reads), num),
        )
        self.scanned = replace(self.scanned, splits=self.splits | cached)

    def image_dataset(self, split: str, train: bool = False) -> ImageDataset:
        """Return the dataset of a split, with the transforms of training or of evaluation."""
        samples = self.splits[split]
        return ImageDataset(
            samples.read,
            samples.targets,
            self.train_transform if train else self.eval_transform,
            seed=run_seed(),
            on_bad_image="skip" if split == "predict" else self.on_bad_image,
            mixing=Mixing(self.settings.mixup, self.settings.cutmix),
            weights=samples.weights,
        )

    def _num_reads(self, reads: float | None) -> float:
        """Return the total number of training samples read; `reads` per image, or by the Trainer's settings if None."""
        num = len(self.splits["train"]) if "train" in self.splits else 0
        if reads is not None:
            return reads * num
        if self.trainer is None or self.trainer.state.fn != "fit":
            return num
        return FitLimits.of(self.trainer).num_reads(num, self.batch_size)

    def _devices(self) -> Devices | None:
        """Return the devices of the Trainer on this machine, None without a Trainer."""
        if self.trainer is None:
            return None
        return Devices(self.trainer.strategy.root_device.type, self.trainer.num_devices)

    @property
    def num_batches(self) -> int:
        """Number of global training batches per epoch."""
        return math.ceil(len(self.splits["train"]) / self.batch_size)

    def worker_options(self, num_at_once: int, num_ahead: int = BATCHES_AHEAD) -> dict[str, Any]:
        """Return the DataLoader options for per-rank batches of this many images."""
        batch_bytes = 3 * num_at_once * self.image_size**2
        return loader_options(self._devices(), self.num_workers, batch_bytes, num_ahead)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        return self._transfer(
            batch, device, partial(super().transfer_batch_to_device, dataloader_idx=dataloader_idx)
        )

    def train_dataloader(self) -> DataLoader:
        return self.loader("train", train=True)

    def val_dataloader(self) -> DataLoader | list:
        # without the split, `validate` is an error, and a fit does not validate
        is_required = self.trainer is not None and self.trainer.state.fn == "validate"
        return self.loader("val", is_limited=True) if "val" in self.splits or is_required else []

    def test_dataloader(self) -> DataLoader:
        return self.loader("test", is_limited=True)

    def predict_dataloader(self) -> DataLoader:
        return self.loader("predict", is_limited=True)


def data_arguments(settings: Data) -> dict[str, Any]:
    """Return the arguments of a data module: all of our classes, and those that were set of a class of the user."""
    if isinstance(settings, ClassSettings):
        return dict(settings.init_args)
    arguments = asdict(settings)
    del arguments["class_path"]
    return arguments


def open_data(settings: Data) -> ImageDataModule:
    """Return the data module of some settings. It reads no files yet.

    Raises:
        WrongUsage: There is no such class, or it does not take these arguments.
    """
    arguments = data_arguments(settings)
    named = ClassSettings(settings.class_path, arguments)
    with as_wrong_usage("data"):
        return named.imported("data", ImageDataModule)(**arguments)
