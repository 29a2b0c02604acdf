"""`--backbone auto`: choose the network of a fit by its images, before any network is built."""

import gc
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning.utilities.seed import isolate_rng

from finetune.data.data_settings import missing_split_message
from finetune.data.datamodule import open_data
from finetune.data.decode import DecodeError
from finetune.data.samples import Samples
from finetune.data.transforms import eval_transform, preparation
from finetune.features.backbone_ranking import FeaturesOf, Ranking, Unusable, rank
from finetune.features.image_features import Features, features_of
from finetune.fitting.build import arguments_in_effect
from finetune.fitting.defaults import settle_preparation
from finetune.fitting.plan import Plan
from finetune.models.backbones import library_of
from finetune.models.hub import is_hub
from finetune.models.library import DEFAULT, Published
from finetune.models.network_names import AUTO, is_choice, is_timm
from finetune.models.timm_networks import backbone_of, has_timm
from finetune.models.weights import folder_of
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
_TIMEOUT = 5.0  # seconds to reach a server
# Small to medium networks whose code and weights have permissive licences, sorted by the size of their weights.
# tests/unit/test_networks.py checks licences and sizes against torchvision and timm.
BUILT_IN = {
    "efficientnet_b0": 20,  # MB
    "timm/mobilenetv4_conv_medium.e500_r256_in1k": 39,
    "resnet18": 45,
    "timm/convnext_nano.in12k_ft_in1k": 62,
    "timm/vit_small_patch16_224.augreg_in21k_ft_in1k": 88,
    "resnet50": 98,
    "convnext_tiny": 109,
}
_OPTION = f"--backbone {AUTO}"
_WEIGHTS = "model.weights"
_ACCURACY = "accuracy"
_ACCURACY_OF_RAREST = "accuracy on the rarest label of each image"


class Candidate(NamedTuple):
    """A network and its initial weights, as values of `model.backbone` and `model.weights`."""

    backbone: str
    weights: str = DEFAULT


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
        scores = f"{row['loss']:.3f}, {100 * row['accuracy']:.1f} %"
        rows.append(f"{row['name']} {scores} ({duration(row['seconds'])})")
    images = f"{best['num_images']} training images"
    if best["num_images"] < record["num_train"]:
        images = f"{best['num_images']} of {record['num_train']} training images"
    lines = [
        f"backbone {best['name']}, chosen in {duration(record['seconds'])} by the cross-validated log loss of a head "
        f"on frozen features of {images}; log loss and {record.get('metric', _ACCURACY)} there: {'; '.join(rows)}"
    ]
    if record["untried"]:
        untried = ", ".join(record["untried"])
        lines.append(f"not tried in the {duration(record['budget'])} of the ranking: {untried}")
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
                name: round(value, 4) if isinstance(value, float) else value
                for name, value in standing._asdict().items()
            }
            for standing in ranking.standings
        ],
        "unusable": ranking.unusable,
        "untried": ranking.untried,
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
    _check_available(candidate, reachable)
    settings = replaced(settings, _settings_of(candidate))
    try:
        values, _ = settle_preparation(settings.data, settings.model, layers)
        arguments = arguments_in_effect(settings.data) | {
            name.removeprefix("data."): value for name, value in values.items()
        }
        prepare = preparation(arguments)
        network = Features(candidate.backbone, candidate.weights, prepare["image_size"])
    except (ValueError, OSError) as error:
        raise Unusable(reason(error)) from error
    size = prepare["image_size"]
    transform = eval_transform(**prepare)
    # a JPEG much larger than needed is decoded at a fraction of its size
    samples = split if split.cached is not None else replace(split, shorter_side=2 * size)

    def prepared(index: int) -> np.ndarray:
        try:
            image = samples.read(index)
        except DecodeError:  # the fit reports it
            image = np.zeros((size, size, 3), np.uint8)
        return transform(image=image)["image"]

    def features(chosen: NDArray[np.integer]) -> Iterable[NDArray[np.floating]]:
        rows = features_of(network, samples, chosen.tolist(), prepared, size)
        return track(rows, len(chosen), f"features of {name}")

    return features


def _check_available(candidate: Candidate, reachable: dict[str, bool]) -> None:
    """Check that a candidate's weights are on this machine, or that their server answers.

    Raises:
        Unusable: They are not on this machine and cannot be downloaded.
    """
    published = published_of(candidate)
    if published is None or published.file is not None:
        return
    address = published.server
    if address not in reachable:
        reachable[address] = bool(address) and is_reachable(address)
    if not reachable[address]:
        where = f"{address} cannot be reached" if address else "HF_HUB_OFFLINE forbids downloads"
        raise Unusable(f"not on this machine, and {where}")
    log.info("downloading the weights of %s", candidate.backbone)


def published_of(candidate: Candidate) -> Published | None:
    """Return where the published weights of a candidate are; None if its weights are a file or folder."""
    return library_of(candidate.backbone).published(candidate.backbone, candidate.weights)


def is_reachable(address: str) -> bool:
    """Return whether a server answers within a few seconds. The hub's client would retry for a minute."""
    request = urllib.request.Request(address, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT):
            return True
    except urllib.error.HTTPError:  # also an answer
        return True
    except OSError:
        return False


def built_in_candidates() -> list[Candidate]:
    """Return the candidates of `auto`. Those of timm are included only if it is installed."""
    return [Candidate(name) for name in BUILT_IN if has_timm() or not is_timm(name)]


def candidate_names(candidates: Sequence[Candidate]) -> list[str]:
    """Return a name for each candidate: its network, and its weights too if several candidates have that network."""
    backbones = [candidate.backbone for candidate in candidates]
    return [
        c.backbone if backbones.count(c.backbone) == 1 else f"{c.backbone}={c.weights}"
        for c in candidates
    ]


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
        library_of(name).check_name(name)
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
    published = published_of(candidate)
    return published is not None and published.file is None


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


def _reasons(unusable: dict[str, str]) -> str:
    """Return the unusable networks as text, grouped by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in unusable.items():
        by_reason.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(networks)} ({why})" for why, networks in by_reason.items())
