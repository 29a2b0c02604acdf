"""Small JSON files of a run, such as about.json."""

import json
from pathlib import Path
from typing import Any

from finetune.system.messages import reason


def read_side_file(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; an empty dict if there is no such file.

    Raises:
        ValueError: The file is damaged.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, IsADirectoryError) as error:
        raise ValueError(f"{path} is damaged: {reason(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it is not a JSON object")
    return content
