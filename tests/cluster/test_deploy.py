"""The files in deploy/: their options, ports, images and metrics exist in carrel, and their commands run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import yaml

from carrel.cli import app
from carrel.cluster.gateway import GatewayMetrics
from carrel.server.middleware import Metrics
from tests.cluster.conftest import NewCluster
from tests.support.cluster import CarrelProcess, nodes_of, wait_for
from tests.support.missing_parts import skip_without
from tests.support.preloaded_python import preloaded_python
from tests.support.server_process import create_session, run_command

DEPLOY = Path(__file__).parents[2] / "deploy"
PORTS = {"serve": "8765", "gateway": "8700"}


def systemd_command(name: str) -> list[str]:
    text = (DEPLOY / f"carrel-{name}.service").read_text()
    [line] = re.findall(r"^ExecStart=\S+/carrel (.*)$", text, re.MULTILINE)
    return shlex.split(line)


def compose_command(name: str) -> list[str]:
    command = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"][name]["command"]
    if len(command) > 1:
        return [str(word) for word in command]
    # The shell's: docker compose makes $ of $$.
    return shlex.split(command[0].removeprefix("exec carrel ").replace("$$", "$"))


def kubernetes_container(name: str) -> dict[str, Any]:
    parts = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    [found] = [each for each in parts if each["metadata"]["name"] == f"carrel-{name}" and "template" in each["spec"]]
    [container] = found["spec"]["template"]["spec"]["containers"]
    return dict(container)


def check_command(words: list[str]) -> str:
    """Fail unless a `carrel` command and all of its options exist; returns its name and the values of some options."""
    found: Any = typer.main.get_command(app)
    depth = 0
    while hasattr(found, "commands"):
        found = found.commands[words[depth]]
        depth += 1
    known = {option for each in found.params for option in each.opts}
    given = {word for word in words[depth:] if word.startswith("--")}
    assert given <= known, (words, given - known)
    required = {each.opts[0] for each in found.params if each.required and each.opts[0].startswith("--")}
    assert required <= given, (words, required - given)
    name = words[0]
    if name in PORTS:
        assert words[words.index("--port") + 1] == PORTS[name]
    return name


@pytest.mark.parametrize("name", ["node", "gateway"])
def test_a_systemd_unit_starts_what_exists(name: str) -> None:
    assert check_command(systemd_command(name)) == {"node": "serve", "gateway": "gateway"}[name]


def test_compose_starts_what_exists() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    services = yaml.safe_load(text)["services"]
    assert check_command(compose_command("node")) == "serve"
    assert check_command(compose_command("gateway")) == "gateway"
    assert services["gateway"]["ports"] == ["127.0.0.1:8700:8700"]
    assert {each["image"] for each in services.values()} == {"carrel", "redis:7"}
    [line] = re.findall(r"compose run --rm gateway (.*)$", text, re.MULTILINE)
    assert check_command(shlex.split(line)) == "keys"


def test_kubernetes_starts_what_exists() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    parts = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}
    for kind, name, command in (("StatefulSet", "carrel-node", "serve"), ("Deployment", "carrel-gateway", "gateway")):
        spec = parts[kind, name]["spec"]
        [container] = spec["template"]["spec"]["containers"]
        assert container["image"] == "carrel"
        assert check_command(container["args"]) == command
        port = int(PORTS[command])
        assert container["ports"] == [{"containerPort": port}]
        assert container["readinessProbe"]["httpGet"] == {"path": "/api/v1/health", "port": port}
        assert parts["Service", name]["spec"]["ports"] == [{"name": "http", "port": port}]
        assert parts["Service", name]["spec"]["selector"] == spec["selector"]["matchLabels"]
        variables = {each["name"] for each in container["env"]}
        assert set(re.findall(r"\$\((\w+)\)", json.dumps(container))) <= variables
    hook = parts["StatefulSet", "carrel-node"]["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]
    assert check_command(hook["exec"]["command"][1:]) == "cluster"


COMMANDS = {
    "systemd": systemd_command,
    "compose": compose_command,
    "kubernetes": lambda name: [str(word) for word in kubernetes_container(name)["args"]],
}


def filled_in(words: list[str], store: str, ports: dict[str, int]) -> list[str]:
    """Return a command with a value for each variable, this machine's name, and free ports."""
    values = {
        # A pod and a container are found by their name, this machine by its address.
        "$(POD).carrel-node": "127.0.0.1",
        "$(hostname)": "127.0.0.1",
        "${CARREL_STORE}": store,
        "$(CARREL_STORE)": store,
        "redis://redis:6379/0": store,
        "${CARREL_NODE_URL}": "http://127.0.0.1:8765",
        "$(POD)": "pod-1",
        "%H": "host-1",
    }
    found = list(words)
    for name, value in values.items():
        found = [word.replace(name, value) for word in found]
    for old, port in ports.items():
        found = [re.sub(rf"(^|:){old}$", rf"\g<1>{port}", word) for word in found]
    assert not [word for word in found if "$" in word], found
    return found


