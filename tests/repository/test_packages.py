"""Lock files are complete and hashed, and every module is in git, in the wheel and in the image."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
OPTIONAL = PROJECT["project"]["optional-dependencies"]
OF_IMAGE = ("parquet", "export", "serve", "storage")
WANTED = {
    "requirements.lock": [
        *PROJECT["project"]["dependencies"],
        *(line for extra in OF_IMAGE for line in OPTIONAL[extra]),
    ],
    "requirements-extras.lock": [
        line for extra in ("timm", "tensorboard", "wandb", "mlflow") for line in OPTIONAL[extra]
    ],
    "requirements-build.lock": PROJECT["build-system"]["requires"],
}
PIN = re.compile(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n?)*)", re.M)
LINE = re.compile(r"|#.*|[\w.-]+==[\w.]+ \\|    --hash=sha256:[0-9a-f]{64}(?: \\)?|    # via [^/]*")


def faults(lock: str, wanted: list[str]) -> list[str]:
    """Return the requirements that a lock does not meet, packages without hashes, and lines that name a place."""
    pins = {
        canonicalize_name(name): (version, hashes) for name, version, hashes in PIN.findall(lock)
    }
    requirements = [Requirement(line) for line in wanted]
    unmet = [
        requirement.name
        for requirement in requirements
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0")[0])
    ]
    unhashed = [name for name, (_, hashes) in pins.items() if not hashes]
    return unmet + unhashed + [line for line in lock.splitlines() if not LINE.fullmatch(line)]


@pytest.mark.parametrize("name", WANTED)
def test_locks_are_complete_and_hashed(name):
    lock = (ROOT / name).read_text("utf-8")
    assert faults(lock, WANTED[name]) == [], "`make lock` brings it up to date"


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("scipy==", "scipi==", "scipy"),
        ("pytorch-lightning==2", "pytorch-lightning==1", "pytorch-lightning"),
        (
            "# This",
            "--index-url https://example.org/simple\n# This",
            "--index-url https://example.org/simple",
        ),
        ("# This", "left-pad==1.0 \\\n# This", "left-pad"),
    ],
)
def test_control_incomplete_locks(old, new, found):
    lock = (ROOT / "requirements.lock").read_text("utf-8")
    assert faults(lock.replace(old, new, 1), WANTED["requirements.lock"]) == [found]


def git(*arguments: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def package_files() -> set[str]:
    files = [path for path in (ROOT / "finetune").rglob("*.*") if path.is_file()]
    return {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}


def test_every_file_of_the_package_is_in_git_and_in_the_wheel():
    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert package_files() - packed == set()
    assert package_files() - {*git("ls-files", "finetune")} == set()


def test_every_kind_of_file_of_the_package_is_sent_to_docker():
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    sent = {Path(line).suffix for line in lines if line.startswith("!finetune/**/")}
    assert {Path(name).suffix for name in package_files()} == sent


def test_git_tracks_no_symbolic_links():
    """A link may lead nowhere on another machine."""
    assert [line for line in git("ls-files", "--stage") if line.startswith("120000")] == []
