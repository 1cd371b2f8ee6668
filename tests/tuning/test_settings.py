"""The settings file: written, read back, and turned into the options of commands that exist."""

import pytest

from peagle.config import from_toml
from peagle.errors import ConfigError
from peagle.provenance import provenance
from peagle.tuning.settings import Native, Settings, Vllm, settings_of, text_of, with_settings

TUNED = {"method": "p-eagle", "num_draft_tokens": None, "max_batch": 32, "vllm": {"num_draft_tokens": 5}}
TUNED |= {"quantize": None}
TUNED |= {"expected": {"output_tokens_per_second": 512.5, "acceptance_length": None}}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tuned.toml"
    path.write_text(text_of(settings_of(TUNED, "acme/model", 'a "drafter"'), provenance()))
    return path


def test_the_file_reads_back_and_says_where_it_comes_from(file):
    expected = Settings("acme/model", 'a "drafter"', Native(None, 32), Vllm(5, 32), {"output_tokens_per_second": 512.5})
    assert from_toml(Settings, file) == expected
    assert file.read_text().startswith("# peagle ")


@pytest.mark.parametrize(
    ("command", "argv", "words"),
    [
        ("serve", [], "--target acme/model --max-batch 32 --drafter D"),
        ("serve", ["other", "--max-batch", "8"], "--drafter D"),
        ("serve", ["--num-draft-tokens", "3"], "--target acme/model --max-batch 32 --drafter D"),
        ("serve", ["--engine", "vllm"], "--target acme/model --num-draft-tokens 5 --max-batch 32 --drafter D"),
        (
            "deploy sagemaker",
            ["name"],
            "--target acme/model --num-draft-tokens 5 --drafter D --env SM_VLLM_MAX_NUM_SEQS=32",
        ),
        (
            "deploy sagemaker",
            ["name", "--env", "SM_VLLM_MAX_NUM_SEQS=4"],
            "--target acme/model --num-draft-tokens 5 --drafter D",
        ),
    ],
)  # fmt: skip
def test_a_command_gets_the_options_that_it_does_not_give(file, command, argv, words):
    argv = [*argv, "--settings", str(file)]
    expected = ['a "drafter"' if word == "D" else word for word in words.split()]
    assert with_settings(argv, command) == [*argv, *expected]


def test_the_batch_limit_joins_the_variables_that_are_given(file):
    words = with_settings(["name", "--env", "A=1", "--settings", str(file)], "deploy sagemaker")
    assert words[:4] == ["name", "--env", "SM_VLLM_MAX_NUM_SEQS=32", "A=1"] and words.count("--env") == 1


def test_the_form_of_the_weights_is_for_our_own_engine(tmp_path):
    path = tmp_path / "tuned.toml"
    path.write_text(text_of(settings_of(TUNED, "acme/model", None, "int8"), provenance()))
    given = ["--settings", str(path)]
    assert with_settings(given, "serve")[-2:] == ["--quantize", "int8"]
    assert "--quantize" not in with_settings([*given, "--engine", "vllm"], "serve")
    assert with_settings(["--quantize", "fp8", *given], "serve").count("--quantize") == 1


def test_vllms_own_options_stay_behind_the_dashes(file):
    given = f"--settings={file}"
    assert with_settings([given], "deploy vllm") == [
        "acme/model", given, "--num-draft-tokens", "5", "--drafter", 'a "drafter"', "--", "--max-num-seqs", "32",
    ]  # fmt: skip
    own = ["--", "--max-num-seqs", "4"]
    assert with_settings(["mine", given, *own], "deploy vllm")[-3:] == own
    assert with_settings(["mine", given, *own], "deploy vllm")[0] == "mine"


def test_without_drafts_no_drafter_is_named(tmp_path):
    tuned = TUNED | {"method": "none", "num_draft_tokens": 0, "vllm": None}
    settings = settings_of(tuned, None, "D")
    assert settings.drafter is None and settings.native.num_draft_tokens == 0
    path = tmp_path / "plain.toml"
    path.write_text(text_of(settings, provenance()))
    assert with_settings(["--settings", str(path)], "serve")[2:] == ["--num-draft-tokens", "0", "--max-batch", "32"]


def test_a_file_that_is_not_there_or_has_other_keys_is_refused(tmp_path):
    argv = ["--settings", str(tmp_path / "none.toml")]
    with pytest.raises(ConfigError) as refused:
        with_settings(argv, "serve")
    assert "no settings at" in refused.value.message and "peagle tune --output" in refused.value.hint
    (tmp_path / "none.toml").write_text("[native]\nmax_batches = 3\n")
    with pytest.raises(ConfigError, match="max_batches"):
        with_settings(argv, "serve")
    assert with_settings(["a", "--port", "1"], "serve") == ["a", "--port", "1"]
