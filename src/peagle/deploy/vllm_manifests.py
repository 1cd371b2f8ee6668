"""vLLM in containers: a Docker Compose file and a Kubernetes manifest for the command that was decided.

On one node vLLM is the container's only process. On several, each node runs one container of a Ray cluster; the head
waits until all of them have joined and then becomes vLLM. No key or token is ever written: both files take them from
the environment or from a secret.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle.deploy.vllm import Command, Launch

MODELS = "/models"
CACHE = "/root/.cache/huggingface"
RAY_PORT = 6379
START_SECONDS = 1800
STOP_SECONDS = 60
SECRETS = {"HF_TOKEN": "hf-token", "VLLM_API_KEY": "api-key"}
"""Variables that may hold secrets, and their keys in the Kubernetes secret."""


@dataclass(frozen=True)
class Placing:
    """What of a deployment is not vLLM's own business."""

    name: str
    image: str
    port: int = 8000
    directories: Mapping[str, Path] = field(default_factory=dict)
    """directories of this machine by the path that a container has them under"""

    @property
    def secret(self) -> str:
        return f"{self.name}-secrets"


def in_container(launch: Launch) -> tuple[Launch, dict[str, Path]]:
    """The launch as a container sees it, and the directories that must be mounted; hub ids stay what they are."""
    directories: dict[str, Path] = {}
    if Path(launch.target).is_dir():
        directories[f"{MODELS}/target"] = Path(launch.target)
        launch = replace(launch, target=f"{MODELS}/target")
    drafter = launch.drafter
    if drafter is not None and Path(drafter.model).is_dir():
        directories[f"{MODELS}/drafter"] = Path(drafter.model)
        launch = replace(launch, drafter=replace(drafter, model=f"{MODELS}/drafter"))
    return launch, directories


def head_script(words: list[str], num_nodes: int) -> str:
    """What the head of a Ray cluster runs: it waits for the other nodes and becomes vLLM."""
    have_joined = (
        'import ray, sys; ray.init(address="auto", logging_level="ERROR"); '
        f'sys.exit(sum(node["Alive"] for node in ray.nodes()) < {num_nodes})'
    )
    return (
        f"ray start --head --port={RAY_PORT}\n"
        f"until python3 -c {shlex.quote(have_joined)}; do\n"
        f'  echo "waiting for {num_nodes} nodes"; sleep 5\n'
        "done\n"
        f"exec {shlex.join(words)}\n"
    )


def worker_script(head: str) -> str:
    return f"exec ray start --address={head}:{RAY_PORT} --block\n"


def served_words(command: Command, placing: Placing) -> list[str]:
    return [*command.words, "--host", "0.0.0.0", "--port", str(placing.port)]


def compose(launch: Launch, command: Command, placing: Placing) -> dict[str, Any]:
    """A Compose document. With several nodes: profile `head` on the first machine, `worker` on each other one."""
    words = served_words(command, placing)
    base: dict[str, Any] = {
        "image": placing.image,
        "environment": dict(command.environment) | dict.fromkeys(SECRETS),
        "volumes": [f"{path}:{inside}:ro" for inside, path in placing.directories.items()] + [f"huggingface:{CACHE}"],
        "ipc": "host",
        "restart": "unless-stopped",
        "stop_grace_period": f"{STOP_SECONDS}s",
        "deploy": {
            "resources": {
                "reservations": {
                    "devices": [{"driver": "nvidia", "count": launch.gpus_per_node, "capabilities": ["gpu"]}]
                }
            }
        },
    }
    document: dict[str, Any] = {"name": placing.name, "services": {}, "volumes": {"huggingface": {}}}
    health = {"healthcheck": _compose_health(placing.port)}
    services = document["services"]
    if launch.num_nodes == 1:
        ports = {"ports": [f"{placing.port}:{placing.port}"]}
        services["vllm"] = base | {"entrypoint": words[:2], "command": _interpolated(words[2:])} | ports | health
        return document
    base["network_mode"] = "host"
    head, worker = head_script(words, launch.num_nodes), worker_script("${HEAD_ADDRESS:?the head's IP address}")
    services["head"] = (
        base | {"profiles": ["head"], "entrypoint": ["bash", "-ec"], "command": _interpolated([head])} | health
    )
    services["worker"] = base | {"profiles": ["worker"], "entrypoint": ["bash", "-ec"], "command": [worker]}
    return document


