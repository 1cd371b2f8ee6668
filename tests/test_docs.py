"""The documents are true: their commands run, and the files and messages that they name exist.

Blocks tagged `python` run as scripts. In blocks tagged `bash` or `console`, each `peagle`, `curl` and `kill` line runs,
and each `make` line must name existing targets. Commands of peagle are forked from a process that has the imports done,
except those with a `&` or `>` for the shell; `tests/install` starts them as users do. The blocks of one document share
a temporary directory and run in order, so a later block may use a file or a server of an earlier one. A block that
cannot run here says why on the line before it:

    <!-- not run: needs a GPU -->
"""

import ast
import contextlib
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.architecture import FLOORS
from harness.warm_processes import run_warm

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "tour.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
MARKDOWN = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINE_LENGTH = 120
SHELL_TAGS = {"bash", "console", "sh", "shell"}
RUN_PROGRAMS = {"peagle", "curl", "kill"}
COMMAND_TIMEOUT_S = 600

EXEMPTION = re.compile(r"<!--\s*not run\b:?\s*(?P<reason>.*?)\s*-->")


@dataclass(frozen=True)
class Block:
    """One fenced block. `exemption` is None if it must run, otherwise the reason given (possibly empty)."""

    line: int
    tag: str
    text: str
    exemption: str | None

    def commands(self) -> list[str]:
        """Shell commands with continued lines joined. In `console` blocks only what follows `$ ` is a command."""
        prompted = self.tag == "console"
        commands = []
        for line in re.sub(r"\\\n\s*", "", self.text).splitlines():
            if line.startswith("$ "):
                commands.append(line[2:].strip())
            elif not prompted and line.strip() and not line.lstrip().startswith("#"):
                commands.append(line.strip())
        return commands


def read_blocks(text: str) -> list[Block]:
    """The tagged blocks that a reader would copy; other tags (`text`, `json`, `toml`, none) are illustrations."""
    blocks: list[Block] = []
    fence, tag, start, body, last_line = "", "", 0, [""], ""
    for number, line in enumerate(text.splitlines(), start=1):
        opening = re.match(r"\s*(`{3,})\s*(\w*)", line)
        if not fence and opening:
            fence, tag, start, body = opening[1], opening[2].lower(), number, []
        elif fence and line.strip() == fence:
            if tag in SHELL_TAGS | {"python"}:
                exemption = EXEMPTION.search(last_line)
                blocks.append(Block(start, tag, "\n".join(body), exemption["reason"] if exemption else None))
            fence, last_line = "", ""
        elif fence:
            body.append(line)
        elif line.strip():
            last_line = line
    assert not fence, f"the block opened on line {start} is never closed"
    return blocks


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def make_complaints(command: str) -> list[str]:
    """Targets of a `make` command that the Makefile does not have; flags and VAR=value are ignored."""
    words = [word for word in command.split("#")[0].split()[1:] if not word.startswith("-") and "=" not in word]
    return [f"`{command}`: the Makefile has no target {word!r}" for word in words if word not in makefile_targets()]


def run_block(block: Block, directory: Path) -> list[str]:
    """Run one block in `directory`; return what failed."""
    if block.tag == "python":
        if "from peagle import" in block.text:
            return run_peagle(block.text, "python block", directory)
        return run_command([sys.executable, "-c", block.text], "python block", directory)
    complaints: list[str] = []
    for command in block.commands():
        program = command.split()[0]
        if program == "make":
            complaints += make_complaints(command)
        elif program == "peagle" and (words := plain_words(command)) is not None:
            complaints += run_peagle(words[1:], f"`{command}`", directory)
        elif program in RUN_PROGRAMS:
            complaints += run_command(["bash", "-euo", "pipefail", "-c", command], f"`{command}`", directory)
        else:
            complaints.append(
                f"`{command}`: only peagle, make, curl and kill are run; put <!-- not run: reason --> above the block"
            )
    return complaints


