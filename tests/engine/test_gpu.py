"""The captured engine on a GPU: equal in float32 to the reference decoder on a CPU, whatever shares the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.model_families import FAMILIES, family_target, sequential, trained_drafter, twin
from peagle.checkpoint.card import DrafterCard, TargetIdentity
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.checkpoint.replacement import read_drafter_files
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.llm import LLM
from peagle.sampling_params import Grammar, SamplingParams
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target
from peagle.worker.captured_steps import CapturedSteps

pytestmark = pytest.mark.gpu

PROMPTS = [[1, *range(20 + index, 20 + index + 3 * index + 2)] for index in range(12)]
SMALL = {"max_batch": 8, "max_length": 128, "prefill_tokens": 64, "page_size": 4}


def answers(
    target: HFTarget, drafter: Drafter | None, num_drafts: int, params: list[SamplingParams]
) -> list[list[int]]:
    return [
        [
            token
            for step in decode(target, prompt, own, drafter=drafter, num_draft_tokens=num_drafts)
            for token in step.token_ids
        ]
        for prompt, own in zip(PROMPTS, params, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_engine_answers_as_the_reference_decoder(family: str) -> None:
    target = family_target(family)
    greedy = [SamplingParams(max_tokens=24, ignore_eos=True)] * len(PROMPTS)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers(target, None, 0, greedy), strict=True)]
    parallel = trained_drafter(target, texts)
    params = [SamplingParams(max_tokens=24, temperature=float(index % 2), seed=index) for index in range(len(PROMPTS))]
    expected = answers(target, None, 0, params)
    assert expected == answers(target, parallel, 4, params)
    accepted: dict[int | None, list[int]] = {}
    for device in ("cpu", "cuda"):
        target.model.to(device)
        for own, num_drafts in ((None, None), (twin(parallel, target), 4), (sequential(parallel, target), 3)):
            with LLM(target, own, num_drafts, num_pages=160, **SMALL) as llm:
                outputs = llm.generate(PROMPTS, params)
                stats = llm.engine.stats()
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            assert stats.num_pages_used == 0
            # Answers would be the same with worse drafts. These are as good, but for a near tie of the drafter's.
            counts = accepted.setdefault(num_drafts, list(stats.accepted_per_position))
            assert list(stats.accepted_per_position) == pytest.approx(counts, rel=0.05, abs=2)


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_prompts_in_the_pass_of_a_captured_decode_step_change_no_token(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_beside, sizes = CapturedSteps.decode_beside, []
    monkeypatch.setattr(
        CapturedSteps, "decode_beside", lambda *given: sizes.append(len(given[1])) or decode_beside(*given)
    )
    target = family_target(family)
    greedy = [SamplingParams(max_tokens=24, ignore_eos=True)] * len(PROMPTS)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers(target, None, 0, greedy), strict=True)]
    parallel = trained_drafter(target, texts)
    params = [SamplingParams(max_tokens=24, temperature=float(index % 2), seed=index) for index in range(len(PROMPTS))]
    expected = answers(target, None, 0, params)
    target.model.to("cuda")
    drafter = twin(parallel, target)
    for own, num_drafts, nodes in ((None, None, None), (drafter, 4, 9), (sequential(parallel, target), 3, None)):
        settings = SMALL | {"prefill_tokens": 256, "num_pages": 160, "tree_nodes": nodes}
        with LLM(target, own, num_drafts, **settings) as llm:
            engine, outputs, waiting = llm.engine, {}, list(range(len(PROMPTS)))
            while waiting or engine.has_work:
                if waiting:
                    index = waiting.pop(0)
                    engine.add(PROMPTS[index], params[index], request_id=str(index))
                outputs |= {int(output.request_id): output for output in engine.step()}
        assert [list(outputs[index].outputs[0].token_ids) for index in range(len(PROMPTS))] == expected
        assert len(sizes) > 4 and max(sizes) > 1, "prompts arrive while others decode"
        sizes.clear()


def test_verifying_the_likeliest_drafts_in_captured_steps_changes_no_token() -> None:
    target = family_target("llama", seed=3)
    params = [SamplingParams(max_tokens=24, temperature=float(index % 2), seed=index) for index in range(len(PROMPTS))]
    expected = answers(target, None, 0, params)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    parallel = trained_drafter(target, texts)
    accepted: dict[int, float] = {}
    for device in ("cpu", "cuda"):
        target.model.to(device)
        for own, num_drafts in ((twin(parallel, target), 4), (sequential(parallel, target), 3)):
            with LLM(target, own, num_drafts, verify_tokens=20, num_pages=160, **SMALL) as llm:
                outputs = llm.generate(PROMPTS, params)
                stats = llm.engine.stats()
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            assert stats.num_draft_tokens < num_drafts * stats.num_drafts, "some were left out"
            # Who shares a batch with whom differs a little: the GPU's host is a step behind.
            share = sum(stats.accepted_per_position) / stats.num_drafts
            assert share == pytest.approx(accepted.setdefault(num_drafts, share), rel=0.1)


def test_trees_of_the_shipped_drafter_change_no_token() -> None:
    """At true widths: the embedded target in float32, and paths across page borders."""
    target = load_target(None, dtype="float32")
    drafter = load_drafter(target.shipped_drafter, target)
    chats = [[{"role": "user", "content": text}] for text in ("What is a tide?", "Count to 20.", "Write a haiku.")]
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    texts, lengths = [], []
    for own, nodes in ((None, None), (drafter, None), (drafter, 32)):
        settings = {"max_batch": 4, "max_length": 256, "prefill_tokens": 128, "page_size": 4}
        with LLM(target, own, None if own is None else 8, tree_nodes=nodes, **settings) as llm:
            outputs = llm.chat(chats, params)
            stats = llm.engine.stats()
        texts.append([output.outputs[0].token_ids for output in outputs])
        lengths.append(1 + sum(stats.accepted_per_position) / max(stats.num_drafts, 1))
        assert stats.num_pages_used == 0
    assert texts[1] == texts[0] and texts[2] == texts[0]
    assert 2 < lengths[1] < lengths[2], "acceptance length of the chain and of the tree"


@pytest.mark.parametrize("capture_adjusted", [False, True])
def test_penalties_and_grammars_in_captured_steps_are_those_of_the_reference_decoder(capture_adjusted: bool) -> None:
    pytest.importorskip("llguidance")
    target = family_target("llama", seed=3)
    greedy = [SamplingParams(max_tokens=24, ignore_eos=True)] * len(PROMPTS)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers(target, None, 0, greedy), strict=True)]
    drafter = trained_drafter(target, texts)
    wishes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.8, "logit_bias": {50: 3.0}},
        {"min_tokens": 9, "presence_penalty": -0.5},
        {"grammar": Grammar("regex", "[a-f]{4,30}(the user)+")},
    ]
    params = [
        SamplingParams(max_tokens=24, temperature=float(index % 2), seed=index, **wishes[index % 4])
        for index in range(len(PROMPTS))
    ]
    expected = answers(target, drafter, 4, params)
    target.model.to("cuda")
    few: dict[str, Any] = {"tree_nodes": 9, "verify_tokens": 20}
    for own, num_drafts, limit in ((None, None, {}), (twin(drafter, target), 4, {}), (twin(drafter, target), 4, few)):
        settings = {"num_pages": 160, "capture_adjusted": capture_adjusted, **SMALL, **limit}
        with LLM(target, own, num_drafts, **settings) as llm:
            outputs = llm.generate(PROMPTS, params)
            again = llm.generate(PROMPTS[::-1], params[::-1])
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert [list(output.outputs[0].token_ids) for output in again] == expected[::-1]


def test_prompts_are_scored_beside_captured_steps() -> None:
    target = family_target("llama")
    params = [SamplingParams(max_tokens=8, prompt_logprobs=2 if index % 2 else None) for index in range(len(PROMPTS))]
    plain = [SamplingParams(max_tokens=8)] * len(PROMPTS)
    expected = answers(target, None, 0, plain)
    with torch.no_grad():
        wanted = [target.forward(torch.tensor([prompt])).logits_BTV[0] for prompt in PROMPTS]
    target.model.to("cuda")
    with LLM(target, None, **SMALL) as llm:
        outputs = llm.generate(PROMPTS, params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    for output, prompt, logits_TV in zip(outputs, PROMPTS, wanted, strict=True):
        for place, entry in enumerate(output.prompt_logprobs or ()):
            if entry is not None:
                own = logits_TV[place - 1].log_softmax(-1)[prompt[place]].item()
                assert entry.logprob == pytest.approx(own, abs=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_half_precision_steps_answer_as_the_model_does(family: str) -> None:
    """Here products take gates and sums along, and kernels begin while others end: no further off than torch's are."""
    target = family_target(family)
    prompt = PROMPTS[5]
    target.model.to("cuda", torch.bfloat16)
    with LLM(target, None, **SMALL) as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=12, logprobs=5, ignore_eos=True))
    (answer,) = output.outputs
    text = torch.tensor([[*prompt, *answer.token_ids]], device="cuda")
    rounded_TV = logprobs_of(target, text)
    target.model.float()  # the same weights: what rounding on the way makes of them is told by the difference
    exact_TV = logprobs_of(target, text)
    for place, found in enumerate(answer.logprobs, start=len(prompt) - 1):
        off = max(abs(exact_TV[place, token].item() - value) for token, value in found.top.items())
        assert off < 0.1 + 1.5 * (exact_TV - rounded_TV).abs().max()


