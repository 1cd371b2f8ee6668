"""`peagle deploy vllm`: the command, the Compose file and the Kubernetes manifest say the same, and are valid."""

import json
import shlex
import subprocess

import pytest
import yaml

from harness.model_directories import write_models
from peagle.cli.main import run
from peagle.vllm.command import DrafterFacts, VllmSettings
from peagle.vllm.flags import read_flags
from peagle.vllm.manifests import RAY_PORT, head_script, in_container

GPT = ["gpt-oss-20b", "--tensor-parallel-size", "4"]
NODES = ["gpt-oss-120b", "--tensor-parallel-size", "16", "--num-nodes", "2"]


@pytest.fixture
def shown(capsys):
    def show(*words):
        assert run(["deploy", "vllm", *map(str, words)]) == 0
        return capsys.readouterr().out

    return show


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def documents(text):
    return list(yaml.safe_load_all(text))


def pod(document):
    return document["spec"]["template"]["spec"]


def by_name(found):
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_the_command_is_printed_for_a_shell_and_parses(shown, tmp_path):
    text = shown(*GPT)
    script = tmp_path / "serve.sh"
    script.write_text(text.replace("vllm serve", "printf '%s\\n' vllm serve"))
    words = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:3] == ["vllm", "serve", "openai/gpt-oss-20b"]
    config = json.loads(read_flags(words[3:])["--speculative-config"][0])
    assert config == {
        "method": "eagle3",
        "model": "amazon/GPT-OSS-20B-P-EAGLE",
        "num_speculative_tokens": 7,
        "parallel_drafting": True,
    }
    assert "VLLM_USE_V2_MODEL_RUNNER=0 " in text


