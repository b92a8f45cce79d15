"""Files in docs/deploy: they can be read, and every setting, option and metric in them exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pdbus.nodes import report
from pdbus.nodes.config import OTHER_VARIABLES, SETTINGS, load
from pdbus.nodes.gateway.command import GatewayConfig
from pdbus.nodes.host import Host
from pdbus.nodes.http.metrics import HttpMetrics
from pdbus.nodes.measures import Measures
from pdbus.nodes.values import DEMO_MODEL

from tests.docs_blocks import ROOT
from tests.unit.test_core import Node

FOLDER = ROOT / "docs/deploy"
HOST = Host(cpus=(0, 1), memory_bytes=8 << 30, run_dir="/tmp", name_suffix="0000")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def documents(name: str) -> list[Any]:
    return [one for one in yaml.safe_load_all((FOLDER / name).read_text()) if one]


def variables(value: Any) -> Iterator[str]:
    """All names that begin with PD_, wherever they stand."""
    yield from re.findall(r"\bPD_[A-Z_]+\b", json.dumps(value))


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_every_variable_is_a_settings(name: str) -> None:
    known = {setting.variable for setting in SETTINGS} | OTHER_VARIABLES
    assert set(variables((FOLDER / name).read_text())) <= known


def test_the_node_of_the_example_starts() -> None:
    """But for its model, which is nobody's here."""
    config = load({"model": DEMO_MODEL}, {}, file=FOLDER / "decode.toml", host=HOST)
    assert (config.role, config.name, config.kv_memory_bytes) == ("decode", "d1", 8 << 30)


def environment(container: dict[str, Any], config_map: dict[str, str]) -> dict[str, str]:
    own = {one["name"]: one.get("value", "pdbus-pod-0") for one in container["env"]}
    return {**config_map, **{key: value.replace("$(PD_NAME)", "pdbus-pod-0") for key, value in own.items()}}


def test_kubernetes_starts_nodes_that_can_be_reached_and_drains_them() -> None:
    found = {(one["kind"], one["metadata"]["name"]): one for one in documents("kubernetes.yaml")}
    shared = found["ConfigMap", "pdbus"]["data"]
    for role in ("prefill", "decode"):
        name = f"pdbus-{role}"
        service, spec = found["Service", name]["spec"], found["StatefulSet", name]["spec"]
        pod = spec["template"]
        (container,) = pod["spec"]["containers"]
        config = load({}, environment(container, shared), host=HOST)
        assert config.role == role and config.advertise == f"tcp://pdbus-pod-0.{spec['serviceName']}:7400"
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
        assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
        assert container["lifecycle"]["preStop"]["exec"]["command"][:2] == ["pd", "drain"]
        assert pod["spec"]["terminationGracePeriodSeconds"] > 120
    joined = environment(found["StatefulSet", "pdbus-decode"]["spec"]["template"]["spec"]["containers"][0], shared)
    assert len(load({}, joined, host=HOST).join) == found["StatefulSet", "pdbus-prefill"]["spec"]["replicas"]


def test_compose_starts_nodes_that_join() -> None:
    (made,) = documents("compose.yaml")
    for role in ("prefill", "decode"):
        service = made["services"][role]
        config = load({}, service["environment"], host=HOST)
        assert config.role == role and config.advertise == f"tcp://{service['hostname']}:7400"
    assert load({}, made["services"]["decode"]["environment"], host=HOST).join == ("tcp://prefill:7400",)


def test_options_of_the_gateway_exist() -> None:
    deployment = next(one for one in documents("kubernetes.yaml") if one["kind"] == "Deployment")
    said = [
        *deployment["spec"]["template"]["spec"]["containers"][0]["args"],
        *documents("compose.yaml")[0]["services"]["gateway"]["command"],
        *(FOLDER / "pdbus-gateway.service").read_text().replace('"', " ").split(),
    ]
    options = {word.removeprefix("--").replace("-", "_") for word in said if word.startswith("--")}
    assert {"join", "http"} <= options <= {field.name for field in fields(GatewayConfig)}


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
@pytest.mark.parametrize("name", ["pdbus-node@.service", "pdbus-gateway.service"])
def test_systemd_takes_the_units(tmp_path: Path, name: str) -> None:
    """But for the programs, which are not installed here."""
    unit = tmp_path / name
    unit.write_text(re.sub(r"/opt/pdbus/bin/\S+", "/bin/true", (FOLDER / name).read_text()))
    said = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=30)
    assert (said.returncode, said.stderr) == (0, "")


# ---------------------------------------------------------------- metrics


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Of all series that a node's /metrics may have."""
    core = Node("decode").core
    status = {
        "metrics": report.metrics(core, {}, 0),
        "measured": [*report.families(core), *Measures().families()],
    }
    text = HttpMetrics().text(status).decode()
    return {
        family.name + suffix
        for family in text_string_to_metric_families(text)
        for suffix in SUFFIXES.get(family.type, ("",))
    }


def expressions() -> Iterator[str]:
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for group in documents("alerts.yaml")[0]["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_every_metric_exists(names: set[str], expression: str) -> None:
    used = set(re.findall(r"\b(?:pdbus_|vllm:)\w+", expression))
    assert used and used <= names
    assert expression.count("(") == expression.count(")")


def test_panels_and_alerts_are_told_apart() -> None:
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    alerts = [rule["alert"] for group in documents("alerts.yaml")[0]["groups"] for rule in group["rules"]]
    assert len(set(alerts)) == len(alerts)
