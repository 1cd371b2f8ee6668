"""Judge: speculators' own loader on a directory that was exported to its layout.

Runs inside speculators' own environment and imports nothing of peagle.

    python load_speculators.py DIRECTORY

The last line of stdout says which class came out of it, which tensors of the file it did not take, which of its own it
did not find there, and how far those it took are from the file's.
"""

import json
import sys
from pathlib import Path

from safetensors.torch import load_file
from speculators import SpeculatorModel


def main() -> None:
    directory = Path(sys.argv[1])
    model = SpeculatorModel.from_pretrained(str(directory))
    stored, taken = load_file(directory / "model.safetensors"), model.state_dict()
    shared = stored.keys() & taken.keys()
    found = {
        "model": type(model).__name__,
        "config": type(model.config).__name__,
        "layers": model.config.transformer_layer_config.model_type,
        "num_draft_tokens": model.config.speculators_config.proposal_methods[0].speculative_tokens,
        "not_taken": sorted(stored.keys() - taken.keys()),
        "not_found": sorted(taken.keys() - stored.keys()),
        "difference": max(float((stored[name].float() - taken[name].float()).abs().max()) for name in shared),
        "sliding_layers": list(model.sliding_window_indices),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
