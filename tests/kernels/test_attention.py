"""Paged attention: the PyTorch implementation against dense attention, and the Triton one against PyTorch.

Without a GPU the Triton kernel runs in Triton's interpreter.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from peagle.kernels import tilings
from peagle.kernels.attention import (
    WASTE_PAGE,
    PagedRows,
    RowTree,
    paged_attention,
    paged_attention_torch,
    paged_attention_triton,
)
from peagle.kernels.tilings import (
    DEEP_PIPELINE_BYTES,
    MOST_DECODE_ROWS,
    NUM_COUNTERS,
    AttentionTiling,
    Gpu,
    attention_tiling,
)

triton = pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE_SIZE = 4


@dataclass(frozen=True)
class Case:
    """Requests as (cached keys, new rows), and the heads."""

    requests: tuple[tuple[int, int], ...]
    num_heads: int = 6
    num_groups: int = 2
    width: int = 16
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_tree: bool = False
    first_key: int = 0
    dtype: torch.dtype = torch.float32


CASES = {
    "one row of one request": Case(((37, 1),)),
    "several rows of several requests": Case(((37, 4), (5, 4), (0, 4), (90, 4))),
    "requests of different numbers of rows, one of none": Case(((9, 3), (0, 17), (30, 0), (3, 1))),
    "a long chunk over many tiles": Case(((13, 70), (0, 33))),
    "a context over many splits": Case(((700, 2),)),
    "rows over several tiles and a context over many splits": Case(((700, 8), (90, 5))),
    "one head a group": Case(((21, 2), (3, 2)), num_heads=2),
    "a width that is no power of two": Case(((21, 2), (3, 2)), width=24),
    "heads as wide as Gemma-4's": Case(((21, 5), (70, 2)), num_heads=8, num_groups=1, width=512),
    "such heads in half precision": Case(((21, 5),), num_heads=8, num_groups=1, width=512, dtype=torch.float16),
    "a sliding window": Case(((37, 4), (5, 40), (200, 2)), window=9),
    "sinks": Case(((37, 4), (0, 3), (300, 2)), has_sinks=True),
    "a soft cap": Case(((37, 4), (0, 3)), softcap=3.0),
    "a tree": Case(((37, 5), (2, 9)), has_tree=True),
    "a tree deeper than the window": Case(((37, 12), (2, 12)), window=3, has_tree=True),
    "a tree of many tiles": Case(((40, 40), (0, 33)), has_tree=True, window=11),
    "a tree beside a prompt": Case(((37, 9), (3, 100), (0, 7)), has_tree=True),
    "a first key": Case(((37, 4), (1, 3), (300, 2)), first_key=1),
    "everything at once": Case(((300, 5), (7, 5)), window=50, softcap=4.0, has_sinks=True, has_tree=True),
    "half precision": Case(((37, 4), (300, 2)), dtype=torch.float16),
}


def build(case: Case) -> tuple[tuple[Tensor, ...], PagedRows, dict[str, object]]:
    """Pages with random content in a shuffled order, new rows, and where they stand."""
    generator = torch.Generator().manual_seed(1)
    needed = [-(-(context + rows) // PAGE_SIZE) for context, rows in case.requests]
    order = torch.randperm(sum(needed), generator=generator) + 1
    page_table_BP = torch.full((len(needed), max(needed) + 1), WASTE_PAGE)
    cells, used = [], 0
    for request, (context, rows) in enumerate(case.requests):
        page_table_BP[request, : needed[request]] = order[used : used + needed[request]]
        used += needed[request]
        index = torch.arange(context, context + rows)
        cells.append(page_table_BP[request, index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE)
    counts = torch.tensor([0] + [rows for _, rows in case.requests])

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    num_rows, heads = int(counts.sum()), (case.num_groups, case.width)
    pages = (len(order) + 1, PAGE_SIZE, *heads)
    tensors = (
        random(num_rows, case.num_heads, case.width),
        random(num_rows, *heads),
        random(num_rows, *heads),
        random(*pages),
        random(*pages),
    )
    max_rows = int(counts.max())
    tree = random_tree([rows for _, rows in case.requests], generator) if case.has_tree else None
    contexts = torch.tensor([context for context, _ in case.requests])
    rows = PagedRows(page_table_BP, counts.cumsum(0), contexts, torch.cat(cells), torch.empty(max_rows, 0), tree)
    settings = {
        "scale": case.width**-0.5,
        "window": case.window,
        "softcap": case.softcap,
        "sinks_H": random(case.num_heads) if case.has_sinks else None,
        "first_key": case.first_key,
    }
    return tensors, rows, settings


def random_tree(num_rows: list[int], generator: torch.Generator) -> RowTree:
    """Each row hangs below one of the few rows before it, so some branches are deep. Some requests have no tree."""
    ancestors, depth = [], []
    for request, count in enumerate(num_rows):
        first = len(ancestors)
        if request % 3 == 1:
            ancestors += [0] * count
            depth += range(count)
            continue
        for row in range(count):
            above = max(0, row - 1 - int(torch.randint(3, (), generator=generator)))
            ancestors.append((ancestors[first + above] if row else 0) | 1 << row)
            depth.append(depth[first + above] + 1 if row else 0)
    return RowTree(torch.tensor(ancestors), torch.tensor(depth))


def dense(case: Case, tensors: tuple[Tensor, ...], rows: PagedRows, settings: dict[str, object]) -> Tensor:
    """The definition, row by row and head by head, over the text's keys in order."""
    query, key, value, key_pages, value_pages = (tensor.double() for tensor in tensors)
    attended = torch.zeros_like(query)
    bounds = rows.first_row_B1.tolist()
    for request, (context, num_rows) in enumerate(case.requests):
        pages = rows.page_table_BP[request]
        new = slice(bounds[request], bounds[request + 1])
        keys = torch.cat([key_pages[pages].flatten(0, 1)[:context], key[new]])
        values = torch.cat([value_pages[pages].flatten(0, 1)[:context], value[new]])
        for row in range(num_rows):
            above, depth = list(range(row + 1)), list(range(num_rows))
            if rows.tree is not None:
                bits, depth = int(rows.tree.ancestors_N[new][row]), rows.tree.depth_N[new].tolist()
                above = [other for other in above if bits >> other & 1 or not bits]
                assert len(above) == depth[row] + 1
            position = [*range(context), *(context + depth[other] for other in range(num_rows))]
            seen = [
                index
                for index in [*range(context), *(context + other for other in above)]
                if index >= case.first_key and (not case.window or position[index] > context + depth[row] - case.window)
            ]
            for head in range(case.num_heads):
                group = head // (case.num_heads // case.num_groups)
                scores = keys[seen, group] @ query[bounds[request] + row, head] * settings["scale"]
                if case.softcap:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                if settings["sinks_H"] is not None:
                    scores = torch.cat([scores, settings["sinks_H"][head : head + 1].double()])
                weights = torch.softmax(scores, 0)[: len(seen)]
                attended[bounds[request] + row, head] = weights @ values[seen, group]
    return attended


