"""One drafter in the layouts that drafters are published in, a function for each maker."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.tiny_models import tiny_target
from peagle.checkpoint.config_json import layer_values
from peagle.checkpoint.layouts import read_tensors
from peagle.checkpoint.native import stored_tensors
from peagle.drafter.create import config_for_target, create_drafter
from peagle.drafter.model import Drafter
from peagle.drafter.vocab import choose_draft_vocab
from peagle.targets.hf import HFTarget

Tensors = dict[str, Tensor]
Values = dict[str, Any]
AUX = "eagle_aux_hidden_state_layer_ids"
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = LLAMA3_SCALING | {"rope_theta": 150000.0}


@dataclass
class Source:
    """A target, a drafter for it, and the drafter's tensors by vLLM's names with all its tables."""

    target: HFTarget
    drafter: Drafter
    tensors: Tensors

    @property
    def layers(self) -> Values:
        """Its layers as a config of today has them."""
        return layer_values(self.drafter.config)

    @property
    def old_layers(self) -> Values:
        """The same with rope_theta and rope_scaling, as transformers wrote them before version 5."""
        rope = dict(self.drafter.config.rope_parameters)
        theta = rope.pop("rope_theta")
        scaling = None if rope == {"rope_type": "default"} else rope
        old = {key: value for key, value in self.layers.items() if key != "rope_parameters"}
        return old | {"rope_theta": theta, "rope_scaling": scaling}


def source(**switches: Any) -> Source:
    """A drafter with every weight its own, tables included; `draft_vocab_size` 100 takes a map into the target's."""
    rope = switches.pop("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
    target = tiny_target(tie_word_embeddings=False, rope_parameters=dict(rope))
    switches = {"num_draft_tokens": 4, "fc_norm": False, "embeddings": "own", "head": "own"} | switches
    config = config_for_target(target, num_layers=2, **switches)
    drafter = create_drafter(target, config, "random", seed=1).eval().requires_grad_(False)
    with torch.no_grad():
        for number, parameter in enumerate(drafter.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        if drafter.config.draft_vocab_size < target.vocab_size:
            counts = torch.rand(target.vocab_size, generator=torch.Generator().manual_seed(3))
            drafter.d2t.copy_(choose_draft_vocab(counts, drafter.config.draft_vocab_size))
    return Source(
        target, drafter, {name: tensor.clone() for name, tensor in stored_tensors(drafter, full=True).items()}
    )


def t2d_of(source: Source) -> Tensor:
    present = torch.zeros(source.target.vocab_size, dtype=torch.bool)
    present[source.drafter.to_target_ids(torch.arange(source.drafter.config.draft_vocab_size))] = True
    return present


def midlayer(tensors: Tensors) -> Tensors:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


def write(directory: Path, values: Values, tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def shard(directory: Path) -> None:
    """Spread a directory's weights over three files with an index."""
    tensors = read_tensors(directory)
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for index, name in enumerate(sorted(tensors)):
        weight_map[name] = f"model-0000{index % 3 + 1}-of-00003.safetensors"
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def aws(directory: Path, *, absolute: bool = False) -> Source:
    """AWS's P-EAGLE heads: `midlayer`, `ptd_token_id`, old rotary keys, both maps of a whole vocabulary, no aux ids."""
    made = source(rope_parameters=LLAMA3)
    vocab_size = made.target.vocab_size
    identity = torch.arange(vocab_size) if absolute else torch.zeros(vocab_size, dtype=torch.long)
    tensors = midlayer(made.tensors) | {"d2t": identity, "t2d": torch.ones(vocab_size, dtype=torch.bool)}
    values = made.old_layers | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": vocab_size}
    write(directory, values | {"ptd_token_id": made.drafter.config.mask_token_id}, tensors)
    return made


def aws_sharded(directory: Path) -> Source:
    made = aws(directory)
    shard(directory)
    return made


def eagle_authors(directory: Path) -> Source:
    """EAGLE-3 as its authors published it: a pickled file, `midlayer`, no embeddings, a draft vocabulary."""
    made = source(parallel=False, draft_vocab_size=100, embeddings="shared")
    values = made.old_layers | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values))
    torch.save(midlayer(made.tensors) | {"t2d": t2d_of(made)}, directory / "pytorch_model.bin")
    return made


def speculators_values(made: Source, kind: str, **top: Any) -> Values:
    return {
        "speculators_model_type": kind,
        "transformer_layer_config": made.layers,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": made.drafter.config.draft_vocab_size,
        "target_hidden_size": None,
        AUX: list(made.drafter.config.aux_layer_ids),
    } | top


def speculators_peagle(directory: Path) -> Source:
    """speculators' P-EAGLE: nested config, defaults left out, fc_norm, a map in both directions."""
    made = source(fc_norm=True, draft_vocab_size=100)
    values = speculators_values(made, "peagle", fc_norm=True, mask_token_id=made.drafter.config.mask_token_id)
    write(directory, values, made.tensors | {"t2d": t2d_of(made)})
    return made


def speculators_qwen3(directory: Path) -> Source:
    """speculators' P-EAGLE with Qwen3's layers and a sliding window in the second."""
    made = source(qk_norm=True, norm_before_fc=True, sliding_window=5, sliding_layers=(1,))
    top = {"norm_before_fc": True, "mask_token_id": made.drafter.config.mask_token_id}
    write(directory, speculators_values(made, "peagle", **top), made.tensors)
    return made


def speculators_eagle3(directory: Path) -> Source:
    """speculators' EAGLE-3: norm_before_residual when nothing is said; an old file with the target's tensors in it."""
    made = source(parallel=False, norm_before_residual=True)
    own = {"verifier_lm_head.weight": torch.zeros(2, 2), "verifier_norm.weight": torch.zeros(2)}
    write(directory, speculators_values(made, "eagle3"), made.tensors | own)
    return made


def nemo(directory: Path) -> Source:
    """NeMo Automodel: `model.` before most names, an architecture of its own, num_depths."""
    made = source(fc_norm=True, draft_vocab_size=100)
    bare = {"lm_head.weight", "mask_hidden", "d2t", "t2d"}
    tensors = made.tensors | {"t2d": t2d_of(made)}
    prefixed = {name if name in bare else f"model.{name}": tensor for name, tensor in tensors.items()}
    values = made.old_layers | {
        "architectures": ["LlamaEagle3DraftModel"],
        "parallel_drafting": True,
        "num_depths": 4,
        "mask_token_id": made.drafter.config.mask_token_id,
        "draft_vocab_size": 100,
        "num_aux_hidden_states": 3,
        "target_hidden_size": 64,
        "fc_norm": True,
    }
    write(directory, values, prefixed)
    return made


def specforge_eagle3(directory: Path) -> Source:
    """SpecForge's EAGLE-3.1: no embeddings, aux ids counted by output and inside eagle_config, a window that is off."""
    made = source(parallel=False, fc_norm=True, norm_output=True, draft_vocab_size=100, embeddings="shared")
    values = made.old_layers | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "fc_norm": True,
        "norm_output": True,
        "draft_vocab_size": 100,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 48,
        "eagle_config": {AUX: [1, 3, 4], "use_aux_hidden_state": True},
    }
    write(directory, values, midlayer(made.tensors) | {"t2d": t2d_of(made)})
    return made


def specforge_raw(directory: Path) -> Source:
    """A checkpoint of SpecForge's P-EAGLE from the middle of training, whose owner has added the mask token."""
    made = source()
    wrapped = {f"module.draft_model.{name}": tensor for name, tensor in made.tensors.items()}
    values = made.old_layers | {"architectures": ["PEagleDraftModel"], "draft_vocab_size": made.target.vocab_size}
    write(directory, values | {"mask_token_id": made.drafter.config.mask_token_id}, wrapped)
    return made


def verl(directory: Path) -> Source:
    """verl-SpeCo: a model type of its own, and a map that begins as a list of target ids."""
    made = source()
    values = made.old_layers | {"architectures": ["LlamaForCausalLMPeagle"], "model_type": "llama_peagle"}
    values |= {"mask_token_id": made.drafter.config.mask_token_id, "draft_vocab_size": made.target.vocab_size}
    write(directory, values, made.tensors | {"d2t": torch.arange(made.target.vocab_size)})
    return made
