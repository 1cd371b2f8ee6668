"""Every flag of every command, written out: a flag that comes, goes or changes its name is a decision."""

import itertools
import re

import pytest

from peagle.cli.main import COMMANDS

TARGET = "--target --dtype --device"
SERVED = f"{TARGET} --quantize"
DRAFTER = "--drafter --allow-mismatch --no-allow-mismatch"
SAMPLING = (
    "--max-tokens --temperature --top-p --top-k --min-p --repetition-penalty --seed --n --stop "
    "--ignore-eos --no-ignore-eos --logprobs --num-draft-tokens --tolerance"
)
ENGINE = (
    "--max-batch --max-length --max-waiting --memory-share --prefill-tokens --reuse-prefixes --no-reuse-prefixes "
    "--eager --no-eager"
)
PARALLEL = "--tensor-parallel-size --data-parallel-size --num-nodes"
SAGEMAKER = (
    "--settings --target --drafter --num-draft-tokens --max-length --allow-mismatch --upload-models --image --engine "
    "--env --role --instance --num-instances --max-instances --target-concurrency --bucket --subnets --security-groups "
    "--network-isolation --metrics --tags --region --profile --dry-run --no-smoke-test --json "
    "--price-per-hour --max-tpot --training-hours --measured"
)
API_KEY = "--api-key-file"
COST = "--price-per-hour --max-tpot --training-hours"

FLAGS = {
    "generate": (f"--compare --no-compare --raw --no-raw --system --json --no-json {SAMPLING} {SERVED} {DRAFTER}"),
    "eval": (
        "--prompts --limit --num-draft-tokens --max-tokens --temperature --record --no-record --as-baseline "
        f"--json --no-json {SERVED} {DRAFTER}"
    ),
    "bench": (
        "--prompts --limit --categories --max-turns --methods --num-draft-tokens --concurrency --num-requests "
        "--max-tokens --temperature --seed "
        "--anchors --dummy --assume-acceptance --drafter-layers --draft-vocab --eagle3-drafter "
        f"--json --plot --report --instance {COST} {SERVED} {DRAFTER}"
    ),
    "bench serve": (
        "--prompts --limit --categories --max-turns --endpoint --model --concurrency --request-rate --num-requests "
        "--max-tokens --ignore-eos --temperature --seed --extra-body --goodput "
        "--ready-seconds --json --detailed --export --plot --report "
        f"--instance {COST} {API_KEY}"
    ),
    "catalog": "--json",
    "serve": (
        "--settings --engine --num-draft-tokens --host --port --served-model-name --api-key-file --cors-origins "
        f"--request-seconds --drain-seconds {ENGINE} {SERVED} {DRAFTER} {PARALLEL} --vllm-python "
        "--record --record-text --record-mb --swap-from"
    ),
    "report": f"--output --markdown --instance {COST}",
    "tune": (
        "--prompts --limit --categories --max-turns --recording --concurrency --request-rate --max-tpot --methods "
        "--num-draft-tokens --allow-quantize --eagle3-drafter --num-requests --max-tokens --temperature --seed "
        f"--no-serve --output --json --report --price-per-hour --instance --training-hours {SERVED} {DRAFTER}"
    ),
    "top": f"--interval --window --once --json {API_KEY}",
    "data synthesize": (
        "--output --num-answers --num-tokens --seconds --given --max-batch --max-length --temperatures --keep-cut "
        f"--no-keep-cut --num-held-out --kinds --documents --drafter --seed --recipe --json --no-json {TARGET}"
    ),
    "data regenerate": (
        "--prompts --output --limit --max-batch --max-length --max-answer-tokens --max-turns --temperatures --seed "
        f"--drafter --recipe --json --no-json {TARGET}"
    ),
    "data inspect": "--num-examples --rows --num-top-tokens --json --no-json --target",
    "train": (
        "--recipe --data --output --method --from-drafter --held-out --num-held-out --num-layers --num-draft-tokens "
        "--draft-vocab-size --init --pair-head --loss --labels --retention --max-length --batch-size --num-steps "
        "--learning-rate --warmup-steps --seed --save-every --keep-best --no-keep-best --features "
        f"--checkpoint-activations --no-checkpoint-activations --parallel {TARGET}"
    ),
    "build": (
        "--output --budget --data --prompts --recipe --max-length --num-draft-tokens --num-layers --seed --dry-run "
        f"--from-stage --to-stage --price-per-hour --instance {TARGET}"
    ),
    "adapt": (
        "--data --output --old --minutes --old-share --num-held-out --num-old --learning-rate --seed --swap "
        f"--json {API_KEY} {TARGET} {DRAFTER.replace(' --no-allow-mismatch', '')}"
    ),
    "export": f"--output --to {TARGET} {DRAFTER}",
    "publish": f"--repo --output --card-only --license --base-model --private --update {TARGET}",
    "deploy vllm": (
        "--settings --output --show --num-draft-tokens --max-length --served-model-name "
        f"--vllm-version --image --name --port {PARALLEL} {DRAFTER}"
    ),
    "deploy sagemaker": SAGEMAKER,
    "deploy sagemaker update": f"{SAGEMAKER} --batch-size --alarms",
    "deploy sagemaker status": "--bucket --json --region --profile",
    "deploy sagemaker delete": "--bucket --logs --dry-run --region --profile",
    "deploy sagemaker invoke": "--max-tokens --temperature --json --region --profile",
    "doctor": f"--engine --prompts --record --no-record --json --no-json {SERVED} {DRAFTER}",
    "lossless": (
        "--prompts --limit --num-draft-tokens --max-tokens --temperature --num-seeds --num-samples "
        f"--output --report --json --no-json {SERVED} {DRAFTER}"
    ),
}

