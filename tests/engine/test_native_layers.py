"""The engine on a CPU with native decoder layers answers what transformers answers, token for token."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from harness.model_families import BASE, sequential, trained_drafter
from harness.tiny_models import tiny_tokenizer
from peagle.compare.divergence import gap_to_best
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.native import jit
from peagle.native.layer import NativeLayer, run_layers
from peagle.native.products import PackedWeight
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget
from peagle.targets.native_layers import _Together
from peagle.targets.near_tie import NEAR_TIE
from peagle.worker.linear_layers import pack_models, repack

SHAPE: dict[str, Any] = BASE | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "attention_dropout": 0.0}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=70)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{name: SHAPE[name] for name in SHAPE if name != "head_dim"})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
}
LENGTHS = (3, 9, 20, 33, 80, 120)
"""of the prompts; those with more than 64 tokens are prefilled by transformers' layers"""
PROMPTS = [
    torch.randint(3, 268, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in LENGTHS
]
GREEDY = SamplingParams(max_tokens=16)

pytestmark = pytest.mark.skipif(jit.missing() is not None, reason=str(jit.missing()))


@pytest.fixture(autouse=True)
def native_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take weights of any size, and count the passes by number of rows."""
    monkeypatch.setattr("peagle.native.packed_linear.MIN_BYTES", 1)
    runs: list[int] = []

    def counted(layers: Sequence[NativeLayer], x: Tensor, *args: Any) -> Tensor:
        runs.extend([x.shape[1]] * len(layers))
        return run_layers(layers, x, *args)

    for module in ("peagle.targets.native_layers", "peagle.drafter.paged"):
        monkeypatch.setattr(f"{module}.run_layers", counted)
    return runs


def rounded(module: Any) -> Any:
    """Weights that bfloat16 holds, as a checkpoint has them."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())
    return module


def target_of(family: str) -> HFTarget:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return HFTarget(rounded(model), tiny_tokenizer(), name=f"tiny-{family}")


def drafter_for(target: HFTarget, texts: list[list[int]]) -> Drafter:
    changes = {"head_dim": 16, "intermediate_size": 96, "num_layers": 2}
    return rounded(trained_drafter(target, texts, num_steps=30, **changes)).requires_grad_(False)


def generated(target: HFTarget, prompt: list[int]) -> list[int]:
    row = torch.tensor([prompt])
    output = target.model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=16, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "family",
    [each if each == "qwen3" else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES],
)
def test_answers_with_native_layers_are_those_of_transformers(
    family: str, native_runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(family)
    expected = [generated(target, prompt) for prompt in PROMPTS]
    drafter = drafter_for(target, [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)])
    tight = {"page_size": 2, "max_length": 140, "num_pages": 120, "prefill_tokens": 100}
    for own, num_draft_tokens, is_for_prompts, settings in (
        (None, 0, True, {"page_size": 4, "max_length": 160}),
        (drafter, 4, True, {"page_size": 4, "max_length": 160, "tree_nodes": 9, "verify_tokens": 0}),
        (drafter, 4, False, tight | {"verify_tokens": 0}),
        (sequential(drafter, target), 3, False, {"page_size": 4, "max_length": 160, "verify_tokens": 0}),
    ):
        native_runs.clear()
        monkeypatch.setattr(PackedWeight, "is_for_prompts", is_for_prompts)
        engine = Engine(target, own, num_draft_tokens, EngineConfig(**settings))
        names = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
        outputs = {}
        while engine.has_work:
            outputs |= {output.request_id: output for output in engine.step()}
        stats = engine.stats()
        engine.close()
        assert len(native_runs) > 40, "decode steps ran native layers"
        assert (max(native_runs) > 64) == is_for_prompts, "so did prompts, where that is faster"
        assert own is None or stats.accepted_per_position[0] > 0, "some drafts were accepted"
        for prompt, name, wanted in zip(PROMPTS, names, expected, strict=True):
            found = list(outputs[name].outputs[0].token_ids)
            if found != wanted:
                part = next(i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1])
                gap = gap_to_best(target, [*prompt, *wanted[:part]], (found[part], wanted[part]))
                assert gap < NEAR_TIE, f"token {part} after {len(prompt)}: {found} is not {wanted}, the gap is {gap}"