def plain_words(command: str) -> list[str] | None:
    """The words of a command that a shell would pass on as they are; None if it has more to do."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    has_more = any(character in command for character in "$*~`") or any(set(word) <= set("();<>|&") for word in words)
    return None if has_more else words


def run_peagle(words: list[str] | str, what: str, directory: Path) -> list[str]:
    """Run a command of peagle or a script that imports it."""
    status, errors = run_warm(words, directory, COMMAND_TIMEOUT_S)
    if status is None:
        return [f"{what}: still running after {COMMAND_TIMEOUT_S} s"]
    return [f"{what}: exit status {status}\n{errors[-2000:]}"] if status else []


def run_command(arguments: list[str], what: str, directory: Path) -> list[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    try:
        result = subprocess.run(
            arguments, cwd=directory, env=environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return [f"{what}: still running after {COMMAND_TIMEOUT_S} s"]
    if result.returncode:
        return [f"{what}: exit status {result.returncode}\n{result.stderr[-2000:]}"]
    return []


def long_lines(text: str) -> list[int]:
    """Numbers of lines over the limit, outside tables, code blocks and lines that hold one unbreakable link."""
    numbers, in_code = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif len(line) > LINE_LENGTH and not in_code and not line.startswith("|") and len(line.split()) > 3:
            numbers.append(number)
    return numbers


def message_templates() -> list[str]:
    """Every string in the source, with `...` for the values of f-strings."""
    templates = []
    for path in sorted((ROOT / "src" / "peagle").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values]
                templates.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                templates.append(node.value)
    return templates


def is_printed(message: str, templates: list[str]) -> bool:
    """Whether one string of the source holds the words of `message` between its `...` in this order."""
    pattern = re.compile(".*".join(re.escape(part) for part in message.split("...")), re.DOTALL)
    return any(pattern.search(template) for template in templates)


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_markdown_lines_fit_the_limit(path: Path) -> None:
    assert long_lines(path.read_text()) == []


def test_readme_lines_all_fit_the_limit() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [number for number, line in enumerate(lines, start=1) if len(line) > LINE_LENGTH] == []


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "docs" / "architecture.md"], ids=lambda path: path.name)
def test_source_files_that_documents_name_exist(path: Path) -> None:
    named = re.findall(r"`([a-z_]+/[a-z_0-9]+\.py)`", path.read_text())
    named = [name for name in named if not name.startswith("tests/")]
    assert named
    assert [name for name in named if not (ROOT / "src" / "peagle" / name).is_file()] == []


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_floors_in_documents_are_those_that_are_enforced(name: str) -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / name).read_text(), re.MULTILINE)
    documented = {package: int(floor) for floor, packages in rows for package in re.findall(r"`(\w+)`", packages)}
    assert documented == FLOORS


def test_api_reference_has_every_public_name() -> None:
    import peagle

    page = (ROOT / "docs" / "api.md").read_text()
    names = [name for name in peagle.__all__ if not name.startswith("_") and not issubclass_of_error(name)]
    assert [name for name in names if not re.search(rf"^::: [\w.]+\.{name}$", page, re.MULTILINE)] == []
    assert "::: peagle.errors" in page


def issubclass_of_error(name: str) -> bool:
    import peagle

    value = getattr(peagle, name)
    return isinstance(value, type) and issubclass(value, Exception)


def unknown_flags(text: str, flags: dict[str, str]) -> list[str]:
    """Flags of `peagle ...` commands, in blocks and in the text, that their command does not have."""
    text = re.sub(r"\\\n\s*", "", text)
    inline = re.findall(
        r"`((?:\w+=\S+ )?peagle [^`]+)`", re.sub(r"\s*\n\s*", " ", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    )
    blocks = [
        line for block in re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL) for line in block.splitlines()
    ]
    found = []
    for command in [*inline, *blocks]:
        words = re.split(r"\s-- |\s#", command[command.find("peagle ") :])[0].split()
        if words[:1] != ["peagle"]:
            continue
        name = max((name for name in flags if words[1:][: len(name.split())] == name.split()), key=len, default=None)
        if name is None:
            continue
        known = {flag.replace("--no-", "--", 1) for flag in flags[name].split()} | {"--help", "--help-all", "--from"}
        used = [word.split("=")[0] for word in words if word.startswith("--")]
        found += [f"{command}: {flag}" for flag in used if flag.replace("--no-", "--", 1) not in known]
    return found


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_use_flags_that_exist(path: Path) -> None:
    if path.name in {"log.md", "CHANGELOG.md"}:
        pytest.skip("history: old commands may be gone")
    flags = runpy.run_path(str(ROOT / "tests" / "cli" / "test_surface.py"))["FLAGS"]
    assert unknown_flags(path.read_text(), flags) == []


def test_flag_check_catches_a_flag_that_is_gone() -> None:
    flags = {"serve": "--port --eager", "bench": "--limit", "bench serve": "--model"}
    block = "```bash\npeagle serve X --port 1 --pack -- --block-size 2\npeagle bench serve URL --limit 3\n```\n"
    text = block + "`peagle bench\n--no-limit`"
    assert [complaint.split()[-1] for complaint in unknown_flags(text, flags)] == ["--pack", "--limit"]


def test_troubleshooting_quotes_messages_as_the_code_prints_them() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^(?:error|hint|warning): (.+)$", page, re.MULTILINE)
    templates = message_templates()
    assert len(messages) > 20
    assert [message for message in messages if not is_printed(message, templates)] == []


def test_message_check_catches_a_reworded_message() -> None:
    templates = ["n=... exceeds capacity (batch + queue = ...)", "give --drafter"]
    assert is_printed("n=... exceeds capacity (batch + queue = ...)", templates)
    assert not is_printed("n=... is above capacity", templates)


def test_line_check_ignores_tables_and_code() -> None:
    long = "word " * 30
    assert long_lines(f"{long}\n| {long}|\n```\n{long}\n```\n[a link](https://{'x' * 130})\n") == [1]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_that_are_not_run_say_why(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exempt = [block for block in read_blocks(document.read_text()) if block.exemption is not None]
    with capsys.disabled():
        for block in exempt:
            print(f"\nnot run: {document.name}:{block.line}: {block.exemption}", end="")
    assert [block.line for block in exempt if not block.exemption] == [], "blocks without a reason, by line"


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_run_in_order(document: Path, tmp_path: Path) -> None:
    try:
        for block in read_blocks(document.read_text()):
            if block.exemption is None:
                assert run_block(block, tmp_path) == [], f"{document.name}:{block.line}"
    finally:
        for file in tmp_path.glob("*.pid"):  # a server that no later block stopped
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


SAMPLE = """
```bash
# a comment
peagle generate \\
    "Hello"
make setup PYTHON=python3.11
```
<!-- not run: needs a GPU -->

