"""Settings of an untrusted checkpoint: only those that the command line can give, and none that name a class."""

from collections import OrderedDict

import pytest
import torch

from finetune.training.checkpoint_settings import class_paths, model_settings, plain

NAMED = {"class_path": "somebody.Thing"}


def test_settings_are_a_copy_of_plain_values():
    given = {
        "class_names": ("a", "b"),
        "freeze": None,
        "layer_decay": 0.5,
        "nested": {"deep": [1, True]},
    }
    settings = plain(given, "hyper_parameters")
    assert settings == {
        "class_names": ["a", "b"],
        "freeze": None,
        "layer_decay": 0.5,
        "nested": {"deep": [1, True]},
    }
    settings["nested"]["deep"].append(2)
    assert given["nested"]["deep"] == [1, True]


@pytest.mark.parametrize(
    ("value", "reported"),
    [
        ({"root": torch.zeros(1)}, "its data hold Tensor"),
        ({"deep": [{"deeper": {1, 2}}]}, "its data hold set"),
        ({"deep": OrderedDict()}, "its data hold OrderedDict"),  # which may bring code of its own
        ({1: "a"}, "its data hold dict"),
        (["root"], "its data are no dict"),
    ],
)
def test_what_no_command_line_can_say_is_refused(value, reported):
    with pytest.raises(
        ValueError, match=f"^the checkpoint is not as `finetune fit` writes them: {reported}$"
    ):
        plain(value, "data")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (NAMED, ["somebody.Thing"]),
        ([1, {"deep": [NAMED, {"class_path": ["no text"]}]}], ["somebody.Thing", ["no text"]]),
        (
            {"class_path": "Outer", "init_args": {"transforms": [NAMED]}},
            ["Outer", "somebody.Thing"],
        ),
        ('{"class_path": "somebody.Thing"}', ["somebody.Thing"]),  # which a parser would read
        (["- class_path: somebody.Thing"], ["somebody.Thing"]),
        # Of which PyYAML says ValueError, AttributeError, KeyError and IndexError.
        ({"class_names": ["4006-38-13", "0x_", "!!timestamp x", "!!bool x", '!!int ""']}, []),
        ({"freeze": "layer2", "note": "class_path", "broken": "{", "num": 3, "none": None}, []),
    ],
)
def test_every_class_path_is_found(value, found):
    assert list(class_paths(value)) == found


def test_a_model_gets_its_own_arguments_and_no_others():
    known = {"class_names": ["a", "b"], "backbone": "lenet", "weights": None}
    assert model_settings({"hyper_parameters": known}) == known
    # `Classifier` takes an optimizer, but a checkpoint never holds one: it would be a class to import.
    for name, value in {
        "optimizer": None,
        "scheduler": None,
        "compile": True,
        "_instantiator": "x",
    }.items():
        with pytest.raises(ValueError, match=f"its hyper_parameters have '{name}'"):
            model_settings({"hyper_parameters": {**known, name: value}})
    with pytest.raises(ValueError, match=r"its hyper_parameters name somebody\.Thing"):
        model_settings({"hyper_parameters": {**known, "class_names": ["a", NAMED]}})
