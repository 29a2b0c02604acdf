"""The outputs of groups against loops over their images: order, sizes, true classes, and groups without an answer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from data_files import nowhere
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.splits import group_ids
from finetune.data.targets import ClassIndex, MultiHot
from finetune.training.calibration import Calibration
from finetune.training.groups import group_outputs
from finetune.training.outputs import Outputs

NUM_CLASSES = 3
IMAGE = st.tuples(st.sampled_from("abcd"), st.integers(0, 1), st.booleans(), st.booleans())


@given(images=st.lists(IMAGE, min_size=1, max_size=12), has_labels=st.booleans())
def test_groups_are_those_of_a_loop_over_their_images(images, has_labels):
    """Each image has a group, a label, and may be damaged, or be left out by a limit."""
    num = len(images)
    rng = np.random.default_rng(num)
    logits = rng.normal(size=(num, NUM_CLASSES)).astype(np.float32)
    labels = np.array([label for _, label, _, _ in images])
    targets = ClassIndex(labels, NUM_CLASSES)
    kind = "several" if has_labels else "single"
    if has_labels:
        targets = MultiHot(np.eye(NUM_CLASSES, dtype=np.uint8)[labels])
    names = [name for name, _, _, _ in images]
    ids = group_ids(names)
    name_of = dict(zip(ids.tolist(), names, strict=True))
    samples = replace(nowhere(num), targets=targets, groups=ids, group_names=name_of)
    good = [i for i, (_, _, is_bad, is_out) in enumerate(images) if not is_bad and not is_out]
    bad = [(i, "torn") for i, (_, _, is_bad, is_out) in enumerate(images) if is_bad and not is_out]
    if not good:
        return
    outputs = Outputs(torch.tensor(good), torch.from_numpy(logits[good]), torch.empty(0), bad)
    calibration = Calibration.unfitted(kind, NUM_CLASSES)
    groups = group_outputs(outputs, calibration, samples)
    evaluated = sorted([*good, *(i for i, _ in bad)])
    order = list(dict.fromkeys(names[i] for i in evaluated))
    assert [groups.samples.group_name(g) for g in range(len(order))] == order
    found = dict(zip(groups.outputs.index.tolist(), groups.outputs.logits.numpy(), strict=True))
    without = dict(groups.outputs.bad)
    for g, name in enumerate(order):
        own = [i for i in good if names[i] == name]
        classes = {int(labels[i]) for i in evaluated if names[i] == name}
        assert groups.sizes[g] == len(own)
        if not own or (len(classes) > 1 and not has_labels):
            assert g not in found and ("classes" in without[g]) == bool(own)
        elif has_labels:
            np.testing.assert_array_equal(found[g], logits[own].max(axis=0))
            assert {*np.flatnonzero(groups.samples.targets[g])} == classes
            p = 1 / (1 + np.exp(-logits[own].astype(np.float64)))
            assert groups.means[g] == pytest.approx(p.mean(axis=0))
        else:
            assert found[g] == pytest.approx(logits[own].mean(axis=0), abs=1e-6)
            assert {groups.samples.targets[g]} == classes