```console
$ peagle train
step 1  loss 2.0
```
<!-- not run -->
```python
print(1)
```
Prose ends an exemption.
````text
```bash
peagle inside another block
```
````
```json
{}
```
"""


def test_reader_finds_blocks_commands_and_exemptions() -> None:
    blocks = read_blocks(SAMPLE)
    assert [(block.tag, block.exemption) for block in blocks] == [
        ("bash", None),
        ("console", "needs a GPU"),
        ("python", ""),
    ]
    assert blocks[0].commands() == ['peagle generate "Hello"', "make setup PYTHON=python3.11"]
    assert blocks[1].commands() == ["peagle train"], "what a console block shows as output is not a command"


def test_reader_refuses_a_block_that_is_never_closed() -> None:
    with pytest.raises(AssertionError, match="opened on line 2 is never closed"):
        read_blocks("\n```bash\npeagle doctor\n")


def test_runner_catches_a_failing_python_block(tmp_path: Path) -> None:
    assert run_block(Block(1, "python", "open('made', 'w').close()", None), tmp_path) == []
    assert (tmp_path / "made").exists(), "blocks run in the temporary directory"
    (complaint,) = run_block(Block(1, "python", "raise SystemExit('gone wrong')", None), tmp_path)
    assert "exit status 1" in complaint and "gone wrong" in complaint


def test_runner_catches_a_make_target_that_does_not_exist(tmp_path: Path) -> None:
    (complaint,) = run_block(Block(1, "bash", "make -j2 setup polish PYTHON=python3", None), tmp_path)
    assert complaint.endswith("the Makefile has no target 'polish'")


def test_commands_that_need_a_shell_get_one() -> None:
    assert plain_words('peagle generate "a > b" --compare  # why') == ["peagle", "generate", "a > b", "--compare"]
    assert plain_words("peagle serve > serve.log 2>&1 & echo $! > serve.pid") is None
    assert plain_words("peagle catalog | head") is None


def test_runner_catches_commands_it_would_pass_over(tmp_path: Path) -> None:
    (complaint,) = run_block(Block(1, "bash", "wget localhost", None), tmp_path)
    assert "only peagle, make, curl and kill are run" in complaint
