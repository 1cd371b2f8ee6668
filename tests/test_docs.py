"""Every block of README.md and of the guides does what it says.

Blocks tagged `python` run as scripts. In blocks tagged `bash` or `console` each `peagle ...`, `curl ...` and `kill ...`
line runs, and each `make ...` line must name targets that exist. The blocks of one document share a temporary
directory and run in order, so that a later one may use what an earlier one wrote, or the server that it started. A
block that cannot run here says why on the line before it:

    <!-- not run: needs a GPU -->
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
SHELL_TAGS = {"bash", "console", "sh", "shell"}
RUN_PROGRAMS = {"peagle", "curl", "kill"}
COMMAND_TIMEOUT_S = 600

EXEMPTION = re.compile(r"<!--\s*not run\b:?\s*(?P<reason>.*?)\s*-->")


@dataclass(frozen=True)
class Block:
    """One fenced block. `exemption` is None where it must run, otherwise the reason given (possibly empty)."""

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
    """Targets named in a `make` command that the Makefile does not have; flags and VAR=value are passed over."""
    words = [word for word in command.split("#")[0].split()[1:] if not word.startswith("-") and "=" not in word]
    return [f"`{command}`: the Makefile has no target {word!r}" for word in words if word not in makefile_targets()]


def run_block(block: Block, directory: Path) -> list[str]:
    """Run one block in `directory`; the complaints it gives rise to."""
    if block.tag == "python":
        return run_command([sys.executable, "-c", block.text], "python block", directory)
    complaints: list[str] = []
    for command in block.commands():
        program = command.split()[0]
        if program == "make":
            complaints += make_complaints(command)
        elif program in RUN_PROGRAMS:
            complaints += run_command(["bash", "-euo", "pipefail", "-c", command], f"`{command}`", directory)
        else:
            complaints.append(
                f"`{command}`: only peagle, make, curl and kill are run; put <!-- not run: reason --> above the block"
            )
    return complaints


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


def test_readme_exists() -> None:
    assert (ROOT / "README.md").is_file()


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
        for file in tmp_path.glob("*.pid"):  # what a block left running, where a later one did not end it
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


def test_runner_catches_commands_it_would_pass_over(tmp_path: Path) -> None:
    (complaint,) = run_block(Block(1, "bash", "wget localhost", None), tmp_path)
    assert "only peagle, make, curl and kill are run" in complaint
