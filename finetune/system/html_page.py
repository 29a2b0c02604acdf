"""Pages of one file: HTML with style, script and pictures inside, which need nothing from anywhere else.

Templates lie beside the code that fills them and extend `system/html_page.html`, which has what they share: light and
dark, phone and paper, tables that sort.
"""

import base64
import io
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from finetune.system.messages import shown

_TEMPLATES = Path(__file__).parents[1]


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