def logprobs_of(target: HFTarget, text: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return target.model(text).logits[0].float().log_softmax(-1)


def test_closing_an_engine_gives_its_memory_back() -> None:
    """All but the workspaces that libraries keep for good, which the first engine of a process brings."""
    target = family_target("llama")
    target.model.to("cuda")
    held = []
    for _ in range(3):
        with LLM(target, None, **SMALL) as llm:
            llm.generate([PROMPTS[0]], SamplingParams(max_tokens=4))
        held.append(torch.cuda.memory_allocated())
    assert max(held) - held[0] < 2**20


def test_captured_steps_draft_with_the_weights_that_were_swapped_in(tmp_path: Path) -> None:
    target = family_target("llama", seed=3)
    greedy = [SamplingParams(max_tokens=24, ignore_eos=True)] * len(PROMPTS)
    expected = answers(target, None, 0, greedy)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    good, bad = (trained_drafter(target, texts, num_steps=num_steps) for num_steps in (80, 1))
    for name, drafter in (("good", good), ("bad", bad)):
        config = drafter.config
        card = DrafterCard(TargetIdentity.of(target), config.method, config.num_draft_tokens, 64, config.aux_layer_ids)
        save_drafter(drafter, tmp_path / name, card, full=False, dtype=torch.float32)
    target.model.to("cuda")

    def accepted(llm: LLM) -> int:
        before = llm.engine.stats().acceptance.num_accepted
        outputs = llm.generate(PROMPTS, greedy)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        return llm.engine.stats().acceptance.num_accepted - before

    usual = {}
    for name in ("good", "bad"):
        with LLM(target, tmp_path / name, 4, num_pages=160, verify_tokens=0, reuse_prefixes=False, **SMALL) as llm:
            usual[name] = accepted(llm)
            for other in ("good", "bad"):
                llm.engine.swap_drafter(read_drafter_files(tmp_path / other))
                assert accepted(llm) == pytest.approx(usual.setdefault(other, accepted(llm)), rel=0.02, abs=2)
            for prompt, own in zip(PROMPTS, greedy, strict=True):
                llm.engine.add(prompt, own)
            found = []
            for step in range(200):
                if step == 4:
                    llm.engine.swap_drafter(read_drafter_files(tmp_path / "good"))
                found += llm.engine.step()
            assert sorted(list(output.outputs[0].token_ids) for output in found) == sorted(expected)
    assert usual["good"] > 2 * usual["bad"]
