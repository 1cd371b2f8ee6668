"""Pages the scheduler shares, takes away and gives back: reuse, preemption, abort, results."""

import pytest

from harness.schedules import add, make, names, see, spans
from peagle.scheduling.pages import IntegrityError

# Reuse ----------------------------------------------------------------------------------------------------------------


def test_two_requests_share_the_pages_of_their_common_beginning() -> None:
    scheduler = make()
    first = add(scheduler, "a", [*range(10), 50, 51, 52])
    scheduler.plan()
    second = add(scheduler, "b", [*range(10), 60, 61, 62])
    (chunk,) = scheduler.plan().chunks
    assert (chunk.start, chunk.end, chunk.first_write) == (7, 13, 8), "one token early, and that one is not written"
    assert second.pages[:2] == first.pages[:2] and not set(second.pages[2:]) & set(first.pages)
    assert second.num_cached_tokens == 7
    scheduler.check_integrity()


def test_the_last_token_is_run_again_even_when_all_pages_of_the_prompt_are_there() -> None:
    scheduler = make()
    add(scheduler, "a", range(8))
    scheduler.plan()
    second = add(scheduler, "b", range(8))
    (chunk,) = scheduler.plan().chunks
    assert (chunk.start, chunk.end, chunk.first_write, chunk.is_last) == (7, 8, 8, True)
    assert second.num_cached_tokens == 7


def test_pages_are_found_after_their_request_is_gone_answer_included() -> None:
    scheduler = make()
    request = add(scheduler, "a", range(6))
    scheduler.plan()
    see(scheduler, request, 91, 92, 93, 94, 95)  # the text is 12 tokens; the newest is not in the cache
    scheduler.finish(request)
    assert (scheduler.pages.num_used, scheduler.pages.num_cached) == (0, 2)
    add(scheduler, "b", [*request.token_ids, 7])
    (chunk,) = scheduler.plan().chunks
    assert (chunk.start, chunk.end, chunk.first_write) == (7, 13, 8)


def test_pages_without_drafter_entries_are_for_requests_without_drafts() -> None:
    scheduler, text = make(), [*range(6), 91, 92, 93, 94, 95]
    plain = add(scheduler, "plain", text[:6])
    scheduler.plan()
    see(scheduler, plain, *text[6:])
    scheduler.finish(plain)
    drafted = add(scheduler, "drafted", text, num_draft_tokens=4)
    scheduler.plan()
    assert drafted.num_cached_tokens == 0
    again, other = add(scheduler, "again", text), add(scheduler, "other", text, num_draft_tokens=4)
    scheduler.plan()
    assert again.num_cached_tokens == other.num_cached_tokens == 7
    assert again.pages[:2] == other.pages[:2] == drafted.pages[:2], "the pages with entries took their place"
    scheduler.check_integrity()


def test_a_prompt_has_drafter_entries_though_its_request_stopped_drafting_with_its_first_step() -> None:
    scheduler, text = make(), [*range(8), *range(91, 97)]
    paused = add(scheduler, "paused", text[:8], num_draft_tokens=4)
    scheduler.plan()
    paused.is_paused = True
    see(scheduler, paused, *text[8:])
    drafted = add(scheduler, "drafted", text, num_draft_tokens=4)
    scheduler.plan()
    assert drafted.pages[:2] == paused.pages[:2] and drafted.pages[2] != paused.pages[2]
    assert drafted.num_cached_tokens == 7
    scheduler.check_integrity()


def test_a_request_with_drafts_does_not_wait_for_the_pages_of_one_without() -> None:
    scheduler = make()
    add(scheduler, "plain", range(12))
    add(scheduler, "drafted", range(12), num_draft_tokens=4)
    add(scheduler, "late", range(12))
    assert spans(scheduler.plan()) == [("plain", 0, 12), ("drafted", 0, 12)]
    assert spans(scheduler.plan()) == [("late", 11, 12)]


