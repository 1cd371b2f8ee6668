"""What cannot work is refused, at start or when it is asked for, with the reason; and it harms nobody else."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

from harness.model_families import BASE, family_target, sequential
from harness.tiny_models import tiny_drafter, tiny_tokenizer
from peagle.decoding.reference import decode
from peagle.engine.engine import Engine
from peagle.engine.llm import LLM
from peagle.errors import CapacityError, ConfigError, PeagleError, RequestError, TargetError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return family_target("llama")


@pytest.fixture(scope="module")
def engine(target: HFTarget) -> Iterator[Engine]:
    engine = Engine(target, tiny_drafter(target), 3, EngineConfig(page_size=4, max_length=60, num_pages=20))
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"num_pages": 2**40},
            CapacityError,
            "num_pages=.* takes .* GiB, but .* GiB is available.*\nhint: use at most",
        ),
        ({"num_pages": 3, "page_size": 4}, CapacityError, "room for 3 pages of 4 tokens .* full length needs 40"),
        ({"memory_share": 1e-9}, CapacityError, "room for 0 pages of 32 tokens"),
        ({"max_length": 161}, ConfigError, "max_length=161 exceeds the 160 tokens of target 'tiny-llama'"),
        ({"max_length": 1}, ConfigError, "max_length must be at least 2, got 1"),
        ({"page_size": 0}, ConfigError, "page_size must be at least 1, got 0"),
        ({"memory_share": 1.5}, ConfigError, "memory_share must be above 0 and at most 1, got 1.5"),
    ],
)
def test_a_budget_that_cannot_hold_is_refused_at_start_with_the_numbers(
    settings: dict[str, Any], error: type[PeagleError], message: str
) -> None:
    target = family_target("llama")
    with pytest.raises(error) as caught:
        Engine(target, config=EngineConfig(**settings))
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)
    target.forward(torch.tensor([[1, 2]]))  # and the target is as it was before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafter": None, "num_draft_tokens": 3}, "num_draft_tokens=3 needs a drafter"),
        ({"drafter": "own", "num_draft_tokens": 0}, "num_draft_tokens=0 contradicts the given drafter"),
        ({"drafter": "own", "num_draft_tokens": 9}, "between 1 and 4, the depth it was trained for, got 9"),
        ({"drafter": "own", "num_draft_tokens": -1}, "num_draft_tokens must be"),
        ({"drafter": "own", "num_draft_tokens": 63}, "num_draft_tokens=63 exceeds the limit of 62"),
        ({"drafter": "own", "num_draft_tokens": 4, "tree_nodes": 63}, "tree_nodes must be between 1 and 62, got 63"),
        ({"drafter": None, "tree_nodes": 8}, "tree_nodes=8 needs a parallel drafter, but there is none"),
        ({"drafter": "eagle3", "num_draft_tokens": 3, "tree_nodes": 8}, "this one drafts token by token (EAGLE-3)"),
        ({"drafter": "auto", "num_draft_tokens": 3}, "no drafter ships for 'tiny-llama'"),
        ({"max_batsh": 3}, "unknown setting 'max_batsh'\nhint: did you mean 'max_batch'?"),
    ],
)
def test_contradictory_and_unknown_options_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    target = family_target("llama")
    if arguments.get("drafter") in ("own", "eagle3"):
        parallel = tiny_drafter(target)
        own = parallel if arguments["drafter"] == "own" else sequential(parallel, target)
        arguments = arguments | {"drafter": own}
    with pytest.raises(ConfigError) as caught:
        LLM(target, **arguments)
    assert message in str(caught.value)


def test_a_target_with_linear_attention_is_refused_by_name_before_anything_runs() -> None:
    config = Qwen3NextConfig(
        **(BASE | {"num_hidden_layers": 2}),
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with pytest.raises(TargetError) as caught:
        Engine(HFTarget(Qwen3NextForCausalLM(config), tiny_tokenizer(), name="linear"))
    assert "Qwen3NextForCausalLM" in str(caught.value) and "linear_attention" in str(caught.value)


class OwnAttention(torch.nn.Module):
    """Attends by itself, past transformers' attention interface."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_layer_that_attends_by_itself_is_refused_by_its_number_and_the_target_is_left_as_it_was() -> None:
    target = family_target("llama")
    target.layers[2].self_attn = OwnAttention()
    before = target.forward(torch.tensor([[5, 6, 7]])).logits_BTV
    with pytest.raises(TargetError, match="layer 2 of LlamaForCausalLM does not use transformers' attention") as caught:
        Engine(target)
    assert "hint:" in str(caught.value)
    assert torch.equal(target.forward(torch.tensor([[5, 6, 7]])).logits_BTV, before)


