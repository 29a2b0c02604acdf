"""`finetune backbones`: list the networks that a fit can train."""

import fnmatch
import json
from typing import TYPE_CHECKING, Any

from rich.table import Column
from rich.text import Text

from finetune.commands.plain_table import plain_table, table_console
from finetune.models.network_names import PREFIX, is_timm
from finetune.settings.all_commands import BackbonesSettings
from finetune.system.messages import NotFound, install

if TYPE_CHECKING:
    from finetune.models.library import ListedNetwork

_WIDTH = 160  # of a table that is not shown on a terminal
# networks whose parameters are counted: each is built, which takes a tenth of a second
_MOST_COUNTED = 100


def list_backbones(options: BackbonesSettings) -> None:
    """List networks."""
    from finetune.models.backbones import LIBRARIES, is_local  # imports torch, for seconds

    networks = [network for library in LIBRARIES for network in library.listed()]
    num_timm = sum(is_timm(network.name) for network in networks)
    matches = [network for network in networks if _is_match(network.name, options.pattern)]
    hint = "" if num_timm else f"; timm has more: {install('timm')}"
    if options.local:
        matches = [network for network in matches if is_local(network.name)]
    elif options.pattern and not matches:
        raise NotFound(
            f"no network matches {options.pattern!r}; patterns are such as 'resnet*' and '*vit*'{hint}"
        )
    elif not options.pattern and not options.json and num_timm:
        matches = [network for network in matches if not is_timm(network.name)]
        hint = f"; timm has {num_timm:,} more: finetune backbones 'timm/*'"
    if options.json:
        rows = [{**network._asdict(), "is_local": is_local(network.name)} for network in matches]
        print(json.dumps(rows, indent=1))
    elif matches:
        _print_table(matches)
        if hint:
            print(f"\n{hint.removeprefix('; ')}")
    else:
        print("no weights on this machine")


def _is_match(name: str, pattern: str | None) -> bool:
    """Return whether a name matches a pattern or contains a text. The prefix `timm/` may be left away."""
    if pattern is None:
        return True
    wanted = pattern.lower() if set(pattern) & set("*?[") else f"*{pattern.lower()}*"
    names = (name.lower(), name.lower().removeprefix(PREFIX))
    return any(fnmatch.fnmatchcase(one, wanted) for one in names)


def _print_table(networks: list["ListedNetwork"]) -> None:
    from finetune.models.backbones import is_local, library_of

    columns = [
        Column("network", overflow="fold"),
        Column("parameters", justify="right", no_wrap=True),
        Column("image size", justify="right", no_wrap=True),
        Column("on this machine", no_wrap=True),
        Column("licence of the weights", overflow="fold"),
    ]
    table = plain_table(columns)
    is_counted = len(networks) <= _MOST_COUNTED
    for network in networks:
        num = library_of(network.name).num_parameters(network.name) if is_counted else None
        cells: list[Any] = [
            network.name,
            "" if num is None else f"{num / 1e6:,.1f} M",
            f"{network.image_size} px",
            "yes" if is_local(network.name) else "",
            network.licence,
        ]
        table.add_row(*map(Text, cells))
    table_console(_WIDTH).print(table)
