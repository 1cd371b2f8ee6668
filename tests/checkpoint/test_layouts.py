"""Directories as their makers publish them, and the traps on the way from one maker to another.

The first table writes one drafter in each layout; every one must come back as that drafter. The second lists what is
known to go wrong between makers and engines, each with what must become of it.
"""

import json
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.drafter_layouts import (
    AUX,
    Source,
    Tensors,
    Values,
    aws,
    aws_sharded,
    eagle_authors,
    nemo,
    source,
    specforge_eagle3,
    specforge_raw,
    speculators_eagle3,
    speculators_peagle,
    speculators_qwen3,
    t2d_of,
    verl,
    write,
)
from harness.drafter_passes import card_for, draft_logits
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint.layouts import read_tensors, weights_files
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.drafter.model import Drafter
from peagle.drafter.vocab import read_table
from peagle.errors import CheckpointError, ConfigError

LAYOUTS: list[tuple[Callable[[Path], Source], int]] = [
    (aws, 0),
    (aws_sharded, 0),
    (lambda directory: aws(directory, absolute=True), 1),
    (eagle_authors, 0),
    (speculators_peagle, 0),
    (speculators_qwen3, 0),
    (speculators_eagle3, 0),
    (nemo, 0),
    (specforge_eagle3, 1),
    (specforge_raw, 0),
    (verl, 1),
]