@pytest.mark.parametrize("file", COMMANDS)
def test_the_commands_make_a_cluster(new_cluster: NewCluster, file: str) -> None:
    cluster = new_cluster()
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        ports = {"8765": one.getsockname()[1], "8700": other.getsockname()[1]}
    words = {name: filled_in(COMMANDS[file](name), cluster.store, ports) for name in ("node", "gateway")}
    node = CarrelProcess(cluster.folder / "node", *words["node"])
    cluster.nodes["node"] = node.start()
    gateway = CarrelProcess(cluster.folder / "gateway", *words["gateway"])
    cluster.gateways.append(gateway.start())
    with cluster.client() as client:
        [info] = wait_for(lambda: nodes_of(client))
        assert info["url"] == f"http://127.0.0.1:{ports['8765']}"
        probe = kubernetes_container("gateway")["readinessProbe"]["httpGet"]["path"]
        for port in ports.values():
            assert httpx.get(f"http://127.0.0.1:{port}{probe}", trust_env=False).json()["status"] == "healthy"
        session_id = create_session(client)
        assert run_command(client, session_id, "echo here")["stdout"] == "here\n"
        client.delete(f"/sessions/{session_id}")
        if file == "kubernetes":
            hook = kubernetes_container("node")["lifecycle"]["preStop"]["exec"]["command"]
            drain = filled_in([str(word) for word in hook[1:]], cluster.store, ports)
            env = {**os.environ, "CARREL_HOME": str(cluster.folder / "home")}
            done = preloaded_python().run(["-m", "carrel", *drain], env)
            assert done.returncode == 0, done.stderr
            wait_for(node.has_ended)


@pytest.mark.real
@pytest.mark.parametrize("name", ["node", "gateway"])
def test_systemd_understands_the_units(tmp_path: Path, name: str) -> None:
    if (program := shutil.which("systemd-analyze")) is None:
        skip_without("no systemd-analyze on this machine: `apt install systemd`")
    unit = tmp_path / f"carrel-{name}.service"
    unit.write_text((DEPLOY / unit.name).read_text().replace("/opt/carrel/bin/carrel", "/bin/true"))
    done = subprocess.run([program, "verify", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_each_file_says_what_was_tried() -> None:
    files = sorted(DEPLOY.iterdir())
    assert len(files) == 6
    assert [file.name for file in files if "Tried: " not in file.read_text()] == []


def test_the_image_has_the_extras_of_a_node() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    [extras] = re.findall(r"carrel-sessions\[(.*?)\]", text)
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert {"server", "redis", "postgres"} <= set(extras.split(","))
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in extras.split(","))


def test_the_dashboard_shows_metrics_that_exist() -> None:
    names = {
        line.split("{")[0].split(" ")[0]
        for metrics in (Metrics(), GatewayMetrics())
        for line in [*metrics.text().decode().splitlines(), *_samples(metrics)]
        if not line.startswith("#")
    }
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            used = set(re.findall(r"\bcarrel_\w+", target["expr"]))
            assert used
            assert used <= names, used - names


def _samples(metrics: Metrics | GatewayMetrics) -> list[str]:
    """The names of metrics with labels, which are shown when they have a value."""
    metrics.add_request("GET", "/x", 200, 0.1)
    if isinstance(metrics, GatewayMetrics):
        metrics.nodes.labels("ready").set(1)
        metrics.failures.labels("refused").inc()
        metrics.created.labels("n").inc()
    return metrics.text().decode().splitlines()
