import functools
import logging

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from harness.model_families import BASE, FAMILIES, family_target
from harness.tiny_models import tiny_target, tiny_tokenizer
from peagle.errors import TargetError
from peagle.kernels.compiler import compiled
from peagle.targets import packed as packed_module
from peagle.targets.hf import HFTarget
from peagle.targets.packed import BLOCK, MIN_HEAD_WIDTH, PackedRows, PackedTarget, TargetHead, block_mask, packed_rows

LENGTHS = ((9, 1, 14, 2), (26,), (3, 19))
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def packed_batch() -> tuple[Batch, list[tuple[int, slice]]]:
    """Three rows of 26 tokens (four documents, one, two and padding), and where each document is."""
    draw = torch.Generator().manual_seed(0)
    token_ids, document, position = (torch.full((3, 26), fill) for fill in (0, -1, 0))
    pieces = []
    for row, lengths in enumerate(LENGTHS):
        first = 0
        for number, length in enumerate(lengths):
            part = slice(first, first + length)
            token_ids[row, part] = torch.randint(3, 260, (length,), generator=draw)
            document[row, part], position[row, part] = number, torch.arange(length)
            pieces.append((row, part))
            first += length
    return (token_ids, document, position), pieces


def check_like_separate_passes(target: HFTarget, packed: PackedTarget) -> None:
    batch, pieces = packed_batch()
    output = packed.forward(*batch)
    for row, part in pieces:
        alone = target.forward(batch[0][row : row + 1, part])
        torch.testing.assert_close(output.aux_hidden_BTA[row, part], alone.aux_hidden_BTA[0], rtol=2e-4, atol=2e-4)
        logits = packed.head(output.last_hidden_BTD[row, part])
        torch.testing.assert_close(logits, alone.logits_BTV[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_a_packed_row_run_as_if_each_were_alone(family: str) -> None:
    target = family_target(family)
    packed = PackedTarget(target)
    assert packed.can_pack and TargetHead(target).is_exact
    check_like_separate_passes(target, packed)


def test_a_compiled_layer_gives_the_same_and_the_target_is_its_own_again_afterwards() -> None:
    target = family_target("gpt-oss")
    attention = target.model.config._attn_implementation
    num_compiled = []

    def compile(function):
        num_compiled.append(function)
        return torch.compile(function, backend="eager", dynamic=False)

    check_like_separate_passes(target, PackedTarget(target, compile))
    assert len(num_compiled) == 3, "the layers share a class; the norm and the rotary embedding have one each"
    assert target.model.config._attn_implementation == attention
    assert "forward" not in target.layers[0].__dict__


def test_a_model_with_attention_of_its_own_runs_its_documents_one_to_a_row(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=4, vocab_size=272, attention_types=[[["global", "local"], 1]]
    )
    target = HFTarget(GPTNeoForCausalLM(config), tiny_tokenizer(), name="neo")
    with caplog.at_level(logging.WARNING, logger="peagle"):
        packed = PackedTarget(target)
    assert not packed.can_pack
    assert "documents of GPTNeoForCausalLM cannot share a row" in caplog.text
    check_like_separate_passes(target, packed)


@pytest.mark.parametrize(
    "model",
    [
        lambda: GraniteForCausalLM(GraniteConfig(**BASE, logits_scaling=8.0)),
        lambda: CohereForCausalLM(CohereConfig(**BASE, logit_scale=0.25)),
    ],
)
def test_the_scale_of_a_head_is_applied(model) -> None:
    torch.manual_seed(0)
    target = HFTarget(model(), tiny_tokenizer(), name="scaled")
    assert TargetHead(target).is_exact
    check_like_separate_passes(target, PackedTarget(target))


def test_logits_of_an_unknown_head_are_kept_whole_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Shifted(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.sinh()
            return output

    torch.manual_seed(0)
    target = HFTarget(Shifted(LlamaConfig(**BASE)), tiny_tokenizer(), name="odd")
    with caplog.at_level(logging.WARNING, logger="peagle"):
        packed = PackedTarget(target)
    assert "the head of Shifted is not a plain projection" in caplog.text
    check_like_separate_passes(target, packed)


def test_a_target_that_an_engine_uses_is_refused() -> None:
    target = tiny_target(num_layers=2)
    packed = PackedTarget(target)
    target.is_lent = True
    with pytest.raises(TargetError, match="in use by an engine"):
        packed.forward(*packed_batch()[0])


@pytest.mark.parametrize("num_tokens", [BLOCK, 3 * BLOCK, 5 * BLOCK - 17])
@pytest.mark.parametrize("window", [0, 1, 60, BLOCK, 200, 300])
def test_blocks_hold_every_token_seen_and_full_blocks_nothing_else(num_tokens: int, window: int) -> None:
    draw = torch.Generator().manual_seed(num_tokens + window)
    is_first = torch.rand(3, num_tokens, generator=draw) < torch.tensor([0.0, 0.004, 0.05])[:, None]
    document = is_first.long().cumsum(1)
    document[2, -9:] = -1
    mask = block_mask(document, window)
    index = torch.arange(num_tokens)
    distance = index[:, None] - index
    seen = (distance >= 0) & (document[:, :, None] == document[:, None])
    seen &= distance < window if window else torch.tensor(True)
    given = mask.mask_mod(torch.arange(3)[:, None, None], torch.tensor(0), index[:, None], index)
    assert torch.equal(given, seen)
    padding = (0, -num_tokens % BLOCK, 0, -num_tokens % BLOCK)
    blocks = torch.nn.functional.pad(seen, padding).unfold(1, BLOCK, BLOCK).unfold(2, BLOCK, BLOCK).flatten(3)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    # A full block may reach beyond the row's end, where nobody looks.
    ends = torch.nn.functional.pad(torch.ones_like(seen), padding).unfold(1, BLOCK, BLOCK).unfold(2, BLOCK, BLOCK)
    assert not (full & (blocks != ends.flatten(3)).any(-1)).any()
    assert not (blocks.any(-1) & ~(full | partial)).any()
    assert not (full & partial).any()


def listed(counts: torch.Tensor | None, indices: torch.Tensor | None) -> torch.Tensor:
    """Lists of block numbers as a table of yes and no."""
    assert counts is not None and indices is not None
    is_listed = torch.arange(indices.shape[-1]) < counts[:, 0, :, None]
    table = torch.zeros(indices[:, 0].shape, dtype=torch.bool)
    return table.scatter(-1, indices[:, 0].long(), is_listed)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 50])
def test_attention_by_blocks_is_that_of_the_dense_mask(
    window: int, has_sinks: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_module, "_compiled_attention", lambda: flex_attention)
    draw = torch.Generator().manual_seed(0)
    document = (torch.rand(2, 200, generator=draw) < 0.03).long().cumsum(1)
    query = torch.randn(2, 6, 200, 16, generator=draw)
    key, value = (torch.randn(2, 3, 200, 16, generator=draw) for _ in range(2))
    sinks = torch.randn(6, generator=draw) if has_sinks else None
    inputs = (query, key, value)
    blocks = PackedRows(document, {window: block_mask(document, window)})
    given = packed_module._attend_blocks(*inputs, blocks, window, 0.3, softcap, sinks)
    expected = packed_module._attend_dense(*inputs, PackedRows(document, None), window, 0.3, softcap, sinks)
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


def test_on_a_cpu_rows_have_a_dense_mask() -> None:
    assert packed_rows(torch.zeros(1, 4 * BLOCK, dtype=torch.long), {0}).blocks is None


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_a_packed_row_run_as_if_each_were_alone_on_a_gpu(
    family: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BASE, "head_dim", MIN_HEAD_WIDTH)
    target = family_target(family)
    target.model.to("cuda")
    packed = PackedTarget(target, functools.partial(compiled, dynamic=False) if compiles else None)
    draw = torch.Generator().manual_seed(1)
    lengths = ((150, 3, 147), (90, 100, 80))
    token_ids, document, position = (torch.full((2, 300), fill) for fill in (0, -1, 0))
    for row, row_lengths in enumerate(lengths):
        first = 0
        for number, length in enumerate(row_lengths):
            part = slice(first, first + length)
            token_ids[row, part] = torch.randint(3, 260, (length,), generator=draw)
            document[row, part], position[row, part] = number, torch.arange(length)
            first += length
    output = packed.forward(token_ids.cuda(), document.cuda(), position.cuda())
    for row, row_lengths in enumerate(lengths):
        for number in range(len(row_lengths)):
            chosen = document[row] == number
            alone = target.forward(token_ids[row : row + 1, chosen].cuda())
            aux, hidden = output.aux_hidden_BTA[row, chosen], output.last_hidden_BTD[row, chosen]
            torch.testing.assert_close(aux, alone.aux_hidden_BTA[0], rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(packed.head(hidden), alone.logits_BTV[0], rtol=1e-2, atol=3e-2)


def test_a_quantized_target_runs_packed_as_alone() -> None:
    target = tiny_target(num_layers=7)
    for module in target.layers.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, RoundedLinear(child))
    check_like_separate_passes(target, PackedTarget(target))


class RoundedLinear(torch.nn.Module):
    """Weights as whole numbers with a scale a row, widened when they are used, as quantizers keep them."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight * self.scale)
