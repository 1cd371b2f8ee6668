"""vLLM's command line: the flags, the budget, what each release can do, and what is refused with which reason."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from peagle.errors import ConfigError
from peagle.vllm.command import (
    SUPPORT,
    TESTED,
    Command,
    DrafterFacts,
    Installed,
    VllmSettings,
    check_combination,
    command,
)
from peagle.vllm.flags import REFUSED_FLAGS, REFUSED_SPECULATION, read_flags, with_flags

ROOT = Path(__file__).parent.parent.parent
GPU = Installed(TESTED)
CPU = Installed(TESTED, is_cpu=True)
P_EAGLE = DrafterFacts("drafter", parallel=True, trained_draft_tokens=10, max_length=8192, num_heads=32)
EAGLE3 = replace(P_EAGLE, parallel=False)


def settings(**changes) -> VllmSettings:
    return replace(VllmSettings("target", ("name",), P_EAGLE, target_max_length=8192), **changes)


def flags(made: Command) -> dict[str, tuple[str, ...]]:
    return read_flags(list(made.words[3:]))


def speculation(made: Command) -> dict:
    return json.loads(flags(made)["--speculative-config"][0])


def refusal(given: VllmSettings, vllm: Installed = GPU, environment=None) -> str:
    with pytest.raises(ConfigError) as caught:
        command(given, vllm, environment)
    return str(caught.value)


def test_a_p_eagle_drafter_is_served_with_parallel_drafting_on_the_first_model_runner():
    made = command(settings(), GPU)
    assert made.words[:3] == ("vllm", "serve", "target")
    assert speculation(made) == {
        "method": "eagle3",
        "model": "drafter",
        "num_speculative_tokens": 7,
        "parallel_drafting": True,
    }
    assert made.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert flags(made)["--served-model-name"] == ("name",)
    assert flags(made)["--generation-config"] == ("vllm",), "what a request leaves out is the same on both engines"


def test_an_eagle3_drafter_is_not_drafted_in_parallel_and_keeps_vllm_s_model_runner():
    made = command(settings(drafter=EAGLE3), GPU)
    assert "parallel_drafting" not in speculation(made) and made.environment == {}


@pytest.mark.parametrize(
    ("trained", "advised", "used"),
    [(4, 7, 4), (10, 5, 5), (None, 5, 5), (None, 9, 9), (4, None, 4), (10, None, 7), (None, None, 7)],
)
def test_the_advised_draft_tokens_are_at_most_those_that_were_trained(trained, advised, used):
    drafter = replace(P_EAGLE, trained_draft_tokens=trained, advised_draft_tokens=advised)
    assert speculation(command(settings(drafter=drafter), GPU))["num_speculative_tokens"] == used


def test_the_worked_example_of_the_module_holds():
    made = command(settings(num_draft_tokens=7, max_batch=256), GPU)
    assert flags(made)["--max-num-batched-tokens"] == ("9728",)
    assert flags(made)["--max-cudagraph-capture-size"] == ("2048",)


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({"max_batch": 256}, 8192 + 6 * 256),
        ({"max_batch": 1024}, 8192 + 6 * 1024),
        ({"max_batch": 1024, "prefill_tokens": 512}, 8 * 1024 + 6 * 1024),
        ({"max_batch": 8, "prefill_tokens": 512}, 512 + 6 * 8),
        ({"max_batch": 8, "num_draft_tokens": 1}, 8192),
        ({"max_batch": 8, "drafter": EAGLE3}, 8192),
        ({"max_batch": 8, "drafter": None}, 8192),
    ],
)
def test_placeholders_of_parallel_drafts_are_added_to_the_token_budget(changes, budget):
    assert flags(command(settings(**changes), GPU))["--max-num-batched-tokens"] == (str(budget),)


def test_a_budget_of_vllm_s_own_is_taken_as_it_is_if_a_full_batch_fits():
    need = 7 * 64 + 64 + 6 * 64
    assert flags(command(settings(max_batch=64, token_budget=need), GPU))["--max-num-batched-tokens"] == (str(need),)
    text = refusal(settings(max_batch=64, token_budget=need - 1))
    assert f"needs {need} per step (512 tokens to verify, 384 placeholders)" in text and f"use {need} or more" in text


def test_graphs_are_captured_for_a_full_batch_but_not_beyond_4096_and_not_where_there_are_none():
    assert flags(command(settings(max_batch=1024), GPU))["--max-cudagraph-capture-size"] == ("4096",)
    for made in (
        command(settings(is_eager=True), GPU),
        command(settings(), CPU),
        command(settings(drafter=None), GPU),
    ):
        assert "--max-cudagraph-capture-size" not in flags(made)


def test_a_cpu_build_gets_a_smaller_batch_and_budget():
    made = command(settings(), CPU)
    assert flags(made)["--max-num-seqs"] == ("16",) and made.max_batch == 16
    assert flags(made)["--max-num-batched-tokens"] == (str(2048 + 6 * 16),)


def test_settings_of_ours_become_flags_of_vllm():
    made = command(
        settings(dtype="float32", max_length=4096, memory_share=0.8, is_eager=True, reuse_prefixes=False, max_batch=4),
        GPU,
    )
    found = flags(made)
    expected = {
        "--dtype": ("float32",),
        "--max-model-len": ("4096",),
        "--gpu-memory-utilization": ("0.8",),
        "--enforce-eager": (),
        "--no-enable-prefix-caching": (),
        "--max-num-seqs": ("4",),
    }
    assert expected.items() <= found.items()


def test_without_a_length_texts_end_where_the_drafter_s_positions_do():
    assert "--max-model-len" not in flags(command(settings(), GPU))
    assert flags(command(settings(target_max_length=131072), GPU))["--max-model-len"] == ("8192",)
    assert flags(command(settings(target_max_length=None), GPU))["--max-model-len"] == ("8192",)
    assert "--max-model-len" not in flags(command(settings(target_max_length=None, drafter=None), GPU))
    text = refusal(settings(max_length=8193))
    assert "max_length=8193 exceeds the drafter's maximum position of 8192" in text and "--max-length 8192" in text


def test_draft_tokens_are_those_asked_for_else_advised_else_seven_at_most():
    def number(**changes):
        return command(settings(**changes), GPU).num_draft_tokens

    assert number() == 7 and number(num_draft_tokens=10) == 10
    assert number(drafter=replace(P_EAGLE, trained_draft_tokens=4)) == 4
    assert number(drafter=replace(P_EAGLE, advised_draft_tokens=5)) == 5
    assert number(drafter=replace(P_EAGLE, trained_draft_tokens=None), num_draft_tokens=30) == 30
    assert "between 0 and 10, the depth it was trained for, got 11" in refusal(settings(num_draft_tokens=11))
    assert "there is no drafter" in refusal(settings(drafter=None, num_draft_tokens=3))


def test_no_draft_tokens_is_plain_decoding():
    made = command(settings(num_draft_tokens=0, pipeline_parallel_size=2), GPU)
    assert "--speculative-config" not in flags(made) and made.environment == {}


@pytest.mark.parametrize(
    ("version", "given", "words"),
    [
        ("0.15.1", settings(), "vLLM 0.15.1 does not support P-EAGLE drafters (parallel drafting)"),
        ("0.15.1", settings(drafter=None), "that needs 0.16"),
        ("0.17.0", settings(is_hybrid=True), "full attention, as GPT-OSS does: that needs 0.18"),
        ("0.21.9", settings(drafter=replace(P_EAGLE, layout="speculators")), "of speculators: that needs 0.22"),
        ("0.21.0", settings(drafter=replace(P_EAGLE, norms=("fc_norm",))), "fc_norm or norm_output (EAGLE-3.1)"),
        ("0.24.0", settings(speculation={"draft_sample_method": "probabilistic"}), "that needs 0.25"),
        ("0.31.0", settings(drafter=EAGLE3, pipeline_parallel_size=2), "EAGLE-3 over pipeline stages"),
    ],
)  # fmt: skip
def test_a_release_that_lacks_something_is_refused_with_the_one_that_has_it(version, given, words):
    assert words in refusal(given, Installed(version))
    command(given, Installed("0.32.0"))


@pytest.mark.parametrize("version", ["0.16.0", "0.16.1rc2.dev3+gabc", "0.32.0+cpu", "0.40.0", "1.0"])
def test_releases_since_parallel_drafting_serve_a_drafter_in_vllm_s_own_layout(version):
    command(settings(), Installed(version))


def test_figures_of_each_answer_are_asked_for_where_vllm_has_them():
    assert flags(command(settings(), GPU))["--per-request-spec-decode-metrics"] == ("summary",)
    assert "--per-request-spec-decode-metrics" not in flags(command(settings(), Installed("0.31.0")))


def test_combinations_that_vllm_cannot_do_are_refused_with_the_reason():
    forced = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert "forces vLLM's second model runner, which cannot draft in parallel" in refusal(
        settings(), environment=forced
    )
    command(settings(drafter=EAGLE3), GPU, forced)
    command(settings(), GPU, {"VLLM_USE_V2_MODEL_RUNNER": "0"})
    assert "M-RoPE" in refusal(settings(drafter=replace(P_EAGLE, uses_mrope=True)))
    text = refusal(settings(pipeline_parallel_size=2))
    assert "a P-EAGLE drafter reads layers of all stages" in text and "--tensor-parallel-size" in text


def test_what_no_form_of_the_files_would_change_is_found_before_they_are_written():
    in_another_form = replace(P_EAGLE, layout="speculators", max_length=512)
    check_combination(settings(drafter=in_another_form, max_length=1024), Installed("0.16.0"), {})
    with pytest.raises(ConfigError, match="M-RoPE"):
        check_combination(settings(drafter=replace(P_EAGLE, uses_mrope=True)), GPU, {})


def test_gpus_and_nodes():
    made = command(settings(tensor_parallel_size=8, data_parallel_size=2), GPU)
    assert flags(made)["--tensor-parallel-size"] == ("8",) and flags(made)["--data-parallel-size"] == ("2",)
    assert "--distributed-executor-backend" not in flags(made), "one node needs no Ray"
    made = command(settings(tensor_parallel_size=16, num_nodes=2), GPU)
    assert flags(made)["--distributed-executor-backend"] == ("ray",)
    assert "--data-parallel-backend" not in flags(made)
    made = command(settings(tensor_parallel_size=4, data_parallel_size=4, num_nodes=2), GPU)
    assert flags(made)["--data-parallel-backend"] == ("ray",)
    assert flags(made)["--data-parallel-size-local"] == ("2",)


def test_a_drafter_whose_heads_cannot_be_split_runs_whole_on_each_gpu():
    assert "draft_tensor_parallel_size" not in speculation(command(settings(tensor_parallel_size=8), GPU))
    made = command(settings(tensor_parallel_size=8, drafter=replace(P_EAGLE, num_heads=9)), GPU)
    assert speculation(made)["draft_tensor_parallel_size"] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        ({"tensor_parallel_size": 3, "num_heads": 32}, "the 32 attention heads of the target do not divide by"),
        ({"tensor_parallel_size": 3, "num_nodes": 2}, "3 GPUs (tensor x pipeline x data parallel) do not divide"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 3, "num_nodes": 2}, "is not a multiple of the 2 nodes"),
    ],
)
def test_gpus_that_do_not_fit_the_nodes_are_refused(changes, words):
    with pytest.raises(ConfigError) as caught:
        settings(**changes)
    assert words in str(caught.value)


def test_flags_of_vllm_s_that_are_checked_become_settings_and_others_are_handed_on():
    words = [
        "--max_num_seqs=8",
        "-tp",
        "2",
        "--max-num-batched-tokens",
        "1k",
        "--enforce-eager",
        "--kv-cache-dtype",
        "fp8",
    ]
    given = with_flags(settings(), words)
    assert (given.max_batch, given.tensor_parallel_size, given.token_budget, given.is_eager) == (8, 2, 1000, True)
    assert flags(command(given, GPU))["--kv-cache-dtype"] == ("fp8",)
    assert list(command(given, GPU).words).count("--max-num-seqs") == 1


def test_a_flag_of_vllm_s_that_we_set_ourselves_can_be_changed():
    given = with_flags(settings(), ["--generation-config", "auto", "--max-cudagraph-capture-size", "64"])
    assert flags(command(given, GPU))["--generation-config"] == ("auto",)
    assert flags(command(given, GPU))["--max-cudagraph-capture-size"] == ("64",)


def test_further_keys_of_the_speculative_config_are_added():
    given = with_flags(settings(), ["--speculative-config", '{"draft_tensor_parallel_size": 1}'])
    assert speculation(command(given, GPU))["draft_tensor_parallel_size"] == 1
    assert speculation(command(given, GPU))["model"] == "drafter"


@pytest.mark.parametrize("known", [True, None])
def test_a_drafter_is_not_drafted_in_parallel_where_the_speculative_config_says_so(known):
    given = settings(drafter=replace(P_EAGLE, parallel=known))
    made = command(with_flags(given, ["--speculative-config", '{"parallel_drafting": false}']), GPU)
    assert speculation(made)["parallel_drafting"] is False and made.environment == {}


def test_a_drafter_of_unknown_kind_is_refused_until_the_kind_is_said():
    given = settings(drafter=replace(P_EAGLE, parallel=None))
    text = refusal(given)
    assert "cannot tell whether the drafter drafter is P-EAGLE or EAGLE-3" in text and "parallel_drafting" in text
    made = command(with_flags(given, ["--speculative-config", '{"parallel_drafting": true}']), GPU)
    assert speculation(made)["parallel_drafting"] is True and made.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_a_flag_that_would_go_past_us_is_refused_with_what_to_use(flag):
    with pytest.raises(ConfigError) as caught:
        with_flags(settings(), [flag.replace("-", "_").replace("__", "--", 1), "x"])
    assert f"{flag} cannot be passed to vLLM here\nhint: {REFUSED_FLAGS[flag]}" == str(caught.value)


@pytest.mark.parametrize("key", REFUSED_SPECULATION)
def test_a_key_of_the_speculative_config_that_is_ours_or_cannot_work_is_refused_with_the_reason(key):
    with pytest.raises(ConfigError) as caught:
        with_flags(settings(), ["--speculative-config", json.dumps({key: [[1, 2, 3]]})])
    assert f"{key} cannot be set here\nhint: {REFUSED_SPECULATION[key]}" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["8"], "'8' is not an option of vLLM"),
        (["--max-num-seqs", "many"], "--max-num-seqs must be a whole number, got 'many'"),
        (["--max-num-seqs"], "--max-num-seqs takes one value, got 0"),
        (["--gpu-memory-utilization", "x"], "--gpu-memory-utilization must be a number, got 'x'"),
        (["--speculative-config", "{"], "--speculative-config is not valid JSON"),
        (["--speculative-config", "[]"], "--speculative-config must be a JSON object, got '[]'"),
        (["--speculative-config", '{"parallel_drafting": "no"}'], "parallel_drafting must be true or false, got 'no'"),
        (["--speculative-config", '{"num_speculative_tokens": 0}'], "num_speculative_tokens must be a whole number"),
        (["--speculative-config.method", "ngram"], "--speculative-config.method is not supported"),
        (["--max-model-len", "5"], "--max-model-len is 5, but max_length is 64"),
    ],
)
def test_flags_that_cannot_be_read_are_refused(words, message):
    with pytest.raises(ConfigError) as caught:
        with_flags(settings(max_length=64), words)
    assert message in str(caught.value)


def test_an_eagle3_drafter_cannot_be_told_to_draft_in_parallel():
    with pytest.raises(ConfigError, match="but the drafter is EAGLE-3"):
        with_flags(settings(drafter=EAGLE3), ["--speculative-config", '{"parallel_drafting": true}'])


def test_the_same_setting_by_both_names_is_no_contradiction():
    assert with_flags(settings(max_length=64), ["--max-model-len", "64"]).max_length == 64


def test_the_text_for_a_shell_is_the_command():
    import shlex

    made = command(settings(), GPU)
    words = shlex.split(made.text().replace("\\\n", ""))
    assert words[0] == "VLLM_USE_V2_MODEL_RUNNER=0" and tuple(words[1:]) == made.words


def test_the_guide_shows_the_table_of_releases():
    rows = re.findall(r"^\| (\d+\.\d+) \| (.+?) \|$", (ROOT / "docs/guides/scale.md").read_text(), flags=re.MULTILINE)
    assert rows == [(".".join(map(str, since)), what) for since, what in SUPPORT.values()]
