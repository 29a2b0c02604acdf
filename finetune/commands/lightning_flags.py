"""The flags of fit, validate, test and predict in addition to Lightning's."""

from typing import Literal

from pytorch_lightning.cli import LightningArgumentParser


def add_flags(parser: LightningArgumentParser, subcommand: str) -> None:
    """Add our flags of a subcommand to its parser."""
    if subcommand == "fit":
        _add_fit_flags(parser)
    else:
        parser.add_argument(
            "--tta",
            type=Literal["flip"] | None,
            default=None,
            help="`flip` averages the predictions of each image and its mirror image, in twice the time.",
        )
        parser.set_defaults({"model.class_names": []})
    if subcommand == "predict":
        parser.add_argument(
            "--output",
            type=str | None,
            default=None,
            help="The .csv file of the predictions, in place of the one in the run's folder.",
        )
        parser.add_argument(
            "--top_k", type=int | None, default=None, help="Write only the k best classes."
        )
        parser.add_argument(
            "--abstain_below",
            type=float | None,
            default=None,
            help="Predict unsure if the class is less probable than that, from 0 to 1.",
        )


def _add_fit_flags(parser: LightningArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        type=bool | str,
        nargs="?",
        const=True,
        default=False,
        help="Continue the newest run of the same data and network under trainer.default_root_dir, or begin a new "
        "one if there is none; with the folder or address of a run, continue that run. Options that are not set keep "
        "the run's values.",
    )
    parser.add_argument(
        "--name",
        type=str | None,
        default=None,
        help="Name of the run's folder, instead of version_N; with --resume the run to continue.",
    )
    parser.add_argument(
        "--folds",
        type=int | None,
        default=None,
        help="Cross-validation: one fit per fold, in one folder. Each image is tested once. Joins the results, and the "
        "networks as one checkpoint.",
    )
    parser.add_argument(
        "--keep_last",
        type=bool,
        default=True,
        help="Keep last.ckpt after the end, so that the run can be continued; false deletes what only resuming "
        "needs.",
    )
    parser.add_argument(
        "--allow_changes",
        type=bool,
        default=False,
        help="Let --resume continue with another seed, batch size or training images, and so in another order.",
    )
    parser.add_argument(
        "--test_after_fit",
        type=bool,
        default=True,
        help="Test the best checkpoint, if there is a test split.",
    )
    parser.add_argument(
        "--report",
        type=bool,
        default=True,
        help="Write report.html, the report of the run.",
    )
    parser.add_argument(
        "--checkpoint_every_n_steps",
        type=int | None,
        default=None,
        help="Write last.ckpt every n optimizer steps, not only at epochs' ends.",
    )
    parser.add_argument(
        "--threshold",
        type=str | None,
        default=None,
        help="Choose the threshold of the first of two classes, or of CLASS in f1:CLASS, that is best on the "
        "validation split for: accuracy, f1, precision:0.95 or recall:0.99. With several labels, each label has one.",
    )
    parser.add_argument(
        "--minutes",
        type=float | None,
        default=None,
        help="End after about this many minutes: times some steps, then chooses epochs, and perhaps a smaller size.",
    )
    parser.add_argument(
        "--patience",
        type=int | None,
        default=None,
        help="End after this many validations without a higher val/accuracy (several labels: val/mAP).",
    )
