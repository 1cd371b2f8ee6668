"""One request: what it may reach, when it wants more, and that its contradictions are named."""

from typing import Any

import pytest

from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.pages import IntegrityError
from peagle.scheduling.request import Request


def request_of(num_prompt: int = 5, max_tokens: int = 10, num_draft_tokens: int = 3, max_length: int = 100) -> Request:
    return Request("r", range(num_prompt), SamplingParams(max_tokens=max_tokens), num_draft_tokens, max_length)


@pytest.mark.parametrize(("max_length", "expected"), [(100, 15), (15, 15), (12, 12)])
def test_the_text_ends_with_max_tokens_or_at_the_engines_limit(max_length: int, expected: int) -> None:
    assert request_of(max_length=max_length).max_length == expected


def test_the_request_owns_its_text() -> None:
    prompt = [1, 2, 3]
    request = Request("r", prompt, SamplingParams(), 0, 100)
    request.token_ids.append(4)
    assert (prompt, request.prompt_length, request.output_ids) == ([1, 2, 3], 3, [4])


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        Request("r7", [], SamplingParams(), 0, 100)
    assert str(caught.value) == "request 'r7' has an empty prompt\nhint: pass at least one token"


@pytest.mark.parametrize(
    ("num_draft_tokens", "num_in_flight", "expected"),
    [
        (0, 0, 5),  # the newest token alone
        (0, 2, 7),
        (3, 0, 11),  # 3 verified, 1 emitted behind them, 2 placeholders: the newest sits at 4, the last at 10
        (3, 1, 15),
        (3, 2, 19),
        (3, 9, 21),  # never beyond the longest text and what hangs from it
    ],
)
def test_a_pass_reaches_behind_everything_that_earlier_ones_may_have_emitted(
    num_draft_tokens: int, num_in_flight: int, expected: int
) -> None:
    assert request_of(num_draft_tokens=num_draft_tokens).reach(num_in_flight) == expected


def test_no_pass_is_wanted_once_the_last_token_is_on_the_way() -> None:
    request = request_of(max_tokens=2)
    assert request.wants_decode
    request.num_in_flight = 1
    assert request.wants_decode
    request.num_in_flight = 2
    assert not request.wants_decode


def test_scores_are_wanted_until_all_but_the_first_token_of_the_prompt_have_one() -> None:
    request = Request("r", [4, 5, 6], SamplingParams(prompt_logprobs=1), 0, 15)
    entry: Any = object()
    for place, is_wanted in ((1, True), (2, False)):
        request.prompt_scores[place] = entry
        assert request.wants_scores is is_wanted
    assert not Request("r", [4, 5], SamplingParams(), 0, 15).wants_scores
    assert not Request("r", [4], SamplingParams(prompt_logprobs=1), 0, 15).wants_scores


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"row": None}, "has row None but is in decode"),
        ({"state": "waiting", "row": None}, "has no row but holds something on the device"),
        ({"token_ids": list(range(16))}, "is longer than its max_length"),
        ({"state": "prefill"}, "has nothing left to prefill"),
        ({"num_in_flight": 3}, "has no page for a position it touches"),
        ({"num_registered": 2}, "may write to a page that others can find"),
    ],
)
def test_a_contradiction_is_named(changes: dict[str, Any], complaint: str) -> None:
    request = request_of()
    request.state, request.row, request.pages = "decode", 0, [1, 2, 3, 4]
    request.num_prefilled, request.num_registered, request.num_in_flight = 5, 1, 2
    request.check_integrity(page_size=4)
    for name, value in changes.items():
        setattr(request, name, value)
    with pytest.raises(IntegrityError, match=f"request 'r' {complaint}"):
        request.check_integrity(page_size=4)
