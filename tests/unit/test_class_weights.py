"""--class_weights are the same as text, in a file and as a mapping; each fault is one line."""

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from promise import promise

from finetune.data.class_weights import check_weighted, parse_class_weights, weights_of_classes
from finetune.system.file_names import composed
from finetune.system.messages import WrongUsage

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1).map(
    composed
)
WEIGHTS = st.just(0.0) | st.floats(1e-6, 1e6)


@promise("class-weights")
@given(weights=st.dictionaries(NAMES, WEIGHTS, min_size=1, max_size=4))
@example(weights={"cat": 2.0, "1": 0.1, "no": 1e-05})
@example(weights={"a,b:c": 3.0})
def test_all_forms_give_the_same_weights(weights, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "w.yaml"
    path.write_text("\ufeff" + yaml.safe_dump(weights, allow_unicode=True), "utf-8")
    values = [str(path), weights]
    # names with separators are for files
    if not any(letter in name for name in weights for letter in ",:{"):
        values.append(", ".join(f"{name}:{weight!r}" for name, weight in weights.items()))
    for value in values:
        assert parse_class_weights(value) == weights
    assert parse_class_weights("balanced") == "balanced" and parse_class_weights(None) is None


WRONG = {
    "a:b:2": "'a:b:2' is not CLASS:WEIGHT",
    "a:2,a:3": "'a' occurs twice",
    "e\u0301:2,\xe9:3": "'\xe9' occurs twice",  # one name in two spellings of Unicode
    "a:-1": "weight of 'a'",
    "a:1e7": "weight of 'a'",
    "balance": "'balance'; it takes balanced",
    "none.yaml": "none.yaml",
    "f.yaml": "f.yaml is not",
    "g.yaml": "not valid YAML",
}
FILES = {"f": "- a\n", "g": "{"}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_fault_is_one_line(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    with pytest.raises((WrongUsage, FileNotFoundError)) as caught:
        parse_class_weights(wrong)
    assert WRONG[wrong] in str(caught.value) and "\n" not in str(caught.value)


def test_weights_must_fit_the_classes():
    assert weights_of_classes({"cat": 2.0, "no": 0.5}, ["1", "cat", "no"]) == [1.0, 2.0, 0.5]
    assert weights_of_classes({"\u00e9": 2.0}, ["cat", "e\u0301"]) == [1, 2]  # decomposed Unicode
    with pytest.raises(WrongUsage, match=r"'cta'; did you mean 'cat'"):
        weights_of_classes({"cta": 2.0}, ["cat", "dog"])
    with pytest.raises(WrongUsage, match="all classes are 0"):
        weights_of_classes({"cat": 0.0, "dog": 0.0}, ["cat", "dog"])
    weights = {"cat": 0.0}
    check_weighted(weights, ["cat", "dog"], {"train": [9, 1], "val": [0, 1]})
    with pytest.raises(WrongUsage, match="all images of val"):
        check_weighted(weights, ["cat", "dog"], {"train": [9, 1], "val": [3, 0]})
