"""The other kernels of a decoder layer against torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from peagle.kernels.attention import PagedRows, RowTree, on_host, paged_attention
from peagle.native import jit
from peagle.native.jit import Call, Calls
from peagle.native.layer_kernels import attention_call, gate_call, norm_call, rotary_call

NUM_HEADS, NUM_GROUPS, WIDTH, PAGE_SIZE, NUM_PAGES = 4, 2, 16, 4, 9
HEADS = {"num_heads": NUM_HEADS, "num_groups": NUM_GROUPS, "width": WIDTH}

pytestmark = pytest.mark.skipif(jit.missing() is not None, reason=str(jit.missing()))


def run(*calls: Call) -> None:
    Calls(calls).run()


def test_norm_is_the_rms_norm_of_each_row() -> None:
    x_ND, weight_D, y_ND = torch.randn(5, 64), torch.randn(64), torch.empty(5, 64)
    run(norm_call(x_ND, weight_D, y_ND, 1e-3))
    torch.testing.assert_close(y_ND, functional.rms_norm(x_ND, (64,), weight_D, 1e-3))


@pytest.mark.parametrize(
    ("name", "activation"),
    [("silu", functional.silu), ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh"))],
)
def test_gate_is_right_for_small_and_for_huge_numbers(name: str, activation: Callable[[Tensor], Tensor]) -> None:
    gate_up = torch.randn(5, 256) * torch.tensor([0.01, 1.0, 10.0, 100.0, 1000.0])[:, None]
    y_NF = torch.empty(5, 128)
    run(gate_call(gate_up, y_NF, name))
    gate, up = gate_up.chunk(2, dim=1)
    torch.testing.assert_close(y_NF, activation(gate) * up, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("first_key", [0, 1])
@pytest.mark.parametrize("has_tree", [True, False])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation_and_attention_are_those_of_paged_attention(
    window: int, first_key: int, has_tree: bool, has_norms: bool
) -> None:
    """Two requests, the second one new; with a tree, new rows see some of those before them only."""
    draw = torch.Generator().manual_seed(0)
    page_table_BP = (torch.randperm(39, generator=draw)[: 2 * NUM_PAGES].view(2, NUM_PAGES) + 1).int()
    context_B, first_row_B1 = torch.tensor([13, 1]), torch.tensor([0, 3, 7])
    request_N, index_N = torch.tensor([0] * 3 + [1] * 4), torch.tensor([0, 1, 2, 0, 1, 2, 3])
    tree = RowTree(torch.tensor([1, 3, 5, 1, 3, 5, 0b1011]), torch.tensor([0, 1, 1, 0, 1, 1, 2])) if has_tree else None
    place_N = context_B[request_N] + index_N
    cell_N = page_table_BP[request_N, place_N // PAGE_SIZE].long() * PAGE_SIZE + place_N % PAGE_SIZE
    rows = on_host(PagedRows(page_table_BP, first_row_B1, context_B, cell_N, torch.empty(4, 0), tree))
    shape = (40, PAGE_SIZE, NUM_GROUPS, WIDTH)
    keys, values = (torch.randn(shape, generator=draw) for _ in range(2))
    qkv = torch.randn(7, (NUM_HEADS + 2 * NUM_GROUPS) * WIDTH, generator=draw)
    cos_NE, sin_NE = (torch.randn(7, WIDTH, generator=draw) for _ in range(2))
    norms = (torch.randn(WIDTH, generator=draw), torch.randn(WIDTH, generator=draw), 1e-6) if has_norms else None

    query, key, value = (
        part.reshape(7, -1, WIDTH)
        for part in qkv.split([count * WIDTH for count in (NUM_HEADS, NUM_GROUPS, NUM_GROUPS)], dim=1)
    )
    if norms is not None:
        query, key = (
            functional.rms_norm(x, (WIDTH,), norm, norms[2]) for x, norm in ((query, norms[0]), (key, norms[1]))
        )
    own_keys, own_values = keys.clone(), values.clone()
    expected_NHE = paged_attention(
        rotated(query, cos_NE, sin_NE),
        rotated(key, cos_NE, sin_NE),
        value,
        own_keys,
        own_values,
        rows,
        scale=0.3,
        window=window,
        first_key=first_key,
    )

    attended, scores = torch.empty(7, NUM_HEADS * WIDTH), torch.empty(torch.get_num_threads(), 64)
    assert rows.host is not None
    table, cells, row_table = rows.host.for_kernels(rows, 7)
    rotary = rotary_call(qkv, 7, norms, **HEADS)
    rotary.arguments[1:6] = [each.data_ptr() for each in (cos_NE, sin_NE, keys, values, cells)]
    attention = attention_call(qkv, attended, 7, scale=0.3, window=window, first_key=first_key, **HEADS)
    attention.arguments[1:6] = [each.data_ptr() for each in (keys, values, table, row_table, scores)]
    attention.arguments[6:9] = [scores.shape[1], NUM_PAGES, PAGE_SIZE]
    run(rotary, attention)
    torch.testing.assert_close(keys, own_keys, rtol=1e-5, atol=2e-6)
    assert torch.equal(values, own_values)
    torch.testing.assert_close(attended.view(7, NUM_HEADS, WIDTH), expected_NHE, rtol=1e-5, atol=2e-6)


def rotated(x_NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:
    first, second = x_NHE.chunk(2, dim=-1)
    return x_NHE * cos_NE[:, None] + torch.cat([-second, first], dim=-1) * sin_NE[:, None]


def test_a_query_attends_the_same_whether_keys_are_older_or_new() -> None:
    """Bit for bit, so that drafts do not change the target's logits; keys before the pass are read in blocks."""
    draw = torch.Generator().manual_seed(0)
    context, num_rows, page_size = 70, 7, 32
    keys, values = (torch.randn(5, page_size, NUM_GROUPS, WIDTH, generator=draw) for _ in range(2))
    qkv = torch.randn(num_rows, (NUM_HEADS + 2 * NUM_GROUPS) * WIDTH, generator=draw)
    table_BP = torch.tensor([[3, 1, 4]], dtype=torch.int32)

    def attended(first: int, number: int) -> Tensor:
        rows = PagedRows(
            table_BP,
            torch.tensor([0, number]),
            torch.tensor([context + first]),
            torch.arange(number),
            torch.empty(number, 0),
            RowTree((2 << torch.arange(number)) - 1, torch.arange(number)),
        )
        host = on_host(rows).host
        assert host is not None
        table, _, row_table = host.for_kernels(rows, number)
        own_qkv, result = qkv[first : first + number].contiguous(), torch.empty(number, NUM_HEADS * WIDTH)
        scores = torch.empty(torch.get_num_threads(), 128)
        call = attention_call(own_qkv, result, number, scale=0.3, window=0, first_key=0, **HEADS)
        call.arguments[1:6] = [each.data_ptr() for each in (keys, values, table, row_table, scores)]
        call.arguments[6:9] = [scores.shape[1], 3, page_size]
        run(call)
        return result

    whole = attended(0, num_rows)
    for row in range(num_rows):
        assert torch.equal(attended(row, 1)[0], whole[row])
    cells = table_BP[0].long().repeat_interleave(page_size) * page_size + torch.arange(page_size).repeat(3)
    own = [each.flatten(0, 1)[cells[: context + num_rows]] for each in (keys, values)]
    key_GTE, value_GTE = (each.transpose(0, 1).repeat_interleave(NUM_HEADS // NUM_GROUPS, dim=0) for each in own)
    query_HNE = qkv[:, : NUM_HEADS * WIDTH].view(num_rows, NUM_HEADS, WIDTH).transpose(0, 1)
    is_seen = torch.ones(num_rows, context + num_rows, dtype=torch.bool).tril(context)
    expected = functional.scaled_dot_product_attention(query_HNE, key_GTE, value_GTE, is_seen, scale=0.3)
    torch.testing.assert_close(whole, expected.transpose(0, 1).flatten(1), rtol=1e-5, atol=2e-6)
