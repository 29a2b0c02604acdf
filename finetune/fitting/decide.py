"""Decide a fit: from what the user has set to a plan in which nothing is open, in one place and in one process."""

from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from pytorch_lightning import seed_everything

from finetune.data.addresses import real_place
from finetune.data.class_weights import parse_class_weights
from finetune.fitting.build import local_root, open_data
from finetune.fitting.defaults import (
    Rule,
    settle_clipping,
    settle_head_stages,
    settle_hub_backbone,
    settle_optimizer,
    settle_preparation,
)
from finetune.fitting.fit_checks import check_minutes, check_several, check_values
from finetune.fitting.minutes import settle_minutes
from finetune.fitting.network_choice import choose_network
from finetune.fitting.plan import Plan
from finetune.fitting.resume import (
    changes_between,
    check_fixed,
    check_resumable,
    has_only_begun,
    held_settings,
    read_identity,
    read_start,
    run_to_continue,
    settings_of_run,
)
from finetune.models.backbones import check_name
from finetune.models.candidates import is_choice
from finetune.models.weights import check_weights
from finetune.runs.facts import Identity
from finetune.runs.folder import check_unused
from finetune.runs.run_dir import RunDir
from finetune.settings.layers import Layer, Layers, replaced
from finetune.settings.schema import FitSettings
from finetune.system.messages import WrongUsage
from finetune.training.run_length import SOLVED_HEAD, settle_length


def decide(layers: Layers, command: str, began: float) -> Plan:
    """Return the plan of a fit: the run that it continues, its network, rate, length and all other settings.

    Args:
        layers: Who has set what.
        command: What the user typed, for run.json.
        began: `time.monotonic` when the command began, for `--minutes`.

    Raises:
        ValueError: Settings contradict each other, or do not go with the run or the checkpoint to continue.
    """
    plan, layers = _begun(layers, command)
    asked = plan.settings.model.backbone
    if plan.settings.folds is not None:
        plan = plan.put({"data.num_folds": plan.settings.folds, "data.fold": 1})
    if plan.settings.members is not None:
        plan = plan.put({"model.head_init": "xavier"})  # the members differ by nothing else
    if plan.run is None:
        plan = _put(plan, settle_optimizer(plan.settings, layers))
        plan = _put(plan, settle_clipping(plan.settings))
    check_values(plan.settings)
    plan = _with_start(plan)
    seed_everything(plan.settings.seed_everything, workers=True, verbose=False)
    if plan.run is None:
        plan = _with_network(plan, layers)
    plan = _with_minutes(plan, layers, began)
    return _with_length(plan, asked)


def _put(plan: Plan, rule: Rule) -> Plan:
    values, note = rule
    return plan.put(values, note)


def _begun(layers: Layers, command: str) -> tuple[Plan, Layers]:
    """Return the beginning of a plan: what the user has set, on the settings of the run that continues, if any."""
    asked = layers.parse(FitSettings)
    if asked.num_fits > 1:
        check_several(asked, layers)
    root = local_root(asked.trainer.default_root_dir, "fit")
    layers = layers.on_top(Layer("run", "decided", {"trainer.default_root_dir": root}))
    if not asked.resume:
        if asked.name is not None:
            check_unused(Path(root, "fit", asked.name))
        return Plan(_normal(layers.parse(FitSettings)), command), layers
    run, note = run_to_continue(asked, layers, Path(root))
    if run is None:
        settings = replaced(layers.parse(FitSettings), {"resume": False})
        begins_again = asked.name is not None and has_only_begun(Path(root, "fit", asked.name))
        plan = Plan(_normal(settings), command, begins_again=begins_again, notes=(note,))
        return plan, layers
    return _continued(run, layers, command, note)


def _normal(settings: FitSettings) -> FitSettings:
    """Return settings with the weights of classes as numbers; a fit with a solved head runs its loop once."""
    weights = parse_class_weights(settings.model.class_weights)
    values = SOLVED_HEAD if settings.model.freeze == "backbone" else {}
    return replaced(settings, {"model.class_weights": weights, **values})


