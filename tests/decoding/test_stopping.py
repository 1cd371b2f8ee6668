"""Where answers end, exact to the token: end tokens, stop strings, limits, and text held back until it is certain."""

import pytest

from harness.tiny_models import tiny_tokenizer
from peagle.decoding.stopping import StopCheck
from peagle.sampling_params import SamplingParams
from peagle.tokenizer import IncrementalDetokenizer

EOS = 2


def follow(token_ids, *, num_prompt_tokens=4, max_length=100, **settings):
    """The text given out with each token, up to the end, and why it ended there."""
    params = SamplingParams(**settings)
    detokenizer = IncrementalDetokenizer(tiny_tokenizer())
    check = StopCheck(params, detokenizer, frozenset({EOS}), num_prompt_tokens, max_length)
    texts = []
    for token_id in token_ids:
        text, finish_reason = check.add(token_id)
        texts.append(text)
        if finish_reason is not None:
            return texts, finish_reason
    return texts, None


def spelled(text):
    """One token for each byte of `text`, so that anything can be split over tokens."""
    tokenizer = tiny_tokenizer()
    return [token_id for character in text for token_id in tokenizer(character)["input_ids"]]


def test_tokens_are_given_out_as_they_come():
    assert follow(spelled("abc")) == (["a", "b", "c"], None)


def test_an_end_token_ends_the_answer_and_is_no_part_of_the_text():
    assert follow([*spelled("ab"), EOS, *spelled("c")]) == (["a", "b", ""], "stop")


def test_an_end_token_is_passed_over_on_request():
    texts, finish_reason = follow([*spelled("a"), EOS, *spelled("b")], ignore_eos=True)
    assert "".join(texts) == "ab" and finish_reason is None


def test_stop_tokens_of_the_request_end_the_answer_even_where_end_tokens_do_not():
    (stop,) = spelled("b")
    assert follow(spelled("abc"), stop_token_ids=(stop,), ignore_eos=True) == (["a", ""], "stop")


def test_a_stop_string_split_over_tokens_ends_the_answer_before_it():
    assert follow(spelled("ab###c"), stop=("###",)) == (["a", "b", "", "", ""], "stop")


def test_text_that_may_begin_a_stop_string_is_held_back_and_given_out_when_it_does_not():
    assert follow(spelled("a##b"), stop=("###",)) == (["a", "", "", "##b"], None)


def test_of_repeated_beginnings_only_what_can_still_match_is_held_back():
    texts, finish_reason = follow(spelled("aab"), stop=("ab",))
    assert (texts, finish_reason) == (["", "a", ""], "stop"), "the second a begins the match, the first is text"


@pytest.mark.parametrize("stops", [("user", "the"), ("the", "user")])
def test_the_earliest_stop_string_wins_whatever_their_order(stops):
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a the user")["input_ids"]
    texts, finish_reason = follow(ids, stop=stops)
    assert "".join(texts) == "a " and finish_reason == "stop"


def test_the_earliest_of_two_stop_strings_in_one_token_wins():
    (the,) = tiny_tokenizer()(" the")["input_ids"]
    texts, finish_reason = follow([*spelled("a"), the], stop=("he", " t"))
    assert (texts, finish_reason) == (["a", ""], "stop")


def test_a_stop_string_inside_a_token_cuts_the_text_there():
    (the,) = tiny_tokenizer()(" the")["input_ids"]
    assert follow([the], stop=("e",)) == ([" th"], "stop")


def test_held_text_is_given_out_when_an_end_token_comes_first():
    assert follow([*spelled("a##"), EOS], stop=("###",)) == (["a", "", "", "##"], "stop")


def test_held_text_is_given_out_at_the_token_limit():
    assert follow(spelled("a##b"), stop=("###",), max_tokens=3) == (["a", "", "##"], "length")


def test_the_token_limit_ends_the_answer_and_counts_the_end_token():
    assert follow(spelled("abcd"), max_tokens=2) == (["a", "b"], "length")
    assert follow([*spelled("a"), EOS], max_tokens=2) == (["a", ""], "stop"), "an end token in the last place is a stop"


def test_a_stop_string_complete_at_the_token_limit_is_a_stop():
    assert follow(spelled("ab"), stop=("b",), max_tokens=2) == (["a", ""], "stop")


def test_the_end_of_the_context_ends_the_answer():
    assert follow(spelled("abcd"), num_prompt_tokens=7, max_length=10) == (["a", "b", "c"], "length")
    assert follow(spelled("abcd"), num_prompt_tokens=7, max_length=10, max_tokens=2)[0] == ["a", "b"]


def test_a_character_of_several_tokens_is_given_out_whole():
    ids = tiny_tokenizer()("\u20ac!")["input_ids"]
    assert len(ids) == 4
    assert follow(ids) == (["", "", "\u20ac", "!"], None)


def test_bytes_that_never_became_a_character_show_as_replacement_at_the_end():
    ids = tiny_tokenizer()("\u20ac")["input_ids"][:2]
    texts, finish_reason = follow([*spelled("a"), *ids, EOS])
    assert "".join(texts) == "a\ufffd" and finish_reason == "stop"
    texts, finish_reason = follow([*spelled("a"), *ids], max_tokens=3)
    assert "".join(texts) == "a\ufffd" and finish_reason == "length"


def test_stop_strings_are_found_in_text_that_the_end_sets_free():
    ids = tiny_tokenizer()("\u20ac")["input_ids"][:2]
    texts, finish_reason = follow([*spelled("a"), *ids], stop=("\ufffd",), max_tokens=3)
    assert "".join(texts) == "a" and finish_reason == "stop"


def test_stop_strings_may_hold_characters_of_several_tokens():
    ids = tiny_tokenizer()("a\u20acb")["input_ids"]
    texts, finish_reason = follow(ids, stop=("\u20ac",))
    assert "".join(texts) == "a" and finish_reason == "stop"


@pytest.mark.parametrize(
    ("min_tokens", "text", "finish_reason"),
    [
        (0, "a", "stop"),
        (2, "a", "stop"),  # the string begins among the first tokens, but ends behind them
        (3, "a##b", "stop"),  # it ends with the last of the first tokens
        (5, "a##b", "stop"),
        (6, "a##b##c", None),
    ],
)
def test_a_stop_string_counts_where_it_ends_behind_the_first_tokens(min_tokens, text, finish_reason):
    texts, reason = follow(spelled("a##b##c"), stop=("##",), min_tokens=min_tokens)
    assert ("".join(texts), reason) == (text, finish_reason)


def test_a_stop_string_that_was_passed_over_may_overlap_with_one_that_counts():
    texts, reason = follow(spelled("###c"), stop=("##",), min_tokens=2)
    assert ("".join(texts), reason) == ("#", "stop")
