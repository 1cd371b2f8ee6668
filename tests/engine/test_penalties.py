"""Penalties, biases and min_tokens: equal to the reference decoder whatever drafts, batch and preemptions there are."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from harness.engine_runs import NUM_DRAFT_TOKENS, answer, drafting, mixed_cells, serve, start
from harness.model_families import trained_drafter
from peagle.decoding.adjusting import adjusted_logits
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.errors import RequestError
from peagle.kernels.adjust import Edits, Penalties, Places, adjust_logits
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget

PROMPTS = [[(7 * index + 3 * place) % 260 + 4 for place in range(1 + 5 * index % 23)] for index in range(16)]
TIGHT = {"page_size": 4, "max_length": 60, "num_pages": 19, "prefill_tokens": 16}
FEW = {"page_size": 4, "verify_tokens": 40}
"""of 16 requests with 9 drafts each"""
CELLS = [*mixed_cells({"page_size": 4}, TIGHT, {"max_batch": 1, "max_length": 60}), ("p-eagle tree", FEW)]
PLAIN = SamplingParams(max_tokens=16, ignore_eos=True)


def wishes(index: int) -> SamplingParams:
    """Every fourth request asks for nothing of the kind, every second one samples."""
    rng = random.Random(index)
    params = replace(
        PLAIN, max_tokens=rng.randrange(8, 24), temperature=(0.0, 0.9)[index % 2], seed=index, ignore_eos=index % 3 == 0
    )
    if index % 4 == 0:
        return params
    return replace(
        params,
        repetition_penalty=rng.choice((1.0, 1.3, 0.8, 2.0)),
        frequency_penalty=rng.choice((0.0, 0.7, 1.9, -0.4)),
        presence_penalty=rng.choice((0.0, 0.6, -1.1)),
        logit_bias={rng.randrange(272): rng.uniform(-100, 9) for _ in range(rng.choice((0, 3, 40)))},
        min_tokens=rng.choice((0, 4, 8)),
        top_k=rng.choice((0, 12)),
    )


@pytest.fixture(scope="module")
def expected(target: HFTarget) -> list[tuple[int, ...]]:
    found = [answer(target, prompt, wishes(index)) for index, prompt in enumerate(PROMPTS)]
    assert len(set(found)) == len(found), "answers vary"
    return found


@pytest.fixture(scope="module")
def drafter(target: HFTarget, expected: list[tuple[int, ...]]) -> Drafter:
    """Trained on the very answers, so that drafts are often right where penalties matter."""
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    return trained_drafter(target, [text for text in texts if len(text) > 14], num_steps=100)


@pytest.mark.slow
def test_drafts_change_nothing_in_the_reference_decoder(
    target: HFTarget, drafter: Drafter, expected: list[tuple[int, ...]]
) -> None:
    num_accepted = 0
    for index, prompt in enumerate(PROMPTS):
        steps = list(decode(target, prompt, wishes(index), drafter=drafter, num_draft_tokens=NUM_DRAFT_TOKENS))
        assert tuple(token for step in steps for token in step.token_ids) == expected[index]
        num_accepted += sum(step.num_accepted for step in steps if wishes(index).adjusts_logits)
    assert num_accepted > 20, "drafts of adjusted requests are accepted too"


@pytest.mark.parametrize(("method", "settings"), CELLS)
def test_a_mixed_batch_is_answered_as_by_the_reference_decoder(
    target: HFTarget, drafter: Drafter, expected: list[tuple[int, ...]], method: str, settings: dict[str, Any]
) -> None:
    """The rows of adjusted requests are taken over by others, and the other way round."""
    chosen, tree = drafting(method, drafter, target)
    engine = start(chosen, **settings, **tree)
    params = [wishes(index) for index in range(len(PROMPTS))]
    outputs = serve(engine, PROMPTS, params)
    stats = engine.stats()
    engine.close()
    for output, wanted, own in zip(outputs, expected, params, strict=True):
        assert output.outputs[0].token_ids == wanted, own
    assert (settings is not TIGHT) or stats.num_preemptions > 0, "the pages are too few for all"
    if chosen is not None:
        assert 0 < stats.accepted_per_position[1] < stats.num_drafts


def test_tables_are_made_by_the_first_request_that_needs_them(engine: Engine) -> None:
    serve(engine, PROMPTS[:4], [PLAIN] * 4)
    assert engine.runner.uploads.adjustments is None, "nobody has asked"
    serve(engine, PROMPTS[:4], [PLAIN] * 3 + [replace(PLAIN, presence_penalty=1.0)])
    assert engine.runner.uploads.adjustments is not None


def test_what_an_interrupted_request_left_in_its_row_is_not_the_next_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, penalized = SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, presence_penalty=0.5)
    wanted = [output.outputs for output in serve(engine, PROMPTS[:2], [plain, penalized])]

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    engine.runner.uploads._adjusted_rows.clear()  # as in an engine whose rows nobody with a wish has had
    with monkeypatch.context() as patched:
        patched.setattr(np, "bincount", interrupt)
        engine.add(PROMPTS[0], SamplingParams(max_tokens=4, logit_bias={50: 100.0}))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.reset()
    assert [output.outputs for output in serve(engine, PROMPTS[:2], [plain, penalized])] == wanted


def test_penalties_do_what_their_names_say(engine: Engine, target: HFTarget) -> None:
    def most_repeated(**wish: Any) -> int:
        params = replace(PLAIN, max_tokens=30, **wish)
        outputs = serve(engine, PROMPTS[:8], [params] * 8)
        return sum(max(Counter(output.outputs[0].token_ids).values()) for output in outputs)

    plain = most_repeated()
    assert most_repeated(frequency_penalty=2.0, presence_penalty=2.0) < plain
    assert most_repeated(repetition_penalty=1.5) < plain
    assert most_repeated(frequency_penalty=-2.0) > plain
    (forced,) = serve(engine, PROMPTS[:1], [replace(PLAIN, logit_bias={77: 100.0})])
    assert set(forced.outputs[0].token_ids) == {77}


@pytest.mark.parametrize("min_tokens", [1, 2, 5, 9])
def test_no_end_token_comes_before_min_tokens(engine: Engine, target: HFTarget, min_tokens: int) -> None:
    eager = SamplingParams(max_tokens=12, logit_bias={2: 100.0}, min_tokens=min_tokens)
    either = replace(eager, ignore_eos=True, stop_token_ids=(50, 51), logit_bias={50: 80.0, 51: 90.0})
    outputs = serve(engine, [PROMPTS[3], PROMPTS[4]], [eager, either])
    for output, params, last in zip(outputs, (eager, either), (2, 51), strict=True):
        completion = output.outputs[0]
        assert len(completion.token_ids) == min_tokens + 1, "it ends as soon as it may"
        assert completion.token_ids[-1] == last and completion.finish_reason == "stop"
        prompt = PROMPTS[3] if params is eager else PROMPTS[4]
        assert completion.token_ids == answer(target, prompt, params)


@pytest.mark.slow
def test_stop_strings_count_only_where_they_end_after_min_tokens(engine: Engine, target: HFTarget) -> None:
    whole = replace(PLAIN, max_tokens=20)
    prompt = PROMPTS[5]
    texts = [text for step in decode(target, prompt, whole) for text in step.texts]
    stop = next(text for text in texts if text)
    for min_tokens in range(0, 20, 3):
        params = replace(whole, stop=(stop,), min_tokens=min_tokens)
        (output,) = serve(engine, [prompt], [params])
        steps = list(decode(target, prompt, params))
        assert output.outputs[0].text == "".join(step.text for step in steps)
        assert len(output.outputs[0].token_ids) > min_tokens or output.outputs[0].finish_reason == "length"


def test_reported_logprobs_are_those_of_the_target_before_penalties(engine: Engine, target: HFTarget) -> None:
    params = replace(PLAIN, logit_bias={77: 100.0}, repetition_penalty=1.7, logprobs=2)
    (output,) = serve(engine, PROMPTS[6:7], [params])
    completion = output.outputs[0]
    text = torch.tensor([[*PROMPTS[6], *completion.token_ids]])
    own_TV = target.forward(text).logits_BTV[0].log_softmax(-1)[len(PROMPTS[6]) - 1 :]
    assert completion.logprobs is not None
    for place, entry in enumerate(completion.logprobs):
        assert entry.logprob == pytest.approx(own_TV[place, completion.token_ids[place]].item(), abs=1e-4)
        assert list(entry.top) == own_TV[place].topk(2).indices.tolist()


def test_batched_adjustments_equal_those_of_single_tokens() -> None:
    """Random settings, texts and trees of drafts with repeated tokens, on both sides of zero; to the last bit.

    A pass has some nodes of two rows, in any order.
    """
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    vocab_size, num_drafts, width = 37, 5, 6
    for _ in range(40):
        rows = [random_row(rng, vocab_size, num_drafts, width) for _ in range(2)]
        chosen = [(row, node) for row in (0, 1) for node in range(num_drafts + 1) if rng.random() < 0.7] or [(0, 0)]
        rng.shuffle(chosen)
        logits_NV = torch.randn(len(chosen), vocab_size, generator=generator) * 4
        edits = Edits(*(torch.tensor(column) for column in zip(*(row.edits for row in rows), strict=True)))
        settings = [
            torch.tensor([getattr(row.params, f"{name}_penalty") for row in rows])
            for name in ("repetition", "frequency", "presence")
        ]
        counts = [[Counter(row.text)[token] for token in range(vocab_size)] for row in rows]
        is_in_prompt = [[token in row.prompt for token in range(vocab_size)] for row in rows]
        places = Places(
            torch.tensor([row for row, _ in chosen]),
            torch.tensor([len(rows[row].prompt + rows[row].text + rows[row].paths[node]) for row, node in chosen]),
            torch.tensor([rows[row].drafts for row, _ in chosen]),
            torch.tensor([rows[row].ancestors[node] for row, node in chosen]),
        )
        penalties = Penalties(*settings, torch.tensor(counts, dtype=torch.int32), torch.tensor(is_in_prompt))
        allowed_NW = torch.full((len(chosen), 2), -1, dtype=torch.int32)
        adjusted_NV = adjust_logits(logits_NV, places, edits, penalties, allowed_NW)
        for place, (row, node) in enumerate(chosen):
            own = rows[row]
            wanted = adjusted_logits(logits_NV[place], own.params, {5}, own.prompt, own.text + own.paths[node])
            assert torch.equal(adjusted_NV[place], wanted), own.params


@dataclass(frozen=True)
class Row:
    params: SamplingParams
    edits: tuple[Any, ...]
    prompt: list[int]
    text: list[int]
    drafts: list[int]
    ancestors: list[int]
    paths: list[list[int]]
    """the drafts from the root down to each node"""


def random_row(rng: random.Random, vocab_size: int, num_drafts: int, width: int) -> Row:
    prompt, text = ([rng.randrange(12) for _ in range(rng.randrange(1, 9))] for _ in range(2))
    drafts = [rng.randrange(12) for _ in range(num_drafts)]
    paths, ancestors = list[list[int]]([[]]), [1]
    for node, token in enumerate(drafts, start=1):
        parent = rng.randrange(node)
        paths.append([*paths[parent], token])
        ancestors.append(ancestors[parent] | 1 << node)
    params = SamplingParams(
        max_tokens=99,
        min_tokens=rng.randrange(14),
        logit_bias={rng.randrange(vocab_size): rng.uniform(-5, 5) for _ in range(4)},
        repetition_penalty=rng.choice((0.5, 1.0, 1.7)),
        frequency_penalty=rng.uniform(-2, 2),
        presence_penalty=rng.uniform(-2, 2),
    )
    entries = [(token, bias, 2**62) for token, bias in params.logit_bias.items()]
    entries.append((5, float("-inf"), len(prompt) + params.min_tokens))
    entries += [(0, 0.0, 0)] * (width - len(entries))
    return Row(params, tuple(zip(*entries, strict=True)), prompt, text, drafts, ancestors, paths)


def test_what_is_not_allowed_has_no_chance_and_neutral_settings_change_no_bit() -> None:
    logits_NV = torch.randn(4, 40)
    allowed_NW = torch.full((4, 2), -1, dtype=torch.int32)
    allowed_NW[3] = torch.tensor([1 << 3 | -(2**31), 1 << 7])
    nothing = Edits(*(torch.zeros(2, 3, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.int64)))
    counts = torch.randint(0, 9, (2, 40), dtype=torch.int32)
    neutral = Penalties(torch.ones(2), torch.zeros(2), torch.zeros(2), counts, counts > 4)
    row_N, no_drafts_NM = torch.tensor([0, 0, 1, 1]), torch.zeros(4, 1, dtype=torch.int64)
    places = Places(row_N, torch.ones(4), no_drafts_NM, torch.tensor([0b01, 0b11] * 2))
    adjusted = adjust_logits(logits_NV, places, nothing, neutral, allowed_NW)
    assert torch.equal(adjusted[:3], logits_NV[:3])
    assert adjusted[3].isfinite().nonzero().flatten().tolist() == [3, 31, 39]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty must be between -2 and 2, got 2.1"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be between -2 and 2, got nan"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be between 0.001 and 1000, got 0.0"),
        ({"repetition_penalty": 1e39}, r"repetition_penalty must be between 0.001 and 1000, got 1e\+39"),
        ({"temperature": 1e39}, r"temperature must be at most 1e6, got 1e\+39"),
        ({"max_tokens": 2**31}, r"max_tokens must be below 2\*\*31"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids must be a list of token ids, 0 or more, got \(-1,\)"),
        ({"logit_bias": {3: 101.0}}, "logit_bias must be at most 300 token ids with numbers between -100 and 100"),
        ({"logit_bias": {-3: 1.0}}, "logit_bias must be at most 300 token ids"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias must be at most 300 token ids"),
        ({"min_tokens": 7, "max_tokens": 6}, r"min_tokens must be between 0 and max_tokens \(6\), got 7"),
        ({"min_tokens": -1}, "min_tokens must be between 0 and max_tokens"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**settings)


def test_an_engine_refuses_what_does_not_fit_its_target(engine: Engine, target: HFTarget) -> None:
    params = SamplingParams(logit_bias={272: 1.0})
    for refuse in (lambda: engine.add(PROMPTS[0], params), lambda: decode(target, PROMPTS[0], params)):
        with pytest.raises(RequestError, match="logit_bias token ids must lie between 0 and 271, got 272"):
            refuse()
    many = SamplingParams(min_tokens=2, stop_token_ids=tuple(itertools.chain(range(600))))
    with pytest.raises(RequestError, match=r"600 edits .* exceed the limit of 512"):
        engine.add(PROMPTS[0], many)
    assert not engine.has_work
