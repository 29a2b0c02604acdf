"""The names of all options, as the real parser has them: to judge a flag before torch, which takes seconds, is there.

Frozen; `tests/commands/test_option_names.py` holds them against the parser, and prints what to put here.
"""

# The version of Lightning, whose options some of these are. Beside another one nothing is refused by them.
LIGHTNING = "2.6"

DATA = """
augmentations batch_size cache_limit_gb cache_size class_names crop_and_flip crop_share cutmix eval_image_size
exclude image_size image_size_schedule interpolation min_crop mixup num_workers on_bad_image predict resize
root split_seed test_fraction val_fraction
"""
_MODEL = """
backbone class_mapping class_weights compile decay_norm_and_bias freeze freeze_batch_norm head_init head_lr_multiplier
label_smoothing layer_decay members optimizer optimizer.lr optimizer.weight_decay scheduler
scheduler.warmup scheduler_interval source_classes weights
"""
_TRAINER = """
accelerator accumulate_grad_batches barebones benchmark callbacks check_val_every_n_epoch default_root_dir
detect_anomaly deterministic devices enable_autolog_hparams enable_checkpointing enable_model_summary
enable_progress_bar fast_dev_run gradient_clip_algorithm gradient_clip_val inference_mode limit_predict_batches
limit_test_batches limit_train_batches limit_val_batches log_every_n_steps logger max_epochs max_steps max_time
min_epochs min_steps model_registry num_nodes num_sanity_val_steps overfit_batches plugins precision profiler
reload_dataloaders_every_n_epochs strategy sync_batchnorm use_distributed_sampler val_check_interval
"""


def _all(own: str, model: str = _MODEL) -> frozenset[str]:
    groups = {"trainer": _TRAINER, "model": model, "data": DATA}
    dotted = {f"{group}.{name}" for group, names in groups.items() for name in names.split()}
    common = "config help print_config seed_everything ckpt_path trainer model data"
    return frozenset({*dotted, *common.split(), *own.split()})


_FIT = (
    "allow_changes checkpoint_every_n_steps minutes patience report resume test_after_fit threshold"
)
# Options with few values, and some that take numbers.
CHOICES = {
    "tta": ("flip",),
    "data.resize": ("shorter_side", "squash", "whole"),
    "data.interpolation": ("bilinear", "bicubic"),
    "data.on_bad_image": ("error", "skip"),
    "model.head_init": ("auto", "xavier", "source", "probe"),
}
NUMBERS = {
    *(
        "data.batch_size",
        "data.image_size",
        "data.val_fraction",
        "data.test_fraction",
        "data.min_crop",
    ),
    *("data.crop_share", "data.mixup", "data.cutmix", "data.eval_image_size"),
    *(
        "trainer.max_epochs",
        "trainer.max_steps",
        "model.optimizer.lr",
        "model.head_lr_multiplier",
        "top_k",
    ),
    "model.members",
    *("abstain_below", "minutes", "patience"),
}
OPTIMIZERS = """
ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam
"""

AUTO = "auto"  # the backbone that leaves the choice to the data

# Of the version of torchvision whose networks these are; beside another one none is refused before torch is there.
TORCHVISION = "0.29"
BACKBONES = """
alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161 densenet169 densenet201
efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5 efficientnet_b6
efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s googlenet inception_v3 lenet maxvit_t
mnasnet0_5 mnasnet0_75 mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf
regnet_x_1_6gf regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf regnet_y_128gf regnet_y_16gf
regnet_y_1_6gf regnet_y_32gf regnet_y_3_2gf regnet_y_400mf regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18
resnet18_small resnet34 resnet50 resnext101_32x8d resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5
shufflenet_v2_x1_0 shufflenet_v2_x1_5 shufflenet_v2_x2_0 small_cnn swin_b swin_s swin_t swin_v2_b swin_v2_s
swin_v2_t vgg11 vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 vit_h_14 vit_l_16 vit_l_32
wide_resnet101_2 wide_resnet50_2
"""

_SHEET = "ckpt_path pictures output num columns seed"
_CHECK = "output lists weights backbone image_size ckpt_path"
_SERVE = """
ckpt_path host port token device precision max_batch max_waiting max_pictures max_megabytes max_megapixels timeout
"""
_MEASURE = _all("trust_modules tta", f"{_MODEL} class_names network_size")

# command: the names of its options without dashes; those of classes that are named by a class_path are not there.
OPTIONS = {
    "fit": _all(_FIT),
    "benchmark": _all(f"{_FIT} repeats devices output"),
    "validate": _MEASURE,
    "test": _MEASURE,
    "predict": _MEASURE | {"output", "top_k", "abstain_below"},
    "sheet": frozenset(
        [
            "ckpt_path",
            "pictures",
            "output",
            "num",
            "columns",
            "seed",
            "config",
            "help",
            "print_config",
        ]
    ),
    "export": frozenset(
        [
            "ckpt_path",
            "format",
            "output",
            "input",
            "verify_on",
            "quantize",
            "root",
            "config",
            "help",
            "print_config",
        ]
    ),
    "serve": frozenset([*_SERVE.split(), "config", "help", "print_config"]),
    "check": frozenset(
        [
            "output",
            "lists",
            "weights",
            "backbone",
            "image_size",
            "ckpt_path",
            "config",
            "help",
            "print_config",
        ]
    ),
}
