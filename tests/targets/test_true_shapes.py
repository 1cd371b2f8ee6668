"""Every architecture of the catalog at its true widths, two layers of random weights, in the captured engine.

Miniatures do not meet the compiler, the kernels and the tiles that the true widths meet. The judge is transformers on
the same weights: it reads the engine's answers and says how far each token is from its own best one.
"""

import random

import pytest
import torch

from peagle.drafter.create import config_for_target, create_drafter
from peagle.engine.llm import LLM
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget
from peagle.targets.shapes import dummy_target

SHAPES = ("llama-8b", "qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "gemma-4-31b")
WINDOWED = ("gpt-oss-20b", "gpt-oss-120b", "gemma-4-31b")
PROMPT, ANSWER, NUM_DRAFTS = 16, 8, 3
SETTINGS = {"max_batch": 64, "max_length": 64, "prefill_tokens": 128, "num_pages": 200}
MAX_REGRET = 0.25
"""Logits that the engine's token may be below transformers' best one, in bfloat16; logits vary by about 1."""


def two_layers(shape: str, device: str, dtype: str, **others: int) -> HFTarget:
    torch.manual_seed(0)
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if shape in WINDOWED else {}
    return dummy_target(shape, device=device, dtype=dtype, num_hidden_layers=2, **kinds, **others)


def prompts_for(target: HFTarget, num_requests: int) -> list[list[int]]:
    draw = random.Random(num_requests)
    return [[draw.randrange(4, target.vocab_size) for _ in range(PROMPT)] for _ in range(num_requests)]


@torch.no_grad()
def largest_regret(target: HFTarget, prompts: list[list[int]], answers: list[list[int]]) -> float:
    ids = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]).to(target.device)
    logits_BAV = target.forward(ids).logits_BTV[:, PROMPT - 1 : -1].float()
    chosen_BA = logits_BAV.gather(-1, ids[:, PROMPT:, None])[..., 0]
    return (logits_BAV.amax(-1) - chosen_BA).max().item()


def check(target: HFTarget, num_drafts: int, sizes: tuple[int, ...], max_regret: float) -> bool:
    """Decode batches of these sizes, let transformers judge, and return whether steps were captured."""
    drafter = None
    if num_drafts:
        config = config_for_target(target, num_layers=1, mask_token_id=3, num_draft_tokens=num_drafts)
        drafter = create_drafter(target, config, "random", seed=0).to(target.dtype)
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    answers = {}
    with LLM(target, drafter, num_drafts or None, **SETTINGS) as llm:
        for size in sizes:
            outputs = llm.generate(prompts_for(target, size), params)
            answers[size] = [list(output.outputs[0].token_ids) for output in outputs]
        is_captured = llm.engine.runner.captured is not None
    for size, found in answers.items():
        for first in range(0, size, 16):
            part = slice(first, first + 16)
            regret = largest_regret(target, prompts_for(target, size)[part], found[part])
            assert regret <= max_regret, f"{size} requests, {num_drafts} drafts"
    return is_captured


@pytest.mark.gpu
@pytest.mark.parametrize("num_drafts", [0, NUM_DRAFTS])
@pytest.mark.parametrize("shape", SHAPES)
def test_true_widths_are_captured_and_decode_as_transformers_does(shape: str, num_drafts: int) -> None:
    target = two_layers(shape, "cuda", "bfloat16")
    assert check(target, num_drafts, (1, 8, 64), MAX_REGRET), "steps are captured"


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_check_itself_holds_at_small_widths_on_a_cpu(shape: str) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 300, "num_attention_heads": 4, "head_dim": 16}
    small |= {"num_key_value_heads": 2}
    if shape == "gemma-4-31b":
        small |= {"global_head_dim": 32, "num_global_key_value_heads": 2}
    if shape == "qwen3-30b-a3b":
        small |= {"moe_intermediate_size": 32}
    target = two_layers(shape, "cpu", "float32", **small)
    assert not check(target, NUM_DRAFTS, (1, 3), max_regret=1e-4), "nothing is captured on a CPU"
    prompts = prompts_for(target, 1)
    wrong = [[5] * ANSWER]
    assert largest_regret(target, prompts, wrong) > 1e-3, "and it tells wrong answers"