@pytest.mark.parametrize(("layout", "num_repairs"), LAYOUTS)
def test_a_published_layout_comes_back_as_the_drafter_it_was(
    tmp_path: Path, layout: Callable[[Path], Source], num_repairs: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = layout(tmp_path / "drafter")
    with caplog.at_level(logging.WARNING):
        loaded = load_drafter(tmp_path / "drafter", made.target)
    ours = made.drafter.config
    for name in ours.__dataclass_fields__:
        if name not in ("num_draft_tokens", "embeddings", "head"):
            assert getattr(loaded.config, name) == getattr(ours, name), name
    assert torch.equal(draft_logits(made.target, loaded), draft_logits(made.target, made.drafter))
    ids = torch.arange(ours.draft_vocab_size)
    assert torch.equal(loaded.to_target_ids(ids), made.drafter.to_target_ids(ids))
    assert len(loaded.repairs) == num_repairs, loaded.repairs
    assert all(repair in caplog.text for repair in loaded.repairs), "what is read otherwise is said"


def test_the_trained_depth_is_taken_where_makers_say_it(tmp_path: Path) -> None:
    for layout, expected in ((nemo, 4), (speculators_peagle, 4), (aws, None)):
        directory = tmp_path / layout.__name__
        assert load_drafter(directory, layout(directory).target).config.num_draft_tokens == expected


# The traps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trap:
    """What somebody's files hold: changes to a sound directory's config and tensors, and the refusal or the reading."""

    name: str
    values: Values
    change: Callable[[Tensors], object] = lambda tensors: None
    refusal: str | None = None
    reading: Callable[[Drafter], object] = lambda drafter: True
    pruned: bool = False


def drop(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def absolute(tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def low_absolute(tensors: Tensors) -> None:
    """A list of target ids that could be offsets just as well, which only t2d tells."""
    tensors["d2t"] = torch.arange(100)
    tensors["t2d"] = torch.arange(288) < 100


TRAPS = [
    Trap("aux ids counted by output", {AUX: [1, 3, 4]}, reading=lambda d: d.config.aux_layer_ids == (2, 4, 5)),
    Trap("aux ids that only look so", {AUX: [1, 3, 5]}, reading=lambda d: d.config.aux_layer_ids == (1, 3, 5)),
    Trap("aux ids in another order", {AUX: [5, 2, 4]}, reading=lambda d: d.config.aux_layer_ids == (2, 4, 5)),
    Trap("no aux ids", {AUX: None}, reading=lambda d: d.config.aux_layer_ids == (2, 4, 5)),
    Trap("a key of two senses", {AUX: None, "target_layer_ids": [1, 3, 4]}, refusal="projects number in two ways"),
    Trap("the target's last state", {AUX: [2, 4, 8]}, refusal="but those of target 'tiny' are 0 to 7"),
    Trap("a mask token inside", {"mask_token_id": None, "dflash_config": {"mask_token_id": 270}}),
    Trap("an early name of it", {"mask_token_id": None, "unused_token_id": 270}),
    Trap("mask tokens that disagree", {"pard_token": 3}, refusal="mask_token_id = 270, pard_token = 3"),
    Trap("and inside", {"dflash_config": {"mask_token_id": 3}}, refusal="dflash_config.mask_token_id = 3"),
    Trap("no mask token", {"mask_token_id": None}, refusal="a parallel drafter needs mask_token_id"),
    Trap("no mask_hidden", {}, drop("mask_hidden"), refusal="lacks the tensor 'mask_hidden'"),
    Trap("a switch without weights", {"fc_norm": True}, refusal="lacks the tensor 'fc_norm.0.weight'"),
    Trap(
        "weights without a switch",
        {},
        lambda t: t.update({"input_norm.weight": torch.ones(192)}),
        refusal="'input_norm.weight', which config.json has no place for",
    ),
    Trap(
        "norms of another sense",
        {"eagle_config": {"norm_before_fc": True}, "norm_before_fc": False},
        refusal="disagree",
    ),
    Trap("an own table dropped", {}, drop("embed_tokens.weight"), reading=lambda d: d.config.embeddings == "shared"),
    Trap("an own head dropped", {}, drop("lm_head.weight"), reading=lambda d: d.config.head == "shared"),
    Trap("ids for offsets", {}, absolute, reading=lambda d: "d2t holds target ids" in d.repairs[0], pruned=True),
    Trap("ids that only t2d tells", {}, low_absolute, reading=lambda d: not d.d2t.any() and d.repairs, pruned=True),
    Trap("no map", {}, drop("d2t"), refusal="lacks the tensor 'd2t'", pruned=True),
    Trap("a map never stored", {}, lambda t: t["d2t"].zero_(), refusal="name different tokens", pruned=True),
    Trap("a short map", {}, lambda t: t.update(d2t=t["d2t"][:9]), refusal="'d2t' has shape [9]", pruned=True),
    Trap(
        "theta in two places",
        {"rope_theta": 5e5},
        refusal="rope_parameters.rope_theta = 10000.0, rope_theta = 500000.0",
    ),
    Trap(
        "scalings that disagree", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, refusal="rope_type = linear"
    ),
    Trap("no epsilon", {"rms_norm_eps": None}, reading=lambda d: d.config.rms_norm_eps == 1e-6),
    Trap("a window without size", {"layer_types": ["sliding_attention"] * 2}, refusal="sliding_window is not given"),
    Trap("too few layer types", {"layer_types": ["full_attention"]}, refusal="the kind of each of 2 layers"),
    Trap("other layer types", {"layer_types": ["linear_attention"] * 2}, refusal="linear_attention are not supported"),
    Trap("a window that no layer has", {"sliding_window": 64}, reading=lambda d: not d.config.sliding_layers),
    Trap(
        "a window by layer",
        {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]},
        reading=lambda d: (d.config.window(0), d.config.window(1)) == (0, 64),
    ),
    Trap("other layers", {"model_type": "qwen3"}, refusal="lacks the tensor 'layers.0.self_attn.k_norm.weight'"),
    Trap(
        "biases without a switch",
        {},
        lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        refusal="q_proj.bias",
    ),
    Trap("quantized weights", {"quantization_config": {"quant_method": "fp8"}}, refusal="quantization_config is"),
    Trap(
        "one tensor twice",
        {},
        lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()}),
        refusal="'norm.weight' twice",
    ),
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_a_known_trap_is_read_rightly_or_refused(tmp_path: Path, trap: Trap) -> None:
    made = source(draft_vocab_size=100 if trap.pruned else None, mask_token_id=270)
    if trap.pruned:
        made.tensors["t2d"] = t2d_of(made)
    values = made.layers | {
        "draft_vocab_size": made.drafter.config.draft_vocab_size,
        "mask_token_id": 270,
        AUX: [2, 4, 5],
    }
    trap.change(made.tensors)
    write(tmp_path, values | trap.values, made.tensors)
    if trap.refusal is not None:
        with pytest.raises(CheckpointError) as caught:
            load_drafter(tmp_path, made.target)
        assert trap.refusal in caught.value.message
    else:
        assert trap.reading(load_drafter(tmp_path, made.target))


def test_dropped_embeddings_are_said_because_the_placeholder_had_a_row_in_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = source(mask_token_id=270)
    values = made.layers | {"draft_vocab_size": 288, "mask_token_id": 270}
    made.tensors.pop("embed_tokens.weight")
    write(tmp_path, values, made.tensors)
    with caplog.at_level(logging.WARNING):
        loaded = load_drafter(tmp_path, made.target)
    assert "the mask token 270 gets the target's row" in caplog.text
    assert torch.equal(loaded.mask_embedding, made.target.embedding_VD[270])


def test_a_directory_of_ours_is_never_taken_to_count_by_output(tmp_path: Path) -> None:
    """With a card, which says what its numbers mean, ids that look like SGLang's are what they say."""
    target = tiny_target()
    target.tap((1, 3, 4))
    drafter = tiny_drafter(target)
    save_drafter(drafter, tmp_path, card_for(target, drafter), full=True)
    assert load_drafter(tmp_path, target).config.aux_layer_ids == (1, 3, 4)


# Files ----------------------------------------------------------------------------------------------------------------


def test_weights_are_looked_for_in_one_order(tmp_path: Path) -> None:
    assert weights_files(tmp_path) == []
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert [path.name for path in weights_files(tmp_path)] == ["pytorch_model.bin"]
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert [path.name for path in weights_files(tmp_path)] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "names gone.safetensors, which is missing"),
        ({"weight_map": {"a": "../a.safetensors"}}, "names the file '../a.safetensors', which is not in its directory"),
        ({"weight_map": {"a": 3}}, "names the file 3"),
        ({"weights": {}}, "is not an index of weight files"),
        ([], "is not an index of weight files"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(tmp_path: Path, index: object, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message.replace(".", r"\.")):
        weights_files(tmp_path)


class Hostile:
    def __reduce__(self) -> tuple:
        return (print, ("this must not run",))


@pytest.mark.parametrize(
    ("write_file", "message"),
    [
        (lambda path: path.write_bytes(pickle.dumps({"a": Hostile()})), "cannot be read"),
        (lambda path: torch.save({"a": Hostile()}, path), "cannot be read"),
        (lambda path: torch.save({"a": torch.zeros(1), "epoch": 3}, path), "holds more than tensors by name"),
        (lambda path: path.write_bytes(b"cut short"), "cannot be read"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
    ],
    ids=["hostile", "hostile in torch's form", "training state", "cut short", "empty"],
)
def test_a_pickled_file_is_read_only_where_it_holds_tensors_alone(
    tmp_path: Path, write_file: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        read_tensors(tmp_path)
    assert "must not run" not in capsys.readouterr().out


def test_a_map_that_names_a_token_twice_is_refused_in_either_reading() -> None:
    with pytest.raises(ConfigError, match="does not map the draft ids to distinct target ids below 9"):
        read_table(torch.tensor([8, 7, 8]), None, vocab_size=9)
