"""A hook of mkdocs.yml: words of inline code, such as `--data.min_crop`, stay on one line.

Long ones may break after a dot, slash, hyphen or underscore, on a phone all of them (docs/site.css).
"""

import re

LONGEST = 36  # characters
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
WORD = re.compile(r"\S+")
ENDS_OF_PARTS = re.compile(r"(?<=[\w)][._/-])(?=[^\W\d]{3})")


def on_page_content(html: str, **_: object) -> str:
    """Return a page, whose HTML mkdocs passes, with an element around each part of each word of inline code."""
    return CODE.sub(lambda code: WORD.sub(_parts, code[0]), html)


def _parts(word: re.Match[str]) -> str:
    end = "<wbr>" if len(word[0]) <= LONGEST else '<wbr class="long">'
    parts = ENDS_OF_PARTS.split(word[0])
    return end.join(f'<span class="word">{part}</span>' for part in parts)
