"""What a user did wrong, apart from what failed."""


class WrongUsage(ValueError):
    """A value that an option can't have, whatever the data: the exit code is that of a mistyped flag."""

    exit_code = 2
