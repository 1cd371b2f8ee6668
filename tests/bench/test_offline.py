"""The closed loop and the sweep: over a stand-in with a clock of its own, then over the real engine."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from harness.tiny_models import tiny_drafter, tiny_target
from peagle.bench.cells import Cell, compare_with_plain
from peagle.bench.offline import (
    cells_of,
    closed_loop,
    depths_of,
    llm_factory,
    reason_of,
    run_cell,
    sweep,
    warm_up,
)
from peagle.console.arguments import WorkloadArguments
from peagle.decoding.acceptance import Acceptance, VerifiedDraft
from peagle.decoding.reference import decode
from peagle.errors import CapacityError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@dataclass
class StandIn:
    """An engine in which a step takes a second, the first one of a request its prefill, the others `pace` tokens."""

    pace: int = 1
    now: float = 100.0
    flight: dict = field(default_factory=dict)
    prompts: list = field(default_factory=list)
    most_in_flight: int = 0
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0
    is_closed: bool = False
    device_times: object = None
    busy: float = 0.0
    """the part of a step in which the device works"""

    @property
    def engine(self):
        return self

    def clock(self):
        return self.now

    def add(self, prompt_ids, params):
        name = f"r{len(self.prompts)}"
        self.prompts.append(prompt_ids)
        self.flight[name] = SimpleNamespace(ids=prompt_ids, params=params, arrived=self.now, first=None, tokens=[])
        self.most_in_flight = max(self.most_in_flight, len(self.flight))
        return name

    def step(self):
        self.now += 1.0
        done = []
        for name, request in list(self.flight.items()):
            if request.first is None:
                self.num_prefill_tokens += len(request.ids)
                request.first, count = self.now, 1
            else:
                count = self.pace
            count = min(count, request.params.max_tokens - len(request.tokens))
            request.tokens += [sum(request.ids)] * count
            self.num_output_tokens += count
            if len(request.tokens) == request.params.max_tokens:
                done.append(self.output(name, self.flight.pop(name)))
        return done

    def output(self, name, request):
        drafts = Acceptance(2, (2,) * (self.pace - 1))
        metrics = SimpleNamespace(
            arrived=request.arrived,
            first_token_at=request.first,
            finished_at=self.now,
            acceptance=drafts,
            num_cached_tokens=1,
            num_preemptions=2,
            num_draft_tokens=2 * (self.pace - 1),
        )
        outputs, text = [SimpleNamespace(token_ids=request.tokens)], f"answer to {request.ids[0]}"
        return SimpleNamespace(
            request_id=name,
            prompt_token_ids=request.ids,
            outputs=outputs,
            text=text,
            metrics=metrics,
            verified_drafts=[VerifiedDraft(len(request.ids), 1, self.pace - 1)],
        )

    def stats(self):
        return SimpleNamespace(
            num_prefill_tokens=self.num_prefill_tokens,
            num_output_tokens=self.num_output_tokens,
            device_seconds=self.busy * self.now,
        )

    def step_times(self, batch):
        return self.device_times

    def close(self):
        self.is_closed = True


def test_a_closed_loop_keeps_the_concurrency_and_starts_the_next_when_one_ends():
    llm = StandIn()
    loop = closed_loop(llm, PROMPTS, [0, 1, 2, 0, 1], SamplingParams(max_tokens=4), 2, clock=llm.clock)
    assert llm.most_in_flight == 2 and not llm.flight
    assert llm.prompts == [PROMPTS[index] for index in (0, 1, 2, 0, 1)]
    assert [index for index, _, _ in loop.outputs] == [0, 1, 2, 0, 1]
    assert loop.seconds == 12.0, "three rounds of four steps"
    assert loop.steady_tokens_per_second == pytest.approx(16 / 8), "until the last round, which is half empty"


def test_a_conversation_keeps_its_place_and_asks_each_turn_with_the_answers_before_it():
    llm, asked = StandIn(), []

    def following(index, answers):
        asked.append((index, list(answers)))
        return [10 * index + len(answers)]

    params = SamplingParams(max_tokens=4)
    loop = closed_loop(llm, PROMPTS, [1, 2], params, 1, num_turns=[3, 1], following=following, clock=llm.clock)
    assert [(index, turn) for index, turn, _ in loop.outputs] == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert llm.prompts == [PROMPTS[1], [11], [12], PROMPTS[2]]
    assert asked == [(1, ["answer to 4"]), (1, ["answer to 4", "answer to 11"])]
    assert llm.most_in_flight == 1 and loop.steady_tokens_per_second == pytest.approx(1.0)


class Asked:
    """Conversations of two turns, one turn and one turn, whose second prompt is made up."""

    num_turns = (2, 1, 1)

    def following(self, index, answers):
        return [100 + index]


def test_requests_are_turns_and_a_repeated_conversation_is_cut_where_they_end():
    llm, params = StandIn(pace=2), SamplingParams(max_tokens=3)
    cell = Cell("p-eagle", 1, 1)
    result = run_cell(llm, cell, PROMPTS, params, 5, conversations=Asked(), clock=llm.clock)
    assert [(each.prompt, each.turn, each.asked) for each in result.answers] == [
        (0, 0, None), (0, 1, (100,)), (1, 0, None), (2, 0, None), (0, 0, None),
    ]  # fmt: skip
    by_category = result.by_category(["code", "chat", "code"])
    assert {name: each["num_requests"] for name, each in by_category.items()} == {"code": 4, "chat": 1}
    assert by_category["chat"] == {
        "num_requests": 1,
        "num_output_tokens": 3,
        "tokens_per_second_per_request": 2.0,
        "acceptance_length": 2.0,
        "num_drafts": 2,
    }


def test_fewer_requests_than_places_are_no_error():
    llm = StandIn()
    loop = closed_loop(llm, PROMPTS, [0], SamplingParams(max_tokens=2), 8, clock=llm.clock)
    assert len(loop.outputs) == 1 and loop.steady_tokens_per_second is None


def test_latencies_follow_the_usual_definitions():
    llm = StandIn(pace=3)
    cell = Cell("p-eagle", 2, 2)
    result = run_cell(llm, cell, PROMPTS, SamplingParams(max_tokens=7), 4, clock=llm.clock)
    report = result.report()
    assert set(report["ttft_ms"]) == {"mean", "p5", "p25", "p50", "p75", "p95", "p99"}
    assert set(report["ttft_ms"].values()) == {1000.0}
    assert report["time_per_output_token_ms"]["mean"] == pytest.approx(2 / 6 * 1000, abs=1e-3)
    assert report["num_requests"] == 4 and report["num_output_tokens"] == 28
    assert report["output_tokens_per_second"] == round(28 / 6, 2)
    assert report["acceptance_length"] == 3.0 and report["num_drafts"] == 8
    assert report["num_verified_draft_tokens"] == 16, "2 drafts of 2 tokens in each of 4 requests"
    assert report["num_cached_tokens"] == 4 and report["num_preemptions"] == 8


def test_an_answer_of_one_token_has_no_time_per_output_token():
    llm = StandIn()
    result = run_cell(llm, Cell("none", 0, 1), PROMPTS, SamplingParams(max_tokens=1), 3, clock=llm.clock)
    assert result.report()["time_per_output_token_ms"] is None and result.acceptance is None
    assert result.step is None, "no step was undisturbed"


def test_the_warm_up_times_undisturbed_steps_and_leaves_the_prefix_cache_of_the_prompts_empty():
    llm = StandIn(device_times=SimpleNamespace(step=0.45, verify=0.3, draft=0.15), busy=0.9)
    split = warm_up(llm, PROMPTS, SamplingParams(max_tokens=256), 4, llm.clock)
    found = (split.wall, split.device, split.verify, split.draft)
    assert found == pytest.approx((1.0, 0.9, 0.6, 0.3)), "the device's own time, in the measured shares"
    assert split.host_gap == pytest.approx(0.1)
    assert llm.prompts == [[2, 3], [5], [7, 8, 9], [2, 3]]
    assert llm.num_output_tokens == 4 * 64


def test_steps_with_a_prefill_or_an_end_are_not_counted_as_undisturbed():
    llm = StandIn()
    loop = closed_loop(llm, PROMPTS, [0, 1], SamplingParams(max_tokens=6), 1, time_steps=True, clock=llm.clock)
    assert loop.walls == [1.0] * 4, "of each request's six steps: prefill, two to settle, two that count, the end"


def test_every_prompt_is_asked_and_every_place_is_taken_eight_times():
    requests = WorkloadArguments().requests
    assert requests(1, 3) == 3 and requests(2, 3) == 16
    assert requests(8, 80) == 80 and requests(128, 80) == 1024
    assert WorkloadArguments(limit=3).requests(128, 3) == 3, "a limit means that many prompts"


def test_cells_of_one_engine_follow_each_other_and_plain_has_no_depth():
    cells = cells_of(("none", "p-eagle"), {"p-eagle": (3, 5)}, (8, 1))
    assert [(cell.method, cell.num_draft_tokens, cell.concurrency) for cell in cells] == [
        *(("none", 0, places) for places in (1, 8)),
        *(("p-eagle", depth, places) for depth in (3, 5) for places in (1, 8)),
    ]


def test_the_engines_own_choice_is_measured_where_every_number_is_deeper_than_the_drafter():
    config = SimpleNamespace(method="p-eagle", num_draft_tokens=2, depths_within=lambda wanted: [])
    assert depths_of(SimpleNamespace(config=config), [None, 3, 5]) == [None], "the default of peagle tune"


def run_sweep(cells, make):
    results, clock, num_requests = [], StandIn().clock, dict.fromkeys((1, 2, 3), 2)
    sweep(cells, make, PROMPTS, SamplingParams(max_tokens=2), results, num_requests=num_requests, clock=clock)
    return results


def test_a_sweep_makes_one_engine_for_the_cells_that_share_it_and_closes_all():
    made = []

    def make(method, num_draft_tokens):
        assert all(llm.is_closed for _, llm in made), "two engines would share the device's memory"
        made.append(((method, num_draft_tokens), StandIn(pace=num_draft_tokens + 1)))
        return made[-1][1]

    cells = cells_of(("none", "p-eagle"), {"p-eagle": (1, 2)}, (1, 2))
    results = run_sweep(cells, make)
    assert [wanted for wanted, _ in made] == [("none", 0), ("p-eagle", 1), ("p-eagle", 2)]
    assert all(llm.is_closed for _, llm in made)
    assert [result.cell for result in results] == cells and not any(result.failure for result in results)


def test_a_cell_that_does_not_fit_is_recorded_and_the_others_go_on():
    made = []

    class Small(StandIn):
        def add(self, prompt_ids, params):
            if len(self.flight) == 2:
                raise CapacityError("no room for a third", hint="ask for less")
            return super().add(prompt_ids, params)

    def make(method, num_draft_tokens):
        made.append(Small())
        return made[-1]

    results = run_sweep(cells_of(("none",), {}, (1, 2, 3)), make)
    assert [result.failure for result in results] == [None, None, "no room for a third"]
    assert all(llm.is_closed for llm in made)


def test_an_engine_that_cannot_be_made_fails_its_cells_only():
    def make(method, num_draft_tokens):
        if method == "none":
            raise MemoryError("all gone\nmore talk")
        return StandIn(pace=2)

    results = run_sweep(cells_of(("none", "p-eagle"), {"p-eagle": (1,)}, (1, 2)), make)
    assert [result.failure for result in results] == ["MemoryError: all gone"] * 2 + [None] * 2


def test_a_defect_stops_the_sweep_and_leaves_what_was_finished():
    results = []

    class Broken(StandIn):
        def step(self):
            if len(self.flight) > 1:
                raise KeyError("defect")
            return super().step()

    llm = Broken()
    with pytest.raises(KeyError):
        sweep(
            cells_of(("none",), {}, (1, 2)),
            lambda *_: llm,
            PROMPTS,
            SamplingParams(max_tokens=2),
            results,
            num_requests=dict.fromkeys((1, 2), 2),
            clock=llm.clock,
        )
    assert len(results) == 1 and llm.is_closed


def test_a_reason_is_one_line():
    assert reason_of(CapacityError("too big", hint="less")) == "too big"
    assert reason_of(RuntimeError("\nfirst\nsecond")) == "RuntimeError: first"
    assert reason_of(ValueError()) == "ValueError"


@pytest.mark.slow
def test_the_real_engine_gives_plain_decodings_answers_in_every_cell():
    target = tiny_target()
    drafter = tiny_drafter(target)
    num_tokens = 2 * EngineConfig().page_size
    prompts = [[1, *range(first, first + num_tokens + more)] for first, more in ((70, 3), (80, 2), (90, 5), (100, 0))]
    params = SamplingParams(max_tokens=12)
    cells = cells_of(("none", "p-eagle"), {"p-eagle": (2, 4)}, (1, 3))
    results = []
    make = llm_factory(target, {"p-eagle": drafter}, prompts, max_tokens=12, concurrency=(1, 3))
    sweep(cells, make, prompts, params, results, num_requests=dict.fromkeys((1, 3), 6), device=target.device)
    assert [result.failure for result in results] == [None] * 6
    compare_with_plain(target, prompts, results, params)
    expected = [[token for step in decode(target, ids, params) for token in step.token_ids] for ids in prompts]
    for result in results:
        assert [list(answer.token_ids) for answer in sorted(result.answers, key=lambda each: each.prompt)] == [
            expected[index] for index in (0, 0, 1, 1, 2, 3)
        ], result.cell
        assert result.comparison.num_compared == 6 and not result.comparison.divergences
        assert all(answer.ttft > 0 for answer in result.answers)
        assert result.memory_bytes > 0
        assert result.num_cached_tokens == 0, "prompts come round again, and each must be prefilled"
        assert (result.acceptance is None) == (result.cell.method == "none")
    assert results[-1].acceptance.num_drafts > 0