def test_all_three_say_the_same(shown, tmp_path):
    assert shown(*GPT, "--output", tmp_path / "out").split() == [
        str(tmp_path / "out" / name) for name in ("serve.sh", "compose.yaml", "kubernetes.yaml")
    ]
    shell = (tmp_path / "out" / "serve.sh").read_text()
    assert (tmp_path / "out" / "serve.sh").stat().st_mode & 0o100, "it can be run"
    words = shlex.split(shell.replace("\\\n", ""), comments=True)[1:]
    (compose,) = documents((tmp_path / "out" / "compose.yaml").read_text())
    service = compose["services"]["vllm"]
    assert service["entrypoint"] + service["command"] == words
    kubernetes = by_name(documents((tmp_path / "out" / "kubernetes.yaml").read_text()))
    (container,) = pod(kubernetes["Deployment", "peagle"])["containers"]
    assert container["command"] + container["args"] == words
    devices = service["deploy"]["resources"]["reservations"]["devices"][0]
    assert devices["count"] == container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert service["image"] == container["image"] == "vllm/vllm-openai:v0.32.0"
    assert service["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert {"name": "VLLM_USE_V2_MODEL_RUNNER", "value": "0"} in container["env"]


def test_what_was_written_before_is_replaced(shown, tmp_path):
    shown(*GPT, "--output", tmp_path)
    before = (tmp_path / "compose.yaml").read_text()
    shown(*GPT, "--output", tmp_path, "--num-draft-tokens", "3")
    assert (tmp_path / "compose.yaml").read_text() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compose.yaml", "kubernetes.yaml", "serve.sh"]


def test_selectors_ports_probes_and_volumes_fit_together(shown):
    for words in (GPT, NODES):
        found = documents(shown(*words, "--show", "kubernetes", "--name", "mine", "--port", "9000"))
        workloads = [each for each in found if each["kind"] == "Deployment"]
        labels = [each["spec"]["template"]["metadata"]["labels"] for each in workloads]
        for each, label in zip(workloads, labels, strict=True):
            assert each["spec"]["selector"]["matchLabels"].items() <= label.items()
            (container,) = pod(each)["containers"]
            volumes = {volume["name"] for volume in pod(each)["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert pod(each)["enableServiceLinks"] is False
        for service in (each for each in found if each["kind"] == "Service"):
            selected = [label for label in labels if service["spec"]["selector"].items() <= label.items()]
            assert len(selected) == 1, "each service leads to one kind of pod"
        front = by_name(found)["Service", "mine"]
        assert front["spec"]["ports"][0]["targetPort"] == 9000
        (server,) = pod(workloads[0])["containers"]
        assert server["readinessProbe"]["httpGet"] == {"path": "/health", "port": 9000}
        assert server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"] == 1800
        assert "--port 9000" in " ".join(server["args"])


def test_no_secret_is_written_only_where_it_comes_from(shown, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_API_KEY", "key_secret")
    texts = [shown(*words, "--show", what) for words in (GPT, NODES) for what in ("command", "compose", "kubernetes")]
    assert not any("secret" in text.replace("peagle-secrets", "").replace("Secrets", "").replace(
        "create secret generic", "").replace("secretKeyRef", "") for text in texts)  # fmt: skip
    environment = documents(texts[1])[0]["services"]["vllm"]["environment"]
    assert environment["HF_TOKEN"] is None and environment["VLLM_API_KEY"] is None, "passed through by compose"
    (container,) = pod(documents(texts[2])[0])["containers"]
    sources = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each}
    assert sources["HF_TOKEN"] == {"name": "peagle-secrets", "key": "hf-token", "optional": True}


def test_the_secret_is_made_without_the_newline_at_the_end_of_its_file(shown):
    text = shown(*GPT, "--show", "kubernetes")
    assert "--from-file" not in text, "it would keep the newline, and no client could send the key"
    assert '--from-literal=api-key="$(cat FILE)" --from-literal=hf-token="$(cat FILE)"' in text


def test_on_several_nodes_a_head_waits_for_all_of_them_and_the_others_join_it(shown):
    (compose,) = documents(shown(*NODES, "--show", "compose"))
    head, worker = compose["services"]["head"], compose["services"]["worker"]
    assert head["profiles"] == ["head"] and worker["profiles"] == ["worker"]
    assert "ray start --head" in head["command"][0] and "exec vllm serve openai/gpt-oss-120b" in head["command"][0]
    assert "HEAD_ADDRESS" in worker["command"][0] and f":{RAY_PORT} --block" in worker["command"][0]
    assert head["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 8
    found = by_name(documents(shown(*NODES, "--show", "kubernetes")))
    assert found["Deployment", "peagle-worker"]["spec"]["replicas"] == 1
    ray = found["Service", "peagle-ray"]["spec"]
    assert ray["publishNotReadyAddresses"] is True and ray["ports"][0]["port"] == RAY_PORT
    (container,) = pod(found["Deployment", "peagle-worker"])["containers"]
    assert f"--address=peagle-ray:{RAY_PORT}" in container["args"][0]
    assert "readinessProbe" not in container, "a worker answers no requests"
    affinity = pod(found["Deployment", "peagle-worker"])["affinity"]
    assert affinity["podAntiAffinity"], "each on a machine of its own"
    assert "--distributed-executor-backend ray" in shown(*NODES)


def test_the_head_s_script_waits_and_becomes_vllm(tmp_path):
    (tmp_path / "ray").write_text("#!/bin/sh\necho ray $@\n")
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$2" >> asked\n[ $(wc -l < asked) -ge 2 ]\n')
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").write_text('#!/bin/sh\nfor word; do echo "[$word]"; done\n')
    for name in ("ray", "python3", "sleep", "vllm"):
        (tmp_path / name).chmod(0o755)
    words = ["vllm", "serve", "target", "--speculative-config", '{"model": "it\'s $HOME"}']
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-ec", head_script(words, 2)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"ray start --head --port={RAY_PORT}" and lines.count("waiting for 2 nodes") == 1
    assert lines[-4:] == ["[serve]", "[target]", "[--speculative-config]", '[{"model": "it\'s $HOME"}]'], done.stderr
    compile((tmp_path / "asked").read_text().splitlines()[0], "check", "exec")


def test_directories_of_this_machine_are_mounted_where_the_command_looks(shown, models, tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path))
    local = [models / "target", "--drafter", models / "drafter"]
    (compose,) = documents(shown(*local, "--show", "compose"))
    service = compose["services"]["vllm"]
    mounted = dict(volume.split(":")[:2][::-1] for volume in service["volumes"])
    assert mounted["/models/target"] == str(models / "target") and str(tmp_path) in mounted["/models/drafter"]
    assert service["command"][0] == "/models/target"
    config = json.loads(service["command"][service["command"].index("--speculative-config") + 1])
    assert config["model"] == "/models/drafter"
    text = shown(*local, "--show", "kubernetes")
    claim = pod(documents(text)[0])["volumes"][-1]["persistentVolumeClaim"]["claimName"]
    assert claim == "peagle-models" and f"# The claim {claim} must exist" in text
    assert f"a copy of {models / 'target'}" in text


def test_a_launch_in_a_container_keeps_hub_ids(tmp_path):
    settings = VllmSettings("some/target", ("name",), DrafterFacts("some/drafter", parallel=True))
    assert in_container(settings) == (settings, {})


def test_dollars_survive_compose_s_interpolation(shown):
    (compose,) = documents(shown(*GPT, "--show", "compose", "--", "--chat-template", "${x}"))
    assert "$${x}" in compose["services"]["vllm"]["command"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt-oss-20b", "--name", "Mine"], "name must be at most 42 lower-case letters, digits and dashes"),
        (["gpt-oss-20b", "--port", "0"], "port must be between 1 and 65535, got 0"),
        (["gpt-oss-20b", "--vllm-version", "0.15.0"], "vLLM 0.15.0 does not support P-EAGLE drafters"),
        (["gpt-oss-20b", "--vllm-version", "0.17.0"], "as GPT-OSS does: that needs 0.18"),
        (["gpt-oss-20b", "--vllm-version", "new"], "which is not a release number"),
        (["gpt-oss-20b", "--", "--pipeline-parallel-size", "2"], "a P-EAGLE drafter reads layers of all stages"),
        (["gpt-oss-20b", "--", "--speculative-config", '{"speculative_token_tree": "[(0,)]"}'], "one chain of tokens"),
        (["gemma-4-31b-it"], "JumpStart"),
    ],
)
def test_what_cannot_work_is_refused_instead_of_written(words, message, capsys, tmp_path):
    at = words.index("--") if "--" in words else len(words)
    assert run(["deploy", "vllm", *words[:at], "--output", str(tmp_path / "out"), *words[at:]]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_directory_is_refused(capsys, tmp_path):
    (tmp_path / "out").touch()
    assert run(["deploy", "vllm", *GPT, "--output", str(tmp_path / "out")]) == 2
    assert "is a file, not a directory" in capsys.readouterr().err


def test_deploy_knows_two_places(capsys):
    assert run(["deploy", "vlm"]) == 2
    assert "no command 'deploy vlm'\nhint: did you mean 'vllm'?" in capsys.readouterr().err
    assert run(["deploy"]) == 0
    assert "sagemaker" in capsys.readouterr().out
