"""The page and the lists of a check are right for hostile file names."""

import json
import os
import re
from html.parser import HTMLParser
from urllib.parse import unquote_to_bytes

import pytest
from drawings import drawing

from finetune.data.checking.check_page import write_json, write_lists, write_page
from finetune.data.checking.findings import Finding, Row
from finetune.data.datasets.listing import list_images

HOSTILE = [
    b"<script>alert(1)</script>",
    b'"onerror=alert(1) x="',
    b"a' b&amp;",
    b"{{ 7 * 7 }}",
    b"\xff\xfe",
    b"new\nline",
]


@pytest.fixture
def listing(tmp_path):
    """A class and an image for each hostile name."""
    for name in HOSTILE:
        folder = os.fsencode(tmp_path / "set") + b"/" + name.replace(b"/", b"_")
        os.makedirs(folder)
        drawing(0, 60, 40).save(tmp_path / "x.jpg")
        os.replace(tmp_path / "x.jpg", folder + b"/" + name.replace(b"/", b"_") + b".jpg")
    return list_images(tmp_path / "set")


def findings(listing):
    rows = [Row([i], f"of {listing.name(i)}", i) for i in range(len(listing.paths))]
    return [
        Finding("unreadable", "bad", f"found in {listing.name(0)}", "Advice.", rows),
        Finding("x", "note", "t", "a", []),
    ]


class Parsed(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.scripts = 0
        self.handlers = []
        self.links = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.links += [
            value
            for name, value in attrs
            if name == "href" and not value.startswith(("#", "data:"))
        ]


def test_the_page_escapes_every_name_and_links_each_file(tmp_path, listing):
    write_page(tmp_path / "plain.html", listing, [], 1.0)
    write_page(tmp_path / "check.html", listing, findings(listing), 1.0)
    text = (tmp_path / "check.html").read_text("utf-8")
    plain, page = Parsed((tmp_path / "plain.html").read_text("utf-8")), Parsed(text)
    assert page.scripts == plain.scripts and page.handlers == plain.handlers
    assert "&lt;script&gt;alert" in text and "{{ 7 * 7 }}" in text and "\\udcff" in text
    # nothing from anywhere else
    assert not re.search(r'(?:src|href)="(?!data:|#)(?:\w+:|//)', text)
    root = os.fsencode(tmp_path) + b"/"
    assert page.links and all(os.path.exists(root + unquote_to_bytes(link)) for link in page.links)


def test_json_holds_all_rows_and_lists_a_path_on_each_line(tmp_path, listing):
    write_json(tmp_path / "check.json", listing, findings(listing))
    content = json.loads((tmp_path / "check.json").read_text("ascii"))
    assert content["num_pictures"] == len(HOSTILE) == sum(content["counts"]["all"])
    files = [file for row in content["findings"][0]["rows"] for file in row["files"]]
    assert len(files) == len(HOSTILE) and all((tmp_path / "set" / file).exists() for file in files)
    # a name of two lines is left out, and counted
    assert write_lists(tmp_path / "lists", listing, findings(listing)) == 1
    lines = (tmp_path / "lists/unreadable.txt").read_bytes().splitlines()
    assert len(lines) == len(HOSTILE) - 1 and all(os.path.exists(line) for line in lines)
    assert os.listdir(tmp_path / "lists") == ["unreadable.txt"]


def test_sets_of_copies_are_divided_by_an_empty_line(tmp_path, listing):
    names = [i for i in range(len(listing.paths)) if "\n" not in listing.paths[i]]
    rows = [Row(names[:2], ""), Row(names[2:5], "")]
    write_lists(tmp_path, listing, [Finding("leak_near", "bad", "", "", rows)])
    sets = (tmp_path / "leak_near.txt").read_bytes().rstrip(b"\n").split(b"\n\n")
    found = [[os.fsdecode(path) for path in lines.split(b"\n")] for lines in sets]
    assert found == [[listing.paths[i] for i in row.images] for row in rows]


def test_a_page_of_thousands_of_copies_stays_small(tmp_path):
    """3,000 images in one set, and 3,000 sets. With all thumbnails the page would have 20 MB."""
    (tmp_path / "a").mkdir()
    drawing(0, 60, 40).save(tmp_path / "a/0.jpg")
    for i in range(1, 3000):
        os.link(tmp_path / "a/0.jpg", tmp_path / f"a/{i}.jpg")
    rows = {"x": [Row([*range(3000)], "")], "y": [Row([i], "") for i in range(3000)]}
    both = [Finding(kind, "bad", "t", "a", of_kind) for kind, of_kind in rows.items()]
    write_page(tmp_path / "check.html", list_images(tmp_path), both, 1)
    text = (tmp_path / "check.html").read_text()
    assert text.count("<figure") == 8 + 100 and len(text) < 500_000
    assert "and 2992 more" in text and "The first 100 of 3,000" in text
