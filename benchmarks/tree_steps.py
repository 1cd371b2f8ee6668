"""Device time per decode step on a GPU in ms, by batch size, tokens of the verification pass and length of the texts.

    python benchmarks/tree_steps.py [--nodes 31] [--max-batch 64] [--lengths 100 300 1000]

The first size of a batch is plain decoding, without the drafter. The draft budget chooses among these sizes, by the
times at 256 tokens.
"""

import argparse

import torch

from peagle import LLM
from peagle.checkpoint.native import load_drafter
from peagle.scheduling.config import TREE_DEPTH, TREE_NODES, decode_buckets
from peagle.targets.load import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=TREE_NODES)
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 300, 1000])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("steps are timed by CUDA graphs, and there is no GPU here")

    target = load_target(None)
    drafter = load_drafter(target.shipped_drafter, target)
    batches = decode_buckets(options.max_batch)
    settings = {"max_batch": options.max_batch, "captured_batches": batches, "tree_nodes": options.nodes}
    with LLM(target, drafter, TREE_DEPTH, **settings) as llm:
        runner = llm.engine.runner
        assert runner.captured is not None, "there is a GPU"
        times = [runner.captured.decode_seconds(runner.kv_cache.num_pages, length) for length in options.lengths]
        print("batch", "tokens", *(f"{length} long" for length in options.lengths), sep="\t")
        for batch, sizes in times[0].items():
            for size in sizes:
                print(batch, size, *(f"{1e3 * seconds[batch][size]:.3f}" for seconds in times), sep="\t")


if __name__ == "__main__":
    main()