ARGUMENTS = {
    "generate": "PROMPT",
    "catalog": "[NAME]",
    "bench serve": "[URL]",
    "serve": "[TARGET]",
    "build": "[TARGET]",
    "report": "RESULT.json ...",
    "top": "[URL]",
    "data inspect": "DATA",
    "export": "[DRAFTER]",
    "publish": "DIR",
    "deploy vllm": "[TARGET]",
    "deploy sagemaker": "NAME",
    "deploy sagemaker update": "NAME",
    "deploy sagemaker status": "NAME",
    "deploy sagemaker delete": "NAME",
    "deploy sagemaker invoke": "NAME PROMPT",
    "doctor": "[DRAFTER]",
    "lossless": "[TARGET]",
}


def test_every_command_is_listed_here():
    assert {name.split()[0] for name in FLAGS} == COMMANDS.keys() and ARGUMENTS.keys() <= FLAGS.keys()


def names_of(flags):
    """Without the no- of booleans: which of the two is shown depends on the default."""
    return {flag.replace("--no-", "--", 1) for flag in flags}


@pytest.mark.parametrize("command", FLAGS)
def test_flags_of(peagle, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")  # where it is wider, long lists stand side by side
    lines = [line for line in peagle(*command.split(), "--help-all").out.splitlines() if re.match(r"\W+ --", line)]
    flags = {
        flag for line in lines for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", re.split(r"(?<=\S)  +", line)[0])
    }
    listed = set(FLAGS[command].split())
    assert names_of(flags) == names_of(listed), "the flags changed: change this list, the docs and the change log"


@pytest.mark.parametrize("command", FLAGS)
def test_usage_of(peagle, command):
    text = peagle(*command.split(), "--help").out
    usage = text.splitlines()[0]
    few = {  # few options are written out
        "catalog": "[NAME] [--json]",
        "deploy sagemaker status": "NAME [--bucket STR] [--json] [--region STR] [--profile STR]",
        "deploy sagemaker delete": "NAME [--bucket STR] [--logs] [--dry-run] [--region STR] [--profile STR]",
    }
    rest = few.get(command, f"[OPTIONS] {ARGUMENTS.get(command, '')}")
    assert usage == f"usage: peagle {command} [-h] {rest}".rstrip()


@pytest.mark.parametrize("command", FLAGS)
def test_every_option_is_explained_in_lines_of_full_width(peagle, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    text = peagle(*command.split(), "--help-all").out
    assert "{None}" not in text, "an option is left out, not set to None"
    words = re.sub(r"[\s│]+", " ", text)
    assert not re.search(r"\(default: (None|False|True|)\)", words), "a default that says nothing"
    assert not re.search(r"--\S+ [A-Z]+ \(default", words), "an option that nothing explains"
    rows = [line[2:-2] for line in text.splitlines() if line[:2] in ("│ ", "  ")]
    for row, following in itertools.pairwise(rows):
        if "  " in row.rstrip() and following.startswith(" ") and (words := following.split()):
            assert len(row.rstrip()) + len(words[0]) > len(row) - 2, row


def test_a_flag_that_turns_something_off_says_so(peagle, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    words = re.sub(r"[\s│]+", " ", peagle("serve", "--help-all").out)
    assert "--no-reuse-prefixes do not keep the KV cache of finished requests" in words


@pytest.mark.parametrize("command", FLAGS)
def test_help_begins_with_what_the_command_does(peagle, command):
    text = peagle(*command.split(), "--help").out.splitlines()[2]
    assert text.endswith((".", ":")) and len(text) > 40


@pytest.mark.parametrize(
    ("command", "rare"), [("generate", "--tolerance"), ("serve", "--memory-share"), ("train", "--retention")]
)
def test_rare_options_are_listed_only_on_demand_and_named_at_the_end(peagle, command, rare):
    *body, last = peagle(command, "--help").out.splitlines()
    assert rare not in "\n".join(body), "most readers do not need it"
    assert last.startswith(f"`peagle {command} --help-all` also shows ") and rare in last
    everything = peagle(command, "--help-all").out
    assert rare in everything and "--help-all" not in everything


def test_a_rare_option_works_as_any_other(peagle):
    refused = peagle("generate", "hello", "--tolerance", "2", "--target", "./nowhere")
    assert refused.status == 2 and "no target at './nowhere'" in refused.err


def test_a_group_of_the_name_of_a_rare_option_is_shown(peagle):
    text = peagle("deploy", "vllm", "--help").out
    assert "--tensor-parallel-size" in text and "--parallel," not in text
