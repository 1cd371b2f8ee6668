"""Take a target and its drafter beyond this machine.

The same drafter directory goes to vLLM on any number of GPUs, and to an Amazon SageMaker endpoint.
"""

import importlib

from peagle.errors import PeagleError, nearest

PLACES = {
    "vllm": "write the command for vLLM, a Docker Compose file and a Kubernetes manifest",
    "sagemaker": "create, update, watch, ask and delete a SageMaker endpoint",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0
    name, *rest = argv
    if name not in PLACES:
        raise PeagleError(
            f"no command 'deploy {name}'", hint=f"{nearest(name, PLACES)} `peagle deploy --help` explains"
        )
    status: int = importlib.import_module(f"peagle.cli.deploy_{name}").main(rest)
    return status


def overview() -> str:
    lines = [f"  {name:<10}  {what}" for name, what in PLACES.items()]
    return "\n".join(
        [
            f"usage: peagle deploy [-h] {{{','.join(PLACES)}}} [OPTIONS]",
            "",
            *(__doc__ or "").strip().splitlines(),
            "",
            *lines,
            "",
            "`peagle deploy COMMAND --help` lists a command's options.",
        ]
    )
