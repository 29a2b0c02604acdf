"""Lightning's four commands: flags and configs from signatures, run folders, checkpoints, resume."""

import logging
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import register_type
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Checkpoint, LearningRateMonitor, ProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.plugins import Precision
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher

from finetune.commands import config_files
from finetune.commands.parser import OneLineErrorParser, last_value
from finetune.commands.rates import settle_rate
from finetune.commands.trust import add_trust_flag, check_root, data_settings
from finetune.data.datamodule import PictureData
from finetune.distributed.launch import cluster_environment, num_processes
from finetune.distributed.mesh_strategy import MeshStrategy
from finetune.distributed.ranks import take_over
from finetune.distributed.signals import Interrupted, StopAtOnce, install_stop_at_once, stopping
from finetune.models.weights import read_weights
from finetune.runs.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from finetune.runs.folder import Run, RunFolder
from finetune.runs.lightning_callbacks import check_averaging
from finetune.runs.metrics_csv import MetricsCSV
from finetune.runs.model_checkpoint import Checkpoints
from finetune.runs.predictions import PredictionWriter
from finetune.runs.results import Results, Skipped
from finetune.runs.resume import beginning, first_checkpoint, go_on, take_up
from finetune.system.machine import keep_freed_memory
from finetune.system.messages import be_quiet
from finetune.training import overview
from finetune.training.checkpoint_settings import model_settings
from finetune.training.classifier import Classifier
from finetune.training.first_pass import check_fit
from finetune.training.precision import automatic_precision, prepare_arithmetic
from finetune.training.progress_bar import PicturesBar

log = logging.getLogger(__name__)

register_type(torch.device)  # of StochasticWeightAveraging, whose config.yaml could else not be read again


class OneLineErrorLightningParser(OneLineErrorParser, LightningArgumentParser):
    """The same for LightningCLI."""


