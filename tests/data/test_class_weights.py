"""Class weights are the same as text, in a file and as a mapping; each fault is one line."""

import pytest
from promise import promise

from finetune.data.class_weights import check_weighted, parse_class_weights, weights_of_classes
from finetune.system.messages import WrongUsage

WEIGHTS = {"cat": 2.0, "1": 0.1, "no": 1e-05}


@promise("class-weights")
def test_all_forms_give_the_same_weights(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_text("\ufeffcat: 2\n1: 0.1\nno: 1e-5\n", "utf-8")
    for value in (str(path), "cat:2, 1:0.1,no:1e-5", {"cat": 2, "1": 0.1, "no": 1e-5}):
        assert parse_class_weights(value) == WEIGHTS
    assert weights_of_classes(WEIGHTS, ["1", "b", "cat", "no"]) == [0.1, 1.0, 2.0, 1e-05]


def test_names_with_separators_are_for_files(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_text('"a,b:c": 3\n')
    assert parse_class_weights(str(path)) == {"a,b:c": 3.0}
    assert parse_class_weights("balanced") == "balanced" and parse_class_weights(None) is None


WRONG = {
    "a:b:2": "'a:b:2' is not CLASS:WEIGHT; put weights of classes whose names contain : or , into a .yaml",
    "a,b:2": "'a' is not CLASS:WEIGHT",
    "a:2,": "'' is not CLASS:WEIGHT",
    "a:2,a:3": "the class 'a' occurs twice",
    "e\u0301:2,\xe9:3": "the class '\xe9' occurs twice",  # one name in two spellings of Unicode
    "a:-1": "the weight of 'a' must be 0 or a number from 0.000001 to 1,000,000, not '-1'",
    "a:nan": "the weight of 'a' must be",
    "a:1e7": "the weight of 'a' must be",
    "balance": "class_weights cannot be 'balance'; it takes balanced, text such as 'cat:2,dog:0.5', or a .yaml",
    "{a: [1]}": "the weight of 'a' must be 0 or a number from 0.000001 to 1,000,000, not 'a list or mapping'",
    "none.yaml": "'none.yaml' does not exist",
}
WRONG_FILES = {
    "e.yaml": ("a: 1\na: 2\n", "e.yaml: the class 'a' occurs twice"),
    "f.yaml": ("- a\n", "f.yaml must be a mapping"),
    "g.yaml": ("{", "class_weights: g.yaml is not valid YAML"),
    "j.yaml": ("", "j.yaml must be a mapping"),
    "k.yaml": ("a: true", "the weight of 'a' must be"),
    "weights.json": ("", "it takes balanced, text such as"),
}


@pytest.mark.parametrize("wrong", [*WRONG, *WRONG_FILES])
def test_a_fault_is_one_line(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, message = WRONG_FILES.get(wrong, ("", WRONG.get(wrong, "")))
    if wrong in WRONG_FILES:
        (tmp_path / wrong).write_text(content)
    with pytest.raises((WrongUsage, FileNotFoundError)) as caught:
        parse_class_weights(wrong)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_weights_must_fit_the_classes():
    with pytest.raises(WrongUsage, match=r"there is no class 'cta'; did you mean 'cat'\?"):
        weights_of_classes({"cta": 2.0}, ["cat", "dog"])
    with pytest.raises(WrongUsage, match="the weights of all classes are 0"):
        weights_of_classes({"cat": 0.0, "dog": 0.0}, ["cat", "dog"])
    assert weights_of_classes({"\u00e9": 2.0}, ["cat", "e\u0301"]) == [1, 2]  # decomposed Unicode
    weights = {"cat": 0.0}
    check_weighted(weights, ["cat", "dog"], {"train": [9, 1], "val": [0, 1]})
    with pytest.raises(WrongUsage, match="all images of val are of classes with weight 0"):
        check_weighted(weights, ["cat", "dog"], {"train": [9, 1], "val": [3, 0]})
