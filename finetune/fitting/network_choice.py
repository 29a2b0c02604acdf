"""`--backbone auto`: choose the network of a fit by its images, before any network is built."""

import gc
import logging
import os
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning.utilities.seed import isolate_rng

from finetune.data.data_settings import missing_split_message
from finetune.data.datamodule import open_data
from finetune.data.decode import DecodeError
from finetune.data.samples import Samples
from finetune.data.transforms import eval_transform, preparation
from finetune.distributed.launch import has_launcher
from finetune.features.backbone_ranking import FeaturesOf, OutOfTime, Ranking, Unusable, rank
from finetune.features.image_features import Features, features_of
from finetune.fitting.build import arguments_in_effect
from finetune.fitting.defaults import settle_preparation
from finetune.fitting.plan import Plan
from finetune.models.backbones import check_name
from finetune.models.candidates import (
    AUTO,
    DEFAULT,
    Candidate,
    built_in_candidates,
    cached_file,
    candidate_names,
    is_choice,
    is_published,
    is_reachable,
    weights_server,
)
from finetune.models.hub import is_hub
from finetune.models.timm_backbones import backbone_of, folder_of
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.run_checkpoint import checkpoint_of
from finetune.settings.layers import Layers, replaced
from finetune.settings.schema import FitSettings
from finetune.system.messages import NotFound, WrongUsage, counted, reason
from finetune.system.progress import duration, track

log = logging.getLogger(__name__)

# Time for the ranking: a share of --minutes; without --minutes seconds.
_BUDGET_SHARE = 0.2
_BUDGET_SECONDS = 120.0
_OPTION = f"--backbone {AUTO}"
_WEIGHTS = "model.weights"
_ACCURACY = "accuracy"
_ACCURACY_OF_RAREST = "accuracy on the rarest label of each image"


def choose_network(plan: Plan, layers: Layers) -> Plan:
    """Choose the network of a fit whose settings leave that to the images; return the plan with its preparation.

    Raises:
        WrongUsage: The candidates are invalid, or another option does not go with a choice among networks.
        OSError: The weights of no candidate can be used.
    """
    settings = plan.settings
    if plan.start is not None:
        before = plan.start.content["hyper_parameters"]
        chosen = Candidate(before["backbone"], before.get("weights"))
        note = f"the network is that of {plan.start.path}, {chosen.backbone}: nothing is ranked"
        plan = plan.put({}, note)
    else:
        _check_options(settings, layers)
        chosen, ranking = _rank_candidates(settings, layers)
        plan = replace(plan.put({}, *describe_ranking(ranking)), ranking=ranking)
    plan = plan.put(_settings_of(chosen))
    return plan.put(*settle_preparation(settings.data, plan.settings.model, layers, plan.start))


def _settings_of(candidate: Candidate) -> dict[str, Any]:
    return {"model.backbone": candidate.backbone, "model.weights": candidate.weights}


def _rank_candidates(settings: FitSettings, layers: Layers) -> tuple[Candidate, dict[str, Any]]:
    """Rank the candidates; return the best one, and the ranking for run.json."""
    candidates = sorted(
        candidates_of(settings.model.backbone, settings.model.weights), key=_needs_download
    )
    data = open_data(settings.data)
    if "train" not in data.splits:
        raise ValueError(missing_split_message(data.root, "train"))
    split = data.splits["train"]
    minutes = settings.minutes
    budget = _BUDGET_SECONDS if minutes is None else _BUDGET_SHARE * 60 * minutes
    log.info(
        "ranking %s by features, in at most about %s",
        counted(len(candidates), "network"),
        duration(budget),
    )
    began = time.monotonic()
    reachable: dict[str, bool] = {}
    by_name = dict(zip(candidate_names(candidates), candidates, strict=True))
    networks = {
        name: partial(_load, name, candidate, settings, layers, split, reachable)
        for name, candidate in by_name.items()
    }
    # If images have several labels, the head predicts the rarest one of each image, or that it has none.
    num_strata = len(data.class_names)
    has_several = data.label_kind == "several"
    if has_several:
        num_strata += 1
    with isolate_rng():  # the ranking must not change the random numbers of the fit
        ranking = rank(
            networks,
            split.targets.strata(),
            num_strata,
            budget,
            settings.seed_everything,
            split.groups,
        )
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # subprocesses may train on this GPU
    if not ranking.standings:
        hint = "pass runs or folders of timm's: --weights A,B"
        raise OSError(f"{_OPTION}: no network can be used: {_reasons(ranking.unusable)}; {hint}")
    chosen = by_name[ranking.standings[0].name]
    record = _record(ranking, chosen, len(split), time.monotonic() - began, budget)
    record["metric"] = _ACCURACY_OF_RAREST if has_several else _ACCURACY
    return chosen, record


