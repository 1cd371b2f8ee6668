"""What vLLM is told to load: names, what the files of a drafter say, and writing them in vLLM's form."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.tiny_models import tiny_drafter, tiny_target, write_target
from peagle.checkpoint.card import DrafterCard, TargetIdentity
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.errors import CheckpointError, ConfigError, TargetError
from peagle.targets.load import load_target
from peagle.vllm.command import Installed
from peagle.vllm.form import in_vllm_form, reason_to_convert
from peagle.vllm.models import facts_of, find_models, tensor_types

NEW, OLD = Installed("0.32.0"), Installed("0.16.0")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, its drafter in the compact form, and the same in vLLM's."""
    root = tmp_path_factory.mktemp("models")
    target = tiny_target()
    target.model.save_pretrained(root / "target")
    target.tokenizer.save_pretrained(root / "target")
    drafter = tiny_drafter(target)
    config = drafter.config
    card = DrafterCard(
        TargetIdentity.of(target), config.method, config.num_draft_tokens, config.max_length, config.aux_layer_ids,
        acceptance={"some": {"per_position": [0.5, 0.25]}},
    )  # fmt: skip
    save_drafter(drafter, root / "compact", card, full=False, dtype=torch.float32)
    save_drafter(drafter, root / "full", card, full=True, dtype=torch.float32)
    return root


@pytest.fixture
def changed(models, tmp_path):
    """A copy of the full drafter with other settings and other names of tensors."""

    def change(rename=lambda name: name, drop=(), config=None, forget=()):
        directory = tmp_path / "changed"
        shutil.copytree(models / "full", directory)
        values = json.loads((directory / "config.json").read_text()) | (config or {})
        values = {key: value for key, value in values.items() if key not in forget}
        (directory / "config.json").write_text(json.dumps(values))
        tensors = load_file(directory / "model.safetensors")
        kept = {rename(name): tensor for name, tensor in tensors.items() if name not in drop}
        save_file(kept, directory / "model.safetensors")
        return directory

    return change


def test_the_files_say_what_vllm_must_be_told(models):
    facts = facts_of(models / "full")
    drafter = tiny_drafter(tiny_target())
    assert facts.parallel and facts.method == "p-eagle" and facts.layout == "vllm" and not facts.uses_mrope
    assert facts.trained_draft_tokens == drafter.config.num_draft_tokens
    assert facts.max_length == drafter.config.max_length and facts.num_heads == drafter.config.num_heads


def test_a_drafter_in_vllm_s_form_is_left_where_it_is(models):
    found = find_models(str(models / "target"), str(models / "full"))
    assert found.target == str(models / "target") and found.name == "target" and found.drafter_name == "full"
    assert found.acceptance == {"some": {"per_position": [0.5, 0.25]}}
    assert in_vllm_form(found, NEW) == found


def test_a_compact_drafter_is_written_in_vllm_s_form_once_and_is_the_same(models, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path))
    caplog.set_level("INFO")
    found = find_models(str(models / "target"), str(models / "compact"))
    converted = in_vllm_form(found, NEW)
    assert converted.drafter.model != found.drafter.model and str(tmp_path) in converted.drafter.model
    assert "without the embedding table" in caplog.text
    types = tensor_types(tmp_path / "vllm" / converted.drafter.model.rpartition("/")[2])
    assert "embed_tokens.weight" in types and set(types.values()) == {"F32"}, "no precision is lost"
    target = load_target(models / "target", dtype="float32")
    ours, theirs = (load_drafter(path, target) for path in (models / "compact", converted.drafter.model))
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
    caplog.clear()
    assert in_vllm_form(found, NEW) == converted
    assert "writing the drafter" not in caplog.text


@pytest.fixture
def own_target(models, tmp_path, monkeypatch):
    """A copy of the target that can be trained on, with an empty cache; how its compact drafter is put in form."""
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(models / "target", tmp_path / "target")

    def form(**options):
        found = find_models(str(tmp_path / "target"), str(models / "compact"))
        return in_vllm_form(found, NEW, **options).drafter.model

    return tmp_path / "target", form


def test_a_target_that_was_trained_on_in_place_is_compared_with_the_card_again(own_target):
    directory, form = own_target
    form()
    write_target(tiny_target(seed=5), directory)
    with pytest.raises(CheckpointError, match="its weights are not the ones the drafter was trained on"):
        form()


def test_a_mismatch_that_was_allowed_once_is_not_allowed_for_good(own_target, caplog):
    caplog.set_level("INFO")
    directory, form = own_target
    first = form()
    write_target(tiny_target(seed=5), directory)
    allowed = form(allow_mismatch=True)
    assert allowed != first, "it has the embedding table of the other target"
    with pytest.raises(CheckpointError, match="its weights are not the ones the drafter was trained on"):
        form()
    caplog.clear()
    assert form(allow_mismatch=True) == allowed
    assert "--allow-mismatch" in caplog.text and "writing the drafter" not in caplog.text, (
        "said each time, written once"
    )


