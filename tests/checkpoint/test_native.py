"""Drafter directories: what is written, what is read, and what is refused and how."""

import dataclasses
import json
import logging
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.drafter_passes import card_for, draft_logits
from harness.tiny_models import tiny_drafter, tiny_target, tiny_tokenizer
from peagle.checkpoint.native import drafter_directory, load_drafter, save_drafter
from peagle.checkpoint.pairing import check_drafter
from peagle.drafter.model import Drafter
from peagle.errors import CheckpointError
from peagle.targets.catalog import ASSETS
from peagle.targets.hf import HFTarget

Tensors = dict[str, Tensor]
PER_LAYER = [
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
]


def saved(
    directory: Path, target: HFTarget, *, full: bool = True, drafter: Drafter | None = None, with_card: bool = True
) -> tuple[Path, Drafter]:
    """A drafter directory in float32, and the drafter."""
    drafter = tiny_drafter(target) if drafter is None else drafter
    save_drafter(drafter, directory, card_for(target, drafter), full=full, dtype=torch.float32)
    if not with_card:
        (directory / "drafter_card.json").unlink()
    return directory, drafter


def edit_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory: Path, **changes: object) -> None:
    """Set keys of config.json; None removes one."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def pruned_drafter(target: HFTarget, **switches: object) -> Drafter:
    drafter = tiny_drafter(target, draft_vocab_size=100, **switches)
    target_ids = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(5))[:100].sort().values
    drafter.d2t.copy_(target_ids - torch.arange(100))
    return drafter


def refused(directory: Path | str | None, target: HFTarget, **options: bool) -> CheckpointError:
    before = target.aux_layer_ids
    with pytest.raises(CheckpointError) as caught:
        load_drafter(directory, target, **options)
    assert target.aux_layer_ids == before, "a refused load leaves the taps alone"
    return caught.value


@pytest.mark.parametrize("full", [False, True], ids=["compact", "full"])
@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"norm_before_residual": True, "fc_norm": False, "norm_before_fc": True},
        {"parallel": False, "norm_output": True},
    ],
    ids=["p-eagle", "other norms", "eagle3"],
)
def test_a_saved_drafter_comes_back_with_the_same_config_and_logits(tmp_path: Path, full: bool, switches: dict) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, **switches)
    saved(tmp_path, target, full=full, drafter=drafter)
    loaded = load_drafter(tmp_path, target)
    assert loaded.config == drafter.config
    assert torch.equal(draft_logits(target, loaded), draft_logits(target, drafter))
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("full", [False, True], ids=["compact", "full"])
def test_own_tables_come_back_as_they_were_trained(tmp_path: Path, full: bool) -> None:
    target = tiny_target(tie_word_embeddings=False)
    drafter = tiny_drafter(target, embeddings="own", head="own")
    with torch.no_grad():
        drafter.embed_tokens.weight[5] += 1
        drafter.lm_head.weight[7] += 1
    saved(tmp_path, target, full=full, drafter=drafter)
    loaded = load_drafter(tmp_path, target)
    assert (loaded.config.embeddings, loaded.config.head) == ("own", "own")
    assert torch.equal(draft_logits(target, loaded), draft_logits(target, drafter))


def test_a_full_directory_has_vllms_tensor_names_and_no_others(tmp_path: Path) -> None:
    target = tiny_target()
    _, drafter = saved(tmp_path, target)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {"embed_tokens.weight", "fc.weight", "mask_hidden", "norm.weight", "layers.0.hidden_norm.weight"}
    expected |= {f"fc_norm.{index}.weight" for index in range(3)}
    expected |= {f"layers.{index}.{name}" for index in range(2) for name in PER_LAYER}
    assert set(tensors) == expected
    assert tensors["mask_hidden"].shape == (1, 1, 3 * 64)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 128)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (64, 64)
    mask = drafter.config.mask_token_id
    table = tensors["embed_tokens.weight"]
    assert torch.equal(table[mask], drafter.mask_embedding)
    others = torch.arange(target.vocab_size) != mask
    assert torch.equal(table[others], target.embedding_VD[others])
    assert not torch.equal(target.embedding_VD[mask], drafter.mask_embedding), "the target keeps its own row"


def test_a_compact_directory_has_no_tables(tmp_path: Path) -> None:
    saved(tmp_path, tiny_target(), full=False)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["mask_embedding"].shape == (64,)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(tensors)


@pytest.mark.parametrize("full", [False, True], ids=["compact", "full"])
def test_a_draft_vocabulary_survives_and_only_the_full_directory_holds_its_head(tmp_path: Path, full: bool) -> None:
    target = tiny_target()
    drafter = pruned_drafter(target)
    saved(tmp_path, target, full=full, drafter=drafter)
    tensors = load_file(tmp_path / "model.safetensors")
    loaded = load_drafter(tmp_path, target)
    assert torch.equal(draft_logits(target, loaded), draft_logits(target, drafter))
    assert draft_logits(target, loaded).shape == (4, 100)
    ids = torch.arange(100)
    assert torch.equal(loaded.to_target_ids(ids), drafter.to_target_ids(ids))
    assert tensors["d2t"].dtype == torch.int64
    assert ("lm_head.weight" in tensors) == full
    if full:
        assert torch.equal(tensors["lm_head.weight"], target.head_VD[drafter.to_target_ids(ids)])


def test_a_bfloat16_directory_keeps_the_targets_table_shared_with_a_float32_target(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)
    save_drafter(drafter, tmp_path, card_for(target, drafter), full=True)
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    loaded = load_drafter(tmp_path, target)
    assert loaded.config.embeddings == "shared"
    assert loaded.embedding_VD.data_ptr() == target.embedding_VD.data_ptr()


def test_a_float32_directory_keeps_the_targets_table_shared_with_a_bfloat16_target(tmp_path: Path) -> None:
    saved(tmp_path, tiny_target())
    target = tiny_target()
    target.model.to(torch.bfloat16)
    loaded = load_drafter(tmp_path, target)
    assert loaded.config.embeddings == "shared" and loaded.fc.weight.dtype == torch.bfloat16


def test_saving_again_replaces_the_files_and_leaves_nothing_else_behind(tmp_path: Path) -> None:
    target = tiny_target()
    saved(tmp_path, target, full=False)
    saved(tmp_path, target, full=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "drafter_card.json", "model.safetensors"]
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")


def test_a_failed_save_leaves_the_earlier_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    _, drafter = saved(tmp_path, target)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr("peagle.checkpoint.native.write_config", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_drafter(drafter, tmp_path, card_for(target, drafter), full=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_is_explained_and_leaves_what_was_there(tmp_path: Path) -> None:
    target = tiny_target()
    _, drafter = saved(tmp_path, target)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # no file may grow beyond this
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written to .* GiB free") as caught:
            save_drafter(drafter, tmp_path, card_for(target, drafter), full=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "free some space" in caught.value.hint
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_loading_taps_the_layers_the_drafter_reads(tmp_path: Path) -> None:
    target = tiny_target()
    target.tap((1, 3, 6))
    saved(tmp_path, target)
    other = tiny_target()
    assert other.aux_layer_ids == (2, 4, 5)
    load_drafter(tmp_path, other)
    assert other.aux_layer_ids == (1, 3, 6)


def test_midlayer_is_the_first_layer(tmp_path: Path) -> None:
    target = tiny_target()
    _, drafter = saved(tmp_path, target)

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)

    edit_tensors(tmp_path, rename)
    assert torch.equal(draft_logits(target, load_drafter(tmp_path, target)), draft_logits(target, drafter))
    edit_tensors(tmp_path, lambda tensors: tensors.update({"layers.0.hidden_norm.weight": torch.ones(64)}))
    message = refused(tmp_path, target).message
    assert "holds 'layers.0.hidden_norm.weight' twice, as" in message and "as midlayer.hidden_norm.weight" in message


@pytest.mark.parametrize("shape", [(-1,), (1, -1), (1, 1, -1)], ids=str)
def test_mask_hidden_is_read_in_every_shape_it_is_published_in(tmp_path: Path, shape: tuple[int, ...]) -> None:
    target = tiny_target()
    _, drafter = saved(tmp_path, target)
    edit_tensors(tmp_path, lambda tensors: tensors.update(mask_hidden=tensors["mask_hidden"].reshape(shape)))
    assert torch.equal(load_drafter(tmp_path, target).mask_hidden, drafter.mask_hidden)


def test_t2d_and_an_all_zero_d2t_of_a_whole_vocabulary_are_ignored(tmp_path: Path) -> None:
    target = tiny_target()
    _, drafter = saved(tmp_path, target)
    extra = {"t2d": torch.ones(288, dtype=torch.bool), "d2t": torch.zeros(288, dtype=torch.long)}
    edit_tensors(tmp_path, lambda tensors: tensors.update(extra))
    assert torch.equal(draft_logits(target, load_drafter(tmp_path, target)), draft_logits(target, drafter))
    swapped = torch.tensor([1, -1] + [0] * 286)
    edit_tensors(tmp_path, lambda tensors: tensors.update(d2t=swapped))
    error = refused(tmp_path, target)
    assert "d2t is not all zeros" in error.message and "offsets" in str(error.hint)


def test_a_directory_without_mask_hidden_and_mask_token_is_an_eagle3_drafter(tmp_path: Path) -> None:
    target = tiny_target()
    saved(tmp_path, target, with_card=False)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("mask_hidden"))
    edit_config(tmp_path, mask_token_id=None, pard_token=None, ptd_token_id=None)
    loaded = load_drafter(tmp_path, target)
    assert not loaded.config.parallel and loaded.config.method == "eagle3"
    assert loaded.config.embeddings == "own", "its table has one row that is not the target's"


def test_a_directory_without_a_card_loads_and_has_no_trained_depth(tmp_path: Path) -> None:
    target = tiny_target()
    _, drafter = saved(tmp_path, target, with_card=False)
    loaded = load_drafter(tmp_path, target)
    assert loaded.config == dataclasses.replace(drafter.config, num_draft_tokens=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "lacks the tensor 'layers.1.mlp.up_proj.weight'"),
        (lambda t: t.pop("fc_norm.2.weight"), "lacks the tensor 'fc_norm.2.weight'"),
        (lambda t: t.pop("mask_hidden"), "lacks the tensor 'mask_hidden'"),
        (lambda t: t.update({"layers.2.mlp.up_proj.weight": torch.zeros(2)}), "holds the tensor 'layers.2.mlp.up_proj"),
        (
            lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
            "q_proj.bias', which config.json has",
        ),
        (lambda t: t.update({"fc.weight": torch.zeros(64, 128)}), r"'fc.weight' has shape \[64, 128\], .* \[64, 192\]"),
        (lambda t: t.update(mask_hidden=torch.zeros(1, 1, 64)), r"'mask_hidden' has shape \[64\]"),
        (lambda t: t["fc.weight"].view(-1)[:1].fill_(float("nan")), "'fc.weight' holds NaN or infinite"),
        (lambda t: t["mask_hidden"].fill_(float("inf")), "'mask_hidden' holds NaN or infinite"),
        (lambda t: t["embed_tokens.weight"][3].fill_(float("nan")), "'embed_tokens.weight' holds NaN"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: Callable, message: str) -> None:
    target = tiny_target()
    saved(tmp_path, target)
    edit_tensors(tmp_path, change)
    target.tap((1, 2, 3))
    error = refused(tmp_path, target)
    assert re.search(message, error.message) and str(tmp_path / "model.safetensors") in error.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update(d2t=(t["d2t"] + torch.arange(100)).flip(0)),
            "d2t does not map the draft ids to distinct target ids",
        ),
        (lambda t: t.update(d2t=-torch.arange(100)), "d2t does not map the draft ids to distinct target ids"),
        (lambda t: t.pop("d2t"), "lacks the tensor 'd2t'"),
        (lambda t: t.update(d2t=torch.zeros(90, dtype=torch.long)), "'d2t' has shape [90]"),
    ],
    ids=["absolute ids in no order", "one id for all", "missing", "short"],
)
def test_a_draft_vocabulary_that_means_nothing_is_refused(tmp_path: Path, change: Callable, message: str) -> None:
    target = tiny_target()
    saved(tmp_path, target, drafter=pruned_drafter(target))
    edit_tensors(tmp_path, change)
    assert message in refused(tmp_path, target).message


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"vocab_size": 320}, "vocab_size is 288, but target 'tiny' has 320"),
        ({"hidden_size": 96}, "target_hidden_size is 64, but target 'tiny' has 96"),
        ({"num_layers": 4}, "the drafter reads layers [2, 4, 5], but those of target 'tiny' are 0 to 3"),
    ],
    ids=["vocabulary", "width", "layers"],
)
def test_a_target_of_another_shape_is_refused(tmp_path: Path, other: dict, message: str) -> None:
    saved(tmp_path, tiny_target(), with_card=False)
    error = refused(tmp_path, tiny_target(**other))
    assert message in error.message and "another target" in str(error.hint)


def test_a_target_of_other_weights_is_refused_unless_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, tiny_target())
    other = tiny_target(seed=1)
    error = refused(tmp_path, other)
    assert "was trained for target 'tiny'" in error.message
    assert "its weights are not the ones the drafter was trained on" in error.message
    assert "tokenizer" not in error.message and "chat template" not in error.message
    assert "--allow-mismatch" in str(error.hint)
    with caplog.at_level(logging.WARNING):
        load_drafter(tmp_path, other, allow_mismatch=True)
    assert "its weights are not the ones" in caplog.text


def test_another_tokenizer_or_chat_template_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    saved(tmp_path, target)
    target.tokenizer = tiny_tokenizer(chat_template="{{ messages }}")
    assert "its chat template is another one" in refused(tmp_path, target).message
    target.tokenizer = tiny_tokenizer()
    target.tokenizer.add_tokens(["<extra>"])
    error = refused(tmp_path, target)
    assert "its tokenizer is another one" in error.message and "chat template" not in error.message


def test_a_card_of_another_drafter_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    saved(tmp_path, target)
    path = tmp_path / "drafter_card.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"aux_layer_ids": [1, 2, 3]}))
    assert "aux_layer_ids is [1, 2, 3] in drafter_card.json, but [2, 4, 5]" in refused(tmp_path, target).message
    path.write_text(json.dumps(values | {"method": "eagle3"}))
    assert "method is eagle3 in drafter_card.json, but p-eagle" in refused(tmp_path, target).message


def test_a_truncated_weight_file_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    saved(tmp_path, target)
    path = tmp_path / "model.safetensors"
    for length in (0, 4, 900, path.stat().st_size - 1):
        path.write_bytes(path.read_bytes()[:length] if length else b"")
        error = refused(tmp_path, target)
        assert f"{path} cannot be read" in error.message and "truncated" in str(error.hint)
        saved(tmp_path, target)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_directory_that_lacks_a_file_is_refused(tmp_path: Path, name: str) -> None:
    target = tiny_target()
    saved(tmp_path, target)
    (tmp_path / name).unlink()
    error = refused(tmp_path, target)
    assert f"no drafter at {tmp_path}: {name} is missing" in error.message
    assert "config.json and model.safetensors" in str(error.hint)


def test_a_wrong_path_is_refused(tmp_path: Path) -> None:
    assert f"no directory {tmp_path / 'nowhere'}" in refused(tmp_path / "nowhere", tiny_target()).message
    (tmp_path / "file").write_text("")
    assert f"no directory {tmp_path / 'file'}" in refused(str(tmp_path / "file"), tiny_target()).message


def test_a_target_without_a_shipped_drafter_says_so() -> None:
    error = refused(None, tiny_target())
    assert (
        "no drafter ships for target 'tiny'" in error.message
        and "peagle build" in str(error.hint)
        and "--num-draft-tokens 0" in str(error.hint)
    )


def test_the_shipped_drafter_is_found_through_its_target(tmp_path: Path) -> None:
    target = tiny_target()
    saved(tmp_path, target)
    target.shipped_drafter = tmp_path
    assert load_drafter(None, target).config.parallel
    target.shipped_drafter = tmp_path / "gone"
    assert "no directory" in refused(None, target).message


def test_a_drafter_that_ships_is_found_by_its_name_and_until_then_the_error_names_those_that_do(tmp_path: Path) -> None:
    target = tiny_target()
    assert "no directory tiny-eagle3" in refused("tiny-eagle3", target).message
    target.shipped_drafter = tmp_path / "assets" / "tiny-p-eagle"
    saved(target.shipped_drafter, target)
    message = refused("tiny-eagle3", target).message
    assert message == (
        "no directory tiny-eagle3, and no drafter of that name ships with this version; those that do: tiny-p-eagle"
    )
    saved(tmp_path / "assets" / "tiny-eagle3", target, drafter=tiny_drafter(target, parallel=False))
    assert load_drafter("tiny-eagle3", target).config.method == "eagle3"
    assert load_drafter(None, target).config.method == "p-eagle"


def test_a_fine_tuned_target_finds_the_drafter_of_the_original_by_its_name() -> None:
    name = "smollm2-135m-instruct-p-eagle"
    assert drafter_directory(name, tiny_target()) == ASSETS / name
    check_drafter(name, None)
    with pytest.raises(CheckpointError, match="no directory smollm2-135m-instruct-p-eagel"):
        check_drafter("smollm2-135m-instruct-p-eagel", None)
