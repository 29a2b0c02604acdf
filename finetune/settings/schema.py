"""The settings of fit, validate, test, predict and benchmark.

A setting is added here, and read where it has its effect. The text of a setting says what it does, with unit and range;
a reason that a user does not need is a comment.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from finetune.settings.fields import About, ClassSettings, Page, Section
from finetune.system.messages import WrongUsage

# Side of the images that a network takes. A batch of larger images would not fit into memory.
MIN_PIXELS = 8
MAX_PIXELS = 8192
MAX_RESIZED = 2**14  # side in pixels of a resized image, before the centre is cropped
MAX_MEMBERS = 32  # of an ensemble, and folds, whose networks become one
MAX_STAGES = 4  # whose features a head takes
# The book and torchvision evaluate the central 224 pixels of a 256-pixel image. The share is the same at any size.
CROP_SHARE = 224 / 256
IMAGE_FOLDER = "finetune.ImageFolderData"
# Our data classes. Another class is imported only if the user names it.
DATA_CLASSES = ("finetune.FashionMNIST", "finetune.Hotdog", IMAGE_FOLDER, "finetune.SampleData")

# Types of values; a title is the placeholder of the value on help pages. A leading ~ of a path is expanded.
Folder = Annotated[str, Meta(min_length=1, title="FOLDER")]
File = Annotated[str, Meta(min_length=1, title="FILE")]
Ckpt = Annotated[str, Meta(min_length=1, title="CKPT")]
Table = Annotated[str, Meta(min_length=1, title="TABLE")]
Count = Annotated[int, Meta(ge=1)]
Pixels = Annotated[int, Meta(ge=MIN_PIXELS, le=MAX_PIXELS, title="PIXELS")]
Share = Annotated[float, Meta(gt=0, le=1, title="SHARE")]
Fraction = Annotated[float, Meta(ge=0, lt=1, title="SHARE")]
Coverage = Annotated[float, Meta(gt=0, lt=1, title="SHARE")]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Limit = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0, le=1)]
Names = Annotated[list[str], Meta(max_length=10_000)]
# Whether each image has exactly one class (softmax), or several labels or none (a sigmoid for each).
LabelKind = Literal["single", "several"]
LabelsOfTable = Literal["auto", "single", "several"]
HeadInit = Literal["auto", "xavier", "probe"]
ResizeMode = Literal["shorter_side", "squash", "whole", "pad"]
Interpolation = Literal["bilinear", "bicubic"]
Precision = Literal["32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]


def colour_jitter() -> list[dict[str, Any]]:
    """Return the default augmentation.

    The shares were chosen with the other defaults of `finetune fit`.
    """
    shares = {"brightness": 0.3, "contrast": 0.3, "saturation": 0.3, "hue": 0.02}
    return [{"class_path": "albumentations.ColorJitter", "init_args": shares}]


class DataSettings(Section, frozen=True):
    """The arguments of `finetune.ImageFolderData`, and the class of the data, if it is one of finetune.

    Attributes:
        class_path: Class of the data: one of finetune, or your own by its import path.
        root: Folder, archive or address of the images; with a table, the folder that its paths start from.
        batch_size: Images in a batch, over all devices.
        image_size: Side of the network's input, in pixels.
        resize: How images are resized in evaluation. `shorter_side` keeps the proportions, `squash` does not; both crop
            the centre. `whole` squashes and `pad` fills the rest; neither crops.
        interpolation: Kernel of resizing: `bilinear`, or `bicubic` as for many of timm's weights.
        crop_share: Side of evaluation's centre crop, as a share of the resized side.
        crop_and_flip: Random crops and flips in training. If false, images are prepared as in evaluation.
        min_crop: Smallest share of an image's area in a random training crop.
        augmentations: Training transforms after crop and flip, each with class_path and init_args. By default
            ColorJitter of albumentations; `TrivialAugment` is a name, too.
        mixup: Blends each training image with another one, by a share from Beta(mixup, mixup). 0 turns it off.
        cutmix: As mixup, but pastes a box of the other image. With both, each image draws one of the two.
        val_fraction: Share for validation if there is no val, or 0.
        test_fraction: Share for testing if there are no splits.
        split_seed: Seed of these splits.
        group_by: Images of one group, such as a patient, share a split and a prediction. `folder` is the folder below
            the class; a regular expression takes its first capture group, or its match.
        num_folds: Number of folds, of which `fold` is tested. `--folds` of `fit` runs all of them.
        fold: The fold that is tested instead of `test_fraction`, from 1.
        num_workers: DataLoader workers for each device.
        cache_limit_gb: Largest size of the cache of decoded images on disk, in gigabytes; 0: no cache.
        on_bad_image: `skip` reports and skips images and folders that cannot be read.
        class_names: The classes in order, if not sorted by name.
        exclude: Names of classes to skip.
        merge: Classes to merge: `a,b:c` makes one class c of a and b.
        table: Table of images (.csv, .tsv, .jsonl or .parquet) instead of class folders.
        columns: Columns for path, label, split, group and weight, such as path:photo,label:breed.
        labels: Whether an image of the table has one label (`single`) or several; `auto` decides by the table.
        label_separator: Character between the labels of an image. Semicolons and vertical bars are found without it.
        corrections: File of corrected labels, which `finetune review` writes, for train and val images.
        correct_test: Correct the test images, too.
        predict: Images for `finetune predict`: an image, folder, glob, table, text file with a path per line, or list.
    """

    class_path: Annotated[str, About(value="CLASS")] = IMAGE_FOLDER
    root: Annotated[
        Folder | None,
        About(
            place="FOLDER", also="path folder root dir data_dir data_path dataset", resume="images"
        ),
    ] = None
    batch_size: Annotated[
        int, Meta(ge=1, le=2**20), About(word="batch", also="batch bs b", resume="order")
    ] = 32
    image_size: Annotated[
        Pixels,
        About(
            word="size", also="size img_size imgsz input_size resolution crop_size", resume="fixed"
        ),
    ] = 224
    resize: Annotated[ResizeMode, About(resume="fixed")] = "shorter_side"
    interpolation: Annotated[Interpolation, About(resume="fixed")] = "bilinear"
    crop_share: Annotated[
        Annotated[float, Meta(ge=0.1, le=1, title="SHARE")], About(resume="fixed")
    ] = CROP_SHARE
    crop_and_flip: bool = True
    min_crop: Share = 0.35
    augmentations: Annotated[
        Annotated[list[dict[str, Any]], Meta(max_length=100)] | None, About(value="LIST")
    ] = msgspec.field(default_factory=colour_jitter)
    mixup: Annotated[NotNegative, About(value="ALPHA")] = 0.0
    cutmix: Annotated[NotNegative, About(value="ALPHA")] = 0.0
    val_fraction: Annotated[Fraction, About(resume="images")] = 0.1
    test_fraction: Annotated[Fraction, About(resume="images")] = 0.2
    split_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1), About(resume="images")] = 0
    group_by: Annotated[
        Annotated[str, Meta(max_length=500)] | None,
        About(value="folder|REGEX", also="groups group", resume="images"),
    ] = None
    num_folds: Annotated[
        Annotated[int, Meta(ge=2, le=MAX_MEMBERS)] | None, About(value="K", resume="images")
    ] = None
    fold: Annotated[Annotated[int, Meta(ge=1, le=MAX_MEMBERS)] | None, About(resume="images")] = (
        None
    )
    num_workers: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["auto"],
        About(word="workers", also="workers j", resume="free"),
    ] = "auto"
    cache_limit_gb: Annotated[NotNegative, About(value="GB", resume="free")] = 8.0
    on_bad_image: Literal["error", "skip"] = "error"
    class_names: Annotated[
        list[str] | None, About(value="NAMES", also="classes", holds_names=True)
    ] = None
    exclude: Annotated[Names | None, About(value="NAMES", holds_names=True)] = None
    merge: Annotated[Names | None, About(value="NAMES", resume="images", holds_names=True)] = None
    table: Annotated[
        Table | None, About(also="csv csv_file table labels_file annotations", resume="images")
    ] = None
    columns: Annotated[
        dict[str, str | list[str]] | str | None,
        About(value="ROLE:NAME", resume="images", holds_names=True),
    ] = None
    labels: Annotated[LabelsOfTable, About(also="multi_label multilabel", resume="images")] = "auto"
    label_separator: Annotated[str | None, About(value="CHAR", resume="images")] = None
    corrections: Annotated[
        File | None, About(also="corrected_labels label_fixes", resume="images")
    ] = None
    correct_test: bool = False
    predict: Annotated[
        list[str] | str | None,
        About(
            word="images",
            place="IMAGES",
            value="IMAGES",
            also="picture pictures image files input source",
            resume="free",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.val_fraction + self.test_fraction >= 1:
            text = f"{self.val_fraction} and test_fraction {self.test_fraction} must leave some training data"
            raise WrongUsage(text, "data.val_fraction")
        self._check_folds()
        side = self.image_size / self.crop_share
        if side > MAX_RESIZED:
            text = f"{self.crop_share} would resize images to {side:,.0f} pixels, at most {MAX_RESIZED:,}"
            raise WrongUsage(text, "data.crop_share")

    def _check_folds(self) -> None:
        if (self.num_folds is None) != (self.fold is None):
            raise WrongUsage(
                "and num_folds go together: finetune fit FOLDER --folds 5 runs all folds",
                "data.fold",
            )
        if self.num_folds is None or self.fold is None:
            return
        if self.fold > self.num_folds:
            raise WrongUsage(
                f"is from 1 to num_folds, got {self.fold} of {self.num_folds}", "data.fold"
            )
        if self.val_fraction + 1 / self.num_folds >= 1:
            text = f"{self.val_fraction} and one fold of {self.num_folds} must leave some training data"
            raise WrongUsage(text, "data.val_fraction")


# A class of the user has defaults of its own: only the arguments that are set are known.
Data = DataSettings | ClassSettings


class OptimizerArguments(Section, frozen=True):
    """The arguments of optimizers that many set; others are known to the class.

    Attributes:
        lr: Learning rate; 0.001 for a random head. Other optimizers than AdamW have their usual one.
        weight_decay: Weight decay. Other optimizers than AdamW have their usual one.
    """

    lr: Annotated[
        NotNegative | None,
        About(word="lr", value="RATE", also="lr learning_rate rate lr0", resume="fixed"),
    ] = None
    weight_decay: Annotated[NotNegative | None, About(also="wd decay", resume="fixed")] = None


class SchedulerArguments(Section, frozen=True):
    """The arguments of schedulers that many set; others are known to the class.

    Attributes:
        warmup: Share of the steps in which the learning rate rises from 0.
    """

    warmup: Annotated[Share | Literal[0] | None, About(resume="fixed")] = None


class ModelSettings(Section, frozen=True):
    """The arguments of `finetune.Classifier`, without those that the data decide.

    Attributes:
        backbone: The network; A,B or auto: choose one. `finetune backbones` lists the names.
        weights: Name, file or run; null for random. A name of torchvision, a state dict, a checkpoint, a folder of
            timm's, or hf://OWNER/NAME.
        head_init: Start of the new head: `xavier` (random) or `probe` (logistic regression on the features). `auto` is
            `probe` if a single network starts from pretrained weights.
        freeze: Last frozen stage; backbone: only fit the head. With `backbone` the head is solved exactly; epochs,
            optimizer and augmentation have no effect.
        freeze_batch_norm: Batch norm keeps its running statistics in stages that train, too. This is the default
            if the head starts as `probe`.
        head_lr_multiplier: Learning rate of the head divided by that of the backbone.
        decay_norm_and_bias: Apply weight decay also to biases, norms, scales and position embeddings.
        optimizer: An optimizer of torch. Its name or import path; its arguments: `--model.optimizer.NAME`.
        scheduler: A scheduler of torch, by its name or import path; its arguments: `--model.scheduler.NAME`.
        scheduler_interval: Whether the scheduler steps after each optimizer step or each epoch.
        label_smoothing: Share of the target that is spread over all classes.
        class_weights: `balanced`, or cat:2,dog:0.5, or a .yaml file. `balanced` is the inverse of the frequency in
            training. Classes that are not named have 1.
        compile: Use torch.compile, which takes about a minute at first.
        init_seed: Seed of the random weights; by default that of the run.
        head_stages: Number of last stages whose features the head takes. A frozen backbone has 3, if the network
            supports it.
    """

    backbone: Annotated[
        str,
        About(
            word="backbone",
            value="NAME",
            also="arch architecture network model_name net",
            resume="fixed",
        ),
    ] = "resnet18"
    weights: Annotated[File | None, About(word="weights", also="pretrained", resume="fixed")] = (
        "DEFAULT"
    )
    head_init: Annotated[HeadInit, About(resume="fixed")] = "auto"
    freeze: Annotated[str | None, About(word="freeze", value="STAGE", resume="fixed")] = None
    freeze_batch_norm: bool | None = None
    head_lr_multiplier: Annotated[Positive, About(resume="fixed")] = 1.0
    decay_norm_and_bias: Annotated[bool, About(resume="fixed")] = False
    optimizer: Annotated[
        ClassSettings,
        About(
            word="optimizer",
            value="NAME",
            also="opt optim",
            resume="fixed",
            arguments=OptimizerArguments,
        ),
    ] = ClassSettings("torch.optim.AdamW", {"lr": 0.0001, "weight_decay": 0.05})
    scheduler: Annotated[
        ClassSettings | None, About(value="NAME", resume="fixed", arguments=SchedulerArguments)
    ] = ClassSettings("finetune.WarmupCosine", {"warmup": 0.2})
    scheduler_interval: Literal["step", "epoch"] = "step"
    label_smoothing: Fraction = 0.0
    class_weights: Annotated[
        dict[str, NotNegative] | str | None,
        About(word="class_weights", value="WEIGHTS", resume="fixed", holds_names=True),
    ] = None
    compile: Annotated[bool, About(resume="free")] = False
    init_seed: Annotated[Seed | None, About(resume="fixed")] = None
    head_stages: Annotated[int, Meta(ge=1, le=MAX_STAGES), About(resume="fixed")] = 1


class TrainerSettings(Section, frozen=True):
    """The arguments of Lightning's Trainer that are settings. Others need a script with a LightningCLI of its own.

    Attributes:
        accelerator: Kind of device: cpu, cuda, mps or auto.
        strategy: Strategy of Lightning. `auto` is DDP, with a process for each device.
        devices: Number of GPUs, or of processes on a CPU. Or the GPUs: 0,2; auto takes all of them.
        num_nodes: Number of machines.
        precision: 32-true or bf16-mixed; by default the faster one.
        max_epochs: Passes over the images; by default 5 to 50. -1: no limit.
        max_steps: End after N optimizer steps; -1: no limit.
        limit_train_batches: Number of training batches in an epoch, or their share.
        limit_val_batches: Number of validation batches, or their share; evenly spaced images.
        limit_test_batches: Number of test batches, or their share; evenly spaced images.
        val_check_interval: Validate after this number of batches, or share of an epoch.
        check_val_every_n_epoch: Validate after every n-th epoch.
        log_every_n_steps: Optimizer steps between lines of steps.csv and of loggers.
        accumulate_grad_batches: Batches whose gradients are added for an optimizer step.
        gradient_clip_val: Largest norm of the gradient; 0: no limit. By default 1 after a fitted head.
        deterministic: Use only operations that are deterministic on a GPU.
        enable_progress_bar: Show a progress bar in a terminal.
        profiler: Measure the parts of the training, by a profiler of Lightning.
        logger: Also log to tensorboard, wandb or mlflow. Several: wandb,mlflow.
        default_root_dir: Where runs go: FOLDER/COMMAND/version_N.
    """

    accelerator: Annotated[str, About(value="KIND", also="cpu cuda mps", resume="free")] = "auto"
    strategy: Annotated[
        Literal[
            "auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true"
        ],
        About(resume="free"),
    ] = "auto"
    devices: Annotated[
        int | str | list[int],
        About(word="devices", also="gpus gpu num_gpus n_gpu device ngpus", resume="free"),
    ] = "auto"
    num_nodes: Annotated[Count, About(resume="free")] = 1
    precision: Annotated[
        Precision | None, About(word="precision", value="KIND", also="amp fp16 bf16 half dtype")
    ] = None
    max_epochs: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        About(word="epochs", also="epochs epoch num_epochs n_epochs"),
    ] = None
    max_steps: Annotated[int, Meta(ge=-1), About(also="steps num_steps iterations")] = -1
    limit_train_batches: Limit | None = None
    limit_val_batches: Limit | None = None
    limit_test_batches: Limit | None = None
    val_check_interval: Count | Share | None = None
    check_val_every_n_epoch: Count | None = 1
    log_every_n_steps: Annotated[Annotated[int, Meta(ge=0)], About(resume="free")] = 10
    accumulate_grad_batches: Count = 1
    gradient_clip_val: Annotated[NotNegative | None, About(value="NORM")] = None
    deterministic: Annotated[bool | Literal["warn"] | None, About(value="true|warn")] = None
    enable_progress_bar: Annotated[bool, About(resume="free")] = True
    profiler: Annotated[
        Literal["simple", "advanced", "pytorch"] | None, About(value="NAME", resume="free")
    ] = None
    logger: Annotated[
        list[Literal["tensorboard", "wandb", "mlflow"]] | None,
        About(word="logger", value="NAMES", resume="free"),
    ] = None
    default_root_dir: Annotated[
        Folder,
        About(
            word="out",
            also="out output_dir out_dir logdir log_dir save_dir run_dir project",
            resume="free",
        ),
    ] = "runs"


class FitSettings(Section, frozen=True):
    """The settings of a fit.

    Attributes:
        seed_everything: Seed of order, augmentation, random weights.
        ckpt_path: Begin a new run that continues from this checkpoint.
        resume: Continue the newest unfinished run, or RUN. Of the same data and network; else the newest finished one,
            else a new run begins. Options that are not set keep the run's values.
        name: Name of the run's folder, instead of version_N. With --resume the run to continue.
        folds: Cross-validation: one fit per fold. Each image is tested once; the networks also become one checkpoint.
        members: Ensemble: fits with different random heads. Their checkpoint averages the probabilities.
        minutes: End after about M minutes, or --epochs. It chooses the number of epochs and the size of images.
        patience: Early stopping: N validations without improvement. It is that of val/accuracy (multi-label: val/mAP).
        threshold: Choose a threshold for f1, accuracy, recall:0.95. It is chosen on the validation split, for the
            first of two classes, for CLASS in f1:CLASS, or for each of several labels.
        coverage: Test prediction sets with the true class for SHARE of images.
        keep_last: Keep last.ckpt after the end, to continue the run; false deletes what only resuming needs.
        allow_changes: Let --resume continue with another seed, batch size or training images.
        test_after_fit: Test the best checkpoint, if there is a test split.
        report: Write report.html, the report of the run.
        checkpoint_every_n_steps: Write last.ckpt every n optimizer steps, not only at epochs' ends.
    """

    page: ClassVar = Page(
        "FOLDER|TABLE [options]",
        "Trains a classifier, then tests it. FOLDER, or its .tar or .zip, has a folder for each class, or train, val "
        "and test with these. TABLE has a row for each image: columns path and label, optionally split, group, weight.",
        (
            "fit photos",
            "fit labels.csv --epochs 20 --size 128 --out runs/small --resume",
            "fit --config hotdog.yaml",
        ),
        {
            "data": "batch size data.val_fraction data.test_fraction",
            "network": "backbone weights freeze",
            "training": "epochs lr optimizer class_weights seed",
            "machine": "devices workers precision",
            "run": "out logger resume name minutes patience threshold coverage",
        },
    )
    data: Data = DataSettings()
    model: ModelSettings = ModelSettings()
    trainer: TrainerSettings = TrainerSettings()
    seed_everything: Annotated[Seed, About(word="seed", also="seed", resume="order")] = 0
    ckpt_path: Annotated[Ckpt | None, About(resume="free")] = None
    resume: Annotated[bool | str, About(resume="free")] = False
    name: Annotated[
        str | None, About(value="NAME", also="run_name experiment exp_name", resume="free")
    ] = None
    folds: Annotated[
        Annotated[int, Meta(ge=2, le=MAX_MEMBERS)] | None,
        About(value="K", also="cv kfold k_fold n_splits num_bag_folds", resume="free"),
    ] = None
    members: Annotated[
        Annotated[int, Meta(ge=2, le=MAX_MEMBERS)] | None,
        About(value="N", resume="free"),
    ] = None
    minutes: Annotated[
        Annotated[float, Meta(gt=0, le=10**6)] | None, About(value="M", resume="free")
    ] = None
    patience: Annotated[Count | None, About(also="early_stopping")] = None
    threshold: Annotated[str | None, About(value="AIM", resume="fixed")] = None
    coverage: Annotated[Coverage | None, About(also="conformal", resume="free")] = None
    keep_last: Annotated[bool, About(resume="free")] = True
    allow_changes: Annotated[bool, About(resume="free")] = False
    test_after_fit: Annotated[bool, About(resume="free")] = True
    report: Annotated[bool, About(resume="free")] = True
    checkpoint_every_n_steps: Annotated[Count | None, About(resume="free")] = None

    @property
    def num_fits(self) -> int:
        """The number of fits whose networks are joined; 1 for a single fit."""
        return self.folds or self.members or 1

    def __post_init__(self) -> None:
        if self.coverage is not None and self.folds is not None:
            raise WrongUsage("needs images that no fold was trained on: omit --folds", "coverage")
        if self.members is None:
            return
        if self.folds is not None:
            raise WrongUsage("and --members both train several networks: omit one", "folds")
        if self.model.head_init not in ("auto", "xavier"):
            raise WrongUsage(
                f"differ by their random heads, which model.head_init {self.model.head_init} makes equal",
                "members",
            )
        if self.model.freeze == "backbone":
            raise WrongUsage(
                "backbone solves the head, so all --members would be alike: omit one",
                "model.freeze",
            )


class BenchmarkSettings(FitSettings, frozen=True):
    """The settings of a measurement of a fit.

    Attributes:
        repeats: Measurements of each part, of two seconds each.
        devices: Numbers of devices to compare, such as 1,2.
        output: Also write the result as a .json.
    """

    page: ClassVar = Page(
        "FOLDER [options]",
        "Measures a fit, with all its options: images per second, and the share of waiting for data. It leaves no "
        "files except caches.",
        (
            "benchmark photos",
            "benchmark photos --devices 1,2",
            "benchmark photos --out measured.json",
        ),
        {
            "the measurement": "repeats devices out",
            "data": "batch size data.val_fraction data.test_fraction",
            "network": "backbone weights freeze",
            "training": "epochs lr optimizer class_weights seed",
            "machine": "workers precision",
        },
    )
    repeats: Count = 5
    devices: Annotated[str | None, About(value="N,N")] = None
    output: Annotated[File | None, About(word="out", also="out o output_file")] = None


_CKPT = "CKPT is a checkpoint, a file of finetune export, or the folder of a run: its best one."


def _measurement(command: str, split: str, name: str, measured: str = "tta") -> Page:
    return Page(
        "CKPT [FOLDER] [options]",
        f"Measures a checkpoint on the {name} split of the data set that it was trained on, or of FOLDER: its "
        f"{split}/, or all of its class folders. Images seen in training are skipped or refused. {_CKPT}",
        (
            f"{command} runs/fit/version_0",
            f"{command} runs/fit/version_0 other_photos",
            f"{command} best.ckpt --batch 256 --devices 2",
        ),
        {
            "data": f"batch data.on_bad_image {measured}",
            "machine": "devices workers precision",
            "run": "out logger",
        },
    )


class EvaluateSettings(Section, frozen=True):
    """The settings of a command that evaluates a checkpoint, which decides those of the model.

    Attributes:
        seed_everything: Seed of what is random.
        ckpt_path: The checkpoint, or the folder of its run.
        tta: Average with the mirror image (flip), in twice the time.
    """

    ignored: ClassVar = (
        *("model.optimizer", "model.scheduler", "trainer.max_epochs", "trainer.max_steps"),
        *("trainer.limit_train_batches", "trainer.val_check_interval"),
        *("trainer.check_val_every_n_epoch", "trainer.accumulate_grad_batches"),
        "trainer.gradient_clip_val",
    )
    data: Data = DataSettings()
    model: ModelSettings = ModelSettings()
    trainer: TrainerSettings = TrainerSettings()
    seed_everything: Seed = 0
    ckpt_path: Annotated[Ckpt | None, About(place="CKPT", also="checkpoint ckpt weights_path")] = (
        None
    )
    tta: Literal["flip"] | None = None


class ValidateSettings(EvaluateSettings, frozen=True):
    page: ClassVar = _measurement("validate", "val", "validation")


class SetSettings(EvaluateSettings, frozen=True):
    """The settings of a command that makes prediction sets.

    Attributes:
        coverage: Prediction sets that have the true class for SHARE of images.
    """

    coverage: Coverage | None = None

    def __post_init__(self) -> None:
        if self.coverage is not None and self.tta is not None:
            raise WrongUsage("is for predictions without --tta, as in validation", "coverage")


class TestSettings(SetSettings, frozen=True):
    page: ClassVar = _measurement("test", "test", "test", "tta coverage")


class PredictSettings(SetSettings, frozen=True):
    """The settings of a command.

    Attributes:
        output: A .csv; default runs/predict/version_N/predictions.csv.
        top_k: Only the k most probable classes.
        abstain_below: Predict unsure if no class is that probable.
        none_below: Predict none if an image is less familiar than this share of validation images. On average 0.05
            refuses at most 5 % of the images of the classes.
    """

    page: ClassVar = Page(
        "CKPT IMAGES ... [options]",
        f"Classifies images. {_CKPT} IMAGES are image files, folders, globs, tables, or text files with a path on each "
        "line.",
        (
            "predict runs/fit/version_0 a.jpg",
            "predict runs/fit/version_0 photos --out predictions.csv --top_k 2",
            "predict best.ckpt -- -a-name-with-a-dash.jpg",
        ),
        {
            "predictions": "out top_k abstain_below none_below coverage data.group_by",
            "data": "batch tta",
            "machine": "devices workers precision",
            "run": "trainer.default_root_dir logger",
        },
    )
    output: Annotated[File | None, About(word="out", also="out o output_file")] = None
    top_k: Annotated[Count | None, About(value="K", also="k top topk")] = None
    abstain_below: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, About(value="P")] = None
    none_below: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, About(value="P")] = None
