"""The door: overview, version, unknown commands, and how a command ends when it is stopped."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from peagle import __version__
from peagle.cli.main import COMMANDS, main
from peagle.errors import PeagleError


def stand_in(monkeypatch, action, command="doctor"):
    """Put `action` in the place of a command."""
    monkeypatch.setitem(sys.modules, f"peagle.cli.{command}", SimpleNamespace(main=action))


def in_new_process(*argv, stdout=subprocess.PIPE):
    code = "from peagle.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code, *argv], stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_overview_names_every_command_and_the_default_models(peagle, argv):
    result = peagle(*argv)
    assert result.status == 0 and result.err == ""
    assert all(f"\n  {name} " in result.out for name in COMMANDS)
    assert "SmolLM2-135M-Instruct" in result.out


def test_without_arguments_the_help_is_short_and_has_an_example(peagle):
    result = peagle()
    assert result.status == 0 and result.err == ""
    assert "peagle generate " in result.out and "peagle --help" in result.out
    assert len(result.out.splitlines()) < 10


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_is_one_line(peagle, flag):
    assert peagle(flag).out == f"peagle {__version__}\n"


def test_unknown_command_is_refused_with_the_nearest_name(peagle):
    result = peagle("generat", "hello")
    assert result.status == 2 and result.out == ""
    assert result.err.startswith("error: no command 'generat'\nhint: did you mean 'generate'?")


def test_unknown_command_that_resembles_none_is_answered_with_all_names(peagle):
    assert all(name in peagle("xyzzy").err for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_status_0_and_is_data(peagle, command):
    result = peagle(command, "--help")
    assert result.status == 0 and result.err == ""
    assert result.out.startswith(f"usage: peagle {command}")


def test_no_help_loads_torch_or_transformers():
    code = (
        "import sys\n"
        "from peagle.cli.main import COMMANDS, run\n"
        "for argv in [['--help'], ['--version'], *([name, '--help'] for name in COMMANDS)]:\n"
        "    assert run(argv) == 0\n"
        "    heavy = {'torch', 'transformers', 'numpy.linalg'} & set(sys.modules)\n"
        "    assert not heavy, (argv, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_error_without_a_hint_is_given_one(peagle, monkeypatch):
    def fail(argv):
        raise PeagleError("nothing works")

    stand_in(monkeypatch, fail)
    result = peagle("doctor")
    assert result.status == 2
    assert result.err == "error: nothing works\nhint: `peagle doctor --help` lists the options\n"


def test_the_hint_names_the_command_that_was_called(peagle):
    refused = peagle("bench", "serve", "--prompts", __file__, "--concurrency", 0)
    assert "hint: `peagle bench serve --help` lists the options" in refused.err


def test_a_file_that_the_system_refuses_is_one_paragraph(peagle, monkeypatch, tmp_path):
    stand_in(monkeypatch, lambda argv: (tmp_path / "none" / "file").write_text("x"))
    result = peagle("doctor")
    assert result.status == 2
    assert f"{tmp_path / 'none' / 'file'}: No such file or directory\nhint: " in result.err


def test_a_defect_of_ours_keeps_its_traceback(peagle, monkeypatch):
    stand_in(monkeypatch, lambda argv: [].pop())
    with pytest.raises(IndexError):
        peagle("doctor")


def test_an_interrupt_from_the_keyboard_ends_with_status_130(peagle, monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    stand_in(monkeypatch, interrupted)
    result = peagle("doctor")
    assert (result.status, result.out, result.err) == (130, "", "\ninterrupted\n")
    stand_in(monkeypatch, interrupted, "train")
    result = peagle("train")
    assert result.err == "\ninterrupted; progress is saved, rerun the command to resume\n"


@pytest.mark.parametrize("num_signals", [1, 2])
def test_sigterm_ends_with_status_143_also_if_it_is_sent_twice_as_timeout_does(monkeypatch, capsys, num_signals):
    def terminated(argv):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt:
            for _ in range(1, num_signals):
                os.kill(os.getpid(), signal.SIGTERM)
            print("saved", flush=True)
            raise

    stand_in(monkeypatch, terminated)
    monkeypatch.setattr(sys, "argv", ["peagle", "doctor"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    printed = capsys.readouterr()
    assert end.value.code == 143 and "terminated" in printed.err and "saved" in printed.out


def test_a_reader_that_goes_away_is_no_error_to_complain_about():
    reading, writing = os.pipe()
    os.close(reading)
    done = in_new_process("--help", stdout=writing)
    os.close(writing)
    assert done.returncode == 141 and done.stderr == ""


def test_the_process_ends_with_the_status_of_the_command():
    done = in_new_process("evil")
    assert done.returncode == 2 and done.stderr.startswith("error: no command 'evil'\nhint: did you mean 'eval'?")


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fastapi", "uvicorn", "llguidance"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from peagle.cli.main import run
sys.exit(run(["serve", "--port", "0"]))
"""


def test_all_packages_of_an_extra_that_are_missing_are_named_at_once():
    ran = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "the server needs the packages fastapi, llguidance, uvicorn, which are not installed" in ran.stderr
    assert "pip install 'peagle[serve]'" in ran.stderr


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("peagle ge", "generate"),
        ("peagle deploy s", "sagemaker"),
        ("peagle generate hello --max-to", "--max-tokens"),
        ("peagle serve --memory", "--memory-share"),
    ],
)
def test_bash_completes_commands_and_options(line, offered, tmp_path):
    program = tmp_path / "peagle"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m peagle "$@"\n')
    program.chmod(0o755)
    words = line.split()
    script = f"""eval "$(peagle --completion)"
    COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _peagle; printf '%s\\n' "${{COMPREPLY[@]}}" """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.split() == [offered], ran.stderr
