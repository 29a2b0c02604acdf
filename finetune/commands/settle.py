"""Decide the plan and the settings of a fit in a fixed order. Each step uses the decisions of earlier steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from finetune.commands.backbone_choice import settle_backbone
from finetune.commands.dependent_defaults import (
    settle_clipping,
    settle_head_stages,
    settle_hub_backbone,
    settle_preparation,
    settle_rate,
)
from finetune.commands.early_values import check_values
from finetune.commands.explicit_settings import ExplicitSettings
from finetune.commands.minutes import settle_minutes
from finetune.commands.plan import Plan
from finetune.commands.resumption import check_run_name, put_settings_of_run
from finetune.data.class_weights import parse_class_weights
from finetune.models.backbones import check_name
from finetune.models.candidates import is_choice
from finetune.models.weights import check_weights
from finetune.profiling.fit_length import Make
from finetune.runs.resume import check_resumable, read_start
from finetune.training.run_length import settle_solved_head


@dataclass(frozen=True)
class Command:
    """A command `fit`, as parsed.

    Attributes:
        config: All settings, with the subcommand; the steps change them in place.
        explicit: The settings that configs and flags give.
        parser: The parser of its options.
        began: `time.monotonic` when it started.
        make: Makes a data module and a network with the settings at the time of the call.
    """

    config: Namespace
    explicit: ExplicitSettings
    parser: ArgumentParser
    began: float
    make: Make

    @property
    def options(self) -> Any:
        """The options of `fit`."""
        return self.config["fit"]


Step = Callable[[Plan, Command], Plan]


def _solved_head(plan: Plan, command: Command) -> Plan:
    if command.options.model.freeze == "backbone":
        settle_solved_head(command.options)
    return plan


def _class_weights(plan: Plan, command: Command) -> Plan:
    """Read the weights that a config gives as text or as a file; those of a flag are read before."""
    model = command.options.model
    model.class_weights = parse_class_weights(model.class_weights)
    return plan


def _run_settings(plan: Plan, command: Command) -> Plan:
    """Take the settings of a run that continues, where they may not change, and check `--name`."""
    changes = put_settings_of_run(plan, command.parser, command.options)
    check_run_name(command.options)
    return replace(plan, changes=changes)


def _start(plan: Plan, command: Command) -> Plan:
    """Read the checkpoint of `--ckpt_path`; that of a run that continues was read to find the run."""
    path = command.options.ckpt_path
    if plan.run is not None or path is None:
        return plan
    start = read_start(path)
    check_resumable(start)
    return replace(plan, start=start)


def _rate(plan: Plan, command: Command) -> Plan:
    if plan.has_config:  # which has the rate of the run
        return plan
    return plan.with_messages(settle_rate(command.config, command.explicit))


def _clipping(plan: Plan, command: Command) -> Plan:
    if not plan.has_config:
        settle_clipping(command.options)
    return plan


def _values(plan: Plan, command: Command) -> Plan:
    check_values(command.options)
    return plan


def _hub_backbone(plan: Plan, command: Command) -> Plan:
    if plan.start is not None:  # the weights are those of its checkpoint
        return plan
    return plan.with_messages(settle_hub_backbone(command.options.model, command.explicit))


def _weights(plan: Plan, command: Command) -> Plan:
    """Check that the weights exist. A fit that continues takes those of its checkpoint."""
    model = command.options.model
    if plan.start is None and model.weights is not None and not is_choice(model.backbone):
        check_name(model.backbone)
        check_weights(model.weights, model.backbone)
    return plan


def _preparation(plan: Plan, command: Command) -> Plan:
    return plan.with_messages(settle_preparation(command.config, command.explicit, plan.start))


def _backbone(plan: Plan, command: Command) -> Plan:
    choice = settle_backbone(command.config, command.explicit, plan.start)
    return replace(plan, ranking=choice.record).with_messages(*choice.messages)


def _head_stages(plan: Plan, command: Command) -> Plan:
    if plan.run is not None:  # the run has their number
        return plan
    return plan.with_messages(settle_head_stages(command.options.model, command.explicit))


def _minutes(plan: Plan, command: Command) -> Plan:
    # Only rank 0 ranks networks.
    seconds = plan.ranking["seconds"] if plan.ranking else 0.0
    message = settle_minutes(
        command.options, command.explicit, command.began, command.make, rank_0_seconds=seconds
    )
    return plan.with_messages(message)


# `resumption.find_run_to_resume` comes before these, since a resumed run gives settings to the parser.
SETTINGS: tuple[Step, ...] = (
    _solved_head,
    _class_weights,
    _run_settings,
    _rate,
    _clipping,
    _values,
    _start,
    _hub_backbone,
    _preparation,
)
# The first of these steps looks for a file; the others read the images.
TRIALS: tuple[Step, ...] = (_weights, _backbone, _head_stages, _minutes)
# After the last: the usual number of epochs (`training.run_length`) and the precision (`trainer.complete`), which need
# the data module and the plugins.


def settle(plan: Plan, command: Command, steps: tuple[Step, ...]) -> Plan:
    """Return the plan after some steps, which also complete the settings of the command.

    Args:
        plan: The decisions so far.
        command: The command; its settings change in place.
        steps: `SETTINGS`, then `TRIALS`.

    Raises:
        ValueError: Settings contradict each other, or the checkpoint cannot be used.
    """
    for step in steps:
        plan = step(plan, command)
    return plan
