"""What the target is asked to write: settings that make no sense, and dialogs that say the same."""

import pytest

from peagle.data.config import SynthesisConfig, drawn_number
from peagle.data.prompts import Dialog
from peagle.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperatures": ()}, "temperatures must be 0 or more, got none"),
        ({"temperatures": (0.5, -1)}, "temperatures must be 0 or more, got 0.5, -1"),
        ({"question_temperature": -1.0}, "question_temperature must be at least 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"given_share": 2}, "given_share must be between 0 and 1"),
        ({"system_prompts": ()}, "system_prompts is empty"),
        ({"num_held_out": 3, "temperatures": (1.0,)}, "temperatures [1.0] has no 0"),
        ({"max_length": 4}, "max_length must be at least 8, got 4"),
        ({"min_answer_tokens": 0}, "min_answer_tokens must be at least 1"),
    ],
)
def test_bad_settings_of_a_synthesis_are_refused(settings, words):
    with pytest.raises(ConfigError) as caught:
        SynthesisConfig(**settings)
    assert words in caught.value.message


def dialog(*turns):
    """Turns as (role, content), or as text of the user."""
    pairs = [("user", turn) if isinstance(turn, str) else turn for turn in turns]
    return Dialog("file:1", [{"role": role, "content": content} for role, content in pairs])


def test_dialogs_have_the_same_key_where_all_messages_say_the_same():
    kind, rude = ("system", "Be kind."), ("system", "Be rude.")
    different = [dialog("a"), dialog("b"), dialog(kind, "a"), dialog(rude, "a"), dialog("a", "b"), dialog(kind)]
    different.append(Dialog("file:1", [{"role": "user", "content": "a", "name": "Ada"}]))
    assert len({one.key() for one in different}) == len(different)
    assert (
        dialog(kind, "a").key()
        == dialog(("system", " Be kind.\n"), "a ").key()
        == Dialog("x", dialog(kind, "a")[1]).key()
    )


def test_the_key_of_a_question_alone_is_that_of_its_words_as_shards_of_earlier_versions_have_it():
    assert dialog(" a question ").key() == drawn_number("a question")


def test_the_first_turn_is_what_is_said_up_to_the_users_first_message_without_an_assistant():
    whole = dialog(("assistant", "Hi"), ("system", "s"), "first", ("assistant", "b"), "second")
    assert whole.first_turn() == dialog(("system", "s"), "first")
