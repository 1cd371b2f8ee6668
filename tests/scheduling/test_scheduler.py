"""What the scheduler plans and whom it admits, rule by rule. That they hold together: test_scheduler_simulation.py."""

from typing import Any

import pytest

from harness.schedules import MAX_LENGTH, add, make, names, see, spans
from peagle.errors import CapacityError, ConfigError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.scheduling import scheduler as scheduler_module
from peagle.scheduling.config import SchedulerConfig
from peagle.scheduling.pages import PagePool
from peagle.scheduling.request import Request
from peagle.scheduling.scheduler import Scheduler

# Plans ----------------------------------------------------------------------------------------------------------------


def test_a_short_prompt_is_prefilled_and_decoded_in_one_plan_and_decoded_in_every_later_one() -> None:
    scheduler = make()
    request = add(scheduler, "a", 6)
    plan = scheduler.plan()
    assert spans(plan) == [("a", 0, 6)] and plan.chunks[0].is_last and plan.chunks[0].first_write == 0
    assert names(plan.decodes) == ["a"] and request.num_in_flight == 2 and request.row == 0
    plan = scheduler.plan()
    assert spans(plan) == [] and names(plan.decodes) == ["a"], "it does not wait for the host to see the first token"


def test_new_prompts_are_prefilled_beside_decoding_requests() -> None:
    scheduler = make()
    add(scheduler, "old", 6)
    scheduler.plan()
    add(scheduler, "new", 5)
    plan = scheduler.plan()
    assert spans(plan) == [("new", 0, 5)]
    assert names(plan.decodes) == ["old", "new"]


def test_a_request_held_to_a_grammar_is_decoded_only_when_the_host_has_seen_all_of_it() -> None:
    scheduler = make()
    add(scheduler, "free", 5)
    guide: Any = object()
    request = Request("held", [9, 8, 7], SamplingParams(max_tokens=9), 0, MAX_LENGTH, guide=guide)
    scheduler.add(request)
    assert names(scheduler.plan().decodes) == ["free"], "its first token is not known yet"
    assert names(scheduler.plan().decodes) == ["free"]
    see(scheduler, request)
    assert names(scheduler.plan().decodes) == ["free", "held"] and request.num_in_flight == 1
    assert names(scheduler.plan().decodes) == ["free"]
    scheduler.check_integrity()


def test_a_prompt_that_is_to_be_scored_is_run_whole_and_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "SCORED_TOKENS", 8)
    scheduler = make()
    prompt = list(range(14))
    add(scheduler, "first", prompt)
    scheduler.plan()
    scored = [
        Request(name, prompt, SamplingParams(prompt_logprobs=0), 0, MAX_LENGTH) for name in ("scored", "scored too")
    ]
    for request in scored:
        scheduler.add(request)
    add(scheduler, "other", prompt)
    assert spans(scheduler.plan()) == [("scored", 0, 8), ("other", 11, 14)], "pages are there, but they say no logits"
    plans = [spans(scheduler.plan()) for _ in range(3)]
    assert [span for plan in plans for span in plan if span[0] == "scored"] == [("scored", 8, 14)]
    assert [span for plan in plans for span in plan if span[0] == "scored too"][-1][2] == 14
    assert all(sum(end - start for name, start, end in plan if "scored" in name) <= 8 for plan in plans)
    scheduler.check_integrity()


def test_an_answer_of_one_token_needs_no_decode_pass() -> None:
    scheduler = make()
    request = add(scheduler, "a", 6, max_tokens=1)
    assert names(scheduler.plan().decodes) == []
    assert scheduler.plan().is_empty and scheduler.has_work, "the token is on its way"
    scheduler.commit(request, [7])
    scheduler.finish(request)
    assert (request.output_ids, scheduler.has_work, scheduler.pages.num_used) == ([7], False, 0)


def test_a_request_leaves_the_plans_when_its_last_token_must_be_in_flight() -> None:
    scheduler = make()
    request = add(scheduler, "a", 6, max_tokens=3, num_draft_tokens=2)
    assert names(scheduler.plan().decodes) == ["a"]
    assert names(scheduler.plan().decodes) == ["a"], "prefill and one pass bring two tokens at least"
    assert scheduler.plan().is_empty, "three passes bring three"
    assert request.num_in_flight == 3


def test_a_long_prompt_is_prefilled_in_chunks_and_decoded_with_its_last_one() -> None:
    scheduler = make(prefill_tokens=10)
    add(scheduler, "a", 25)
    plans = [scheduler.plan() for _ in range(3)]
    assert [spans(plan) for plan in plans] == [[("a", 0, 10)], [("a", 10, 20)], [("a", 20, 25)]]
    assert [names(plan.decodes) for plan in plans] == [[], [], ["a"]]