def _continued(run: Path, layers: Layers, command: str, note: str) -> tuple[Plan, Layers]:
    """Return the plan of a fit that continues a run, and the layers with that of the run."""
    own = settings_of_run(run, layers)
    layers = layers.below_configs(own)
    before = Layers("fit", (own,)).parse(FitSettings)
    now = _normal(layers.parse(FitSettings))
    if is_choice(now.model.backbone):  # the run has chosen
        chosen = {f"model.{name}": getattr(before.model, name) for name in ("backbone", "weights")}
        now = replaced(now, chosen)
    changes = changes_between(own.values, now)
    check_fixed(changes)
    held: dict[str, Any] = {
        name: reduce(getattr, name.split("."), before) for name in held_settings(changes)
    }
    held |= {"resume": str(run), "trainer.default_root_dir": str(run.parent.parent)}
    start = None
    if now.num_fits > 1:
        check_several(now, layers)
    else:
        start = read_start(RunDir(run).checkpoint("last"))
        check_resumable(start)
    if now.name not in (None, run.resolve().name):
        raise WrongUsage(
            f"--name {now.name}: the run to continue is {run}, which keeps its name: omit --name"
        )
    plan = Plan(replaced(now, held), command, run=run, start=start, changes=changes)
    return plan.put({}, note), layers


def _with_start(plan: Plan) -> Plan:
    """Read the checkpoint of `--ckpt_path`; that of a run that continues was read with its settings."""
    path = plan.settings.ckpt_path
    if plan.run is not None or path is None:
        return plan
    start = read_start(path)
    check_resumable(start)
    return replace(plan, start=start)


def _with_network(plan: Plan, layers: Layers) -> Plan:
    """Settle the network of a new run, its weights, and what depends on them."""
    if plan.start is None:  # else the weights are those of its checkpoint
        plan = _put(plan, settle_hub_backbone(plan.settings.model, layers))
    model = plan.settings.model
    if plan.settings.minutes is not None:
        check_minutes(plan.settings, layers)
    if is_choice(model.backbone):
        plan = choose_network(plan, layers)
    else:
        plan = _put(plan, settle_preparation(plan.settings.data, model, layers, plan.start))
    if plan.start is None and model.weights is not None and not is_choice(model.backbone):
        check_name(model.backbone)
        check_weights(model.weights, model.backbone)
    return _put(plan, settle_head_stages(plan.settings.model, layers))


def _with_minutes(plan: Plan, layers: Layers, began: float) -> Plan:
    settings = plan.settings
    if settings.minutes is None:
        return plan
    if plan.run is None:
        return settle_minutes(plan, layers, began)
    check_minutes(replaced(settings, {"ckpt_path": None}), layers)
    if settings.trainer.max_steps != -1:
        raise WrongUsage(
            f"{plan.run} ends by trainer.max_steps {settings.trainer.max_steps}: pass that instead of --minutes to "
            "continue"
        )
    epochs = settings.trainer.max_epochs
    return plan.put(
        {"minutes": None}, f"--minutes is for new runs: {plan.run} continues to its {epochs} epochs"
    )


def _with_length(plan: Plan, asked: str) -> Plan:
    """Read the images, and settle the number of epochs, which depends on their number."""
    data = open_data(plan.settings.data)
    data.read()
    if "train" in data.splits:
        num = len(data.splits["train"])
        plan = _put(plan, settle_length(plan.settings.trainer, num, data.batch_size))
    recorded = None if plan.run is None else read_identity(plan.run)
    identity = Identity(
        place=real_place(data.root) if data.root else "",
        data_class=plan.settings.data.class_path,
        network=asked if recorded is None else recorded.network,
        chosen=plan.settings.model.backbone,
        folds=plan.settings.folds,
        members=plan.settings.members,
    )
    return replace(plan, identity=identity, data=data)
