"""Models known by name: what the catalog says, a user's own file, and from a name to a running target and drafter."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from harness.drafter_passes import card_for
from harness.local_hub import COMMIT, StandInHub, running
from harness.published_models import PUBLISHED, published_drafter, write_head, write_target
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint.native import load_drafter, save_drafter
from peagle.engine.llm import LLM
from peagle.errors import CapacityError, CheckpointError, ConfigError, PeagleError, TargetError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import TREE_DEPTH
from peagle.targets import capacity, hub
from peagle.targets.catalog import ASSETS, DEFAULT_TARGET, CatalogDrafter, CatalogEntry, entries, find
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target, load_tokenizer

PUBLISHED_NAMES = ["gpt-oss-20b", "gpt-oss-120b", "qwen3-coder-30b-a3b-instruct", "gemma-4-31b-it"]
TEXTS = [[(7 * place + start) % 250 + 5 for place in range(30)] for start in (0, 3)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No catalog and no cache but the test's own, and no network."""
    monkeypatch.delenv("PEAGLE_CATALOG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    with running(StandInHub()) as stand_in:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", stand_in.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield stand_in


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-OSS-20B and a head for it, as directories `target` and `head`."""
    root = tmp_path_factory.mktemp("made")
    published = PUBLISHED["gpt-oss-20b"]
    target = load_target(write_target(published, root / "target"), dtype="float32", device="cpu")
    write_head(published_drafter(target, TEXTS, published.num_draft_tokens), root / "head")
    return root


def put_into_cache(home: Path, model_id: str, directory: Path) -> Path:
    """The directory as `hf download` leaves it in the cache."""
    place = home / "hub" / f"models--{model_id.replace('/', '--')}"
    shutil.copytree(directory, place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    return place / "snapshots" / COMMIT


def refused(call: Callable[[], object], kind: type[PeagleError]) -> PeagleError:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.hint, "every refusal says what to do"
    return caught.value


# What the catalog says ------------------------------------------------------------------------------------------------


def test_the_four_published_models_and_the_embedded_one_are_known() -> None:
    assert [entry.name for entry in entries()] == [DEFAULT_TARGET, *PUBLISHED_NAMES]
    for entry in entries():
        assert entry.license == "Apache-2.0" and entry.hardware and entry.architecture and entry.max_length
        assert entry.native_gb() >= entry.vllm_gb() > 0
        assert (entry.instance is None) == (entry.name == DEFAULT_TARGET)


def test_a_name_is_found_in_any_case_and_by_the_id_of_its_target() -> None:
    names = ["GPT-OSS-20B", "openai/gpt-oss-20b", "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8", "nobody/nothing"]
    found = [find(name) for name in names]
    assert [entry.name if entry else None for entry in found] == [
        "gpt-oss-20b",
        "gpt-oss-20b",
        "qwen3-coder-30b-a3b-instruct",
        None,
    ]


@pytest.mark.parametrize("name", PUBLISHED_NAMES[:3])
def test_the_long_context_head_is_chosen_above_ten_thousand_tokens(name: str) -> None:
    entry = find(name)
    assert entry is not None
    chosen = {length: entry.drafter(max_length=length).variant for length in (None, 4096, 10_000, 10_001, 131_072)}
    assert chosen == {
        None: "base",
        4096: "base",
        10_000: "base",
        10_001: "long-context",
        131_072: "long-context",
    }
    assert entry.drafter("base", max_length=100_000).variant == "base", "a variant that is asked for by name is given"
    error = refused(lambda: entry.drafter("long"), ConfigError)
    assert "has no drafter 'long'" in error.message and "long-context" in str(error.hint)


def test_importing_the_catalog_loads_no_torch() -> None:
    script = "import sys, peagle.targets.catalog as c; c.entries(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


# A file of the user's own ---------------------------------------------------------------------------------------------

OWN = """
[house-model]
target = "./target"
num_parameters = 1_000_000
title = "our own"

[[house-model.drafters]]
variant = "base"
where = "directory"
source = "./drafter"
num_draft_tokens = 3
"""


def write_own(home: Path, text: str = OWN) -> Path:
    path = home / "config" / "peagle" / "catalog.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_adds_a_model_whose_paths_are_its_own(home: Path, made: Path) -> None:
    folder = write_own(home).parent
    tiny = tiny_target()
    tiny.model.save_pretrained(folder / "target")
    tiny.tokenizer.save_pretrained(folder / "target")
    drafter = tiny_drafter(tiny)
    save_drafter(drafter, folder / "drafter", card_for(tiny, drafter), full=True, dtype=torch.float32)
    assert [entry.name for entry in entries()] == [DEFAULT_TARGET, *PUBLISHED_NAMES, "house-model"]
    target = load_target("house-model", dtype="float32", device="cpu")
    assert target.name == "house-model" and target.shipped_drafter == folder / "drafter"
    loaded = load_drafter(None, target)
    assert (loaded.config.usual_num_draft_tokens, loaded.config.num_draft_tokens) == (3, 4)


def test_the_guides_example_is_a_catalog(home: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "models.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", guide, flags=re.DOTALL)
    folder = write_own(home, example).parent
    entry = entries()[-1]
    assert entry.name == "house-coder" and entry.vllm_gb() == 8.5
    assert entry.drafter(max_length=20_000).source == str(folder / "house-coder-8b-p-eagle-long")
    named = {field.name for kind in (CatalogEntry, CatalogDrafter) for field in dataclasses.fields(kind)}
    unused = {name for name in named - {"name", "package"} if not re.search(rf"^{name} =", example, flags=re.MULTILINE)}
    assert unused == {"drafters"}, "the example shows every key"
    for each in entries()[:-1]:
        assert f"`{each.name}`" in guide and f"| {each.native_gb(each.drafter()):.1f} GB |" in guide


def test_the_variable_names_another_file_which_must_exist(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_own(home)
    other = home / "other.toml"
    other.write_text(OWN.replace("house-model", "other-model"))
    monkeypatch.setenv("PEAGLE_CATALOG", str(other))
    assert find("other-model") is not None and find("house-model") is None
    monkeypatch.setenv("PEAGLE_CATALOG", str(home / "gone.toml"))
    assert "PEAGLE_CATALOG=" in refused(entries, ConfigError).message


BAD = {
    "a built-in name": (OWN.replace("house-model", "gpt-oss-20b"), 2, "'gpt-oss-20b' is a built-in entry"),
    "an unknown key": (OWN.replace("title", "titel"), 5, "unknown key 'titel'"),
    "a wrong type": (OWN.replace("1_000_000", '"many"'), 4, "num_parameters must be a whole number, got 'many'"),
    "a missing key": (OWN.replace("num_parameters = 1_000_000\n", ""), 2, "the key 'num_parameters' is missing"),
    "a wrong choice": (OWN.replace('"directory"', '"cloud"'), 9, "drafters[0].where must be one of"),
    "a drafter without a source": (OWN.replace('source = "./drafter"', ""), 7, "needs the key 'source'"),
    "a source that nobody has": (OWN.replace('"directory"', '"jumpstart"'), 10, "a jumpstart drafter has no source"),
    "no drafter": (OWN[: OWN.index("[[")], 2, "the key 'drafters' is missing"),
    "two of one variant": (OWN + OWN[OWN.index("[[") :], 2, "two drafters have the same variant, 'base'"),
    "more drafts than it was trained for": (OWN + "trained_draft_tokens = 2\n", 11, "num_draft_tokens is 3, but"),
    "a depth of nothing": (OWN.replace("= 3", "= 0"), 11, "num_draft_tokens must be at least 1, got 0"),
    "a name with a space": (OWN.replace("house-model", '"House Model"'), 2, "'House Model' is not a valid name"),
    "a value instead of a table": ("speed = 3", 1, "an entry must be a table, got 3"),
    "no TOML": (OWN.replace("[[", "[[["), 7, "cannot be read"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_entry_is_refused_with_its_line_and_key(home: Path, what: str) -> None:
    text, line, message = BAD[what]
    path = write_own(home, text)
    error = refused(entries, ConfigError)
    assert str(path) in error.message and message in error.message
    assert f"line {line}" in error.message, f"line {line} is at fault: {error.message}"


# From a name to a target and its drafter ------------------------------------------------------------------------------


def test_a_name_runs_its_target_with_its_head_at_the_advised_depth_from_the_cache_alone(home: Path, made: Path) -> None:
    snapshot = put_into_cache(home, "openai/gpt-oss-20b", made / "target")
    heads = {
        4096: put_into_cache(home, "amazon/GPT-OSS-20B-P-EAGLE", made / "head"),
        12_000: put_into_cache(home, "amazon/gpt-oss-20b-p-eagle-long-context", made / "head"),
    }
    target = load_target("gpt-oss-20b", dtype="float32", device="cpu")
    assert (target.name, target.directory) == ("gpt-oss-20b", snapshot)
    assert target.shipped_drafter_name == "GPT-OSS-20B-P-EAGLE"
    plain = target.forward(torch.tensor([TEXTS[0]])).logits_BTV[0, -1].argmax().item()
    for length, head in heads.items():
        assert target.drafter_for(length) == head
        with LLM(target, max_length=length, max_batch=1) as llm:
            assert llm.engine.num_draft_tokens == TREE_DEPTH, "a tree"
            assert llm.drafter is not None and llm.drafter.config.num_draft_tokens == 10, "the depth it was trained for"
            assert llm.drafter.config.usual_num_draft_tokens == 7, "the depth of a chain that its makers advise"
            assert str(target.shipped_drafter_name).endswith("long-context") == (length > 10_000)
            (output,) = llm.generate([TEXTS[0]], SamplingParams(max_tokens=4))
            assert output.outputs[0].token_ids[0] == plain


@pytest.mark.parametrize("given", ["base", "amazon/GPT-OSS-20B-P-EAGLE", "long-context"])
def test_a_drafter_is_chosen_by_its_variant_or_its_id(home: Path, made: Path, given: str) -> None:
    put_into_cache(home, "openai/gpt-oss-20b", made / "target")
    model_id = "amazon/gpt-oss-20b-p-eagle-long-context" if given == "long-context" else "amazon/GPT-OSS-20B-P-EAGLE"
    head = put_into_cache(home, model_id, made / "head")
    target = load_target("openai/gpt-oss-20b", dtype="float32", device="cpu")
    assert target.find_drafter(given) == head
    assert load_drafter(given, target).config.usual_num_draft_tokens == 7
    error = refused(lambda: load_drafter("long-contxt", target), CheckpointError)
    assert "has no drafter of that name for openai/gpt-oss-20b" in error.message and "long-context" in str(error.hint)


def test_plain_decoding_fetches_no_drafter(home: Path, made: Path) -> None:
    put_into_cache(home, "openai/gpt-oss-20b", made / "target")
    target = load_target("gpt-oss-20b", dtype="float32", device="cpu")
    with LLM(target, num_draft_tokens=0, max_length=64) as llm:
        assert llm.drafter is None
    error = refused(lambda: LLM(target, max_length=64), CheckpointError)
    assert "no drafter at 'amazon/GPT-OSS-20B-P-EAGLE'" in error.message and "HF_HUB_OFFLINE" in error.message


def test_the_gemma_head_is_refused_because_only_jumpstart_has_it() -> None:
    entry = find("gemma-4-31b-it")
    target = tiny_target()
    named = HFTarget(target.model, target.tokenizer, name="gemma-4-31b-it", entry=entry)
    for call in (lambda: named.shipped_drafter, lambda: load_drafter("base", named), lambda: LLM(named, max_length=64)):
        error = refused(call, CheckpointError)
        assert "JumpStart bundles it with the model" in error.message and "--num-draft-tokens 0" in str(error.hint)
    with LLM(named, num_draft_tokens=0, max_length=64) as llm:
        assert llm.drafter is None, "it still answers plainly"


def test_a_directory_of_a_catalog_name_is_reached_by_a_path(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(home)
    tiny = tiny_target()
    tiny.model.save_pretrained(home / "gpt-oss-20b")
    tiny.tokenizer.save_pretrained(home / "gpt-oss-20b")
    assert load_target("./gpt-oss-20b", dtype="float32", device="cpu").entry is None
    with caplog.at_level("INFO"):
        refused(lambda: load_target("gpt-oss-20b", dtype="bfloat16", device="cpu"), PeagleError)
    assert "for the directory, pass ./gpt-oss-20b" in caplog.text


# The hub --------------------------------------------------------------------------------------------------------------


def test_a_model_is_downloaded_once_and_only_its_own_files(home: Path, made: Path, stand_in: StandInHub) -> None:
    remote = home / "remote"
    shutil.copytree(made / "target", remote)
    (remote / "original").mkdir()
    (remote / "original" / "model.safetensors").write_bytes(b"the same in another form")
    stand_in.repositories = {"openai/gpt-oss-20b": remote, "amazon/GPT-OSS-20B-P-EAGLE": made / "head"}
    assert load_tokenizer("openai/gpt-oss-20b").eos_token == "<|im_end|>"
    assert not any("safetensors" in name for name in stand_in.served), "a tokenizer needs no weights"
    found = hub.fetch("openai/gpt-oss-20b", "target")
    assert (found / "model.safetensors").read_bytes() == (made / "target" / "model.safetensors").read_bytes()
    assert not (found / "original").exists(), "copies in other forms stay where they are"
    num_served = len(stand_in.served)
    assert hub.fetch("openai/gpt-oss-20b", "target") == found and len(stand_in.served) == num_served
    target = load_target("openai/gpt-oss-20b", dtype="float32", device="cpu")
    assert load_drafter(None, target).config.advised_draft_tokens == 7


def test_a_download_that_was_cut_off_is_completed(home: Path, made: Path, stand_in: StandInHub) -> None:
    place = put_into_cache(home, "some/model", made / "target")
    (place / "model.safetensors").unlink()
    assert hub.cached("some/model", "target") is None
    stand_in.repositories = {"some/model": made / "target"}
    assert (hub.fetch("some/model", "target") / "model.safetensors").is_file()


def test_a_snapshot_without_one_of_its_shards_is_not_complete(home: Path, made: Path) -> None:
    place = put_into_cache(home, "some/model", made / "target")
    (place / "model.safetensors").rename(place / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hub.cached("some/model", "target") is None
    (place / "model-00002-of-00002.safetensors").write_bytes(b"")
    assert hub.cached("some/model", "target") == place


@pytest.mark.parametrize(("what", "kind"), [("target", TargetError), ("drafter", CheckpointError)])
def test_a_gated_model_asks_for_its_license_to_be_accepted(
    home: Path, made: Path, stand_in: StandInHub, what: hub.What, kind: type[PeagleError]
) -> None:
    stand_in.repositories, stand_in.gated = {"some/model": made / "target"}, {"some/model"}
    error = refused(lambda: hub.fetch("some/model", what), kind)
    assert "'some/model' is gated" in error.message and "license" in error.message
    assert "https://huggingface.co/some/model" in str(error.hint) and "HF_TOKEN" in str(error.hint)


def test_an_unknown_id_an_unreachable_hub_and_offline_mode_are_told_apart(
    home: Path, stand_in: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = refused(lambda: load_target("some/model", device="cpu"), TargetError)
    assert "the Hugging Face Hub has no such model, or it is private" in unknown.message
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    unreachable = refused(lambda: load_target("some/model", device="cpu"), TargetError)
    assert "the Hugging Face Hub cannot be reached" in unreachable.message and "network" in str(unreachable.hint)
    assert str(home / "hub") in unreachable.message, "says which cache was looked into"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = refused(lambda: load_target("some/model", device="cpu"), TargetError)
    assert "HF_HUB_OFFLINE is set" in offline.message and "hf download some/model" in str(offline.hint)


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "numbers"),
    [
        ("gpt-oss-120b", "bfloat16", "116.8 billion parameters of 2 bytes (bfloat16) take 233.7 GB"),
        ("gpt-oss-20b", "float32", "20.9 billion parameters of 4 bytes (float32) take 83.7 GB"),
    ],
)
def test_a_catalog_model_that_does_not_fit_is_refused_with_the_numbers_before_any_download(
    stand_in: StandInHub, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, numbers: str
) -> None:
    monkeypatch.setattr(capacity, "available_bytes", lambda: 64_000_000_000)
    error = refused(lambda: load_target(name, dtype=dtype, device="cpu"), CapacityError)
    assert error.message.startswith(f"{name} does not fit: {numbers}, but ") and "64.0 GB" in error.message
    assert f"peagle serve {name} --engine vllm" in str(error.hint)
    assert ("--dtype bfloat16" in str(error.hint)) == (dtype == "float32")
    assert not stand_in.served


@pytest.mark.parametrize(("kind", "billions", "config"), [("U8", 4, {}), ("I32", 1, {"bits": 4}), ("I32", 2, {})])
def test_of_any_other_model_the_hub_is_asked_how_large_it_is(
    made: Path, stand_in: StandInHub, monkeypatch: pytest.MonkeyPatch, kind: str, billions: int, config: dict[str, int]
) -> None:
    stand_in.repositories, stand_in.quantization = {"some/model": made / "target"}, {"some/model": config}
    stand_in.parameters = {"some/model": {"BF16": 1_000_000_000, kind: billions * 1_000_000_000}}
    monkeypatch.setattr(capacity, "available_bytes", lambda: 16_000_000_000)
    error = refused(lambda: load_target("some/model", dtype="bfloat16", device="cpu"), CapacityError)
    assert "9.0 billion parameters of 2 bytes (bfloat16) take 18.0 GB" in error.message and not stand_in.served


def test_files_that_are_here_are_measured_by_their_heads(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = capacity.count_parameters(made / "target")
    monkeypatch.setattr(capacity, "available_bytes", lambda: 4 * held - 1)
    error = refused(lambda: load_target(made / "target", dtype="float32", device="cpu"), CapacityError)
    assert "target does not fit" in error.message and "--dtype bfloat16" in str(error.hint)


def test_a_second_copy_of_the_weights_is_not_counted(home: Path, made: Path) -> None:
    held = capacity.count_parameters(made / "target")
    directory = home / "two-copies"
    shutil.copytree(made / "target", directory)
    shutil.copy(directory / "model.safetensors", directory / "consolidated.safetensors")
    assert capacity.count_parameters(directory) == held
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "model-00001-of-00001.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert capacity.count_parameters(directory) == held
    (directory / "model-00001-of-00001.safetensors").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match="safetensors cannot be read as safetensors"):
        capacity.count_parameters(directory)


def test_the_embedded_drafter_is_still_the_shipped_one() -> None:
    entry = find(DEFAULT_TARGET)
    assert entry is not None and (ASSETS / str(entry.drafter().source) / "config.json").is_file()
