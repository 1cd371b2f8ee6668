"""Tolerance keeps drafts that the target finds hardly less likely, as the reference decoder does, and marks them."""

from dataclasses import replace

import pytest

from harness.engine_runs import NUM_DRAFT_TOKENS, TREE_NODES, answer, drafting, run, serve, start
from harness.model_families import trained_drafter
from peagle.decoding import reference
from peagle.decoding.reference import Step, decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.engine.outputs import Update
from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget

PROMPTS = [[(5 * index + 7 * place) % 260 + 4 for place in range(2 + 3 * index % 17)] for index in range(16)]
EXACT = SamplingParams(max_tokens=24, ignore_eos=True)


def wishes(index: int) -> SamplingParams:
    """Every fourth request is exact, every third one samples, some have penalties."""
    return replace(
        EXACT,
        tolerance=1.0 if index % 4 == 3 else (0.9, 0.6, 0.3)[index % 4],
        temperature=0.7 if index % 3 == 2 else 0.0,
        presence_penalty=0.5 if index % 5 == 4 else 0.0,
        seed=index,
    )


@pytest.fixture(scope="module")
def drafter(target: HFTarget) -> Drafter:
    """Trained little, so that many drafts are near misses."""
    texts = [[*prompt, *answer(target, prompt, EXACT)] for prompt in PROMPTS]
    return trained_drafter(target, texts, num_steps=60)


def kinds(steps: list[Step]) -> list[str]:
    return [kind for step in steps for kind in step.kinds]


@pytest.mark.parametrize(
    "method", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle3", "p-eagle")), "p-eagle tree"]
)
def test_tolerated_drafts_are_those_of_the_reference_decoder(target: HFTarget, drafter: Drafter, method: str) -> None:
    chosen, tree = drafting(method, drafter, target)
    engine = start(chosen, page_size=4, **tree)
    outputs = serve(engine, PROMPTS, [wishes(index) for index in range(len(PROMPTS))])
    num_tolerated = 0
    for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        params = wishes(index)
        steps = list(decode(target, prompt, params, drafter=chosen, num_draft_tokens=NUM_DRAFT_TOKENS, **tree))
        assert list(output.outputs[0].token_ids) == [token for step in steps for token in step.token_ids]
        assert output.metrics.num_tolerated_tokens == kinds(steps).count("tolerated")
        assert output.metrics.is_lossless == (output.metrics.num_tolerated_tokens == 0)
        if params.tolerance == 1:
            assert output.outputs[0].token_ids == answer(target, prompt, params), "exact beside tolerant requests"
            assert output.metrics.is_lossless
        num_tolerated += output.metrics.num_tolerated_tokens
    stats = engine.stats()
    engine.close()
    assert stats.num_tolerated_tokens == num_tolerated > 5


def test_of_a_tree_cut_by_a_limit_the_same_drafts_are_tolerated(
    target: HFTarget, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which drafts a tolerant request keeps depends on those that were verified, so the reference gets these."""
    heard: dict[str, list[Update]] = {}
    engine = start(drafter, page_size=4, tree_nodes=TREE_NODES, verify_tokens=48)
    names = [
        engine.add(
            prompt, wishes(index), on_update=lambda update: heard.setdefault(update.request_id, []).append(update)
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    run(engine)
    engine.close()
    checked, kept, best_first = list[int](), list[str](), reference.best_first
    for index, (name, prompt) in enumerate(zip(names, PROMPTS, strict=True)):
        sizes = [update.num_drafts for update in heard[name] if not update.is_prefill]
        left = iter(sizes)
        monkeypatch.setattr(
            reference, "best_first", lambda own, logits, _, left=left: best_first(own, logits, next(left))
        )
        drafts = {"drafter": drafter, "num_draft_tokens": NUM_DRAFT_TOKENS, "tree_nodes": TREE_NODES}
        steps = list(decode(target, prompt, wishes(index), **drafts))
        assert [token for update in heard[name] for token in update.token_ids] == [
            token for step in steps for token in step.token_ids
        ]
        assert [kind for update in heard[name] for kind in update.kinds] == kinds(steps)
        checked += sizes
        kept += kinds(steps)
    assert min(checked) < TREE_NODES and kept.count("tolerated") > 5


@pytest.mark.slow
def test_less_tolerance_keeps_fewer_drafts(target: HFTarget, drafter: Drafter) -> None:
    engine = start(drafter, page_size=4)
    found = []
    for tolerance in (0.2, 0.6, 0.9, 1.0):
        outputs = serve(engine, PROMPTS, [replace(EXACT, tolerance=tolerance)] * len(PROMPTS))
        found.append(sum(output.metrics.num_tolerated_tokens for output in outputs))
    engine.close()
    assert found == sorted(found, reverse=True) and found[0] > found[-1] == 0


def test_updates_mark_tolerated_tokens(target: HFTarget, drafter: Drafter) -> None:
    engine, updates = start(drafter, page_size=4), list[Update]()
    engine.add(PROMPTS[0], replace(EXACT, tolerance=0.2), on_update=updates.append)
    while engine.has_work:
        engine.step()
    engine.close()
    steps = decode(
        target, PROMPTS[0], replace(EXACT, tolerance=0.2), drafter=drafter, num_draft_tokens=NUM_DRAFT_TOKENS
    )
    assert [kind for update in updates for kind in update.kinds] == kinds(list(steps))


def test_a_plain_engine_answers_exactly(engine: Engine, target: HFTarget) -> None:
    params = replace(EXACT, tolerance=0.2, num_draft_tokens=0)
    (output,) = serve(engine, PROMPTS[:1], [params])
    assert output.metrics.is_lossless and output.outputs[0].token_ids == answer(target, PROMPTS[0], EXACT)


@pytest.mark.parametrize("tolerance", [0.0, -0.5, 1.01])
def test_a_tolerance_outside_its_range_is_refused(tolerance: float) -> None:
    with pytest.raises(RequestError, match="tolerance must be above 0 and at most 1"):
        SamplingParams(tolerance=tolerance)