def test_a_page_is_found_only_after_the_plan_that_writes_it() -> None:
    scheduler = make(prefill_tokens=8)
    add(scheduler, "a", range(20))
    add(scheduler, "b", range(20))
    assert spans(scheduler.plan()) == [("a", 0, 8)], "b waits for the pages that a is computing"
    assert spans(scheduler.plan()) == [("a", 8, 16)]
    assert spans(scheduler.plan()) == [("a", 16, 20)]
    plan = scheduler.plan()
    assert spans(plan) == [("b", 19, 20)] and plan.chunks[0].first_write == 20


def test_a_request_goes_its_own_way_where_the_common_beginning_ends_or_its_writer_is_aborted() -> None:
    scheduler = make(prefill_tokens=8)
    add(scheduler, "a", range(20))
    add(scheduler, "b", [*range(6), *range(50, 64)])
    assert spans(scheduler.plan()) == [("a", 0, 8)]
    assert spans(scheduler.plan()) == [("a", 8, 12), ("b", 3, 7)]
    scheduler.abort("a")
    assert spans(scheduler.plan()) == [("b", 7, 15)]


def test_pages_of_an_aborted_plan_are_not_found() -> None:
    scheduler = make()
    add(scheduler, "a", range(12))
    scheduler.plan()
    scheduler.abort("a")  # before the launch, for all the scheduler knows
    add(scheduler, "b", range(12))
    assert spans(scheduler.plan()) == [("b", 0, 12)]


def test_without_reuse_every_prompt_is_prefilled() -> None:
    scheduler = make(reuse=False)
    for name in "ab":
        add(scheduler, name, range(12))
    assert spans(scheduler.plan()) == [("a", 0, 12), ("b", 0, 12)]


# Preemption, abort, results -------------------------------------------------------------------------------------------


def test_a_request_that_cannot_grow_preempts_the_youngest_which_loses_no_token() -> None:
    scheduler = make(num_pages=8, page_size=4)
    old, young = add(scheduler, "old", 9, max_tokens=15), add(scheduler, "young", 9, max_tokens=15)
    scheduler.plan()
    assert scheduler.pages.num_used == 6
    see(scheduler, old, 1)
    see(scheduler, young, 21)
    epoch = young.epoch
    while not (plan := scheduler.plan()).preempted:
        for request in plan.decodes:
            see(scheduler, request)
        text = list(young.token_ids)
    assert names(plan.preempted) == ["young"] and names(plan.decodes) == ["old"]
    assert (young.state, young.row, young.pages, young.num_in_flight) == ("waiting", None, [], 0)
    assert young.epoch == epoch + 1 and young.num_preemptions == 1 and young.token_ids == text
    add(scheduler, "new", 2, max_tokens=2)
    assert names(scheduler.waiting) == ["young", "new"], "it keeps its place"
    scheduler.check_integrity()
    scheduler.finish(old)
    plan = scheduler.plan()
    assert plan.chunks[0].request is young and plan.chunks[0].end == len(text), "the whole text is prefilled again"
    assert plan.chunks[0].is_last and young in plan.decodes


def test_the_youngest_preempts_itself_when_it_is_the_one_that_cannot_grow() -> None:
    scheduler = make(num_pages=8, page_size=4)
    old, young = add(scheduler, "old", 9, max_tokens=3), add(scheduler, "young", 11, max_tokens=15)
    scheduler.plan()
    assert (len(old.pages), len(young.pages)) == (3, 3)
    hog = scheduler.pages.allocate(1)
    see(scheduler, young)
    plan = scheduler.plan()
    assert names(plan.preempted) == ["young"] and "young" not in names(plan.decodes)
    scheduler.pages.release(hog)


def test_requests_that_hold_all_their_pages_keep_none_from_a_waiting_one() -> None:
    scheduler = make(num_pages=5, page_size=4)  # two requests of two pages: all that both can use
    add(scheduler, "a", 5, max_tokens=3)
    add(scheduler, "b", 5, max_tokens=3)
    assert spans(scheduler.plan()) == [("a", 0, 5), ("b", 0, 5)]
    scheduler = make(num_pages=5, page_size=4)
    add(scheduler, "grows", 5, max_tokens=4)
    add(scheduler, "waits", 5, max_tokens=3)
    assert spans(scheduler.plan()) == [("grows", 0, 5)]


