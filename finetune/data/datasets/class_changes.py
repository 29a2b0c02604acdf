"""Check the options that change the classes of a data set: classes to exclude, and classes to merge."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage, did_you_mean


@dataclass(frozen=True)
class ClassChanges:
    """Changes of the classes of a data set.

    Attributes:
        exclude: Classes to skip, by name or folder.
        merge: New names of classes. Those with one new name are one class.
    """

    exclude: Collection[str] = ()
    merge: Mapping[str, str] = field(default_factory=dict)


NO_CHANGES = ClassChanges()


def check_names_exist(
    option: str, names: Collection[str], existing: Collection[str], what: str = "class"
) -> None:
    """Check that the classes that an option names exist. A misspelt one would otherwise not be excluded or merged.

    Raises:
        WrongUsage: One does not.
    """
    for name in sorted(names):  # the same message for a set in any order
        if composed(name) not in existing:
            hint = did_you_mean(name, sorted(existing))
            raise WrongUsage(f"{option}: there is no {what} {name!r}{hint}")