def test_a_drafter_that_fits_is_not_written_again_where_a_mismatch_would_be_allowed(own_target):
    _, form = own_target
    assert form() == form(allow_mismatch=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"rename": lambda name: f"model.{name}"}, "prefixed names"),
        ({"drop": ["mask_hidden"]}, "no mask_hidden"),
        ({"config": {"architectures": ["LlamaForCausalLMPeagle"]}}, "no architecture LlamaForCausalLMPeagle"),
        ({"config": {"architectures": ["Eagle3Qwen3ForCausalLM"]}}, None),
        ({"config": {"draft_vocab_size": 8}}, "no d2t"),
        ({"config": {"draft_vocab_size": None}}, None),
        ({"forget": ["draft_vocab_size"]}, None),
        ({"config": {"speculators_model_type": "peagle", "fc_norm": False}}, None),
        ({"config": {"speculators_model_type": "peagle", "fc_norm": True}}, "fc_norm"),
    ],
)
def test_directories_that_vllm_would_not_load_as_they_are_have_a_reason(changed, changes, reason):
    directory = changed(**changes)
    found = reason_to_convert(directory, facts_of(directory), NEW)
    assert found is None if reason is None else reason in found


def test_the_layout_of_speculators_is_converted_for_releases_that_do_not_read_it(changed):
    directory = changed(config={"speculators_model_type": "peagle", "fc_norm": False})
    facts = facts_of(directory)
    assert facts.layout == "speculators"
    assert "0.16.0 does not read the layout" in reason_to_convert(directory, facts, OLD)


def test_a_drafter_for_another_chat_template_is_refused_unless_allowed(models, tmp_path, caplog):
    shutil.copytree(models / "target", tmp_path / "target")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        path = tmp_path / "target" / name
        if path.exists():
            path.write_text(path.read_text().replace("role", "rolle"))
    found = find_models(str(tmp_path / "target"), str(models / "full"))
    with pytest.raises(CheckpointError) as caught:
        in_vllm_form(found, NEW)
    assert "another chat template" in str(caught.value) and "--allow-mismatch" in str(caught.value)
    in_vllm_form(found, NEW, allow_mismatch=True)
    assert "another chat template" in caplog.text


def test_a_published_model_is_given_to_vllm_by_its_id():
    found = find_models("gpt-oss-20b", None, here=False)
    assert found.target == "openai/gpt-oss-20b" and found.name == "gpt-oss-20b" and found.is_hybrid
    assert found.drafter.model == "amazon/GPT-OSS-20B-P-EAGLE" and found.drafter.advised_draft_tokens == 7
    long = find_models("gpt-oss-20b", None, max_length=100_000, here=False)
    assert long.drafter.model == "amazon/gpt-oss-20b-p-eagle-long-context"
    assert find_models("gpt-oss-20b", "long-context", here=False).drafter == long.drafter
    assert find_models("qwen3-coder-30b-a3b-instruct", None, here=False).target.endswith("-FP8"), "the quantized twin"
    assert find_models("gpt-oss-20b", None, wants_drafter=False).drafter is None


def test_a_model_that_is_given_by_its_id_is_served_from_its_own_weights():
    coder = "Qwen/Qwen3-Coder-30B-A3B-Instruct"
    found = find_models(coder, None, here=False)
    assert found.target == coder and found.name == coder, "not the quantized twin; called as on our own engine"
    assert found.drafter.model == "amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE", "which fits both"
    assert find_models(f"{coder}-FP8", None, here=False).target == f"{coder}-FP8"
    assert find_models("openai/gpt-oss-20b", None, here=False).is_hybrid, "the catalog still says what it knows"


def test_the_embedded_target_s_id_means_the_weights_on_the_hub_for_which_no_drafter_was_trained(monkeypatch):
    def converted(name):
        raise AssertionError(f"{name} was converted")

    monkeypatch.setattr("peagle.targets.load.find_target", converted)
    found = find_models("HuggingFaceTB/SmolLM2-135M-Instruct", None)
    assert found.target == "HuggingFaceTB/SmolLM2-135M-Instruct" and found.directory is None and found.drafter is None


def test_a_directory_that_the_catalog_names_can_be_given_as_a_directory(models, tmp_path, monkeypatch):
    (tmp_path / "catalog.toml").write_text(
        f"""[mine]
        target = "{models / "target"}"
        num_parameters = 1000
        drafters = [{{ variant = "base", where = "directory", source = "{models / "full"}" }}]
        """
    )
    monkeypatch.setenv("PEAGLE_CATALOG", str(tmp_path / "catalog.toml"))
    for name in ("mine", str(models / "target")):
        found = find_models(name, None)
        assert found.target == str(models / "target") and found.drafter.model == str(models / "full")


def test_a_drafter_that_cannot_be_had_is_refused_with_the_reason():
    with pytest.raises(CheckpointError) as caught:
        find_models("gemma-4-31b-it", None, here=False)
    assert "JumpStart" in str(caught.value)


def test_a_target_without_a_known_drafter_is_served_plainly(models, caplog):
    caplog.set_level("INFO")
    assert find_models(str(models / "target"), None).drafter is None
    assert "no known drafter for target: plain decoding" in caplog.text
    assert find_models("someone/model", None).target == "someone/model"


@pytest.mark.parametrize(
    ("target", "drafter", "kind", "words"),
    [
        ("./nothing/here", None, ConfigError, "no target at './nothing/here'"),
        ("gpt-oss-20", None, TargetError, "did you mean 'gpt-oss-20b'?"),
        ("someone/model", "nothing", CheckpointError, "nothing is neither a directory nor a known drafter"),
    ],
)
def test_models_that_are_not_there_are_refused(target, drafter, kind, words):
    with pytest.raises(kind) as caught:
        find_models(target, drafter)
    assert words in str(caught.value)


def test_files_that_cannot_be_read_are_refused_with_their_path(models, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        facts_of(tmp_path)
    shutil.copytree(models / "full", tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(CheckpointError, match="truncated"):
        facts_of(tmp_path / "cut")
    (tmp_path / "cut" / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        facts_of(tmp_path / "cut")
