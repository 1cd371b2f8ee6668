"""A typo is refused before torch is imported, which takes many seconds on a cold machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = "--target target --drafter drafter"
TYPOS = [
    "generate hello --target ./nowhere",
    "generate hello --target smollm2-135m-instrct",
    "generate hello --target rows.jsonl",
    "generate hello --target empty",
    "generate hello --drafter ./nowhere",
    "generate hello --drafter longcontext",
    "generate hello --drafter empty",
    "generate hello --device gpu",
    "generate hello --dtype float8",
    "generate hello --temperature -1",
    "eval --prompts nowhere.jsonl",
    "eval --target ./nowhere",
    "eval --limit 0",
    f"eval {MODELS} --max-tokens 0",
    "eval --num-draft-tokens 0",
    "bench --prompts nowhere.jsonl",
    "bench --prompts rows.jsonl --target ./nowhere",
    "bench --prompts rows.jsonl --drafter ./nowhere",
    "bench --prompts rows.jsonl --eagle3-drafter ./nowhere --methods none,eagle3",
    "bench --prompts rows.jsonl --methods peagle",
    "bench --prompts rows.jsonl --plot nowhere/plot.png",
    "bench --dummy lama-8b",
    "tune --prompts rows.jsonl --output nowhere/settings.toml",
    "lossless ./nowhere",
    "lossless --prompts nowhere.jsonl",
    "lossless --output report.docx",
    "doctor ./nowhere",
    "doctor --target ./nowhere",
    f"doctor {MODELS} --prompts nowhere.jsonl",
    "serve ./nowhere",
    "serve --drafter ./nowhere",
    "serve --port 70000",
    "serve --port 0 --record rows.jsonl",
    "train --data nowhere.jsonl --output out",
    "train --data rows.jsonl --output out --target ./nowhere",
    "train --data rows.jsonl --output out --from ./nowhere",
    "train --data rows.jsonl --output out --recipe nowhere.toml",
    "train --data rows.jsonl --output rows.jsonl",
    "train --data rows.jsonl --output out --num-steps 0",
    "adapt --data nowhere.jsonl --output out",
    "adapt --data rows.jsonl --output out --drafter ./nowhere",
    "adapt --data rows.jsonl --output out --swap ftp://here",
    "build ./nowhere --output out",
    "build --output rows.jsonl",
    "build --output out --prompts nowhere.jsonl",
    "build --output out --budget 3",
    "data synthesize --output out --num-answers 4 --target ./nowhere",
    "data synthesize --output out --num-answers 4 --given nowhere.jsonl",
    "data synthesize --output out --num-answers 4 --documents nowhere.txt",
    "data synthesize --output out --num-answers 4 --drafter ./nowhere",
    "data regenerate --output out --prompts nowhere.jsonl",
    "data regenerate --output rows.jsonl --prompts rows.jsonl",
    "data inspect nowhere",
    "data inspect rows.jsonl --target ./nowhere",
    "export ./nowhere --output out",
    "export drafter --target ./nowhere --output out",
    "export drafter --target target --output full",
    "deploy vllm ./nowhere",
    "deploy vllm --drafter ./nowhere",
    "deploy vllm --output rows.jsonl",
    "deploy sagemaker nothing --role arn:aws:iam::123456789012:role/name",
]
SCRIPT = """
import contextlib, io, json, sys
from peagle.cli.main import run
found = {}
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        status = run(words.split())
    found[words] = [status, "torch" in sys.modules, said.getvalue()]
    if "torch" in sys.modules:
        break
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """Status, whether torch was imported, and what was said, by command line; all in one process."""
    root = tmp_path_factory.mktemp("typos")
    for name in ("target", "drafter"):
        (root / name).symlink_to(models / name)
    for name in ("empty", "full"):
        (root / name).mkdir()
    (root / "full" / "file").write_text("")
    (root / "rows.jsonl").write_text('{"prompt": "the user", "answer": "the answer"}\n')
    found: dict[str, list] = {}
    while rest := [words for words in TYPOS if words not in found]:
        command = [sys.executable, "-c", SCRIPT, json.dumps(rest)]
        ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        found |= json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("words", TYPOS)
def test_a_typo_is_refused_without_torch(answers, words):
    status, has_torch, said = answers[words]
    assert status == 2, said
    assert not has_torch, said
