"""What the engine answers is what the reference decoder and `transformers.generate` answer, token for token.

Tiny float32 targets of many families, plain and with drafters that are right about some tokens and wrong about others.
An answer may part from the expected one only where both tokens lie within NEAR_TIE of the target's best.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
import torch

from harness.model_families import FAMILIES, family_target, sequential, trained_drafter, twin
from peagle.compare.divergence import gap_to_best
from peagle.decoding.reference import Step, decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.engine.outputs import EngineStats, RequestOutput, Update
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget
from peagle.targets.near_tie import NEAR_TIE

MAX_TOKENS = 16
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)
LENGTHS = (1, 2, 3, 5, 8, 9, 12, 15, 16, 17, 20, 24, 28, 31, 36, 40)
SOME = (0, 8, 15)
"""prompts that are also decoded with drafts by the reference decoder, and alone by the engine"""
ROOMY = {"page_size": 4, "max_length": 80}
TIGHT = {"page_size": 2, "max_length": 60, "num_pages": 38, "prefill_tokens": 24}
METHODS = {"none": 0, "eagle3": 3, "p-eagle": 4, "p-eagle tree": 4}
SOME_METHODS = [
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "eagle3", "p-eagle")),
    "p-eagle tree",
]
TREE_NODES = 9


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 268) for _ in range(length)] for length in LENGTHS]
    for index in (9, 11, 13):
        prompts[index][:16] = prompts[8]
    return prompts


PROMPTS = make_prompts()


def tree_nodes(method: str) -> int | None:
    return TREE_NODES if method.endswith("tree") else None


@dataclass
class Case:
    """A target, what is expected of it, and drafters for it. Made once, as far as somebody asks for it."""

    target: HFTarget
    served: HFTarget
    """the same weights, lent to engines"""
    references: dict[str, dict[int, list[Step]]] = field(default_factory=dict)

    @cached_property
    def answers(self) -> list[list[int]]:
        """What transformers generates, one prompt at a time."""
        return [self._generate(prompt) for prompt in PROMPTS]

    def _generate(self, prompt: list[int]) -> list[int]:
        row = torch.tensor([prompt])
        output = self.target.model.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=MAX_TOKENS, do_sample=False
        )
        return output[0, len(prompt) :].tolist()

    @cached_property
    def parallel(self) -> Drafter:
        texts = [prompt + answer for prompt, answer in zip(PROMPTS, self.answers, strict=True)]
        return trained_drafter(self.target, [text for text in texts if len(text) > MAX_TOKENS], num_steps=50)

    def drafter(self, method: str) -> Drafter | None:
        if method == "none":
            return None
        return sequential(self.parallel, self.target) if method == "eagle3" else self.parallel

    def reference(self, method: str) -> dict[int, list[Step]]:
        """Steps of the reference decoder for some of the prompts."""
        if method not in self.references:
            drafts: dict[str, Any] = {"drafter": self.drafter(method), "num_draft_tokens": METHODS[method]}
            drafts["tree_nodes"] = tree_nodes(method)
            self.references[method] = {
                index: list(decode(self.target, PROMPTS[index], GREEDY, **drafts)) for index in SOME
            }
        return self.references[method]

    def engine(self, method: str, **settings: Any) -> Engine:
        """Every draft is verified, so that steps are the same on every machine."""
        config = EngineConfig(tree_nodes=tree_nodes(method), **{"verify_tokens": 0} | settings)
        return Engine(self.served, self.drafter(method), METHODS[method], config)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(family_target(request.param), family_target(request.param))


@dataclass
class Served:
    """Answers of an engine in the order of the prompts, and how many tokens of each step were accepted drafts."""

    outputs: list[RequestOutput]
    accepted: list[list[int]]
    stats: EngineStats

    @property
    def answers(self) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in self.outputs]


def serve(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Served:
    accepted: dict[str, list[int]] = {}

    def listen(update: Update) -> None:
        if update.num_drafts:
            accepted.setdefault(update.request_id, []).append(update.num_accepted)

    ids = [engine.add(prompt, own, on_update=listen) for prompt, own in zip(prompts, params, strict=True)]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    engine.check_integrity()
    assert engine.stats().num_pages_used == 0, "an idle engine holds no pages"
    return Served([outputs[name] for name in ids], [accepted.get(name, []) for name in ids], engine.stats())


def serve_once(case: Case, method: str, prompts: Sequence[list[int]], params: Any = GREEDY, **settings: Any) -> Served:
    engine = case.engine(method, **settings)
    try:
        return serve(engine, prompts, [params] * len(prompts) if isinstance(params, SamplingParams) else params)
    finally:
        engine.close()


def assert_same(target: HFTarget, found: list[list[int]], expected: list[list[int]], prompts: list[list[int]]) -> None:
    """Equal, or parted at a near tie; those are counted and printed."""
    num_near_ties = 0
    for ours, theirs, prompt in zip(found, expected, prompts, strict=True):
        if ours == theirs:
            continue
        part = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        assert part is not None, f"{ours} and {theirs} are of different lengths"
        gap = gap_to_best(target, [*prompt, *theirs[:part]], (ours[part], theirs[part]))
        assert gap < NEAR_TIE, f"token {part} after {len(prompt)} of prompt: {ours} is not {theirs}, the gap is {gap}"
        num_near_ties += 1
    print(f"{target.name}: {len(found)} answers, {num_near_ties} part at a near tie")


def assert_same_drafts(found: list[int], steps: list[Step]) -> None:
    """Each step accepted what the reference decoder's did, unless the drafter itself wavered there."""
    expected = [step for step in steps if step.draft_token_ids]
    for ours, step in zip(found, expected, strict=False):
        if ours != step.num_accepted_emitted:
            assert min(step.draft_gaps) < NEAR_TIE, f"accepted {ours}, the reference {step.num_accepted_emitted}"
            return
    assert len(found) == len(expected), "as many steps as the reference decoder"


