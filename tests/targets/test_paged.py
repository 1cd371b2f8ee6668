"""A target over paged memory: equal to its own forward, and given back as it was."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.model_families import BASE, FAMILIES, family_target
from harness.tiny_models import tiny_tokenizer
from peagle.errors import TargetError
from peagle.kernels import attention
from peagle.kernels.attention import PagedRows
from peagle.targets.hf import HFTarget
from peagle.targets.paged import PagedTarget
from peagle.worker.graphs import compile_once

TEXT = [(13 * place) % 260 + 4 for place in range(19)]


def rows_of(context: int, num_rows: int) -> PagedRows:
    """One request in the pages 3, 1, 2, ... of four tokens."""
    pages = [3, 1, 2, 5, 4]
    cells = [pages[index // 4] * 4 + index % 4 for index in range(context, context + num_rows)]
    return PagedRows(
        torch.tensor([pages], dtype=torch.int32),
        torch.tensor([0, num_rows]),
        torch.tensor([context]),
        torch.tensor(cells),
        torch.empty(num_rows, 0),
    )


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_pieces_of_a_text_give_the_logits_and_states_of_one_forward(family: str) -> None:
    target = family_target(family)
    whole = target.forward(torch.tensor([TEXT]))
    paged = PagedTarget(target)
    memory = paged.new_memory(6, 4)
    for start, end in ((0, 7), (7, 8), (8, 19)):
        ids, positions = torch.tensor(TEXT[start:end]), torch.arange(start, end)
        logits_NV, aux_NA = paged.forward(ids, positions, memory, rows_of(start, end - start), None)
        assert torch.allclose(logits_NV, whole.logits_BTV[0, start:end], atol=2e-4), f"logits {start}..{end}"
        assert torch.allclose(aux_NA, whole.aux_hidden_BTA[0, start:end], atol=2e-4), f"states {start}..{end}"
    last_RV, _ = paged.forward(ids, positions, memory, rows_of(8, 11), torch.tensor([10]))
    assert torch.allclose(last_RV, whole.logits_BTV[0, -1:], atol=2e-4), "logits of chosen rows only"
    paged.close()


@pytest.mark.slow
@torch.no_grad()
def test_compiled_layers_write_their_own_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the attention kernel, here interpreted, is an operator that torch.compile sees from outside."""
    pytest.importorskip("triton")
    target = family_target("llama")
    whole = target.forward(torch.tensor([TEXT]))
    monkeypatch.setattr(attention, "paged_attention_torch", attention.paged_attention_triton)
    paged = PagedTarget(target, compile_once)
    memory = paged.new_memory(6, 4)
    for start, end in ((0, 7), (7, 19)):
        ids, positions = torch.tensor(TEXT[start:end]), torch.arange(start, end)
        logits_NV, _ = paged.forward(ids, positions, memory, rows_of(start, end - start), None)
        assert torch.allclose(logits_NV, whole.logits_BTV[0, start:end], atol=2e-4), f"logits {start}..{end}"
    paged.close()


def test_the_keys_and_the_values_of_a_layer_share_no_memory() -> None:
    """torch.compile gets wrong results from two arguments that are written and share memory."""
    paged = PagedTarget(family_target("llama"))
    memory = paged.new_memory(6, 4)
    keys, values = memory[1]
    assert keys.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()
    paged.close()


def test_where_rotary_frequencies_follow_the_longest_text_a_target_holds_what_they_are_the_same_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(3)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2, 4, 8]}
    config = LlamaConfig(**BASE, rope_parameters=rope | {"original_max_position_embeddings": 40})
    target = HFTarget(LlamaForCausalLM(config), tiny_tokenizer(), name="long")
    assert target.max_length == 40 and "context limited to 40 of 160 tokens: longrope" in caplog.text
    whole = target.forward(torch.tensor([TEXT]))
    paged = PagedTarget(target)
    ids, positions = torch.tensor(TEXT), torch.arange(len(TEXT))
    logits_NV, _ = paged.forward(ids, positions, paged.new_memory(6, 4), rows_of(0, len(TEXT)), None)
    assert torch.allclose(logits_NV, whole.logits_BTV[0], atol=2e-4)
    rotary = target.model.model.rotary_emb
    near, _ = rotary(torch.zeros(1, 2, 1), torch.tensor([[1, 2]]))
    far, _ = rotary(torch.zeros(1, 2, 1), torch.tensor([[1, 150]]))
    assert torch.equal(near[:, 0], far[:, 0]), "a position is turned alike whatever is beside it"
    paged.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_closing_gives_the_target_its_attention_and_layers_back(family: str) -> None:
    target = family_target(family)
    before = target.forward(torch.tensor([TEXT])).logits_BTV
    attention = target.model.config._attn_implementation
    paged = PagedTarget(target)
    assert target.model.config._attn_implementation != attention
    paged.close()
    assert target.model.config._attn_implementation == attention
    assert not any("forward" in vars(module) for module in target.model.modules()), "no layer keeps a wrapped forward"
    assert torch.equal(target.forward(torch.tensor([TEXT])).logits_BTV, before)


def with_attention_arguments(**arguments: Any) -> HFTarget:
    """A target whose third layer hands more to its attention."""
    target = family_target("llama")
    attention = target.layers[2].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs, **arguments)
    return target


def test_an_attention_argument_that_is_not_known_is_refused_by_name_and_layer() -> None:
    target = with_attention_arguments(relative_bias=torch.ones(1))
    with pytest.raises(TargetError, match=r"LlamaForCausalLM passes relative_bias to its attention \(layer 2\)"):
        PagedTarget(target)
    assert target.model.config._attn_implementation == "sdpa", "a refused target is left as it was"


def test_an_attention_argument_that_is_none_or_changes_nothing_is_let_through() -> None:
    PagedTarget(with_attention_arguments(relative_bias=None, output_attentions=False)).close()
