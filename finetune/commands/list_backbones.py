"""`finetune backbones`: list the networks that a fit can train; without torch, so that it answers at once."""

import fnmatch
import json
from collections.abc import Sequence

from rich.table import Column
from rich.text import Text

from finetune.commands.parser import OneLineErrorParser, PlainHelpFormatter
from finetune.commands.plain_table import plain_table, table_console
from finetune.models.network_list import ListedNetwork, has_timm, listed_networks
from finetune.system.messages import NotFound, install

_WIDTH = 160  # of a table that is not shown on a terminal
_HELP = """\
Lists the networks that --backbone takes: those of torchvision and, if it is installed, of timm. Without a
pattern or --local, those of timm are only counted.

for example:
  finetune backbones
  finetune backbones '*vit*'
  finetune backbones --local"""


def make_parser() -> OneLineErrorParser:
    """Return the parser of the command."""
    parser = OneLineErrorParser(
        prog="finetune backbones",
        usage="finetune backbones [PATTERN] [--local] [--json]",
        description=_HELP,
        formatter_class=PlainHelpFormatter,
    )
    parser.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="Part of a name, or a pattern such as '*vit*' or 'timm/*'.",
    )
    parser.add_argument(
        "--local", action="store_true", help="Only those whose weights are on this machine."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    return parser


def list_backbones(arguments: Sequence[str]) -> None:
    """List networks; see `finetune backbones --help`."""
    options = make_parser().parse_args(list(arguments))
    usable = [network for network in listed_networks() if has_timm() or not network.is_of_timm]
    matches = matching(usable, options.pattern)
    if options.local:
        matches = [network for network in matches if network.is_local()]
    elif options.pattern and not matches:
        hint = _without_timm(options.pattern) or "; patterns are such as 'resnet*' and '*vit*'"
        raise NotFound(f"no network matches {options.pattern!r}{hint}")
    if options.json:
        print(json.dumps([network.as_dict() for network in matches], indent=1))
        return
    is_short = not options.pattern and not options.local
    shown = [network for network in matches if not (is_short and network.is_of_timm)]
    if shown:
        _print_table(shown)
    else:
        print("no weights on this machine")
    num = sum(network.is_of_timm for network in matching(listed_networks(), options.pattern))
    if num and not has_timm():
        print(f"\ntimm has {num:,} more and is not installed: {install('timm')}")
    elif num and is_short:
        print(f"\ntimm has {num:,} more: finetune backbones 'timm/*'")


def matching(networks: Sequence[ListedNetwork], pattern: str | None) -> list[ListedNetwork]:
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


def _without_timm(pattern: str) -> str:
    """Return a hint if networks of timm match, and it is not installed."""
    if has_timm() or not matching(listed_networks(), pattern):
        return ""
    return f"; timm has some: {install('timm')}"


def _print_table(networks: Sequence[ListedNetwork]) -> None:
    columns = [
        Column("network", overflow="fold"),
        Column("parameters", justify="right", no_wrap=True),
        Column("weights", justify="right", no_wrap=True),
        Column("image size", justify="right", no_wrap=True),
        Column("on this machine", no_wrap=True),
        Column("licence of the weights", overflow="fold"),
    ]
    table = plain_table(columns)
    for network in networks:
        table.add_row(*map(Text, _cells(network)))
    table_console(_WIDTH).print(table)


def _cells(network: ListedNetwork) -> list[str]:
    size = "none" if network.megabytes is None else f"{network.megabytes:,.0f} MB"
    return [
        network.name,
        f"{network.parameters / 1e6:,.1f} M",
        size,
        f"{network.image_size} px",
        "yes" if network.is_local() else "",
        network.licence,
    ]
