"""Everything a user can get wrong: one paragraph, a hint, status 2, and nothing written."""

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest

ROW = json.dumps({"prompt": "the user", "answer": "the answer of the user"}) + "\n"


def cut(path: Path, share: float = 0.5) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def damaged(source: Path, destination: Path, damage) -> None:
    shutil.copytree(source, destination)
    damage(destination)


@pytest.fixture(scope="module")
def world(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sound and damaged targets, drafters and files, by the names the cases below use."""
    root = tmp_path_factory.mktemp("world")
    for name in ("target", "drafter", "stranger"):
        shutil.copytree(models / name, root / name)
    damages = {
        "target-cut-weights": lambda at: cut(at / "model.safetensors"),
        "target-cut-config": lambda at: cut(at / "config.json"),
        "target-cut-tokenizer": lambda at: cut(at / "tokenizer.json"),
        "target-binary-config": lambda at: (at / "config.json").write_bytes(b"\xff\xfe\x00"),
        "target-unknown-type": lambda at: edit_json(at / "config.json", model_type="nonesuch"),
        "target-without-weights": lambda at: (at / "model.safetensors").unlink(),
        "target-other-sizes": lambda at: edit_json(at / "config.json", hidden_size=32),
        "target-of-text": lambda at: edit_json(at / "config.json", num_hidden_layers="eight"),
        "drafter-cut-weights": lambda at: cut(at / "model.safetensors"),
        "drafter-empty-weights": lambda at: cut(at / "model.safetensors", 0),
        "drafter-cut-config": lambda at: cut(at / "config.json"),
        "drafter-binary-config": lambda at: (at / "config.json").write_bytes(b"\xff\xfe\x00"),
        "drafter-list-config": lambda at: (at / "config.json").write_text("[1, 2]"),
        "drafter-of-text": lambda at: edit_json(at / "config.json", num_hidden_layers="two"),
        "drafter-without-layers": lambda at: edit_json(at / "config.json", num_hidden_layers=None),
        "drafter-wide": lambda at: edit_json(at / "config.json", vocab_size=999),
        "drafter-strange": lambda at: edit_json(at / "config.json", model_type="nonesuch"),
        "drafter-cut-card": lambda at: cut(at / "drafter_card.json"),
        "drafter-list-card": lambda at: (at / "drafter_card.json").write_text("[]"),
        "drafter-binary-card": lambda at: (at / "drafter_card.json").write_bytes(b"\xff\xfe\x00"),
        "drafter-new-card": lambda at: edit_json(at / "drafter_card.json", acceptanse={}),
        "drafter-without-weights": lambda at: (at / "model.safetensors").unlink(),
    }
    for name, damage in damages.items():
        damaged(root / name.split("-")[0], root / name, damage)
    (root / "empty").mkdir()
    (root / "rows.jsonl").write_text(ROW * 3)
    (root / "broken.jsonl").write_text(ROW + '{"prompt": \n')
    (root / "blank.jsonl").write_text("\n")
    (root / "cut.jsonl.gz").write_bytes(gzip.compress(ROW.encode() * 100)[:-9])
    (root / "empty-prompt.jsonl").write_text(ROW + '{"prompt": " "}\n')
    (root / "long.jsonl").write_text(ROW + json.dumps({"id": "q2", "prompt": "x" * 600}) + "\n")
    (root / "strange.jsonl").write_text('{"text": "neither asked nor answered"}\n')
    (root / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (root / "unknown-key.toml").write_text("num_step = 3\n")
    (root / "wrong-type.toml").write_text('num_steps = "many"\n')
    (root / "wrong-choice.toml").write_text('loss = "mse"\n')
    (root / "out-of-range.toml").write_text("num_draft_tokens = 0\n")
    (root / "broken.toml").write_text("num_steps = \n")
    (root / "deep-layer.toml").write_text("aux_layer_ids = [3, 99]\n")
    (root / "large-id.toml").write_text("mask_token_id = 999\n")
    return root


ON = "--target target --drafter drafter --dtype float32"
GENERATE = f"generate hello {ON}"
EVAL = f"eval {ON} --prompts rows.jsonl"
BENCH = f"bench {ON} --prompts rows.jsonl"
TRAIN = "train --target target --dtype float32 --num-steps 1 --num-layers 1 --max-length 64 --output out"
EXPORT = "export --output out --dtype float32"
DOCTOR = "doctor --json --dtype float32"

# The command line, then what the message must name. {root} is the folder of `world`.
CASES = {
    # a wrong path
    f"{GENERATE} --target {{root}}/none": "{root}/none",
    f"{GENERATE} --target empty": "empty",
    f"{GENERATE} --target rows.jsonl": "rows.jsonl is a file, but not a GGUF file",
    f"{GENERATE} --drafter none": "no directory none",
    f"{GENERATE} --drafter empty": "no drafter at empty: config.json is missing",
    f"{GENERATE} --drafter drafter-without-weights": "model.safetensors is missing",
    "generate hello --target target --dtype float32": "no drafter ships for target 'target'",
    f"{EVAL} --prompts none.jsonl": "none.jsonl",
    f"{EVAL} --prompts empty": "empty",
    f"{EVAL} --target {{root}}/none": "{root}/none",
    f"{EVAL} --drafter none": "no directory none",
    f"{TRAIN} --data none.jsonl": "none.jsonl",
    f"{TRAIN} --data rows.jsonl --target {{root}}/none": "{root}/none",
    f"{TRAIN} --data rows.jsonl --recipe none.toml": "no recipe at none.toml",
    f"{TRAIN} --data rows.jsonl --recipe empty": "cannot read empty",
    f"{TRAIN} --data rows.jsonl --held-out none.jsonl": "none.jsonl",
    f"{TRAIN} --data rows.jsonl --output rows.jsonl": "rows.jsonl",
    f"{EXPORT} --target target --drafter none": "no directory none",
    f"{EXPORT} --target {{root}}/none --drafter drafter": "{root}/none",
    f"export --output rows.jsonl {ON}": "rows.jsonl is a file",
    f"export --output drafter {ON}": "drafter is not empty",
    f"export --output rows.jsonl/out {ON}": "rows.jsonl",
    f"export drafter --output out {ON}": "two drafters are given: drafter and --drafter drafter",
    f"{DOCTOR} none --target target": "no directory none",
    f"{DOCTOR} drafter --target {{root}}/none": "{root}/none",
    f"{DOCTOR} drafter --drafter drafter --target target": "two drafters are given",
    f"{DOCTOR} drafter --target target --prompts none.jsonl": "none.jsonl",
    f"{DOCTOR} --record": "--record needs a drafter",
    f"{DOCTOR} --engine vllm": "--engine needs a drafter",
    f"{DOCTOR} drafter --target stranger --record": "its weights are not the ones the drafter was trained on",
    f"{DOCTOR} drafter-cut-weights --target target --record": "drafter-cut-weights/model.safetensors cannot be read",
    # a corrupt or truncated file
    f"{GENERATE} --target target-cut-weights": "target-cut-weights",
    f"{GENERATE} --target target-cut-config": "target-cut-config",
    f"{GENERATE} --target target-cut-tokenizer": "target-cut-tokenizer",
    f"{GENERATE} --target target-binary-config": "target-binary-config",
    f"{GENERATE} --target target-unknown-type": "nonesuch",
    f"{GENERATE} --target target-without-weights": "target-without-weights",
    f"{GENERATE} --target target-other-sizes": "target-other-sizes",
    f"{GENERATE} --target target-of-text": "target-of-text",
    f"{GENERATE} --target cut.gguf": "cut.gguf cannot be read as a GGUF model",
    f"{GENERATE} --drafter drafter-cut-weights": "drafter-cut-weights/model.safetensors cannot be read",
    f"{GENERATE} --drafter drafter-empty-weights": "drafter-empty-weights/model.safetensors cannot be read",
    f"{GENERATE} --drafter drafter-cut-config": "drafter-cut-config/config.json is not valid JSON",
    f"{GENERATE} --drafter drafter-binary-config": "drafter-binary-config/config.json is not valid JSON",
    f"{GENERATE} --drafter drafter-list-config": "config.json must hold a JSON object",
    f"{GENERATE} --drafter drafter-of-text": "drafter-of-text/config.json",
    f"{GENERATE} --drafter drafter-without-layers": "drafter-without-layers/config.json",
    f"{GENERATE} --drafter drafter-strange": "nonesuch",
    f"{GENERATE} --drafter drafter-cut-card": "drafter-cut-card/drafter_card.json cannot be read",
    f"{GENERATE} --drafter drafter-list-card": "drafter-list-card/drafter_card.json",
    f"{GENERATE} --drafter drafter-binary-card": "drafter-binary-card/drafter_card.json",
    f"{EVAL} --prompts broken.jsonl": "broken.jsonl:2: not valid JSON",
    f"{EVAL} --prompts blank.jsonl": "blank.jsonl has no rows",
    f"{EVAL} --prompts cut.jsonl.gz": "cut.jsonl.gz is a damaged gzip file",
    f"{EVAL} --drafter drafter-cut-weights": "drafter-cut-weights/model.safetensors",
    f"{TRAIN} --data broken.jsonl": "broken.jsonl:2: not valid JSON",
    f"{TRAIN} --data cut.jsonl.gz": "cut.jsonl.gz is a damaged gzip file",
    f"{TRAIN} --data strange.jsonl": "strange.jsonl:1: not a conversation",
    f"{TRAIN} --data rows.jsonl --recipe broken.toml": "broken.toml is not valid TOML",
    f"{TRAIN} --data rows.jsonl --target target-cut-weights": "target-cut-weights",
    f"{EXPORT} --target target --drafter drafter-cut-weights": "drafter-cut-weights/model.safetensors",
    # a config key that does not exist, or a value it does not take
    f"{TRAIN} --data rows.jsonl --recipe unknown-key.toml": "unknown key 'num_step'\nhint: did you mean 'num_steps'?",
    f"{TRAIN} --data rows.jsonl --recipe wrong-type.toml": "num_steps must be a whole number, got 'many'",
    f"{TRAIN} --data rows.jsonl --recipe wrong-choice.toml": "got 'mse'",
    f"{GENERATE} --drafter drafter-new-card": "unknown key 'acceptanse'",
    # methods, sweeps and options that contradict each other
    f"bench {ON}": "nothing to run",
    f"{BENCH} --methods none,p-eagel": "no method 'p-eagel'\nhint: did you mean 'p-eagle'?",
    f"{BENCH} --methods none,none": "none,none: duplicate value",
    f"{BENCH} --concurrency 0,8": "--concurrency must be at least 1, got 0",
    f"{BENCH} --num-requests 0": "num_requests must be at least 1, got 0",
    f"{BENCH} --num-draft-tokens 5,6": "between 1 and 4, the depth it was trained for, got 5",
    f"{BENCH} --num-draft-tokens 0": "--num-draft-tokens must be at least 1, got 0",
    "bench --target target --prompts rows.jsonl --methods none --num-draft-tokens 2": "needs a method that drafts",
    f"{BENCH} --methods none": "--drafter needs p-eagle in --methods",
    f"{BENCH} --methods none,p-eagle,eagle3": "the method eagle3 needs an EAGLE-3 drafter",
    f"{BENCH} --eagle3-drafter drafter": "--eagle3-drafter needs eagle3 in --methods",
    f"{BENCH} --methods p-eagle,eagle3 --eagle3-drafter drafter": "is a drafter for p-eagle, but the method is eagle3",
    f"{BENCH} --anchors --temperature 1": "--anchors decode greedily, but --temperature is 1.0",
    # weights in few bits
    f"{GENERATE} --device cpu --quantize int4": "--quantize int4 needs a GPU\nhint: on a CPU use a GGUF file",
    f"{EVAL} --device cpu --quantize fp8": "--quantize fp8 needs a GPU",
    f"{EVAL} --quantize fp8 --record": "--record takes the target's own weights, which contradicts --quantize",
    f"{BENCH} --quantize int8 --anchors": "--anchors takes the target's own weights, which contradicts --quantize",
    "bench --dummy llama-8b --device cpu --quantize int8": "--quantize int8 needs a GPU",
    f"{DOCTOR} drafter --target target --quantize fp8 --record": "--record takes the target's own weights",
    f"{DOCTOR} drafter --target target --quantize fp8 --engine vllm": "--engine vllm takes the target's own weights",
    f"{DOCTOR} drafter --target target --device cpu --quantize fp8": "--quantize fp8 needs a GPU",
    f"{BENCH} --prompts rows.jsonl,none.jsonl": "none.jsonl",
    f"{BENCH} --limit 0": "limit must be at least 1, got 0",
    f"{BENCH} --max-tokens 0": "max_tokens must be at least 1, got 0",
    f"{BENCH} --prompts long.jsonl": "prompt 'q2': the prompt has",
    f"{BENCH} --plot plot.txt": "the name must end in",
    f"{BENCH} --plot none/plot.png": "no directory none",
    "bench --dummy llama-8": "no shape 'llama-8'",
    "bench --dummy broken.jsonl": "broken.jsonl is not valid JSON",
    "bench --dummy llama-8b --prompts rows.jsonl": "contradicts --prompts",
    "bench --dummy llama-8b --target target": "contradicts --target",
    "bench --dummy llama-8b --anchors": "contradicts --anchors",
    f"{BENCH} --anchors lama.cpp": "no anchor 'lama.cpp'\nhint: did you mean 'llama.cpp'?",
    "bench --dummy llama-8b --methods p-eagle": "contradicts --methods",
    "bench --dummy llama-8b --num-draft-tokens 3": "contradicts --num-draft-tokens",
    "bench --dummy llama-8b --assume-acceptance 0.5,0.7": "which do not grow",
    "bench --dummy llama-8b --assume-acceptance 0.5,0.4 --num-draft-tokens 3": "has 2 shares, but 3 draft tokens",
    "bench --dummy llama-8b --assume-acceptance 5 --num-draft-tokens 3": "3 draft tokens reach at most 4",
    "bench --dummy llama-8b --assume-acceptance published": "no acceptance length is published for the shape llama-8b",
    "bench --dummy llama-8b --assume-acceptance published,0.5": "takes shares or 'published', not both",
    "bench --dummy llama-8b --drafter-layers 2": "--drafter-layers needs --assume-acceptance",
    "bench --dummy llama-8b --assume-acceptance 0.5 --drafter-layers 0": "drafter_layers must be at least 1",
    "bench --dummy llama-8b --assume-acceptance 0.5 --draft-vocab 200000": "exceeds the vocabulary of 128256 tokens",
    f"{BENCH} --draft-vocab 100": "--draft-vocab needs --dummy",
    f"{BENCH} --assume-acceptance 0.5": "--assume-acceptance needs --dummy",
    # a drafter for another target
    f"{GENERATE} --target stranger": "'stranger', its weights are not the ones the drafter was trained on",
    f"{GENERATE} --drafter drafter-wide": "vocab_size is 999, but target 'target' has 288",
    f"{EVAL} --target stranger": "its weights are not the ones",
    f"{EXPORT} --target stranger --drafter drafter": "its weights are not the ones",
    # K out of range
    f"{GENERATE} --num-draft-tokens 5": "num_draft_tokens must be between 1 and 4, the depth it was trained for, got 5",
    f"{GENERATE} --num-draft-tokens -1": "got -1",
    f"{GENERATE} --num-draft-tokens 0 --compare": "--compare needs drafts",
    f"{EVAL} --num-draft-tokens 5": "between 1 and 4, the depth it was trained for, got 5",
    f"{EVAL} --num-draft-tokens 0": "got 0",
    f"{TRAIN} --data rows.jsonl --num-draft-tokens 0": "num_draft_tokens must be at least 1, got 0",
    f"{TRAIN} --data rows.jsonl --recipe out-of-range.toml": "num_draft_tokens must be at least 1, got 0",
    # an empty prompt, a prompt longer than the context
    f"generate '' {ON}": "the prompt is empty",
    f"generate ' ' {ON}": "the prompt is empty",
    f"generate {'x' * 600} {ON}": "the context of target 'target' is 512 tokens",
    f"generate {'x' * 600} --raw {ON}": "the prompt has 600 tokens",
    f"{EVAL} --prompts empty-prompt.jsonl": "empty-prompt.jsonl:2: the prompt is empty",
    f"{EVAL} --prompts long.jsonl": "prompt 'q2': the prompt has 6",
    f"{TRAIN} --data rows.jsonl --max-length 600": "max_length 600 exceeds the target's 512",
    # other values out of their range, and options that contradict each other
    f"{GENERATE} --max-tokens 0": "max_tokens must be at least 1, got 0",
    f"{GENERATE} --temperature -1": "temperature must be 0 or more, got -1.0",
    f"{GENERATE} --top-p 2": "got 2.0",
    f"{GENERATE} --stop ''": "stop must be",
    f"{GENERATE} --n 0": "n must be at least 1, got 0",
    f"{GENERATE} --json --logprobs 21": "logprobs must be between 0 and 20, or None, got 21",
    f"{GENERATE} --logprobs 2": "--logprobs are reported in the JSON document only",
    f"{GENERATE} --raw --system s": "--system 's' has no effect",
    f"{GENERATE} --device abacus": "unknown device 'abacus'",
    f"{EVAL} --limit 0": "limit must be at least 1, got 0",
    f"{EVAL} --max-tokens 0": "max_tokens must be at least 1, got 0",
    f"{TRAIN} --data rows.jsonl --num-steps 0": "num_steps must be at least 1, got 0",
    f"{TRAIN} --data rows.jsonl --num-layers 9": "num_layers 9 exceeds the target's 3",
    f"{TRAIN} --data rows.jsonl --recipe deep-layer.toml": "99",
    f"{TRAIN} --data rows.jsonl --recipe large-id.toml": "999",
    f"{DOCTOR} --device abacus": "unknown device 'abacus'",
}


def tree(root: Path) -> dict[str, tuple[int, int]]:
    found = {str(path): path.stat() for path in root.rglob("*")}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def words(line: str) -> list[str]:
    return [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]


@pytest.fixture
def in_world(peagle, world, monkeypatch):
    """Run a command line in the world's folder; afterwards the folder must be as it was."""
    monkeypatch.chdir(world)
    monkeypatch.setenv("PEAGLE_CACHE", str(world / "cache"))
    before = tree(world)

    def call(line: str):
        result = peagle(*words(line.replace("{root}", str(world))))
        assert tree(world) == before, "something was written"
        return result

    return call


@pytest.mark.parametrize("line", CASES)
def test_refused(in_world, world, line):
    result = in_world(line)
    assert result.status == 2, result.err
    assert result.out == "", "stdout is data"
    _, found, paragraph = ("\n" + result.err).partition("\nerror: ")
    assert found, result.err
    assert CASES[line].replace("{root}", str(world)) in paragraph
    assert paragraph.count("\nhint: ") == 1 and "\n\n" not in paragraph and "Traceback" not in result.err
    assert len(paragraph.strip().splitlines()) <= 3, "one paragraph"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("generate hi --bogus", "--bogus"),
        ("generate hi --sample-drafts", "--sample-drafts"),
        ("eval --bogus", "--bogus"),
        ("bench --bogus", "--bogus"),
        ("bench --prompts rows.jsonl --concurrency 1,few", "few"),
        ("train --bogus", "--bogus"),
        ("export --output out --bogus", "--bogus"),
        ("doctor --bogus", "--bogus"),
        ("generate", "PROMPT"),
        ("train", "--data"),
        ("export", "--output"),
        ("generate hi --dtype float31", "float31"),
        ("generate hi --max-tokens many", "many"),
        ("generate hi --temperature", "--temperature"),
        ("eval --prompts rows.jsonl --limit few", "few"),
        ("train --data a --output b --loss mse", "mse"),
        ("generate hi there", "there"),
        ("train --data a --output b --drafter c", "--drafter"),
        ("train --data a --output b --quantize int8", "--quantize"),
        ("build --output b --quantize int8", "--quantize"),
        ("generate hi --quantize int5", "int5"),
    ],
)
def test_options_that_cannot_be_read_are_explained(in_world, line, named):
    result = in_world(line)
    assert result.status == 2 and result.out == ""
    assert named in result.err and "--help" in result.err and "Traceback" not in result.err


def test_a_misspelled_option_is_answered_with_the_right_one(in_world):
    assert "--num-draft-tokens" in in_world("generate hi --num-draft-token 3").err
