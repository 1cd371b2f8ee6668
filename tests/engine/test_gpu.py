"""The captured engine on a GPU: equal to the reference decoder in float32, and to itself whatever shares the batch."""

import pytest
import torch

from families import FAMILIES, family_target, sequential, trained_drafter
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.llm import LLM
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget

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
    one_by_one = sequential(parallel, target)
    for model in (target.model, parallel, one_by_one):
        model.to("cuda")
    params = [SamplingParams(max_tokens=24, temperature=float(index % 2), seed=index) for index in range(len(PROMPTS))]
    for own, num_drafts in ((None, 0), (parallel, 4), (one_by_one, 3)):
        expected = answers(target, own, num_drafts, params)
        with LLM(target, own, num_drafts or None, num_pages=160, **SMALL) as llm:
            outputs = llm.generate(PROMPTS, params)
            stats = llm.engine.stats()
        found = [list(output.outputs[0].token_ids) for output in outputs]
        assert found == expected
        assert stats.num_pages_used == 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_half_precision_steps_answer_as_the_model_does(family: str) -> None:
    """Here products take gates and sums along, and kernels begin while others end."""
    target = family_target(family)
    target.model.to("cuda", torch.bfloat16)
    prompt = PROMPTS[5]
    with LLM(target, None, **SMALL) as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=12, logprobs=5, ignore_eos=True))
    (answer,) = output.outputs
    text = torch.tensor([[*prompt, *answer.token_ids]], device="cuda")
    with torch.no_grad():
        wanted_TV = target.model(text).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
    for wanted_V, found in zip(wanted_TV, answer.logprobs, strict=False):
        assert max(abs(wanted_V[token].item() - value) for token, value in found.top.items()) < 0.15


def test_closing_an_engine_gives_its_memory_back() -> None:
    target = family_target("llama")
    target.model.to("cuda")
    before = torch.cuda.memory_allocated()
    with LLM(target, None, **SMALL) as llm:
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=4))
    assert torch.cuda.memory_allocated() - before < 2**20
