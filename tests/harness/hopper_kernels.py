"""Compile our Triton kernels for an H200, at the widths of the catalog's models, on a machine without a GPU.

    PYTHONPATH=src:tests python -m harness.hopper_kernels

Prints each kernel with the shared memory it takes. With another driver, Triton compiles for a GPU that is not there, as
long as nothing is launched. Triton's interpreter and the GPU tests check what the kernels compute.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from peagle.experts import few_bit_triton, product_triton
from peagle.experts.top_k_triton import top_k_triton
from peagle.kernels import attention_triton
from peagle.kernels.attention import PagedRows, RowTree, paged_attention_triton
from peagle.kernels.candidate_tree_triton import grow_tree_triton
from peagle.kernels.choose_triton import launch as choose_triton
from peagle.kernels.likeliest_triton import likeliest_tokens_triton, likeliest_triton
from peagle.kernels.move_triton import move_entries_triton
from peagle.kernels.tilings import MOST_DECODE_ROWS, Gpu
from peagle.linears import few_bit_triton as few_bit_linear_triton
from peagle.linears import skinny_linear_triton
from peagle.linears.few_bit import FewBitWeight, quantize
from peagle.linears.tilings import linear_tiling

SHARED_BYTES = 227 << 10
"""Per CTA, at most."""
H200 = Gpu(132, 228 << 10)
PAGE_SIZE = 32
LINEARS = {
    "SmolLM2": ((960, 576, ""), (576, 576, "+"), (3072, 576, "gated"), (576, 1536, "+")),
    "Llama-8B": ((6144, 4096, ""), (4096, 4096, "+"), (28672, 4096, "gated"), (4096, 14336, "+")),
}
EXPERTS = {"GPT-OSS-20B": (32, 4, 2880, 2880, "clamped"), "Qwen3-30B-A3B": (128, 8, 2048, 768, "silu")}
HEADS = {
    "SmolLM2": (9, 3, 64, 0),
    "Llama-8B": (32, 8, 128, 0),
    "GPT-OSS": (64, 8, 64, 128),
    "Gemma-4": (32, 16, 256, 1024),
    "Gemma-4, all tokens": (32, 4, 512, 0),
}
"""Query heads, key-value heads, width, window."""


class NoGpu:
    """Stands in for Triton's driver: says what to compile for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    largest = compile_all()
    if too_large := {name: size for name, size in largest.items() if size > SHARED_BYTES}:
        sys.exit(f"more than {SHARED_BYTES} bytes of shared memory: {too_large}")
    print(f"{len(largest)} products and kernels")


