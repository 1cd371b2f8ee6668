"""Every flag of every command, written out: a flag that comes, goes or changes its name is a decision."""

import re

import pytest

from peagle.cli.main import COMMANDS

TARGET = "--target --dtype --device"
DRAFTER = "--drafter --allow-mismatch --no-allow-mismatch"
SAMPLING = (
    "--max-tokens --temperature --top-k --top-p --min-p --seed --stop --stop-token-ids --ignore-eos --no-ignore-eos "
    "--min-tokens --logit-bias --repetition-penalty --frequency-penalty --presence-penalty "
    "--n --logprobs --prompt-logprobs --num-draft-tokens"
)
ENGINE = (
    "--max-batch --max-length --page-size --num-pages --memory-share --prefill-tokens --verify-rows --max-held "
    "--max-waiting --reuse-prefixes --no-reuse-prefixes --compile --capture --capture-adjusted --no-capture-adjusted "
    "--pack --quantize"
)
PARALLEL = "--tensor-parallel-size --pipeline-parallel-size --data-parallel-size --num-nodes"
SAGEMAKER = (
    "--target --drafter --num-draft-tokens --allow-mismatch --no-allow-mismatch --upload-target --no-upload-target "
    "--upload-drafter --no-upload-drafter --engine --image --vllm-tag --max-length --tensor-parallel-size --env "
    "--role --instance --num-instances --max-instances --min-instances --target-concurrency --scale-in-seconds "
    "--scale-out-seconds --bucket --ami --startup-seconds --download-seconds --volume-gb --subnets --security-groups "
    "--network-isolation --no-network-isolation --metrics --no-metrics --tags --region --profile --smoke-test "
    "--no-smoke-test --dry-run --no-dry-run --poll-seconds --limit-minutes --json --no-json"
)
API_KEY = "--api-key-file --api-key-variable"

FLAGS = {
    "generate": (
        f"--compare --no-compare --raw --no-raw --system --quantize --json --no-json {SAMPLING} {TARGET} {DRAFTER}"
    ),
    "eval": (
        "--prompts --limit --num-draft-tokens --max-tokens --temperature --seed --compare --no-compare "
        f"--json --no-json {TARGET} {DRAFTER}"
    ),
    "bench": (
        "--prompts --limit --methods --num-draft-tokens --concurrency --num-requests --max-tokens --temperature --seed "
        "--anchors --no-anchors --anchor-methods --dummy --eagle3-drafter "
        f"--json --no-json --plot {TARGET} {DRAFTER}"
    ),
    "bench serve": (
        "--prompts --limit --endpoint --model --concurrency --request-rate --burstiness --num-requests --num-warmups "
        "--max-tokens --ignore-eos --no-ignore-eos --temperature --seed --extra-body --goodput --percentiles "
        "--timeout-seconds --ready-seconds --label --json --no-json --detailed --no-detailed --plot "
        f"{API_KEY}"
    ),
    "catalog": "--json --no-json",
    "serve": (
        "--engine --num-draft-tokens --host --port --served-model-name --api-key-file --cors-origins --max-choices "
        "--max-body-bytes --body-seconds --request-seconds --keep-alive-seconds --drain-seconds --log-format "
        f"{ENGINE} {TARGET} {DRAFTER} {PARALLEL} --vllm-python --start-seconds"
    ),
    "top": f"--interval --window --once --no-once --json --no-json {API_KEY}",
    "data synthesize": (
        "--output --num-answers --num-tokens --seconds --given --max-batch --max-length --temperatures --top-p --top-k "
        "--question-temperature --max-question-tokens --min-answer-tokens --keep-cut --no-keep-cut "
        "--keep-loops --no-keep-loops --given-share "
        f"--num-held-out --system-prompts --seed --json --no-json {TARGET}"
    ),
    "data regenerate": (
        "--prompts --output --limit --max-batch --max-length --max-answer-tokens --max-turns --temperatures --top-p "
        f"--top-k --seed --json --no-json {TARGET}"
    ),
    "data inspect": "--num-examples --rows --num-top-tokens --json --no-json --target",
    "train": (
        "--recipe --data --output --method --from-drafter --held-out --num-held-out --num-layers --num-draft-tokens "
        "--aux-layer-ids --mask-token-id --fc-norm --no-fc-norm --norm-before-fc --no-norm-before-fc --norm-output "
        "--no-norm-output --draft-vocab-size --embeddings --init --loss --labels --depth-weights --retention "
        "--retention-floor --max-length --batch-size --num-steps --optimizer --learning-rate --warmup-steps "
        "--min-learning-rate-ratio --weight-decay --max-gradient-norm --seed --save-every --log-every --features "
        "--features-directory --micro-batch-size --num-partitions --checkpoint-activations --no-checkpoint-activations "
        f"--parallel --compile {TARGET}"
    ),
    "export": f"--output --to {TARGET} {DRAFTER}",
    "deploy vllm": (
        "--output --show --num-draft-tokens --dtype --max-batch --max-length --prefill-tokens --served-model-name "
        f"--vllm-version --image --name --port {PARALLEL} {DRAFTER}"
    ),
    "deploy sagemaker": SAGEMAKER,
    "deploy sagemaker update": f"{SAGEMAKER} --batch-size --batch-unit --wait-seconds --alarms",
    "deploy sagemaker status": "--bucket --json --no-json --region --profile",
    "deploy sagemaker delete": "--bucket --logs --no-logs --dry-run --no-dry-run --poll-seconds --region --profile",
    "deploy sagemaker invoke": "--max-tokens --temperature --json --no-json --region --profile",
    "doctor": (f"--engine --prompts --limit --vllm-python --record --no-record --json --no-json {TARGET} {DRAFTER}"),
    "lossless": (
        "--prompts --limit --num-draft-tokens --max-tokens --temperature --num-seeds --num-samples "
        f"--num-sampled-prompts --output --json --no-json {TARGET} {DRAFTER}"
    ),
}

ARGUMENTS = {
    "generate": "PROMPT",
    "catalog": "[NAME]",
    "bench serve": "[URL]",
    "serve": "[TARGET]",
    "top": "[URL]",
    "data inspect": "DATA",
    "export": "[DRAFTER]",
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
    assert list(dict.fromkeys(name.split()[0] for name in FLAGS)) == list(COMMANDS) and ARGUMENTS.keys() <= FLAGS.keys()


@pytest.mark.parametrize("command", FLAGS)
def test_flags_of(peagle, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")  # where it is wider, long lists stand side by side
    lines = [line for line in peagle(*command.split(), "--help").out.splitlines() if re.match(r"\W+ --", line)]
    flags = {
        flag for line in lines for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", re.split(r"(?<=\S)  +", line)[0])
    }
    assert flags == set(FLAGS[command].split()), "the flags changed: change this list, the docs and the change log"


@pytest.mark.parametrize("command", FLAGS)
def test_usage_of(peagle, command):
    usage = peagle(*command.split(), "--help").out.splitlines()[0]
    few = {"catalog": "[NAME] [--json | --no-json]"}  # so few options are written out
    rest = few.get(command, f"[OPTIONS] {ARGUMENTS.get(command, '')}")
    assert usage == f"usage: peagle {command} [-h] {rest}".rstrip()


@pytest.mark.parametrize("command", FLAGS)
def test_help_begins_with_what_the_command_does(peagle, command):
    text = peagle(*command.split(), "--help").out.splitlines()[2]
    assert text.endswith((".", ":")) and len(text) > 40
