"""Pages of one file: HTML with style, script and pictures inside, which need nothing from anywhere else.

Templates lie beside the code that fills them and extend `system/html_page.html`, which has what they share: light and
dark, phone and paper, tables that sort.
"""

import base64
import io
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

_TEMPLATES = Path(__file__).parents[1]
# What a browser would not show as it is: control characters, line breaks, and bytes that are not UTF-8.
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def render(template: str, **values: Any) -> str:
    """Return a page; all values are escaped, whatever characters names and messages hold.

    Args:
        template: Its path in the package, such as `commands/check.html`.
        values: What it calls by name; one that is missing is an error.
    """
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = shown
    return environment.get_template(template).render(**values)


def shown(name: object) -> str:
    """Return a name, of a file for one, as text on a line: what could not be seen in it is written as an escape."""
    return _UNSHOWN.sub(lambda match: ascii(match[0])[1:-1], str(name))


def link_to(path: str, page: str | Path) -> str:
    """Return the address of a file as seen from a page: a relative one, right while both lie as they do."""
    return quote(os.fsencode(os.path.relpath(path, Path(page).parent)))


def thumbnail(image: np.ndarray, side: int) -> str:
    """Return a picture (H, W, 3) or (H, W) uint8 as an address that holds it, its longer side at most `side` pixels."""
    picture = Image.fromarray(image)
    picture.thumbnail((side, side), Image.Resampling.BILINEAR)
    content = io.BytesIO()
    picture.save(content, format="WebP", quality=75, method=2)
    return f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode()}"