def test_nobody_is_admitted_in_the_plan_that_preempts() -> None:
    scheduler = make()
    add(scheduler, "old", 9)
    young = add(scheduler, "young", 9, num_draft_tokens=4)
    for _ in range(4):  # passes that nobody has seen take pages, which it can begin again without
        scheduler.plan()
    hog = scheduler.pages.allocate(scheduler.pages.num_free)
    plan = scheduler.plan()
    assert names(plan.preempted) == ["young"] and names(plan.decodes) == ["old"]
    assert plan.chunks == () and young.state == "waiting"
    num_needed = scheduler.pages.pages_for(young.reach(1)) + len(plan.decodes)
    assert num_needed <= scheduler.pages.num_free, "or memory alone would have kept it out"
    assert [chunk.request for chunk in scheduler.plan().chunks] == [young], "the next plan lets it in"
    scheduler.pages.release(hog)


def test_abort_while_waiting_in_prefill_and_in_decode_gives_everything_back() -> None:
    scheduler = make(max_batch=2, prefill_tokens=10)
    decoding = add(scheduler, "decoding", 5)
    scheduler.plan()
    prefilling, waiting = add(scheduler, "prefilling", 40), add(scheduler, "waiting", 5)
    scheduler.plan()
    assert [r.state for r in (decoding, prefilling, waiting)] == ["decode", "prefill", "waiting"]
    for request in (waiting, prefilling, decoding):
        assert scheduler.abort(request.request_id) is request
        assert (request.state, request.epoch, request.row, request.pages) == ("finished", 1, None, [])
        scheduler.check_integrity()
    assert (scheduler.has_work, scheduler.pages.num_used, scheduler.plan().is_empty) == (False, 0, True)
    assert scheduler.abort("decoding") is None and scheduler.abort("never seen") is None


def test_abort_of_a_preempted_request_gives_everything_back() -> None:
    scheduler = make(num_pages=8, page_size=4)
    add(scheduler, "old", 9, max_tokens=15)
    young = add(scheduler, "young", 9, max_tokens=15)
    while not (plan := scheduler.plan()).preempted:
        for request in plan.decodes:
            see(scheduler, request)
    assert scheduler.abort("young") is young and young.epoch == 2
    scheduler.abort("old")
    assert scheduler.pages.num_used == 0


def test_a_result_that_nothing_in_flight_can_have_given_is_refused() -> None:
    scheduler = make()
    request = add(scheduler, "a", 5)
    scheduler.plan()
    scheduler.commit(request, [1, 2], num_passes=2)
    assert (request.output_ids, request.num_in_flight) == ([1, 2], 0)
    with pytest.raises(IntegrityError, match="request 'a': no pass in flight"):
        scheduler.commit(request, [3])


def test_what_is_held_when_nothing_runs_is_named() -> None:
    scheduler = make()
    scheduler.check_idle()
    scheduler.pages.allocate(2)
    with pytest.raises(IntegrityError, match="no requests, but 2 pages are held"):
        scheduler.check_idle()


def test_contradictions_between_requests_and_pages_are_named() -> None:
    scheduler = make()
    first, second = add(scheduler, "a", 5), add(scheduler, "b", 5)
    scheduler.plan()
    scheduler.check_integrity()
    second.row = first.row
    with pytest.raises(IntegrityError, match="rows are lost or held twice"):
        scheduler.check_integrity()
    second.row = 1
    first.arrival = 5
    with pytest.raises(IntegrityError, match="not in order of arrival"):
        scheduler.check_integrity()
    first.arrival = 0
    scheduler.pages.share(second.pages[:1])
    with pytest.raises(IntegrityError, match=f"'b' may write to page {second.pages[0]}, which others can read"):
        scheduler.check_integrity()
    scheduler.pages.release(second.pages[:1])
    second.pages.append(scheduler.pages.capacity)
    with pytest.raises(IntegrityError, match="'b' may write to page 100"):
        scheduler.check_integrity()
