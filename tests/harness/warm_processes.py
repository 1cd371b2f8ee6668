"""`peagle` commands and Python scripts, each in a new process that is forked from one with the imports done.

Importing torch and transformers takes several seconds, and a small command little more. The first call starts the
process that the others are forked from.
"""

import multiprocessing
import os
import sys
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "peagle.cli.generate",
        "peagle.cli.train",
        "peagle.cli.doctor",
        "peagle.cli.lossless",
        "peagle.engine.llm",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
        "transformers.models.llama.tokenization_llama",
        "transformers.generation",
    ]
)


def run_warm(words: list[str] | str, directory: Path, timeout: float) -> tuple[int | None, str]:
    """Run `peagle WORDS`, or the script `words`, in `directory`; its exit status, None after `timeout`, and stderr."""
    output = directory / ".stderr"
    process = FORKS.Process(target=_run, args=(words, directory, output))
    process.start()
    process.join(timeout)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    process.close()
    errors = output.read_text(errors="replace")
    output.unlink()
    return status, errors


def _run(words: list[str] | str, directory: Path, output: Path) -> None:
    os.chdir(directory)
    with output.open("wb") as errors, open(os.devnull, "r+b") as nothing:
        for stream, number in ((nothing, 0), (nothing, 1), (errors, 2)):
            os.dup2(stream.fileno(), number)
    if isinstance(words, str):
        exec(compile(words, "block", "exec"), {"__name__": "__main__"})
        return
    from peagle.cli.main import main

    sys.argv = ["peagle", *words]
    main()
