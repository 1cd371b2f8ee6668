"""Device time per decode step on a GPU, by drafts and batch size: verification + drafting, in ms.

    python benchmarks/tree_steps.py --nodes 8 16 32 62 --batch 1 8 32 64

The first rows are plain decoding and a chain. `num_draft_tokens` of a chain and the depth of a tree are `--depth`.
"""

import argparse

import torch

from peagle import LLM
from peagle.checkpoint.native import load_drafter
from peagle.targets.load import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 62])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--depth", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("steps are timed by CUDA graphs, and there is no GPU here")

    target = load_target(None)
    drafter = load_drafter(target.shipped_drafter, target)
    print("drafts", *(f"batch {batch}" for batch in options.batch), "start, s", sep="\t")
    for nodes in (0, None, *options.nodes):
        tree = nodes or None
        name = "none" if nodes == 0 else f"chain, K = {options.depth}" if nodes is None else f"{nodes} nodes"
        drafts = (None, 0) if nodes == 0 else (drafter, options.depth)
        with LLM(target, *drafts, max_batch=max(options.batch), tree_nodes=tree) as llm:
            times = [llm.engine.step_times(batch) for batch in options.batch]
            cells = [f"{1e3 * each.verify:.3f} + {1e3 * each.draft:.3f}" for each in times if each is not None]
            print(name, *cells, f"{llm.engine.runner.capture_cost.seconds:.1f}", sep="\t", flush=True)


if __name__ == "__main__":
    main()
