"""Names of files and classes in messages and on pages."""

from hypothesis import example, given
from hypothesis import strategies as st

from finetune.system.messages import shown


@given(st.text(st.characters()))
@example("new\nline\x00 \u202egnp.exe \udcff")
def test_any_name_is_shown_on_one_line_without_control_characters(name):
    text = shown(name)
    assert len(text.splitlines()) <= 1
    assert text.encode("utf-8").decode() == text
    assert not any(ord(letter) < 32 or 0x202A <= ord(letter) <= 0x202E for letter in text)


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
@example("caf\xe9 \u732b")
def test_letters_of_any_language_are_shown_as_they_are(name):
    assert shown(name) == name
