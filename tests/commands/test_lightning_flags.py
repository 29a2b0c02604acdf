"""Each of Lightning's four commands has its own flags, and none of another's."""

import pytest
from pytorch_lightning.cli import LightningArgumentParser

from finetune.commands.lightning_flags import add_flags

FIT = {"resume", "allow_changes", "test_after_fit", "report", "checkpoint_every_n_steps", "threshold"}
FIT |= {"minutes", "patience"}
MEASURE = {"tta", "trust_modules"}
PREDICT = MEASURE | {"output", "top_k", "abstain_below"}


@pytest.mark.parametrize(
    ("command", "flags"), [("fit", FIT), ("validate", MEASURE), ("test", MEASURE), ("predict", PREDICT)]
)
def test_a_command_has_its_flags(command, flags):
    parser = LightningArgumentParser()
    parser.add_argument("--model.class_names")
    before = {action.dest for action in parser._actions}
    add_flags(parser, command)
    added = {action.dest: action for action in parser._actions if action.dest not in before}
    assert added.keys() == flags
    assert all(action.help for action in added.values())