def test_a_family_with_other_layers_runs_on_torch_and_the_log_says_why(
    native_runs: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, sliding_window=70, query_pre_attn_scalar=16)
    target = HFTarget(rounded(Gemma2ForCausalLM(config)), tiny_tokenizer(), name="tiny-gemma2")
    with caplog.at_level("INFO"):
        engine = Engine(target, None, 0, EngineConfig(max_length=64))
    engine.close()
    assert not native_runs
    assert "Gemma2DecoderLayer runs on torch's kernels: it has other parts" in caplog.text


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Ministral3ForCausalLM(Ministral3Config(**SHAPE)), "cannot be compared"),
        (
            lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**SHAPE, first_k_dense_replace=4, partial_rotary_factor=0.5)),
            "a rotary embedding of another width than its heads",
        ),
    ],
)
def test_layers_that_need_more_than_the_kernels_give_them_run_on_torch(
    make: Callable[[], Any], reason: str, native_runs: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    target = HFTarget(rounded(make()), tiny_tokenizer(), name="tiny")
    expected = generated(target, PROMPTS[0])
    with caplog.at_level("INFO"):
        engine = Engine(target, None, 0, EngineConfig(max_length=64))
    native_runs.clear()
    name, outputs = engine.add(PROMPTS[0], GREEDY), {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    engine.close()
    assert not native_runs and reason in caplog.text
    assert list(outputs[name].outputs[0].token_ids) == expected


def test_layers_with_rotary_embeddings_of_their_own_do_not_run_together() -> None:
    one, other = object(), object()
    together = _Together([torch.nn.Module() for _ in range(5)], [], [one, one, other, one, one])
    assert [together._end(index) for index in range(5)] == [2, 2, 3, 5, 5]


def test_layers_that_compute_something_else_than_their_parts_say_run_on_torch(
    native_runs: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = target_of("llama")
    for layer in target.layers:
        norm = layer.input_layernorm
        monkeypatch.setattr(norm, "forward", lambda x, own=norm.forward: 1.01 * own(x))
    with caplog.at_level("INFO"):
        engine = Engine(target, None, 0, EngineConfig(max_length=64))
        native_runs.clear()
        engine.add(PROMPTS[0], GREEDY)
        while engine.has_work:
            engine.step()
        engine.close()
    assert not native_runs
    assert "it computes something else than its parts say" in caplog.text


@pytest.mark.parametrize(("taps", "runs"), [((1,), [1, 3]), ((0, 2), [2, 2]), ((1, 2, 3), [1, 1, 1, 1])])
def test_the_layers_up_to_the_next_tap_run_as_one_call(
    taps: tuple[int, ...], runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of("llama")
    assert target.num_layers == 4
    target.tap(taps)
    lengths: list[int] = []

    def counted(layers: Sequence[NativeLayer], *args: Any) -> Tensor:
        lengths.append(len(layers))
        return run_layers(layers, *args)

    engine = Engine(target, None, 0, EngineConfig(max_length=64))
    monkeypatch.setattr("peagle.targets.native_layers.run_layers", counted)
    engine.add(PROMPTS[0], GREEDY)
    while engine.has_work:
        engine.step()
    engine.close()
    assert lengths == runs * 16, "one prefill pass and 15 steps"


def test_after_weights_were_replaced_the_drafters_native_layers_use_the_new_ones(native_runs: list[int]) -> None:
    target = target_of("llama")
    old, new = (drafter_for(target, [prompt + prompt for prompt in PROMPTS[:number]]) for number in (2, 4))
    undo = pack_models(target, old, 4, 64)
    try:
        old.load_state_dict(new.state_dict())
        repack(old)
        layer, expected = old.layers[0], new.layers[0]
        packed, plain = layer.self_attn.o_proj.packed, expected.self_attn.o_proj.weight
        x = torch.randn(3, plain.shape[1])
        torch.testing.assert_close(layer.self_attn.o_proj(x), x @ plain.t(), rtol=1e-4, atol=1e-4)
        run = old.__dict__["run_layers"]
        cells = dict(zip(run.__code__.co_freevars, (cell.cell_contents for cell in run.__closure__), strict=True))
        assert cells["natives"][0].output is packed, "not the weight packed before"
    finally:
        undo()
    assert "run_layers" not in old.__dict__
