"""`finetune backbones`: list the networks that a fit can train."""

import dataclasses
import fnmatch
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Column
from rich.text import Text

from finetune.commands.plain_table import plain_table, table_console
from finetune.settings.all_commands import BackbonesSettings
from finetune.system.messages import NotFound, install

if TYPE_CHECKING:
    from finetune.models.network_list import ListedNetwork

_WIDTH = 160  # of a table that is not shown on a terminal
_MOST_COUNTED = (
    100  # networks whose parameters are counted: each is built, which takes a tenth of a second
)


def list_backbones(options: BackbonesSettings) -> None:
    """List networks."""
    # imports torch, for seconds
    from finetune.models.network_list import timm_networks, torchvision_networks

    of_timm = list(timm_networks())
    matches = matching([*torchvision_networks(), *of_timm], options.pattern)
    hint = "" if of_timm else f"; timm has more: {install('timm')}"
    if options.local:
        matches = [network for network in matches if network.is_local()]
    elif options.pattern and not matches:
        raise NotFound(
            f"no network matches {options.pattern!r}; patterns are such as 'resnet*' and '*vit*'{hint}"
        )
    if not options.pattern and not options.local and not options.json:
        matches = [network for network in matches if network not in of_timm]
        if of_timm:
            hint = f"; timm has {len(of_timm):,} more: finetune backbones 'timm/*'"
    if options.json:
        print(json.dumps([_as_dict(network) for network in matches], indent=1))
    elif matches:
        _print_table(matches)
        if hint:
            print(f"\n{hint.removeprefix('; ')}")
    else:
        print("no weights on this machine")


def matching(networks: Sequence["ListedNetwork"], pattern: str | None) -> list["ListedNetwork"]:
    """Return the networks whose name matches a pattern or contains a text. The prefix `timm/` may be left away."""
    if pattern is None:
        return list(networks)
    wanted = pattern.lower() if set(pattern) & set("*?[") else f"*{pattern.lower()}*"
    return [
        network
        for network in networks
        if fnmatch.fnmatchcase(network.name.lower(), wanted)
        or fnmatch.fnmatchcase(network.name.lower().removeprefix("timm/"), wanted)
    ]


def _print_table(networks: Sequence["ListedNetwork"]) -> None:
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
        num = network.num_parameters() if is_counted else None
        cells = [
            network.name,
            "" if num is None else f"{num / 1e6:,.1f} M",
            f"{network.image_size} px",
            "yes" if network.is_local() else "",
            network.licence,
        ]
        table.add_row(*map(Text, cells))
    table_console(_WIDTH).print(table)


def _as_dict(network: "ListedNetwork") -> dict[str, Any]:
    return {**dataclasses.asdict(network), "is_local": network.is_local()}