def run(function: object, tensors: tuple[Tensor, ...], rows: PagedRows, settings: dict[str, object]) -> list[Tensor]:
    """What is attended, and the pages afterwards, all on the CPU."""
    moved = [tensor.clone().to(DEVICE) for tensor in tensors]
    if rows.tree is not None:
        rows = rows._replace(tree=RowTree(*(part.to(DEVICE) for part in rows.tree)))
    rows = PagedRows(*(part.to(DEVICE) if isinstance(part, Tensor) else part for part in rows))
    settings = {name: part.to(DEVICE) if isinstance(part, Tensor) else part for name, part in settings.items()}
    attended = function(*moved, rows, *settings.values())
    return [attended.cpu(), moved[3].cpu(), moved[4].cpu()]


@pytest.mark.parametrize("name", CASES)
def test_pytorch_attention_follows_the_definition(name: str) -> None:
    case = CASES[name]
    tensors, rows, settings = build(case)
    attended, key_pages, value_pages = run(paged_attention_torch, tensors, rows, settings)
    tolerance = 1e-5 if case.dtype == torch.float32 else 5e-3
    torch.testing.assert_close(attended.double(), dense(case, tensors, rows, settings), atol=tolerance, rtol=tolerance)
    assert torch.equal(key_pages.flatten(0, 1)[rows.cell_N], tensors[1])
    assert torch.equal(value_pages.flatten(0, 1)[rows.cell_N], tensors[2])


