"""Configs by name: a file here, else one that is shipped with the package."""

from collections.abc import Sequence
from pathlib import Path


class ConfigNotFound(FileNotFoundError):
    """There is no such config: wrong usage, as a mistyped flag is."""

    exit_code = 2


def shipped() -> dict[str, Path]:
    """Return the shipped configs by file name: in the package once installed, beside it in a checkout."""
    package = Path(__file__).parent
    folders = (package / "configs", package.parent / "configs")
    folder = next((f for f in folders if f.is_dir()), folders[0])
    return {path.name: path for path in sorted(folder.glob("*.yaml"))}


def find(name: str) -> str:
    """Return the path of config `name`.

    Raises:
        ConfigNotFound: It is neither a file nor shipped; the message lists the shipped ones.
    """
    if Path(name).is_file():
        return name
    available = shipped()
    for candidate in (name, f"{name}.yaml"):
        if candidate in available:
            return str(available[candidate])
    raise ConfigNotFound(f"there is no config {name!r} here, and none of the shipped ones is: {', '.join(available)}")


def resolve(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with the config named by --config (-c) replaced by its path."""
    resolved = list(arguments)
    for i, argument in enumerate(resolved):
        flag, equals, value = argument.partition("=")
        if flag in ("-c", "--config") and equals:
            resolved[i] = f"{flag}={find(value)}"
        elif flag in ("-c", "--config") and i + 1 < len(resolved):
            resolved[i + 1] = find(resolved[i + 1])
    return resolved
