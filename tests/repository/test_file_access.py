"""How the package opens, writes and replaces files: text in a stated encoding, and one helper to replace a file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

PACKAGE = ROOT / "finetune"
MODULES = sorted(PACKAGE.rglob("*.py"))
# Methods and functions that read or write text, and the place of `encoding` among their positional arguments.
TEXT = {
    "open": 3,
    "fdopen": 3,
    "read_text": 0,
    "write_text": 1,
    "NamedTemporaryFile": 3,
    "TemporaryFile": 3,
}
MODE = {"fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0}
# What others open: a descriptor, an image, a process, an address; and an archive's members, which are bytes.
NOT_TEXT = {"os.open", "Image.open", "zipfile.open", "tarfile.open", "archive.open"}
# They rename what no file is in the place of: a folder, or a file of which the run has one of two.
RENAMES = {
    "system/files.py",
    "data/archives.py",
    "data/datasets/download.py",
    "data/datasets/fashion_mnist.py",
    "demo/drawing.py",
}


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    """Yield each call, the name of what is called, and what stands before its last dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            is_name = isinstance(node.func, ast.Name)
            yield (
                node,
                node.func.id if is_name else node.func.attr,
                "" if is_name else ast.unparse(node.func.value),
            )


def without_encoding(source: str) -> list[str]:
    """Return the calls that open text in the encoding of the locale."""
    found = []
    for node, name, owner in calls(ast.parse(source)):
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in ("run", "Popen", "check_output") and owner == "subprocess":
            # else bytes, or `encoding`
            is_text = "text" in keywords or "universal_newlines" in keywords
        elif name in TEXT and f"{owner}.{name}" not in NOT_TEXT:
            is_method = name == "open" and bool(owner) and owner != "io"
            place = MODE.get(name, 0 if is_method else 1)
            mode = keywords.get("mode", node.args[place] if len(node.args) > place else None)
            is_text = name.endswith("_text") or not (
                isinstance(mode, ast.Constant) and "b" in str(mode.value)
            )
            is_text &= not (mode is None and name.endswith("TemporaryFile"))  # w+b
            is_text &= len(node.args) <= TEXT[name] - is_method
        else:
            continue
        if is_text and "encoding" not in keywords:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def replacements(source: str) -> list[str]:
    """Return the calls that rename a file: `str.replace` has two arguments, `Path.replace` has one."""
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node, name, owner in calls(ast.parse(source))
        if (name in ("replace", "rename", "renames", "move") and owner in ("os", "shutil"))
        or (name in ("replace", "rename") and owner and len(node.args) == 1 and not node.keywords)
    ]


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("open(path)", True),
        ("open(path, 'w', newline='')", True),
        ("path.open()", True),
        ("path.open('a')", True),
        ("Path(x).read_text()", True),
        ("path.write_text(text)", True),
        ("tempfile.NamedTemporaryFile('w')", True),
        ("subprocess.run(command, text=True)", True),
        ("open(path, 'rb')", False),
        ("open(path, mode='xb')", False),
        ("open(path, encoding='utf-8')", False),
        ("path.open('r', -1, 'utf-8')", False),
        ("path.open('rb')", False),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text, 'utf-8')", False),
        ("path.write_text(text, encoding='utf-8')", False),
        ("os.open(path, os.O_RDONLY)", False),
        ("tempfile.TemporaryFile()", False),
        ("subprocess.run(command)", False),
    ],
)
def test_the_search_for_text_without_an_encoding_finds_it(source, is_found):
    assert bool(without_encoding(source)) == is_found


def test_text_is_read_and_written_in_a_stated_encoding():
    found = {
        str(path.relative_to(PACKAGE)): without_encoding(path.read_text("utf-8"))
        for path in MODULES
    }
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_one_helper_replaces_files():
    """`finetune.system.files` keeps links, modes and owners, which a bare rename loses."""
    assert replacements("part.replace(target)") and replacements("os.replace(a, b)")
    assert not replacements("text.replace(a, b)") and not replacements("replace(split, read=read)")
    found = {
        str(Path(path).relative_to(PACKAGE)): replacements(path.read_text("utf-8"))
        for path in MODULES
    }
    assert {name for name, calls in found.items() if calls} == RENAMES
