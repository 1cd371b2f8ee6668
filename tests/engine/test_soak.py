"""Thousands of requests through an engine with too few pages: nothing leaks, and every answer is right."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.model_families import BASE, trained_drafter
from harness.tiny_models import tiny_tokenizer
from peagle.decoding.reference import decode
from peagle.engine.engine import Engine
from peagle.engine.outputs import RequestOutput
from peagle.sampling_params import Grammar, SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget

NUM_KINDS = 60
NUM_DRAFT_TOKENS = 2


@dataclass(frozen=True)
class Kind:
    """A prompt with its wishes, and the reference decoder's answer to it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None


def make_target() -> HFTarget:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**(BASE | sizes | {"num_key_value_heads": 1, "initializer_range": 0.5}))
    return HFTarget(LlamaForCausalLM(config), tiny_tokenizer(), name="smallest", aux_layer_ids=(0,))


def make_kinds(target: HFTarget) -> list[Kind]:
    rng = random.Random(1)
    stem = [rng.randrange(3, 268) for _ in range(12)]
    kinds = []
    for index in range(NUM_KINDS):
        own = [rng.randrange(3, 268) for _ in range(rng.randrange(1, 9))]
        prompt = stem[: rng.choice((4, 8, 12))] + own if index % 3 == 0 else own
        params = SamplingParams(
            max_tokens=rng.randrange(1, 5) if index % 2 else 11,
            temperature=rng.choice((0.0, 0.0, 0.9)),
            top_k=rng.choice((0, 20)),
            seed=index,
            ignore_eos=rng.random() < 0.5,
        )
        if index % 6 == 2:
            params = replace(params, presence_penalty=1.5, repetition_penalty=1.2, logit_bias={17: 2.0})
        elif index % 12 == 5:
            params = replace(params, ignore_eos=False, grammar=Grammar("regex", "[a-z ]{2,6}"))
        text = "".join(step.text for step in decode(target, prompt, params))
        if index % 4 == 1 and len(text) > 3:
            params = replace(params, stop=(text[2:4],))
        steps = list(decode(target, prompt, params))
        tokens = tuple(token for step in steps for token in step.token_ids)
        drafts = rng.choice((None, None, None, 0, 1))
        own_params = replace(params, num_draft_tokens=drafts)
        text = "".join(step.text for step in steps)
        kinds.append(Kind(tuple(prompt), own_params, tokens, text, steps[-1].finish_reason))
    assert sum(kind.finish_reason == "stop" for kind in kinds) >= 5, "some answers stop, some run out"
    return kinds


def check(output: RequestOutput, kind: Kind) -> None:
    (completion,) = output.outputs
    assert completion.token_ids == kind.token_ids, f"{kind.prompt} with {kind.params}"
    assert (completion.text, completion.finish_reason) == (kind.text, kind.finish_reason)


def num_arriving(rng: random.Random, num_open: int, num_left: int) -> int:
    """Few or many at a time: requests that start together grow together, and the pages run out."""
    return min(rng.choice((1, 40, 80)), num_left) if num_open < 10 else 0


@pytest.mark.parametrize(
    ("num_requests", "tree_nodes"),
    [(400, 5), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1_000, None), (10_000, 5)))],
)
def test_requests_with_aborts_leave_no_page_behind_and_are_answered_right(
    num_requests: int, tree_nodes: int | None
) -> None:
    target = make_target()
    kinds = make_kinds(target)
    texts = [[*kind.prompt, *kind.token_ids] for kind in kinds]
    drafter = trained_drafter(target, [text for text in texts if len(text) > 6], num_draft_tokens=NUM_DRAFT_TOKENS)
    config = EngineConfig(
        max_batch=32, max_length=48, page_size=1, num_pages=240, prefill_tokens=64, tree_nodes=tree_nodes
    )
    engine = Engine(target, drafter, NUM_DRAFT_TOKENS, config)
    rng = random.Random(2)
    open_requests: dict[str, Kind] = {}
    num_added = num_finished = num_aborted = 0
    while num_added < num_requests or engine.has_work:
        for _ in range(num_arriving(rng, len(open_requests), num_requests - num_added)):
            kind = rng.choice(kinds)
            open_requests[engine.add(kind.prompt, kind.params)] = kind
            num_added += 1
        for output in engine.step():
            check(output, open_requests.pop(output.request_id))
            num_finished += 1
        if open_requests and rng.random() < 0.2:
            name = rng.choice(list(open_requests))
            assert engine.abort(name), "an open request can be aborted at any moment"
            del open_requests[name]
            num_aborted += 1
            if num_aborted % 20 == 0:
                engine.check_integrity()
    engine.check_integrity()
    stats = engine.stats()
    engine.close()
    print(
        f"{num_finished} finished, {num_aborted} aborted, {stats.num_preemptions} preempted, {stats.num_steps} steps, "
        f"{stats.num_cached_tokens} tokens reused, accepted {stats.accepted_per_position} of {stats.num_drafts}"
    )
    assert not open_requests and num_finished + num_aborted == num_requests
    assert stats.num_pages_used == 0 and stats.num_running == 0 and stats.num_waiting == 0
    assert (stats.num_finished, stats.num_aborted) == (num_finished, num_aborted)
    assert num_aborted > num_requests // 100 and stats.num_preemptions > num_requests // 200
    assert stats.num_cached_tokens > 0
    assert 0 < stats.accepted_per_position[0] < stats.num_drafts, "some drafts are accepted, some are not"
