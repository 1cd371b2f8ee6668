"""Where an artefact came from: the record's content, and what it says when the system tells less."""

import json
import platform
import shlex
import subprocess
import sys

import pytest

import peagle.provenance as module
from peagle import __version__
from peagle.provenance import commit, package_version, processor_name, provenance


def test_the_record_can_be_written_as_json_and_names_all_there_is_to_name():
    record = json.loads(json.dumps(provenance("a GPU")))
    assert record.keys() == {"command", "created", "commit", "python", "versions", "hardware"}
    assert record["python"] == platform.python_version()
    assert record["versions"]["peagle"] == __version__ and record["versions"]["torch"]
    assert record["hardware"]["accelerator"] == "a GPU" and record["hardware"]["num_cores"] >= 1
    assert record["created"].endswith("+00:00"), "the time is in UTC"


def test_the_command_can_be_given_again(monkeypatch):
    argv = ["/some/where/peagle", "generate", "two words", "it's"]
    monkeypatch.setattr(sys, "argv", argv)
    assert shlex.split(provenance()["command"]) == ["peagle", *argv[1:]]
    monkeypatch.setattr(sys, "argv", ["/some/where/peagle/__main__.py", *argv[1:]])
    assert shlex.split(provenance()["command"]) == ["peagle", *argv[1:]], "as with python -m peagle"


def test_a_package_that_is_absent_has_no_version():
    assert package_version("no-such-package-anywhere") is None


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit, which holds the module's file."""
    source = tmp_path / "src" / "peagle" / "provenance.py"
    source.parent.mkdir(parents=True)
    source.write_text("pass\n")
    monkeypatch.setattr(module, "__file__", str(source))
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    return source


def test_a_checkout_is_named_by_its_commit_and_by_its_changes(checkout):
    clean = commit()
    assert clean is not None and len(clean) == 12 and set(clean) <= set("0123456789abcdef")
    (checkout.parent / "new.txt").write_text("not tracked")
    assert commit() == clean
    checkout.write_text("changed\n")
    assert commit() == f"{clean}+changes"


def test_an_installed_package_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "lib" / "peagle" / "provenance.py"))
    assert commit() is None


def test_a_machine_without_git_has_no_commit(checkout, monkeypatch):
    monkeypatch.setenv("PATH", str(checkout.parent))
    assert commit() is None


def test_the_processor_is_named_even_where_the_system_has_no_file_about_it(monkeypatch):
    assert processor_name()

    def refuse(self, *args, **kwargs):
        raise FileNotFoundError(self)

    monkeypatch.setattr(module.Path, "read_text", refuse)
    assert processor_name() == (platform.processor() or platform.machine())
