"""The shipped configs through the real parser."""

import pytest
import yaml
from paths import ROOT

SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def settings(cli, capsys):
    """The settings of a `fit`, as `--print_config` prints them."""

    def printed(*arguments):
        cli("fit", *arguments, "--print_config")
        return yaml.safe_load(capsys.readouterr().out)

    return printed


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_are_understood(settings, path):
    written = yaml.safe_load(path.read_text("utf-8"))
    read = settings("--config", path.name)
    assert read["data"]["class_path"].rpartition(".")[2] == written["data"]["class_path"][9:]
    assert all(
        read["data"]["init_args"][key] == value
        for key, value in written["data"].get("init_args", {}).items()
        if not isinstance(value, list)
    )


def test_image_folder_yaml_trains_as_fit_folder(settings, colours):
    by_config = settings("--config", "image_folder.yaml", "--data.root", str(colours))
    assert by_config == settings(str(colours))


def test_config_headers_have_purpose_and_command_and_no_devices():
    for path in SHIPPED:
        text = path.read_text("utf-8")
        header, _, body = text.partition("\ndata:")
        assert all(line.startswith("# ") for line in header.splitlines()), path
        assert f"finetune fit --config {path.name}" in header, path
        assert not {"devices:", "num_nodes:", "accelerator:", "logger:"} & {*body.split()}, path
