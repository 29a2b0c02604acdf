"""`--name`: the name of a run's folder."""

from pathlib import Path

from jsonargparse import Namespace

from finetune.runs.folder import check_name, check_unused
from finetune.system.messages import WrongUsage


def check_run_name(options: Namespace) -> None:
    """Make sure that the run of a fit can have the name that the options give it, if any.

    Args:
        options: Those of the fit; `resume` is the folder of the run that it continues, or False.

    Raises:
        WrongUsage: It is not a plain name, it is taken, or the run that is resumed has another.
    """
    name = options.name
    if name is None:
        return
    check_name(name)
    if not options.resume:
        check_unused(Path(options.trainer.default_root_dir, "fit", name))
    elif Path(options.resume).resolve().name != name:
        raise WrongUsage(
            f"--name {name}: the run to continue is {options.resume}, which keeps its name: leave --name out"
        )
