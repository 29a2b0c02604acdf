"""Options in messages of shared code: as the running command spells them, or not at all."""

import pytest

from finetune.system.option_names import only_settings, option, with_option


def test_options_have_the_names_of_the_running_command():
    assert option("data.root") == "--data.root"
    with only_settings(["data.root"]):
        assert option("data.root") == "--root" and option("data.exclude") == ""
        with only_settings(None):
            assert option("data.exclude") == "--data.exclude"
        assert option("data.exclude") == ""
    assert option("data.exclude") == "--data.exclude"
    with pytest.raises(KeyError), only_settings([]):
        raise KeyError
    assert option("data.root") == "--data.root"


def test_advice_is_left_out_with_its_option():
    text = ", or skip it with {} skip"
    assert with_option("data.on_bad_image", text) == ", or skip it with --data.on_bad_image skip"
    with only_settings(["data.root"]):
        assert with_option("data.on_bad_image", text) == ""
        assert with_option("data.root", " ({})") == " (--root)"
