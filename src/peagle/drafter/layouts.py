"""The files and tensor names that drafters are published with, read as vLLM's.

| maker | files | names |
|---|---|---|
| peagle, vLLM | model.safetensors | `layers.0.*`, `embed_tokens`, `fc`, `norm`, `lm_head`, `mask_hidden`, `d2t` |
| AWS's P-EAGLE heads | one file or shards with an index | the first layer as `midlayer.*`; `t2d` beside `d2t` |
| EAGLE's first authors | pytorch_model.bin | `midlayer.*` |
| speculators | model.safetensors | vLLM's; older ones with the target's `verifier_*` |
| NeMo Automodel | model.safetensors | `model.` before all but `lm_head`, `mask_hidden` and the tables |
| SpecForge | model.safetensors | vLLM's, embeddings left out; raw checkpoints with `draft_model.` |

Names are told by what is in front of them, so no maker has to be recognized, and a maker's habits may mix.
"""

import json
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from peagle.errors import CheckpointError

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
PICKLED_NAME = "pytorch_model.bin"
WEIGHTS_NAMES = (WEIGHTS_NAME, f"{WEIGHTS_NAME}.index.json", PICKLED_NAME, f"{PICKLED_NAME}.index.json")
"""Where weights may be, the first that is there being taken."""

WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|draft_model\.|model\.)+")
"""What training frameworks put in front of every name, once or nested."""
IGNORED = re.compile(r"^verifier_|(?:^|\.)rotary_emb\.inv_freq$")
"""The target's own tensors, and tables that follow from the config."""


def weights_files(directory: Path) -> list[Path]:
    """The files that hold a directory's weights, in the order of their names; empty when there are none.

    Shards are found through their index; one that the index names and that is not there is an error.
    """
    for name in WEIGHTS_NAMES:
        path = directory / name
        if path.is_file():
            return _shards(path) if name.endswith(".index.json") else [path]
    return []


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a drafter directory, on the CPU, by vLLM's names."""
    tensors: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for path in weights_files(directory):
        for name, tensor in load_tensors(path).items():
            if IGNORED.search(bare := WRAPPERS.sub("", name)):
                continue
            ours = re.sub(r"^midlayer\.", "layers.0.", bare)
            if ours in tensors:
                raise CheckpointError(
                    f"{path} holds {ours!r} twice, as {origin[ours]} and as {name}", hint="remove one of the two"
                )
            tensors[ours], origin[ours] = tensor, name
    return tensors


def _shards(index: Path) -> list[Path]:
    try:
        names: list[Any] = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of weight files: {error!r}", hint="copy it again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"{index} names the file {name!r}, which is not in its directory", hint="copy it again"
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is missing", hint="copy the directory again")
    return [index.parent / name for name in names]


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, names untouched; one that is damaged or holds more than tensors is refused."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():  # of pickles in other dialects, which are refused or read all the same
            warnings.simplefilter("ignore")
            # Without objects of any kind, a pickled file can hold nothing that runs.
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, EOFError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="the file is corrupt or cut short, or holds more than tensors; copy it again",
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(
            f"{path} holds more than tensors by name", hint="save the drafter's state_dict() alone, as safetensors"
        )
    return found
