"""Weight files and tensor names of published drafters, read as vLLM's. Only `load_tensors` imports torch.

| project | files | names |
|---|---|---|
| peagle, vLLM | model.safetensors | `layers.0.*`, `embed_tokens`, `fc`, `norm`, `lm_head`, `mask_hidden`, `d2t` |
| AWS P-EAGLE heads | one file, or shards with an index | the first layer as `midlayer.*`; `t2d` beside `d2t` |
| EAGLE (SafeAILab) | pytorch_model.bin | `midlayer.*` |
| speculators | model.safetensors | vLLM's; older ones also hold the target's `verifier_*` |
| NeMo Automodel | model.safetensors | `model.` before all but `lm_head`, `mask_hidden` and the tables |
| SpecForge | model.safetensors | vLLM's, embeddings left out; raw checkpoints with `draft_model.` |

Each prefix is recognised on its own, so no project has to be identified and prefixes may be mixed.
"""

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.errors import CheckpointError
from peagle.safetensors_header import read_header, read_index

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
PAIR_HEAD_NAME = "pair_head.safetensors"
"""Only in our own directories; see `pair_head.py`. It is not among the weights."""
PICKLED_NAME = "pytorch_model.bin"
WEIGHTS_NAMES = (WEIGHTS_NAME, f"{WEIGHTS_NAME}.index.json", PICKLED_NAME, f"{PICKLED_NAME}.index.json")
"""File names of weights, in the order they are looked for."""

SAVED_NAME = ".saved"
"""A complete save inside a drafter directory whose files are not moved into place yet; see `native.write_directory`."""

WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|draft_model\.|model\.)+")
"""Prefixes that training frameworks add to every name, also nested."""
IGNORED = re.compile(r"^verifier_|(?:^|\.)rotary_emb\.inv_freq$")
"""Tensors of the target, and tables that follow from the config."""


def vllm_name(name: str) -> str:
    """vLLM's name of a tensor: without prefixes, and the first layer as `layers.0`.

    >>> vllm_name("draft_model.midlayer.mlp.up_proj.weight")
    'layers.0.mlp.up_proj.weight'
    """
    return re.sub(r"^midlayer\.", "layers.0.", WRAPPERS.sub("", name))


def weights_files(directory: Path) -> list[Path]:
    """The weight files of a directory, sorted by name; empty if there are none. Shards are found by their index."""
    for name in WEIGHTS_NAMES:
        path = directory / name
        if path.is_file():
            return read_index(path) if name.endswith(".index.json") else [path]
    return []


def read_tensors(directory: Path) -> dict[str, "Tensor"]:
    """All tensors of a drafter directory, on the CPU, by vLLM's names."""
    tensors: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for path in weights_files(directory):
        for name, tensor in load_tensors(path).items():
            ours = vllm_name(name)
            if IGNORED.search(ours):
                continue
            if ours in tensors:
                raise CheckpointError(
                    f"{path} holds {ours!r} twice, as {origin[ours]} and as {name}", hint="remove one of the two"
                )
            tensors[ours], origin[ours] = tensor, name
    return tensors


def complete_directory(directory: Path) -> Path:
    """Where to read a drafter: the directory itself, or `.saved` in it if a save was killed half-way."""
    return directory / SAVED_NAME if (directory / SAVED_NAME).is_dir() else directory


def tensor_types(directory: Path) -> dict[str, str] | None:
    """Names and dtypes ("BF16") of a directory's tensors, from headers alone; None if it has no safetensors."""
    files = weights_files(directory)
    if not files or any(path.suffix != ".safetensors" for path in files):
        return None
    return {name: info.dtype for path in files for name, info in read_header(path).items()}


def load_tensors(path: Path) -> dict[str, "Tensor"]:
    """The tensors of one file under their own names. A file that holds anything else is refused."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():  # torch warns about pickle dialects that it reads or refuses anyway
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True)  # never unpickles code
    except (SafetensorError, OSError, EOFError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="the file is corrupt or truncated, or holds more than tensors; copy it again",
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise CheckpointError(
            f"{path} holds more than tensors by name", hint="save the drafter's state_dict() alone, as safetensors"
        )
    return found