def test_of_several_long_prompts_each_leaves_half_to_the_younger_ones() -> None:
    scheduler = make(prefill_tokens=32)
    for name in "abc":
        add(scheduler, name, 80)
    assert spans(scheduler.plan()) == [("a", 0, 16), ("b", 0, 8), ("c", 0, 8)]


def test_a_short_prompt_gets_through_behind_long_ones_and_what_it_leaves_goes_to_them() -> None:
    scheduler = make(prefill_tokens=32)
    for name, length in (("a", 80), ("b", 80), ("short", 5)):
        add(scheduler, name, length)
    plan = scheduler.plan()
    assert spans(plan) == [("a", 0, 16), ("b", 0, 11), ("short", 0, 5)]
    assert names(plan.decodes) == ["short"]


def test_a_lower_limit_on_prompt_tokens_holds_while_another_request_runs_or_waits() -> None:
    scheduler = make(prefill_tokens=32)
    add(scheduler, "alone", 80)
    assert spans(scheduler.plan(shared_tokens=10)) == [("alone", 0, 32)], "nobody waits for it"
    stream = add(scheduler, "stream", 5)
    assert spans(scheduler.plan(shared_tokens=10)) == [("alone", 32, 37), ("stream", 0, 5)]
    assert spans(scheduler.plan(shared_tokens=10)) == [("alone", 37, 47)]
    assert spans(scheduler.plan(shared_tokens=100)) == [("alone", 47, 79)], "prefill_tokens stays the limit"
    scheduler.finish(stream)
    assert spans(scheduler.plan(shared_tokens=10)) == [("alone", 79, 80)]


def test_a_plan_has_at_most_max_chunks_chunks() -> None:
    scheduler = make(max_chunks=2)
    for name in "abc":
        add(scheduler, name, 5)
    assert names(chunk.request for chunk in scheduler.plan().chunks) == ["a", "b"]
    assert names(chunk.request for chunk in scheduler.plan().chunks) == ["c"]


def test_pages_grow_with_what_may_be_in_flight_and_the_plan_says_whose() -> None:
    scheduler = make(page_size=4)
    request = add(scheduler, "a", 6, num_draft_tokens=2)
    scheduler.plan()
    assert len(request.pages) == 4, "6 tokens, 3 in flight, 4 positions behind: 13"
    assert scheduler.plan().grown == (), "with 6 in flight it reaches 16, the end of its fourth page"
    assert scheduler.plan().grown == (request,) and len(request.pages) == 5
    scheduler.check_integrity()


# Admission ------------------------------------------------------------------------------------------------------------


def test_requests_wait_for_a_row_in_the_order_of_arrival() -> None:
    scheduler = make(max_batch=2)
    first, second, third = (add(scheduler, name, 5) for name in "abc")
    scheduler.plan()
    assert (first.row, second.row, third.row) == (0, 1, None)
    assert (names(scheduler.running), names(scheduler.waiting)) == (["a", "b"], ["c"])
    scheduler.finish(first)
    scheduler.plan()
    assert third.row == 0, "the row that was given back"


def test_a_small_request_does_not_pass_an_older_one_that_does_not_fit() -> None:
    scheduler = make(num_pages=11, page_size=4)
    running = add(scheduler, "running", 20, max_tokens=10)
    scheduler.plan()
    big, small = add(scheduler, "big", 30, max_tokens=4), add(scheduler, "small", 2, max_tokens=2)
    assert spans(scheduler.plan()) == []
    assert (big.state, small.state) == ("waiting", "waiting")
    scheduler.finish(running)
    assert names(chunk.request for chunk in scheduler.plan().chunks) == ["big", "small"]


def test_a_request_is_admitted_only_with_pages_for_its_whole_text() -> None:
    scheduler = make(num_pages=11, page_size=4, prefill_tokens=4)
    add(scheduler, "a", 20, max_tokens=4)
    scheduler.plan()
    assert scheduler.pages.num_used == 6, "20 tokens, and the first of the answer"
    waiting = add(scheduler, "b", 16, max_tokens=4)
    scheduler.plan()
    assert waiting.state == "waiting", "5 pages wanted, 4 are free"


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = make(num_pages=11, page_size=4)
    with pytest.raises(CapacityError) as caught:
        add(scheduler, "a", 30, max_tokens=9, num_draft_tokens=2)
    assert caught.value.message == (
        "request 'a': 30 prompt and up to 9 output tokens need 11 pages of 4 tokens, but the KV cache has 10"
    )
    assert caught.value.hint is not None and "lower max_tokens" in caught.value.hint
    assert not scheduler.has_work
    add(scheduler, "b", 30, max_tokens=6, num_draft_tokens=2)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused() -> None:
    scheduler = make()
    with pytest.raises(CapacityError) as caught:
        add(scheduler, "a", MAX_LENGTH)
    assert "a prompt of 200 tokens leaves no room for output" in caught.value.message
    assert "hint: shorten the prompt, or raise --max-length" in str(caught.value)


