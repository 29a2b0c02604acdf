"""Find configs by name: a file, or else one that is shipped with the package."""

from pathlib import Path

from finetune.commands.parsed_line import ParsedLine
from finetune.system.messages import NotFound, WrongUsage, did_you_mean


def shipped() -> dict[str, Path]:
    """Return the shipped configs by file name. In a checkout they lie next to the package, else inside it."""
    package = Path(__file__).parents[1]
    folders = (package / "configs", package.parent / "configs")
    folder = next((f for f in folders if f.is_dir()), folders[0])
    return {path.name: path for path in sorted(folder.glob("*.yaml"))}


def find(name: str) -> str:
    """Return the path of the config `name`.

    Raises:
        NotFound: It is neither a file nor shipped; the message suggests shipped ones.
        WrongUsage: It is empty, or not UTF-8.
    """
    if Path(name).is_file():
        _check_text(Path(name))
        return name
    available = shipped()
    for candidate in (name, f"{name}.yaml"):
        if candidate in available:
            return str(available[candidate])
    names = (
        available if name.endswith(".yaml") else [path.removesuffix(".yaml") for path in available]
    )
    raise NotFound(
        f"there is no config {name!r}, and none of that name is shipped{did_you_mean(name, names)}"
    )


def _check_text(path: Path) -> None:
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise WrongUsage(
            f"the config {path} is not UTF-8: byte {error.start} is not readable"
        ) from error
    if not text.strip():
        raise WrongUsage(f"the config {path} is empty")


def put_configs_first(line: ParsedLine) -> None:
    """Move the configs of a command line before all other flags, each by its path.

    Later options win, so flags win over configs wherever they are typed.
    """
    configs: list[tuple[str, str | None]] = []
    others: list[tuple[str, str | None]] = []
    for name, value in line.flags:
        if name == "config" and value is not None:
            configs.append((name, find(value)))
        else:
            others.append((name, value))  # the parser reports a --config that has no value
    line.flags = configs + others