def describe_ranking(record: dict[str, Any]) -> list[str]:
    """Return a line about a ranking, and further lines if it is incomplete."""
    best = record["rows"][0]
    rows = []
    for row in record["rows"]:
        of = "" if row["num_images"] == best["num_images"] else f" of {row['num_images']} images"
        scores = f"{row['loss']:.3f}, {100 * row['accuracy']:.1f} %"
        rows.append(f"{row['name']} {scores}{of} ({duration(row['seconds'])})")
    images = f"{best['num_images']} training images"
    if best["num_images"] < record["num_train"]:
        images = f"{best['num_images']} of {record['num_train']} training images"
    lines = [
        f"backbone {best['name']}, chosen in {duration(record['seconds'])} by the cross-validated log loss of a head "
        f"on frozen features of {images}; log loss and {record.get('metric', _ACCURACY)} there: {'; '.join(rows)}"
    ]
    if record["is_cut"]:
        untried = f"; not tried: {', '.join(record['untried'])}" if record["untried"] else ""
        lines.append(f"the ranking ended early, after its {duration(record['budget'])}{untried}")
    if record["unusable"]:
        lines.append(f"not ranked: {_reasons(record['unusable'])}")
    return lines


def _record(
    ranking: Ranking, chosen: Candidate, num_train: int, seconds: float, budget: float
) -> dict[str, Any]:
    return {
        "backbone": chosen.backbone,
        "weights": chosen.weights,
        "num_train": num_train,
        "seconds": round(seconds, 2),
        "budget": budget,
        "rows": [
            {
                "name": standing.name,
                "accuracy": round(standing.accuracy, 4),
                "loss": round(standing.loss, 4),
                "num_images": standing.num_images,
                "seconds": round(standing.seconds, 2),
            }
            for standing in ranking.standings
        ],
        "unusable": ranking.unusable,
        "untried": ranking.untried,
        "is_cut": ranking.is_cut,
    }


def _load(
    name: str,
    candidate: Candidate,
    settings: FitSettings,
    layers: Layers,
    split: Samples,
    reachable: dict[str, bool],
) -> FeaturesOf:
    """Return a function that computes a candidate's features of training images, prepared as in its fit.

    Args:
        name: What the candidate is called in messages.
        candidate: The network.
        settings: Those of the fit.
        layers: Who has set what.
        split: The training images.
        reachable: Which servers have answered; completed in place.

    Raises:
        Unusable: Its weights are not available, or it does not take images of this size.
    """
    weights = _weights_here(candidate, reachable)
    settings = replaced(settings, _settings_of(candidate))
    try:
        values, _ = settle_preparation(settings.data, settings.model, layers)
        arguments = arguments_in_effect(settings.data) | {
            name.removeprefix("data."): value for name, value in values.items()
        }
        prepare = preparation(arguments)
        network = Features(candidate.backbone, weights, arguments["image_size"])
    except (ValueError, OSError) as error:
        raise Unusable(reason(error)) from error
    size = prepare["image_size"]
    try:
        network(torch.zeros(1, 3, size, size, dtype=torch.uint8))
    except Exception as error:  # networks raise different errors if images are too small
        raise Unusable(f"it does not take images of {size} pixels ({reason(error)})") from error
    transform = eval_transform(**prepare)
    samples = _decoded_small(split, size)

    def prepared(index: int) -> np.ndarray:
        try:
            image = samples.read(index)
        except DecodeError:  # the fit reports it
            image = np.zeros((size, size, 3), np.uint8)
        return transform(image=image)["image"]

    def features(chosen: NDArray[np.integer], deadline: float | None) -> NDArray[np.floating]:
        rows: list[NDArray[np.floating]] = []
        for row in track(
            features_of(network, samples, chosen.tolist(), prepared, size),
            len(chosen),
            f"features of {name}",
        ):
            rows.append(row)
            if deadline is not None and len(rows) < len(chosen) and time.monotonic() > deadline:
                raise OutOfTime
        return np.stack(rows)

    return features


