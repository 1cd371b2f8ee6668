"""How far the engine's logits are from transformers' own on the same numbers in float32, for every few-bit format.

`pytest -s -m slow tests/quantized/test_logits.py` prints the figures of docs/decisions/0036.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.few_bit_models import FEW_BIT, WIDE_GROUPS, store_in_few_bits
from harness.few_bit_targets import dequantized
from harness.model_families import family_target
from harness.tiny_models import tiny_target, write_target
from peagle.engine.llm import LLM
from peagle.sampling_params import SamplingParams
from peagle.targets import load
from peagle.targets.few_bit import quantize_model
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target

PROMPT, MAX_TOKENS = [5, 80, 33, 261, 7], 12
LARGEST = 2e-5
"""Between two orders of summation in float32; logits spread by about 1."""
ROUNDED = (("llama", "int8"), ("llama", "int4"), ("qwen3-moe", "fp8"), ("gpt-oss", "mxfp4"))


def engine_logits(target: HFTarget) -> tuple[list[int], Tensor]:
    """A greedy answer, and the logits behind each of its tokens."""
    rows: list[Tensor] = []
    with LLM(target, None, max_batch=1, max_length=64) as llm:
        paged = llm.engine.runner.paged_target
        forward = paged.forward

        def recorded(*args: object, **options: object) -> tuple[Tensor, Tensor | None]:
            found = forward(*args, **options)  # type: ignore[arg-type]
            rows.append(found[0][0].clone())
            return found

        paged.forward = recorded  # type: ignore[method-assign]
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    return list(output.outputs[0].token_ids), torch.stack(rows[:MAX_TOKENS])


@torch.no_grad()
def check(name: str, target: HFTarget, judge: HFTarget) -> None:
    answer, found = engine_logits(target)
    ids = torch.tensor([PROMPT + answer])
    expected = judge.model(ids).logits[0, len(PROMPT) - 1 : -1]
    difference, spread = (found - expected).abs().max().item(), expected.std().item()
    print(f"\n{name}: largest difference {difference:.1e}, logits spread by {spread:.2f}")
    assert len(found) == MAX_TOKENS and difference <= LARGEST * max(spread, 1)
    assert expected.argmax(-1).tolist() == answer


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True], ids=["plain", "kept"])
@pytest.mark.parametrize("name", FEW_BIT | WIDE_GROUPS)
def test_stored_formats(name: str, keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"num_layers": 3, "tie_word_embeddings": False}
    write_target(tiny_target(**shape), tmp_path)
    numbers = store_in_few_bits(tmp_path, name)
    judge = tiny_target(**shape)
    judge.model.load_state_dict(numbers)
    monkeypatch.setattr(load, "keeps_few_bits", lambda *_: keeps)
    target = load_target(tmp_path, dtype="float32", device="cpu")
    print(f"\n{name}: {target.precision}")
    check(f"{name}, {'kept' if keeps else 'plain'}", target, judge)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), ROUNDED)
def test_rounded_targets(family: str, form: str) -> None:
    target = family_target(family)
    quantize_model(target.model, form)
    check(f"--quantize {form}, {family}", target, dequantized(target))
