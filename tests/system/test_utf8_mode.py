"""Commands under locales that are not UTF-8: file names, configs, tables and output are the same as under UTF-8."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from colours import QUICKEST, draw_colours
from paths import ROOT

# their last bytes are control characters or none at all in other encodings
NAME, CLASS = "straße", "gröẞe"
# Python does not mend the locale by itself
AS_IT_IS = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module", params=["ascii", "iso8859-1"])
def locale(request, tmp_path_factory) -> dict[str, str]:
    """The variables of a process in an encoding that is not UTF-8."""
    variables = {"LC_ALL": "C"}
    if request.param == "iso8859-1":
        place = tmp_path_factory.mktemp("locales")
        variables = {"LC_ALL": "en_US.ISO-8859-1", "LOCPATH": str(place)}
        define = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(place / "en_US.ISO-8859-1")]
        try:
            subprocess.run(define, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"localedef cannot make this locale: {error}")
    variables |= AS_IT_IS
    reported = python(
        ["-c", "import sys; print(sys.getfilesystemencoding())"], Path.cwd(), variables
    )
    assert reported.stdout.decode().strip() == request.param
    return variables


def python(
    arguments: list[str], folder: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=120)


@pytest.mark.parametrize("is_script", [True, False])
def test_arguments_and_output_are_utf8(locale, tmp_path, is_script):
    (tmp_path / "finetune").write_text("from finetune.cli import main\nmain()\n")
    program = [str(tmp_path / "finetune")] if is_script else ["-m", "finetune"]
    done = python([*program, NAME], tmp_path, locale)
    assert done.returncode == 2 and f"there is no command '{NAME}'" in done.stderr.decode("utf-8")


def test_the_program_of_somebody_else_is_not_started_again(locale, tmp_path):
    script = "print('begun', flush=True)\nfrom finetune.cli import main\nmain()\n"
    (tmp_path / "train.py").write_text(script)
    done = python(["train.py", "--version"], tmp_path, locale)
    assert done.returncode == 0 and done.stdout.decode().count("begun") == 1
    (tmp_path / "finetune").write_text(script)  # the control
    assert (
        python([str(tmp_path / "finetune"), "--version"], tmp_path, locale)
        .stdout.decode()
        .count("begun")
        == 2
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    root = draw_colours(tmp_path_factory.mktemp("data") / NAME, train=8, test=4)
    for split in ("train", "test"):
        (root / split / "blue").rename(root / split / CLASS)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["ascii"], indirect=True)  # two interpreters
def test_fit_report_and_predict(locale, images, tmp_path):
    def finetune(*arguments: object) -> None:
        done = python(["-m", "finetune", *map(str, arguments)], tmp_path, locale)
        assert done.returncode == 0, done.stderr.decode()

    # a shipped config, which is not ASCII
    given = ["--config", "sample", "--data.root", images, *QUICKEST, "--report", "true"]
    finetune("fit", *given)
    run = tmp_path / "runs/fit/version_0"
    assert CLASS in json.loads((run / "test.json").read_text("utf-8"))["class_names"]
    assert f"root: {images}" in (run / "config.yaml").read_text("utf-8")
    assert CLASS in (run / "report.html").read_text("utf-8")
    finetune("predict", run, images / "test", "--output", f"{CLASS}.csv")
    with open(tmp_path / f"{CLASS}.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 and all(Path(row["path"]).is_file() for row in rows)


# What a program that calls finetune from Python reads, in the encoding that it has.
READS = """
import json, sys
from pathlib import Path
from finetune.commands.parser import OneLineErrorParser
from finetune.data.datasets.folders import scan
parser = OneLineErrorParser()
parser.add_argument("--config", action="config")
parser.add_argument("--size", type=str)
size = parser.parse_args(["--config", "config.yaml"]).size
names, files = scan(Path(sys.argv[1]))
print(json.dumps([size, names, len(files["train"])]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["iso8859-1"], indirect=True)
def test_python_programs_read_configs_and_class_names_as_utf8(locale, images, tmp_path):
    (tmp_path / "config.yaml").write_text(f"size: {CLASS}\n", "utf-8")
    done = python(["-c", READS, str(images)], tmp_path, locale)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == [CLASS, sorted([CLASS, "green", "red"]), 24]