def _decoded_small(split: Samples, size: int) -> Samples:
    """Return the images such that a JPEG much larger than needed is decoded at a fraction of its size."""
    if split.cached is None and split.shorter_side is None:
        return replace(split, shorter_side=2 * size)
    return split


def _weights_here(candidate: Candidate, reachable: dict[str, bool]) -> str:
    """Return the source of a candidate's weights: a file on this machine, or else a name to download.

    Raises:
        Unusable: They are not on this machine and cannot be downloaded.
    """
    if not is_published(candidate):
        return candidate.weights
    file = cached_file(candidate)
    if file is not None:
        # torchvision's weights are read by name, which checks their hash; timm would query the hub first.
        return str(file) if candidate.backbone.startswith("timm/") else candidate.weights
    address = weights_server(candidate)
    if address not in reachable:
        reachable[address] = bool(address) and is_reachable(address)
    if not reachable[address]:
        where = f"{address} cannot be reached" if address else "HF_HUB_OFFLINE forbids downloads"
        raise Unusable(f"not on this machine, and {where}")
    log.info("downloading the weights of %s", candidate.backbone)
    return candidate.weights


def candidates_of(backbone: str, weights: str | None) -> list[Candidate]:
    """Return the networks to choose from.

    Args:
        backbone: `auto`, or names separated by commas.
        weights: DEFAULT; with `auto` also candidates separated by commas; with names also weights that all of them
            have.

    Raises:
        WrongUsage: They are invalid.
    """
    if weights is None:
        raise WrongUsage(
            f"null: {_OPTION} ranks networks by their pretrained features, so omit it", _WEIGHTS
        )
    if backbone == AUTO:
        return (
            built_in_candidates()
            if weights == DEFAULT
            else [_candidate_of_weights(part) for part in _parts(weights)]
        )
    if "," in weights or os.path.exists(os.path.expanduser(weights)):
        raise WrongUsage(
            f"{weights} is not for several networks: pass runs or folders of timm's with {_OPTION}",
            _WEIGHTS,
        )
    listed = _parts(backbone)
    for name in listed:
        check_name(name)
    return [Candidate(name, weights) for name in listed]


def _candidate_of_weights(part: str) -> Candidate:
    """Return the candidate that a part of `--weights` names: a folder of timm's, or a checkpoint."""
    path = os.path.expanduser(part)
    folder = folder_of(path)
    if folder is not None and (is_hub(path) or os.path.isfile(os.path.join(folder, "config.json"))):
        return Candidate(backbone_of(folder), path)
    if not os.path.exists(path):
        raise NotFound(
            f"{part}: there is no such file or folder; with {_OPTION} pass runs or folders of timm's",
            _WEIGHTS,
        )
    path, _ = checkpoint_of(path)
    return Candidate(read_checkpoint(path)["hyper_parameters"]["backbone"], path)


def _parts(text: str) -> list[str]:
    """Return the different parts of a list that is separated by commas."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _needs_download(candidate: Candidate) -> bool:
    """Return whether weights are not on this machine yet: such networks are ranked last."""
    return is_published(candidate) and cached_file(candidate) is None


def _check_options(settings: FitSettings, layers: Layers) -> None:
    """Refuse what cannot be combined with a choice among networks, before anything is computed."""
    for layer in layers.layers:
        backbone = layer.values.get("model.backbone")
        if layer.kind == "config" and backbone is not None and not is_choice(backbone):
            raise WrongUsage(
                f"{_OPTION} and the backbone {backbone} of {layer.source} both choose the network: omit one"
            )
    if settings.model.freeze not in (None, "backbone"):
        raise WrongUsage(
            f"{settings.model.freeze}: stages have different names in each network; with {_OPTION} only backbone can "
            "be frozen",
            "model.freeze",
        )
    if settings.trainer.num_nodes != 1 or has_launcher():
        raise WrongUsage(
            f"{_OPTION} ranks networks on one machine, in one process: on several machines, name a network"
        )


def _reasons(unusable: dict[str, str]) -> str:
    """Return the unusable networks as text, grouped by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in unusable.items():
        by_reason.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(networks)} ({why})" for why, networks in by_reason.items())
