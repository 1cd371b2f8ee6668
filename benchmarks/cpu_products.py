"""What tile registers (AMX) gain on a CPU: products of a pass by rows, and the time to the first token.

    python benchmarks/cpu_products.py [--rows 1 8 16 32] [--prompt-tokens 64 128 256 512] [--rounds 40]

Both for vectors and, where the CPU has them, for tiles. Times are the shortest of the rounds, so other work on the
machine matters little. "products" are all products of the target's layers and its head, one after another.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console

from peagle import LLM, SamplingParams
from peagle.bench.report import make_table
from peagle.linears.joined_linear import joined_groups
from peagle.native import amx
from peagle.native.jit import Calls
from peagle.native.packed_linear import PackedLinear
from peagle.native.products import PackedWeight, make_product, new_scratch
from peagle.targets.load import load_target


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args(argv)
    takes, reason = amx.takes, amx.missing()
    for name in ("vectors", "tiles"):
        if name == "tiles" and reason is not None:
            print(f"tiles: {reason}")
            break
        amx.takes = takes if name == "tiles" else lambda num_outputs, num_inputs: False
        target = load_target(None)
        with LLM(target, max_batch=1, max_length=2048, reuse_prefixes=False) as llm:
            linears = [*target.model.modules(), *(group.packed for group in joined_groups(target.model))]
            weights = [each.packed for each in linears if isinstance(each, PackedLinear)]
            products = [weight for weight in weights if isinstance(weight, PackedWeight)]
            rows = [[str(number), f"{products_ms(products, number, options.rounds):.2f}"] for number in options.rows]
            Console().print(make_table(f"{name}: {len(products)} products", ["rows", "ms"], rows))
            rows = [
                [str(number), f"{first_token_ms(llm, number, options.rounds):.1f}"] for number in options.prompt_tokens
            ]
            Console().print(make_table(f"{name}: time to the first token", ["prompt tokens", "ms"], rows))


def products_ms(weights: Sequence[PackedWeight], num_rows: int, rounds: int) -> float:
    """Milliseconds of the products with all weights."""
    calls, tensors = [], []
    for weight in weights:
        x_NI, y_NO = torch.randn(num_rows, weight.num_inputs), torch.empty(num_rows, weight.num_outputs)
        tensors += [x_NI, y_NO, scratch := new_scratch(weight, num_rows)]
        calls += make_product(x_NI, weight, y_NO, None, scratch).calls
    return shortest_ms(Calls(calls).run, rounds)


def first_token_ms(llm: LLM, num_tokens: int, rounds: int) -> float:
    """Milliseconds to the first token of a prompt."""
    prompt = list(range(1000, 1000 + num_tokens))
    return shortest_ms(lambda: llm.generate([prompt], SamplingParams(max_tokens=1)), max(2, rounds // 8))


def shortest_ms(run: Callable[[], object], rounds: int) -> float:
    """The shortest time of some runs in milliseconds."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return 1000 * min(seconds)


if __name__ == "__main__":
    main()
