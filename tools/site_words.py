"""A hook of mkdocs.yml: words of inline code, such as `--data.min_crop`, stay on one line."""

import re

LONGEST = 36  # characters; longer words would not fit on a phone
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
WORD = re.compile(rf"(?<!\S)\S{{1,{LONGEST}}}(?!\S)")


def on_page_content(html: str, **_: object) -> str:
    """Return a page, whose HTML mkdocs passes, with an element around each word of code."""
    return CODE.sub(lambda code: WORD.sub(r'<span class="word">\g<0></span>', code[0]), html)