class FinetuneCLI(LightningCLI):
    """LightningCLI with run folders, `--resume`, and checkpoints that say what the model is."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.run: Run
        self.checkpoint: dict[str, Any] | None = None
        super().__init__(
            Classifier,
            PictureData,
            subclass_mode_data=True,
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_class=OneLineErrorLightningParser,
            seed_everything_default=0,
            trainer_defaults={
                "default_root_dir": "runs",
                "max_epochs": 5,
                "use_distributed_sampler": False,  # ours shares every batch exactly
                "enable_model_summary": False,
                "num_sanity_val_steps": 0,
                "log_every_n_steps": 10,
            },
            args=config_files.resolve(arguments),
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        ours = {"model", "datamodule", "weights_only"}
        return {
            "fit": {*ours, "train_dataloaders", "val_dataloaders"},
            "validate": {*ours, "dataloaders", "verbose"},
            "test": {*ours, "dataloaders", "verbose"},
            "predict": {*ours, "dataloaders", "return_predictions"},
        }

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.set_defaults({"data": {"class_path": "finetune.ImageFolderData"}})
        if subcommand == "fit":
            parser.link_arguments("data.class_names", "model.class_names", apply_on="instantiate")
            parser.add_argument(
                "--resume",
                action="store_true",
                help="Go on in the newest run beneath trainer.default_root_dir; start afresh if there is none.",
            )
            parser.add_argument(
                "--allow_changes",
                type=bool,
                default=False,
                help="Let --resume go on with another seed, batch size or training pictures, and so in another order.",
            )
            parser.add_argument(
                "--test_after_fit", type=bool, default=True, help="Test the best checkpoint, if there is a test split."
            )
            parser.add_argument(
                "--checkpoint_every_n_steps",
                type=int | None,
                default=None,
                help="Write last.ckpt every n optimizer steps, not only at the end of each epoch.",
            )
        else:
            parser.set_defaults({"model.class_names": []})
            add_trust_flag(parser)
        if subcommand == "predict":
            parser.add_argument("--output", type=str | None, default=None, help="A .csv, .jsonl or .parquet file.")
            parser.add_argument("--top_k", type=int | None, default=None, help="Write only the k best classes.")
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        subcommand, ckpt_path = args[0], last_value(args, "--ckpt_path")
        asks_for_help = any(a in ("-h", "--help") or re.match(r"--[\w.]+\.help\b", a) for a in args)
        if subcommand != "fit" and not asks_for_help:
            if ckpt_path is None:
                parser.error(f"finetune {subcommand} needs --ckpt_path CHECKPOINT")
            self.checkpoint = read_checkpoint(ckpt_path)
            self._subcommand_parsers[subcommand].set_defaults({"data": data_settings(self.checkpoint, args)})
        super().parse_arguments(parser, args)
        check_root(self.config[subcommand], self.checkpoint, args)
        self.rate_told = settle_rate(self.config, args)

    def _parse_ckpt_path(self) -> None:
        # On fit the command line wins over the checkpoint; elsewhere the checkpoint says what the model is.
        if self.checkpoint is None:
            return
        config = self.config[self.config.subcommand]
        if self.config.subcommand == "predict" and config.data.init_args.get("predict") is None:
            self.parser.error("finetune predict needs --data.predict PICTURE, FOLDER, GLOB or LIST.txt")
        for name, value in model_settings(self.checkpoint).items():
            config.model[name] = value
        config.data.init_args["class_names"] = config.model["class_names"]
        for name in ("image_size", "resize"):  # which the network learned with
            config.data.init_args[name] = self.checkpoint["datamodule_hyper_parameters"][name]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        assert self.subcommand is not None
        config = self._get(self.config_init, "trainer")
        if config["sync_batchnorm"]:  # Lightning's would also replace, and so unfreeze, what is frozen
            self.parser.error("leave trainer.sync_batchnorm out: batch norm takes the whole batch's statistics anyway")
        if isinstance(config["strategy"], ModelParallelStrategy) and not isinstance(config["strategy"], MeshStrategy):
            self.parser.error("for trainer.strategy take model_parallel or finetune.MeshStrategy")
        self.run = Run(config["default_root_dir"], self.subcommand)
        options = self.config[self.subcommand]
        plugins = [AtomicCheckpointIO(), *_listed(config["plugins"])]
        if config["precision"] is None and not any(isinstance(plugin, Precision) for plugin in plugins):
            goes_on = self.subcommand == "fit"
            path = first_checkpoint(self.run.root, options.resume, options.ckpt_path) if goes_on else None
            checkpoint = read_checkpoint(path) if path and Path(path).is_file() else self.checkpoint
            precision = automatic_precision(config["accelerator"], checkpoint, goes_on)
            config["precision"] = options.trainer.precision = precision
        callbacks: list[Any] = [
            RunFolder(self.run, self._parser(self.subcommand), options),
            Results(self.run),
            Skipped(self.run),
            StopAtOnce(),
        ]
        if self.subcommand == "fit":
            callbacks += [LearningRateMonitor(), Checkpoints(self.run, options.checkpoint_every_n_steps)]
        if self.subcommand == "predict":
            callbacks.append(PredictionWriter(self.run, options.output, options.top_k))
        own = _listed(config["callbacks"])
        if config["enable_progress_bar"] is not False and not any(isinstance(c, ProgressBar) for c in own):
            callbacks.append(PicturesBar())
        loggers = [MetricsCSV(self.run), *_listed(config["logger"])]
        config["devices"], config["num_nodes"] = num_processes(config["devices"], config["num_nodes"], plugins)
        plugins += cluster_environment(plugins)
        config["callbacks"] = [*own, *callbacks]
        has_checkpoints = any(isinstance(callback, Checkpoint) for callback in config["callbacks"])
        trainer = super().instantiate_trainer(logger=loggers, plugins=plugins, enable_checkpointing=has_checkpoints)
        take_over(trainer)
        prepare_arithmetic(trainer)
        if trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()
        # With max_steps Lightning takes an epoch that ended for one to go on with, and loses its successor on resume.
        trainer.fit_loop._iteration_based_training = bool  # type: ignore  # gives False
        return trainer

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        check_fit(self.trainer, self.model, self.datamodule, subcommand)
        if subcommand == "predict":
            return {**kwargs, "return_predictions": False}
        return kwargs if subcommand == "fit" else {**kwargs, "verbose": False}

    def fit(self, **kwargs: Any) -> None:
        """Train, from where `--resume` or `--ckpt_path` says, then test the best checkpoint."""
        options = self.config["fit"]
        check_averaging(self.trainer, self.model, self.model.backbone)
        given = kwargs.pop("ckpt_path")
        resumed, ckpt_path, finished, told = beginning(self.trainer, self.run.root, options.resume, given)
        self.run.path = resumed
        if finished:
            return self._after_training(finished)
        if ckpt_path is None and self.model.weights is not None:
            read_weights(self.model.weights, self.model.backbone)  # fails here, before other processes are started
        if resumed:
            go_on(self.trainer, self.run, self.datamodule, options)
        else:
            self.run.began_from = None if ckpt_path is None else str(Path(ckpt_path).resolve())
            for text in filter(None, (told, self.rate_told) if self.trainer.is_global_zero else ()):
                log.info(text)
            if isinstance(self.trainer.strategy.launcher, _MultiProcessingLauncher):
                self.run.choose()  # its processes get a copy of the run, the parent keeps the original
        overview.tell(self.trainer, self.model, self.datamodule, ckpt_path)
        self.datamodule.is_fitted = True  # said here: processes that are spawned have a copy
        self.trainer.ckpt_path = ckpt_path  # as an argument of `fit` it is not yet known in `setup` and `prepare_data`
        self.trainer.fit(**kwargs)
        self.trainer.ckpt_path = None
        self._after_training()

    def _after_training(self, finished: str = "") -> None:
        if finished:
            take_up(self.trainer, self.run)
        test, best = self.run.file("test.json"), self.run.checkpoint("best")
        is_tested = test.exists() and best.stat().st_mtime <= test.stat().st_mtime  # a prolonged run has another best
        has_test = "test" in self.datamodule.splits and self.config["fit"].test_after_fit
        if finished and (is_tested or not has_test):
            what = "the run %s is finished, with %s; a larger limit prolongs it, a fit without --resume starts anew"
            log.info(what, self.run.path, finished)
            return
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        callback = next(c for c in callbacks if isinstance(c, Checkpoints))
        if callback.stopped_by and has_test:
            raise Interrupted(callback.stopped_by)
        if has_test:
            if not best.exists():
                raise ValueError(f"nothing was trained in {self.run.path}: a limit ended it before its first step")
            self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=best, verbose=False)
        if self.trainer.is_global_zero:
            print(f"run in {self.run.path}", flush=True)


def run_lightning(arguments: Sequence[str], kind: type[FinetuneCLI] = FinetuneCLI) -> FinetuneCLI:
    """Run fit, validate, test or predict, or another kind of fit, and return what ran."""
    be_quiet()
    sys.argv = [sys.argv[0], *arguments]  # what Lightning starts the other devices' processes with
    handlers = {signum: signal.getsignal(signum) for signum in stopping()}
    install_stop_at_once()  # until training begins, where Checkpoints takes over
    try:
        return kind(arguments)
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _listed(value: Any) -> list[Any]:
    listed = list(value) if isinstance(value, (list, tuple)) else [value]
    return [] if value is None or isinstance(value, bool) else listed
