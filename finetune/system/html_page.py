"""Pages of one file: HTML with style, script and images inside, without references to other files.

Templates lie next to the code that renders them. They extend `system/html_page.html`, which has the common parts: light
and dark mode, phone width, print, and sortable tables.
"""

import base64
import html
import io
import os
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from finetune.system.messages import shown

_TEMPLATES = Path(__file__).parents[1]
_OPTION = re.compile(r"--\w[\w.-]*\w")


def render(template: str, **values: Any) -> str:
    """Render a page. All values are escaped.

    Args:
        template: The path of the template in the package, such as `commands/check.html`.
        values: The variables of the template. A missing one is an error.
    """
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    """Return the environment of all templates, which keeps those that it has compiled."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = shown
    environment.filters["sentence"] = _sentence
    return environment


def _sentence(text: object) -> Markup:
    """Return a text as `shown` does, with no line break within an option, as `--data.val_fraction`."""
    return Markup(_OPTION.sub(r'<span class="nowrap">\g<0></span>', html.escape(shown(text))))


def link_to(path: str | os.PathLike[str], page: str | Path) -> str:
    """Return the URL of a file relative to a page; an address is returned as a URL."""
    text = os.fspath(path)
    if "://" in text:
        return quote(text, safe="/:")
    return quote(os.fsencode(os.path.relpath(text, Path(page).parent)))


def webp(image: np.ndarray, side: int, quality: int = 75) -> bytes:
    """Return an image (H, W, 3) or (H, W) uint8 as a WebP file, with at most `side` pixels on the longer side."""
    smaller = Image.fromarray(image)
    smaller.thumbnail((side, side), Image.Resampling.BILINEAR)
    content = io.BytesIO()
    smaller.save(content, format="WebP", quality=quality, method=1)
    return content.getvalue()


def thumbnail(image: np.ndarray, side: int) -> str:
    """Return an image as a data URL, as `webp`."""
    return f"data:image/webp;base64,{base64.b64encode(webp(image, side)).decode()}"
