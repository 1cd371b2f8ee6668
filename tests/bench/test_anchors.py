"""transformers' own ways of decoding, run for real on a tiny target."""

import pytest
import torch

from harness.tiny_models import tiny_target
from peagle.bench import anchors
from peagle.bench.anchors import CONTINUOUS, EAGER, STATIC, batches_of, left_padded, run_anchors, until_end
from peagle.decoding.reference import decode
from peagle.sampling_params import SamplingParams

PROMPTS = [[1, 70, 71, 72], [1, 80], [1, 90, 91, 92, 93, 94]]
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=3)


@pytest.fixture(scope="module")
def expected(target):
    params = SamplingParams(max_tokens=MAX_TOKENS)
    return [tuple(token for step in decode(target, ids, params) for token in step.token_ids) for ids in PROMPTS]


def run(target, concurrency):
    results = []
    run_anchors(target, PROMPTS, concurrency, MAX_TOKENS, results, num_requests=dict.fromkeys(concurrency, 3))
    return results


def without_compilation(monkeypatch):
    def fail(*_):
        raise NotImplementedError("left out: it takes a while\nand a compiler")

    monkeypatch.setattr(anchors, "run_static", fail)


@pytest.mark.slow
def test_every_anchor_gives_the_targets_own_answers_and_a_failure_is_a_row(target, expected, monkeypatch):
    without_compilation(monkeypatch)
    results = run(target, (2, 1))
    assert [(each.cell.method, each.cell.concurrency) for each in results] == [
        (method, places) for method in (EAGER, STATIC, CONTINUOUS) for places in (1, 2)
    ]
    for each in results:
        if each.cell.method == STATIC:
            assert each.failure == "NotImplementedError: left out: it takes a while" and not each.answers
            continue
        assert each.failure is None
        assert len(each.answers) == (4 if each.cell.concurrency == 2 else 3), "whole batches"
        assert all(answer.token_ids == expected[answer.prompt] for answer in each.answers), each.cell
        assert all(answer.seconds_per_token > 0 for answer in each.answers if len(answer.token_ids) > 1)
        assert each.seconds > 0 and each.memory_bytes > 0
        assert all((answer.ttft is None) == (each.cell.method == EAGER) for answer in each.answers)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch itself deprecates
def test_static_compiled_gives_the_targets_own_answers(target, expected, monkeypatch):
    # Traced as it would be compiled, without the half minute and the compiler that making machine code takes.
    monkeypatch.setattr(anchors, "CPU_COMPILE", {"backend": "eager", "mode": None})
    with anchors.as_loaded(target):
        answers, seconds = anchors.run_static(target, PROMPTS, [[0, 1], [2, 0]], MAX_TOKENS)
        assert "_compiled_call" in vars(target.model), "generate compiled its forward"
    assert "_compiled_call" not in vars(target.model)
    assert seconds > 0 and [answer.token_ids for answer in answers] == [expected[index] for index in (0, 1, 2, 0)]


@pytest.mark.slow
def test_anchors_answer_the_requests_of_the_engines_cells_up_to_a_number_of_batches(target, monkeypatch):
    asked = []

    def note(target, prompts, batches, max_tokens):
        asked.append(batches)
        return [], 1.0

    monkeypatch.setattr(anchors, "run_eager", note)
    for name in ("run_static", "run_continuous"):
        monkeypatch.setattr(anchors, name, lambda *_: ([], 1.0))
    num_requests = {1: 12, 4: 32}
    run_anchors(target, PROMPTS, (1, 4), MAX_TOKENS, [], num_requests=num_requests)
    assert asked == [batches_of(3, 1, 10), batches_of(3, 4, 32)], "the first ten of twelve, and all of 32"


@pytest.mark.slow
def test_attention_and_taps_are_as_before_also_after_a_failure(target, monkeypatch):
    def fail(*_):
        target.model.set_attn_implementation("eager")
        assert not any(module._forward_pre_hooks for module in target.model.modules()), "taps would slow them down"
        raise RuntimeError("broken")

    for name in ("run_eager", "run_static", "run_continuous"):
        monkeypatch.setattr(anchors, name, fail)
    attention = target.model.config._attn_implementation
    before = target.forward(torch.tensor([[1, 2, 3]])).aux_hidden_BTA
    assert all(each.failure == "RuntimeError: broken" for each in run(target, (1,)))
    assert target.model.config._attn_implementation == attention
    assert torch.equal(target.forward(torch.tensor([[1, 2, 3]])).aux_hidden_BTA, before)


def test_only_tokens_up_to_the_end_are_counted():
    ends = frozenset({2})
    assert until_end([5, 6, 2, 0, 0], ends) == (5, 6, 2)
    assert until_end([5, 6], ends) == (5, 6) and until_end([2, 2], ends) == (2,)


def test_prompts_are_padded_on_the_left():
    ids, mask = left_padded([[5, 6, 7], [8]], 0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_batches_are_whole_and_take_the_prompts_in_turn():
    assert batches_of(3, 2, 3) == [[0, 1], [2, 0]]
    assert batches_of(3, 1, 4) == [[0], [1], [2], [0]]
    assert batches_of(2, 4, 1) == [[0, 1, 0, 1]]
