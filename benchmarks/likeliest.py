"""Time our search for the likeliest tokens against torch's, by rows and vocabulary. Needs a GPU.

    python benchmarks/likeliest.py [--rows 1 7 64 448 2048] [--vocab 49152 201088 262144] [--width 16]

Microseconds per call, in a CUDA graph of calls on the same bfloat16 logits. They stay in the L2 cache if they fit, as
they do when the engine decodes. `read` is what reading them once from memory takes at --bandwidth. torch.topk and
torch.argmax give no log-probabilities; ours do. For one token, `likeliest` is timed as well as `likeliest_tokens`.

Legend: N rows, V vocabulary.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch

from peagle.kernels.likeliest import likeliest, likeliest_tokens
from peagle.worker.graphs import capture, replay_seconds

CALLS_PER_GRAPH = 20
NUM_REPLAYS = 5
NUM_TRIES = 5


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 7, 64, 448, 2048])
    parser.add_argument("--vocab", nargs="+", type=int, default=[49_152, 201_088, 262_144])
    parser.add_argument("--width", type=int, default=16, help="tokens per row")
    parser.add_argument("--bandwidth", type=float, default=4.8, help="of the memory, in TB/s; default 4.8, an H200's")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    width = arguments.width
    names = ("rows", "vocab", "read", "torch.topk", "ours", "torch.argmax", "likeliest", "ours, 1 token")
    print(*(f"{name:>13}" for name in names))
    for num_rows, vocab_size in itertools.product(arguments.rows, arguments.vocab):
        logits_NV = torch.randn(num_rows, vocab_size, device="cuda").bfloat16()
        calls: list[Callable[[], object]] = [
            partial(logits_NV.topk, width),
            partial(likeliest_tokens, logits_NV, width),
            partial(logits_NV.argmax, -1),
            partial(likeliest, logits_NV),
            partial(likeliest_tokens, logits_NV, 1),
        ]
        times = [logits_NV.nbytes / arguments.bandwidth / 1e6, *map(microseconds, calls)]
        print(f"{num_rows:>13} {vocab_size:>13}", *(f"{time:>13.2f}" for time in times), flush=True)


def microseconds(call: Callable[[], object]) -> float:
    """Per call, the fastest of some tries."""
    replay = capture(lambda: [call() for _ in range(CALLS_PER_GRAPH)], torch.cuda.graph_pool_handle())
    return min(replay_seconds(replay, NUM_REPLAYS) for _ in range(NUM_TRIES)) / CALLS_PER_GRAPH * 1e6


if __name__ == "__main__":
    main()
