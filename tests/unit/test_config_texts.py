"""A config that settings are written to gives the same settings again, as does each value as the text of a flag."""

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec import inspect

from finetune.settings.configs import config_text
from finetune.settings.fields import Setting, settings_of
from finetune.settings.layers import Layer, Layers, read_config, read_values, replaced
from finetune.settings.schema import FitSettings
from finetune.system.messages import WrongUsage

# of a value that is a number or a text, `12` is a number; `null` is none wherever there is none
WORDS = st.sampled_from(["photos", "1e5", "007", "no", "a,b:c", "Scene 2: beach", "it's", "ä 🌭"])
NAMES = st.one_of(WORDS, st.sampled_from(["null", "true", "12:30"]))
# with those that go together
BESIDE = {"data.num_folds", "data.fold", "data.correct_test", "data.crop_share"}
BESIDE |= {"trainer.devices"}  # where `007` is a number
BESIDE |= {"data.val_fraction", "data.test_fraction", "members", "model.freeze", "coverage"}


def values(setting: Setting) -> st.SearchStrategy[Any]:
    return st.one_of(*of_type(inspect.type_info(setting.type), setting.about.holds_names))


def of_type(info: inspect.Type, holds_names: bool) -> list[st.SearchStrategy[Any]]:
    if isinstance(info, inspect.UnionType):
        return [each for one in info.types for each in of_type(one, holds_names)]
    if isinstance(info, inspect.Metadata):
        return of_type(info.type, holds_names)
    if isinstance(info, inspect.IntType):
        low = -50 if info.ge is None else info.ge
        return [st.integers(low, low + 999 if info.le is None else info.le)]
    if isinstance(info, inspect.FloatType):
        low = max(x for x in (info.ge, info.gt, -1e9) if x is not None)
        high = min(x for x in (info.le, info.lt, 1e9) if x is not None)
        is_open = {"exclude_min": info.gt is not None, "exclude_max": info.lt is not None}
        return [st.floats(low, high, allow_subnormal=False, **is_open)]
    if isinstance(info, inspect.ListType) and holds_names:
        return [st.lists(NAMES, max_size=3)]
    known = {
        inspect.BoolType: [st.booleans()],
        inspect.NoneType: [st.none()],
        inspect.StrType: [] if holds_names else [WORDS],
        inspect.LiteralType: [st.sampled_from(getattr(info, "values", [None]))],
    }
    return known.get(type(info), [])


SETTINGS = {
    name: setting
    for name, setting in settings_of(FitSettings).items()
    if setting.about.arguments is None and name not in BESIDE | {"data.class_path"}
}
DRAWN = st.fixed_dictionaries(
    {}, optional={n: values(s) for n, s in SETTINGS.items() if n.count(".") < 2}
)


@hypothesis_settings(max_examples=25)
@given(drawn=DRAWN)
def test_a_config_gives_the_settings_that_were_written(tmp_path_factory, drawn):
    settings = replaced(FitSettings(), drawn)
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(config_text(settings), "utf-8")
    again = Layers("fit", (read_config("fit", str(path)),)).parse(FitSettings)
    assert again == settings


@given(data=st.data())
def test_a_value_as_text_is_that_value(data):
    setting = data.draw(st.sampled_from([s for s in SETTINGS.values() if s.name.count(".") < 2]))
    value = data.draw(values(setting))
    text = "null" if value is None else yaml.safe_dump(value, default_flow_style=True, width=9**9)
    text = value if isinstance(value, str) else text.partition("\n...")[0].strip()
    if (setting.about.holds_names and value is None) or setting.name == "resume":
        return  # a class may be called null, and no run `no`
    line = Layer("finetune fit", "command_line")
    (found,) = read_values("fit", line, {setting.name: text}).values.values()
    assert found == value


@given(data=st.data())
def test_a_number_out_of_range_is_refused_with_the_range(data):
    whole = {name: one for name, one in SETTINGS.items() if isinstance(one.default, int | float)}
    setting = data.draw(st.sampled_from([one for one in whole.values() if not one.is_switch]))
    for value in (math.nan, math.inf, "x", -(10.0**9)):
        with pytest.raises(WrongUsage) as raised:
            setting.converted(value)
        assert raised.value.setting == setting.name and "takes" in raised.value.text
