"""Lightning's private names are in one module, since any release may change them."""

import ast
from pathlib import Path

import pytest
import pytorch_lightning
from paths import ROOT

PACKAGE = ROOT / "finetune"
# What subclasses use of their own base class, which cannot stand in another module.
OF_BASE_CLASSES = {
    # LightningCLI has no public hooks for flags, arguments and the end of a command
    "commands/benchmark.py": {"_get", "_prepare_subcommand_parser"},
    "commands/lightning_cli.py": {
        "_get",
        "_parse_ckpt_path",
        "_parser",
        "_prepare_subcommand_kwargs",
        "_prepare_subcommand_parser",
        "_run_subcommand",
        "_subcommand_parsers",
    },
    # a name of torch's DataLoader, which a class of Lightning has, too
    "data/train_loader.py": {"_iterator"},
    # loggers are written by overriding `experiment`, which keeps its object in a private attribute
    "runs/mlflow_logger.py": {"_run_id"},
    "runs/tensorboard_logger.py": {"_experiment", "_kwargs"},
    "runs/wandb_logger.py": {"_offline", "_wandb_init"},
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(source: str) -> set[str]:
    """Return the private functions, classes and attributes of `self` that a module defines."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def used_names(source: str) -> set[str]:
    """Return the private names of other objects than `self` that a module reads, sets, overrides or imports.

    Those of `self` are among them where the module does not define them.
    """
    own = defined_names(source)
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
        is_plain_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if is_plain_call and node.func.id in ("getattr", "setattr"):
            names |= {a.value for a in node.args if isinstance(a, ast.Constant)}
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_own or node.attr not in own:
                names.add(node.attr)
    return {name for name in names if isinstance(name, str) and is_private(name)}


def sources(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text("utf-8")
        for path in sorted(folder.rglob("*.py"))
    }


@pytest.fixture(scope="module")
def lightning() -> set[str]:
    modules = sources(Path(pytorch_lightning.__file__).parent)
    return set().union(*map(defined_names, modules.values()))


def test_no_other_module_touches_private_names_of_lightning(lightning):
    own = sources(PACKAGE)
    gathered = used_names(own.pop("lightning_private.py")) & lightning
    assert len(gathered) > 15
    for name, source in own.items():
        assert used_names(source) & lightning <= OF_BASE_CLASSES.get(name, set()), name


@pytest.mark.parametrize(
    "line",
    [
        "trainer.fit_loop._skip_backward = True",
        "getattr(strategy, '_timeout', None)",
        "from pytorch_lightning.loops.progress import _Progress",
        "self._extract_stats(trainer, 'any')",
        "super()._setup()",
    ],
)
def test_each_way_to_touch_one_is_found(lightning, line):
    assert used_names(line) & (lightning | {"_setup"})