def _interpolated(words: list[str]) -> list[str]:
    """Compose takes $ for one of its variables; doubled it is a plain one."""
    return [word.replace("$", "$$") for word in words]


def _compose_health(port: int) -> dict[str, Any]:
    asked = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/health', timeout=5)"
    return {
        "test": ["CMD", "python3", "-c", asked],
        "interval": "10s",
        "timeout": "10s",
        "retries": 3,
        "start_period": f"{START_SECONDS}s",
    }


def kubernetes(launch: Launch, command: Command, placing: Placing) -> list[dict[str, Any]]:
    """The documents of a manifest: what runs, and the service in front of it."""
    name, words = placing.name, served_words(command, placing)
    if launch.num_nodes == 1:
        server = _container(launch, command, placing) | {"command": words[:2], "args": words[2:]}
        return [_workload(name, name, 1, server | _probes(placing.port), placing), _service(name, name, placing.port)]
    head = _container(launch, command, placing) | {
        "command": ["bash", "-ec"],
        "args": [head_script(words, launch.num_nodes)],
    }
    worker = _container(launch, command, placing) | {"command": ["bash", "-ec"], "args": [worker_script(f"{name}-ray")]}
    ray = _service(f"{name}-ray", f"{name}-head", RAY_PORT)
    # The cluster is joined before vLLM answers, so this name must lead to a head that is not ready yet.
    ray["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return [
        _workload(f"{name}-head", f"{name}-head", 1, head | _probes(placing.port), placing, apart=True),
        _workload(f"{name}-worker", f"{name}-worker", launch.num_nodes - 1, worker, placing, apart=True),
        ray,
        _service(name, f"{name}-head", placing.port),
    ]


def _container(launch: Launch, command: Command, placing: Placing) -> dict[str, Any]:
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in command.environment.items()]
    for name, key in SECRETS.items():
        source = {"name": placing.secret, "key": key, "optional": True}
        variables.append({"name": name, "valueFrom": {"secretKeyRef": source}})
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "cache", "mountPath": CACHE}]
    if placing.directories:
        mounts.append({"name": "models", "mountPath": MODELS, "readOnly": True})
    return {
        "name": "vllm",
        "image": placing.image,
        "env": variables,
        "ports": [{"name": "http", "containerPort": placing.port}],
        "resources": {"limits": {"nvidia.com/gpu": launch.gpus_per_node}},
        "volumeMounts": mounts,
    }


def _probes(port: int) -> dict[str, Any]:
    check = {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 10, "timeoutSeconds": 5}
    return {
        "startupProbe": check | {"failureThreshold": START_SECONDS // 10},
        "readinessProbe": check | {"failureThreshold": 1},
        "livenessProbe": check | {"failureThreshold": 6},
    }


def _workload(
    name: str, app: str, replicas: int, container: dict[str, Any], placing: Placing, *, apart: bool = False
) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "cache", "emptyDir": {}},
    ]
    if placing.directories:
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": f"{placing.name}-models"}})
    pod: dict[str, Any] = {
        # Else the address of a service named vllm would come in as VLLM_PORT, which vLLM takes for its own.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }
    labels = {"app.kubernetes.io/name": app, "app.kubernetes.io/part-of": placing.name}
    if apart:
        term = {
            "labelSelector": {"matchLabels": {"app.kubernetes.io/part-of": placing.name}},
            "topologyKey": "kubernetes.io/hostname",
        }
        pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": replicas,
            # Two copies would not fit on the GPUs of one while one replaces the other.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {"app.kubernetes.io/name": app}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _service(name: str, app: str, port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "selector": {"app.kubernetes.io/name": app},
            "ports": [{"name": "http" if port != RAY_PORT else "ray", "port": port, "targetPort": port}],
        },
    }


def as_yaml(documents: list[dict[str, Any]], comment: str) -> str:
    """YAML with the comment on top; scripts are written as blocks of lines."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return head + yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000)
