"""The files in deploy/: their commands, options, ports, images and metrics exist in carrel. They are not run here."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from carrel.cli import app
from carrel.cluster.gateway import GatewayMetrics
from carrel.server.middleware import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
PORTS = {"serve": "8765", "gateway": "8700"}


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
    text = (DEPLOY / f"carrel-{name}.service").read_text()
    [line] = re.findall(r"^ExecStart=\S+/carrel (.*)$", text, re.MULTILINE)
    assert check_command(shlex.split(line)) == {"node": "serve", "gateway": "gateway"}[name]


def test_compose_starts_what_exists() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    services = yaml.safe_load(text)["services"]
    [shell_line] = services["node"]["command"]
    assert check_command(shlex.split(shell_line.removeprefix("exec carrel "))) == "serve"
    assert check_command(services["gateway"]["command"]) == "gateway"
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