def test_a_target_whose_mask_our_attention_does_not_make_is_refused_by_its_kind() -> None:
    sizes = {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48}
    config = Llama4TextConfig(**BASE, **sizes, layer_types=["chunked_attention"] * 3 + ["full_attention"])
    target = HFTarget(Llama4ForCausalLM(config), tiny_tokenizer(), name="chunks")
    with pytest.raises(TargetError, match="Llama4ForCausalLM has layers of type chunked_attention"):
        Engine(target)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([5] * 60, {}, "a prompt of 60 tokens leaves no room for output"),
        ([5] * 200, {}, "200 tokens"),
        ([272], {}, "between 0 and 271"),
        ([-1], {}, "between 0 and 271"),
        ([1.5, 2], {}, "the prompt must be a list of token ids"),
        ("text", {}, "the prompt must be a list of token ids"),
        ([5], {"num_draft_tokens": 4}, "num_draft_tokens=4 exceeds the engine's 3"),
        ([5], {"max_tokens": 3.5}, "max_tokens must be a whole number, got 3.5"),
        ([5], {"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ([5], {"stop": (5,)}, "stop must be"),
        ([5], {"stop": "text"}, "stop must be"),
        ([5], {"stop_token_ids": (1.5,)}, "stop_token_ids must contain token ids"),
    ],
)
def test_a_refused_request_leaves_the_others_their_answers(
    engine: Engine, prompt: Any, params: dict[str, Any], message: str
) -> None:
    good = engine.add([5, 6, 7], SHORT)
    engine.step()
    with pytest.raises((RequestError, CapacityError)) as caught:
        engine.add(prompt, SamplingParams(**params))
    assert message in str(caught.value)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.check_integrity()
    assert [output.request_id for output in outputs] == [good]
    twin = family_target("llama")
    wanted = tuple(token for step in decode(twin, [5, 6, 7], SHORT) for token in step.token_ids)
    assert outputs[0].outputs[0].token_ids == wanted


def test_a_text_that_needs_more_pages_than_there_are_is_refused_and_a_shorter_one_is_not(target: HFTarget) -> None:
    engine = Engine(family_target("llama"), None, 0, EngineConfig(page_size=4, max_length=40, num_pages=10))
    with pytest.raises(CapacityError, match="max_length=40"):
        engine.add([5] * 45, SamplingParams(max_tokens=2))
    engine.add([5] * 30, SamplingParams(max_tokens=500))
    while engine.has_work:
        engine.step()
    assert engine.stats().num_finished == 1
    engine.close()


def test_a_second_request_of_the_same_id_is_refused_while_the_first_goes_on(engine: Engine) -> None:
    engine.add([5, 6], SHORT, request_id="twice")
    with pytest.raises(RequestError, match="request 'twice' is already being served"):
        engine.add([7], SHORT, request_id="twice")
    assert engine.abort("twice") and not engine.abort("twice")


def test_an_id_that_the_engine_gives_is_never_one_that_a_caller_chose(engine: Engine) -> None:
    _, number = engine.add([5, 6], SHORT).split("-")
    taken = [f"request-{int(number) + index}" for index in (1, 2, 4)]
    given = [engine.add([5, 6], SHORT, request_id=name) for name in taken] + [engine.add([7], SHORT) for _ in range(3)]
    assert len(set(given)) == 6
    while engine.has_work:
        engine.step()


def test_huge_top_k_and_extreme_temperatures_are_served(engine: Engine) -> None:
    """Wishes that no row of 32 bits could hold, or that overflow a softmax, must not stop a step."""
    for params in ({"top_k": 2**40}, {"temperature": 1e-30}, {"temperature": 1e6}, {"top_p": 1e-9}, {"min_p": 1.0}):
        engine.add([5, 6, 7], SamplingParams(**{"max_tokens": 4, "temperature": 1.0} | params))
    num_before = engine.stats().num_finished
    while engine.has_work:
        engine.step()
    assert engine.stats().num_finished == num_before + 5