@pytest.mark.parametrize("name", CASES)
def test_triton_attention_equals_pytorch(name: str) -> None:
    case = CASES[name]
    built = build(case)
    expected, found = run(paged_attention_torch, *built), run(paged_attention_triton, *built)
    tolerance = 2e-5 if case.dtype == torch.float32 else 5e-3
    torch.testing.assert_close(found[0], expected[0], atol=tolerance, rtol=tolerance)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


def test_a_prompt_beside_trees_takes_several_tiles_even_with_one_head_a_group() -> None:
    tensors, rows, settings = build(Case(((37, 9), (3, 100)), num_heads=1, num_groups=1, width=64, has_tree=True))
    rows = rows._replace(span_L0=torch.empty(MOST_DECODE_ROWS, 0))  # as of `joined`
    expected = run(paged_attention_torch, tensors, rows, settings)
    torch.testing.assert_close(run(paged_attention_triton, tensors, rows, settings), expected, atol=2e-5, rtol=2e-5)


SLOW = [(32, 16, 2), (16, 16, 3), (16, 16, 3, 4, 7)]
TILINGS = [
    *(AttentionTiling(*sizes) for sizes in ((16, 16, 1), (64, 32, 4))),
    *(pytest.param(AttentionTiling(*sizes), marks=pytest.mark.slow) for sizes in SLOW),
]


@pytest.mark.parametrize("tiling", TILINGS)
def test_triton_attention_is_the_same_with_any_tiling(monkeypatch: pytest.MonkeyPatch, tiling: AttentionTiling) -> None:
    built = build(Case(((70, 12), (3, 1), (0, 9), (130, 7)), window=40))
    expected = run(paged_attention_torch, *built)
    monkeypatch.setattr(tilings, "attention_tiling", lambda *_: tiling)
    for _ in range(2):  # what one call counts, the next finds at zero again
        found = run(paged_attention_triton, *built)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("width", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tiling_fits_its_gpu(width: int, dtype: torch.dtype) -> None:
    small, large = Gpu(58, 100 << 10), Gpu(132, DEEP_PIPELINE_BYTES)
    sizes = itertools.product((small, large), (1, 8, 33, 63, 300), (1, 8, 64, 333), (1, 3))
    for gpu, max_rows, num_requests, share in sizes:
        num_rows = max(num_requests, num_requests * max_rows // share)
        tile, step, num_splits, _, num_stages = attention_tiling(
            num_rows, max_rows, num_requests, 3, 3, width, dtype, gpu
        )
        num_tiles = (num_rows * 3 // tile + num_requests) * 3
        assert num_splits == 1 or num_tiles <= NUM_COUNTERS, "a counter for each tile that is split"
        # Finding a page takes a stage as well. Large tiles are multiplied where the keys lie, which stay for one more.
        num_held = max(1, (num_stages - 1) // 2) + (tile == 64 and dtype == torch.bfloat16)
        step_bytes = 2 * step * width * dtype.itemsize
        num_beside = 2 if num_stages > 2 else 1
        assert num_held * step_bytes * num_beside <= gpu.shared_bytes, "with steps in flight there are two"


def test_rows_sent_to_the_waste_page_leave_the_others_alone() -> None:
    tensors, rows, settings = build(Case(((9, 3),)))
    before = tensors[3].clone()
    rows = rows._replace(cell_N=torch.full_like(rows.cell_N, WASTE_PAGE))
    paged_attention(*tensors, rows, **settings)
    assert torch.equal(tensors[3][1:], before[1:])


def test_pages_in_order_are_read_without_a_copy_and_give_the_same() -> None:
    tensors, rows, settings = build(Case(((30, 2),)))
    expected = paged_attention_torch(*(tensor.clone() for tensor in tensors), rows, *settings.values())
    table = rows.page_table_BP[0, :-1]
    in_order = torch.arange(1, len(table) + 1)
    key_pages, value_pages = (pages.clone() for pages in tensors[3:])
    for pages, original in ((key_pages, tensors[3]), (value_pages, tensors[4])):
        pages[in_order] = original[table]
    index = torch.arange(30, 32)
    moved = rows._replace(
        page_table_BP=in_order[None], cell_N=in_order[index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE
    )
    found = paged_attention_torch(*tensors[:3], key_pages, value_pages, moved, *settings.values())
    assert torch.equal(found, expected)
