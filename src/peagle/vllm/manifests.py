"""Files that run vLLM: a shell script, a Docker Compose file and a Kubernetes manifest, from `templates/`.

On one node vLLM is the container's only process. On several, each node runs one container of a Ray cluster; the head
waits until all of them have joined and then becomes vLLM. The files never contain a key or a token: they read both
from the environment or from a Kubernetes secret.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from string import Template
from textwrap import indent

from peagle.vllm.command import Command, Installed, VllmSettings, command

MODELS = "/models"
RAY_PORT = 6379
START_SECONDS = 1800
CONSTANTS = {
    "cache": "/root/.cache/huggingface",
    "ray_port": RAY_PORT,
    "stop_seconds": 60,
    "start_seconds": START_SECONDS,
    "start_failures": START_SECONDS // 10,
}


@dataclass(frozen=True)
class Deployment:
    """What the files need besides vLLM's own settings."""

    name: str
    image: str
    port: int = 8000


def render(settings: VllmSettings, vllm: Installed, deployment: Deployment) -> dict[str, str]:
    """The text of each file, by its kind."""
    inside, directories = in_container(settings)
    there = command(inside, vllm)
    return {
        "command": _script(settings, command(settings, vllm), deployment),
        "compose": _compose(inside, there, deployment, directories),
        "kubernetes": _kubernetes(inside, there, deployment, directories),
    }


def in_container(settings: VllmSettings) -> tuple[VllmSettings, dict[str, Path]]:
    """Settings with the paths inside the container, and the directories to mount there. Hub ids do not change."""
    directories: dict[str, Path] = {}
    if Path(settings.target).is_dir():
        directories[f"{MODELS}/target"] = Path(settings.target)
        settings = replace(settings, target=f"{MODELS}/target")
    drafter = settings.drafter
    if drafter is not None and Path(drafter.model).is_dir():
        directories[f"{MODELS}/drafter"] = Path(drafter.model)
        settings = replace(settings, drafter=replace(drafter, model=f"{MODELS}/drafter"))
    return settings, directories


def head_script(words: Sequence[str], num_nodes: int) -> str:
    """What the head of a Ray cluster runs: wait for the other nodes, then become vLLM."""
    return _fill("head.sh", num_nodes=num_nodes, command=shlex.join(words))


def _script(settings: VllmSettings, made: Command, deployment: Deployment) -> str:
    nodes = settings.num_nodes
    notes = f"# Run it on the head of a Ray cluster of {nodes} nodes; `ray status` lists them." if nodes > 1 else ""
    return _fill("serve.sh", notes=notes, command=replace(made, words=tuple(_served(made, deployment))).text())


def _served(made: Command, deployment: Deployment) -> list[str]:
    return [*made.words, "--host", "0.0.0.0", "--port", str(deployment.port)]


def _compose(settings: VllmSettings, made: Command, deployment: Deployment, directories: Mapping[str, Path]) -> str:
    # Compose expands $; a doubled one is literal.
    words = [word.replace("$", "$$") for word in _served(made, deployment)]
    base = _fill(
        "compose_base.yaml",
        image=_quoted(deployment.image),
        environment="\n".join(f"{name}: {_quoted(value)}" for name, value in made.environment.items()),
        mounts=_items(f"{path}:{inside}:ro" for inside, path in directories.items()),
        num_gpus=settings.gpus_per_node,
    )
    values = {"name": deployment.name, "base": base, "port": deployment.port}
    values["health"] = _fill("compose_health.yaml", port=deployment.port)
    if settings.num_nodes == 1:
        return _fill("compose.yaml", **values, args=_items(words[2:]))
    script = head_script(words, settings.num_nodes)
    return _fill("compose_nodes.yaml", **values, num_workers=settings.num_nodes - 1, script=script)


def _kubernetes(settings: VllmSettings, made: Command, deployment: Deployment, directories: Mapping[str, Path]) -> str:
    name, words = deployment.name, _served(made, deployment)
    values = {"name": name, "port": deployment.port, "num_gpus": settings.gpus_per_node}
    values |= {
        "image": _quoted(deployment.image),
        "environment": "\n".join(
            f"- {{name: {key}, value: {_quoted(value)}}}" for key, value in made.environment.items()
        ),
        "mounts": f"- {{name: models, mountPath: {MODELS}, readOnly: true}}" if directories else "",
        "volumes": f"- {{name: models, persistentVolumeClaim: {{claimName: {name}-models}}}}" if directories else "",
    }
    probes = _fill("probes.yaml", port=deployment.port)
    if settings.num_nodes == 1:
        run = f"command: [vllm, serve]\nargs:\n{indent(_items(words[2:]), '  ')}"
        workload = _fill("deployment.yaml", **values, app=name, replicas=1, command=run, probes=probes, affinity="")
        documents = [workload, _fill("service.yaml", **values, app=name)]
    else:
        values["affinity"] = _fill("affinity.yaml", name=name)
        head, worker = f"{name}-head", f"{name}-worker"
        waits = _bash(head_script(words, settings.num_nodes))
        joins = _bash(f"exec ray start --address={name}-ray:{RAY_PORT} --block\n")
        documents = [
            _fill("deployment.yaml", **values, app=head, replicas=1, command=waits, probes=probes),
            _fill("deployment.yaml", **values, app=worker, replicas=settings.num_nodes - 1, command=joins, probes=""),
            _fill("ray_service.yaml", **values, app=head),
            _fill("service.yaml", **values, app=head),
        ]
    notes = []
    if directories:
        notes.append(f"The claim {name}-models must exist, be readable by every node, and hold these directories:")
        notes += [f"  {Path(inside).name}/  a copy of {path}" for inside, path in directories.items()]
    if settings.num_nodes > 1:
        notes.append(f"Needs {settings.num_nodes} nodes with {settings.gpus_per_node} GPUs each, and Ray in the image.")
    comment = "\n".join(f"# {line}" for line in notes)
    return _fill("kubernetes.yaml", name=name, notes=comment, documents="---\n".join(documents))


def _bash(script: str) -> str:
    return f"command: [bash, -ec]\nargs:\n  - |\n{indent(script, '    ')}"


def _quoted(text: str) -> str:
    """A YAML string: JSON's double quotes mean the same there."""
    return json.dumps(text, ensure_ascii=False)


def _items(values: Iterable[str]) -> str:
    return "\n".join(f"- {_quoted(value)}" for value in values)


def _fill(template: str, /, **values: object) -> str:
    """A template with its placeholders filled in.

    A placeholder alone on its line takes a block of lines, which gets the line's indentation; an empty one vanishes.
    """
    lines = []
    for line in (resources.files("peagle.vllm") / "templates" / template).read_text().splitlines():
        alone = re.fullmatch(r"( *)\$(\w+)", line)
        if alone is None:
            lines.append(Template(line).substitute(CONSTANTS, **values))
        elif block := str(values[alone[2]]).rstrip("\n"):
            lines.append(indent(block, alone[1]))
    return "\n".join(lines) + "\n"