def test_an_id_in_use_is_refused() -> None:
    scheduler = make()
    add(scheduler, "a", 5)
    with pytest.raises(RequestError, match="request 'a' is already being served"):
        add(scheduler, "a", 5)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefill_tokens must be at least 1, got 0"):
        SchedulerConfig(max_batch=1, max_length=10, prefill_tokens=0)


def test_new_requests_are_held_back_to_share_a_prefill_pass_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "DECODES_PER_ADMISSION", 2)
    scheduler = Scheduler(
        SchedulerConfig(max_batch=12, max_length=64, prefill_tokens=64, max_delay=3), PagePool(200, page_size=4)
    )

    def ask(name: str) -> Request:
        request = Request(name, [1, 2, 3, len(name)], SamplingParams(max_tokens=50), 0, 64)
        scheduler.add(request)
        return request

    first = [ask("a" * length) for length in range(1, 7)]
    assert [chunk.request for chunk in scheduler.plan().chunks] == first, "nothing decodes yet, so nobody waits"
    alone = ask("alone")
    for _ in range(3):
        plan = scheduler.plan()
        assert not plan.chunks and len(plan.decodes) == 6
    assert [chunk.request for chunk in scheduler.plan().chunks] == [alone], "it has waited long enough"
    together = [ask("b" * length) for length in range(8, 11)]
    assert [chunk.request for chunk in scheduler.plan().chunks] == together, "enough for one pass"


def test_few_prompt_tokens_share_the_pass_of_a_decode_step_and_decode_from_the_next_one_on() -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_batch=16, max_length=800, prefill_tokens=512, max_delay=3, shares_passes=True),
        PagePool(400, page_size=16),
    )

    def ask(length: int, **settings: Any) -> Request:
        name = str(len(scheduler.running) + len(scheduler.waiting))
        request = Request(name, [int(name) + 1] * length, SamplingParams(max_tokens=50, **settings), 0, 800)
        scheduler.add(request)
        return request

    first = ask(100)
    plan = scheduler.plan()
    assert not plan.shares_pass and plan.decodes == (first,), "nothing decodes yet"
    few = [ask(100), ask(156)]
    plan = scheduler.plan()
    assert plan.shares_pass and plan.decodes == (first,) and [chunk.request for chunk in plan.chunks] == few
    assert scheduler.plan().decodes == (first, *few)
    for settings in ({"length": 257}, {"length": 10, "presence_penalty": 0.5}, {"length": 10, "prompt_logprobs": 0}):
        request = ask(**settings)
        plan = scheduler.plan()
        assert not plan.shares_pass and request in plan.decodes, settings
        scheduler.finish(request)
    for _ in range(8):
        ask(3)
    assert not scheduler.plan().shares_pass, "the pass has room for 7 prompts and the padding"


def test_a_few_new_requests_take_no_more_than_a_shared_pass_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "DECODES_PER_ADMISSION", 2)
    config = SchedulerConfig(max_batch=12, max_length=900, prefill_tokens=512, max_delay=3, shares_passes=True)
    scheduler = Scheduler(config, PagePool(400, page_size=16))

    def ask(name: str, length: int) -> Request:
        token = len(scheduler.running) + len(scheduler.waiting) + 1
        request = Request(name, [token] * length, SamplingParams(max_tokens=50), 0, 900)
        scheduler.add(request)
        return request

    decoding = [ask(f"first {index}", 4 + index) for index in range(8)]
    assert len(scheduler.plan().decodes) == 8
    first, second, long = ask("first", 100), ask("second", 150), ask("long", 300)
    sizes = []
    for _ in range(3):
        plan = scheduler.plan()
        assert plan.shares_pass and set(decoding) <= set(plan.decodes)
        sizes.append({chunk.request.request_id: chunk.end - chunk.start for chunk in plan.chunks})
    assert sizes == [{"first": 100, "second": 150, "long": 6}, {"long": 256}, {"long": 38}]
    assert set(scheduler.plan().decodes) == {*decoding, first, second, long}
    ask("penalized", 10).adjusts = True
    assert not scheduler.plan().chunks, "its pass is not shared, and others may still come to share it"
    scheduler.abort("penalized")
    scheduler.plan()
    short = ask("short", 10)
    assert not scheduler.plan(may_share=False).chunks
    assert [chunk.request for chunk in scheduler.plan().chunks] == [short]