def assert_mixed(stats: EngineStats, method: str) -> None:
    """Some drafts were accepted, at more than one depth, and some rejected.

    The untrained EAGLE-3 drafter is rarely right at the second depth; on some CPUs it rounds to never.
    """
    first, second, *_, last = stats.accepted_per_position
    assert 0 < first < stats.num_drafts, "both accepted and rejected drafts belong in this test"
    assert (second > 0 or method == "eagle3") and last < first, f"at several depths: {stats.accepted_per_position}"


@pytest.mark.parametrize("method", SOME_METHODS)
def test_the_reference_decoder_equals_transformers_for_every_family(case: Case, method: str) -> None:
    steps = case.reference(method)
    found = [[token for step in steps[index] for token in step.token_ids] for index in SOME]
    assert_same(case.target, found, [case.answers[i] for i in SOME], [PROMPTS[i] for i in SOME])
    assert len({tuple(answer) for answer in case.answers}) > 12, "answers vary"


@pytest.mark.parametrize("method", SOME_METHODS)
def test_sixteen_requests_of_mixed_lengths_get_the_targets_own_answers(case: Case, method: str) -> None:
    """The second time all prompts are found in the pages, where the drafter's entries must be right too."""
    engine = case.engine(method, **ROOMY)
    for is_repeated in (False, True):
        served = serve(engine, PROMPTS, [GREEDY] * 16)
        assert_same(case.target, served.answers, case.answers, PROMPTS)
        for index, steps in case.reference(method).items():
            assert_same_drafts(served.accepted[index], steps)
        num_reused = sum(output.metrics.num_cached_tokens > 0 for output in served.outputs)
        assert num_reused >= (12 if is_repeated else 3), "prompts that begin alike share pages"
    engine.close()
    if method != "none":
        assert_mixed(served.stats, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_of_one_gets_the_same_answers_as_a_batch_of_sixteen(case: Case, method: str) -> None:
    prompts = [PROMPTS[index] for index in SOME]
    served = serve_once(case, method, prompts, max_batch=1, max_length=80)
    assert_same(case.target, served.answers, [case.answers[index] for index in SOME], prompts)
    for found, steps in zip(served.accepted, case.reference(method).values(), strict=True):
        assert_same_drafts(found, steps)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "p-eagle tree"])
def test_preemption_chunked_prefill_and_reuse_change_no_token(case: Case, method: str) -> None:
    served = serve_once(case, method, PROMPTS, **TIGHT)
    assert_same(case.target, served.answers, case.answers, PROMPTS)
    stats = served.stats
    assert stats.num_preemptions > 0, "the pages are too few for all"
    assert stats.num_cached_tokens > 0, "prompts that begin alike share pages"
    assert max(LENGTHS) > TIGHT["prefill_tokens"], "the longest prompt comes in pieces"
    assert_mixed(stats, method)


@pytest.mark.slow
def test_trees_of_every_depth_change_no_token(case: Case) -> None:
    """The drafter was trained for four tokens; deeper, it is wrong more often."""
    drafter = twin(case.parallel, case.target, num_draft_tokens=32)
    prompts = [PROMPTS[index] for index in SOME]
    for depth in (*range(1, 9), 32):
        config = EngineConfig(tree_nodes=8 + depth, page_size=3, max_length=120, verify_tokens=0)
        engine = Engine(case.served, drafter, depth, config)
        served = serve(engine, prompts, [GREEDY] * len(prompts))
        engine.close()
        assert_same(case.target, served.answers, [case.answers[index] for index in SOME], prompts)
        assert served.stats.accepted_per_position[0] > 0 and len(served.stats.accepted_per_position) == depth


@pytest.mark.slow
def test_verifying_only_the_likeliest_drafts_of_a_batch_changes_no_token(case: Case) -> None:
    served = serve_once(case, "p-eagle", PROMPTS, verify_tokens=40, **ROOMY)
    assert_same(case.target, served.answers, case.answers, PROMPTS)
    assert_mixed(served.stats, "p-eagle")
    assert served.stats.num_draft_tokens < METHODS["p-eagle"] * served.stats.num_drafts, "some were left out"