def compile_all() -> dict[str, int]:
    """The most shared memory of a kernel, in bytes, by what it is for."""
    triton.runtime.driver.set_active(NoGpu())
    run = JITFunction.run
    largest: dict[str, int] = {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        native = {"is_native": True} if "is_native" in options else {}
        kernel = run(self, *args, grid=grid, warmup=True, **options | native)
        largest[name] = max(largest.get(name, 0), kernel.metadata.shared)
        return kernel

    JITFunction.run = compile_only
    attention_triton.gpu_of = lambda _: H200
    for module in list(sys.modules.values()):
        if module.__name__.startswith("peagle.") and hasattr(module, "can_overlap"):
            module.can_overlap = lambda _: True
    for name, call in calls():  # `compile_only` reads the name
        call()
        print(f"{name}: {largest[name]:,} bytes", flush=True)
    return largest


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    yield from linears()
    yield from experts()
    yield from attention()
    for num_rows, vocab_size in product((1, 64), (49_152, 201_088)):
        logits = empty(num_rows, vocab_size)
        where = f"{num_rows} rows of {vocab_size:,} logits"
        yield f"likeliest token, {where}", lambda logits=logits: likeliest_triton(logits)
        yield f"likeliest 16 tokens, {where}", lambda logits=logits: likeliest_tokens_triton(logits, 16)
        numbers, places = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        settings = (numbers, places, numbers, numbers, places, places, 0)
        yield f"choice, {where}", lambda logits=logits, settings=settings: choose_triton(1, logits, *settings)
    for shape in ((8, 16), (8, 16, 16)):
        yield f"tree of {shape}", lambda shape=shape: grow_tree_triton(torch.empty(64, *shape), 31)
    cells, place = empty(30, 4096, 192), torch.empty(64, 8, dtype=torch.int64)
    yield "moves", lambda: move_entries_triton(cells, cells, place, place)
    for width, k in ((128, 8), (32, 4)):
        yield f"top {k} of {width}", lambda width=width, k=k: top_k_triton(empty(64, width), k)


def empty(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def stored(form: str, *shape: int) -> FewBitWeight:
    """A quantized weight without values."""
    weight = quantize(torch.empty(shape, dtype=torch.bfloat16, device="meta"), form)
    return weight._replace(
        **{
            name: torch.empty_like(getattr(weight, name), device="cpu")
            for name in ("words", "scale", "zero")
            if getattr(weight, name) is not None
        }
    )


def linears() -> Iterator[tuple[str, Callable[[], object]]]:
    for model, shapes in LINEARS.items():
        for (columns, size, kind), num_rows in product(shapes, (1, 8, 64)):
            x = empty(num_rows, size)
            activation = "silu" if kind == "gated" else None
            residual = empty(num_rows, columns) if kind == "+" else None
            where = f"{num_rows} rows x {columns} x {size} {kind}".strip()
            if model == "SmolLM2" or num_rows <= 16:
                tiling = linear_tiling(columns, size, num_rows)
                arguments = (x, empty(columns, size), None, residual, activation, tiling)
                yield where, lambda own=arguments: skinny_linear_triton.skinny_linear_triton(*own)
            for form in ("int4", "int8", "fp8") if model != "SmolLM2" else ():
                few = (x, stored(form, columns, size), None, residual, activation)
                yield f"{where}, {form}", lambda own=few: few_bit_linear_triton.few_bit_product_triton(*own)


def experts() -> Iterator[tuple[str, Callable[[], object]]]:
    for (model, (num_experts, num_chosen, width, inner, gate)), num_rows in product(EXPERTS.items(), (1, 8, 64)):
        index = torch.zeros(num_rows, num_chosen, dtype=torch.int64)
        chosen = (empty(num_rows, width), index, empty(num_rows, num_chosen))
        shapes = (num_experts, 2 * inner, width), (num_experts, width, inner)
        for form in ("mxfp4", "int4") if gate == "clamped" else ("fp8", "int4"):
            gate_up, down = (stored(form, *shape) for shape in shapes)
            few = (*chosen, gate_up, None, down, None, gate, 1.7, 7.0)
            name = f"{model}'s experts, {num_rows} rows, {form}"
            yield name, lambda own=few: few_bit_triton.few_bit_expert_products_triton(*own)
        is_transposed = gate == "clamped"
        stacks = [empty(*shape).transpose(1, 2).contiguous() if is_transposed else empty(*shape) for shape in shapes]
        plain = (*chosen, stacks[0], None, stacks[1], None, is_transposed, gate, 1.7, 7.0)
        name = f"{model}'s experts, {num_rows} rows, bfloat16"
        yield name, lambda own=plain: product_triton.expert_products_triton(*own)


def attention() -> Iterator[tuple[str, Callable[[], object]]]:
    batches = ((1, 1, False), (64, 1, False), (8, 8, False), (1, 32, True), (64, 8, True), (1, 512, False))
    for (model, (heads, groups, width, window)), (num_requests, num_rows, is_tree) in product(HEADS.items(), batches):
        total = num_requests * num_rows
        places = torch.zeros(total, dtype=torch.int64)
        table = torch.zeros(num_requests, 64, dtype=torch.int32)
        span = torch.empty(32 if is_tree else num_rows if num_rows <= MOST_DECODE_ROWS else total, 0)
        first, context = torch.arange(num_requests + 1) * num_rows, torch.zeros(num_requests, dtype=torch.int64)
        rows = PagedRows(table, first, context, places, span, RowTree(places, places) if is_tree else None)
        pages = empty(80, PAGE_SIZE, groups, width)
        new = (empty(total, heads, width), empty(total, groups, width), empty(total, groups, width))
        sinks = empty(heads) if model == "GPT-OSS" else None
        arguments = (*new, pages, pages, rows, width**-0.5, window, 0.0, sinks, 0)
        name = f"attention of {model}, {num_requests} x {num_rows}{' in trees' * is_tree}"
        yield name, lambda own=arguments: paged_attention_triton(*own)


if __name__ == "__main__":
    main()
