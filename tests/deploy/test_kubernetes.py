"""The manifests, as Kubernetes' own schemas, its graceful end and mldserver's command line judge them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import mldserver
from mldserver.cli import command_line
from mldserver.config.resolve import resolve, resolve_functions
from mldserver.kcl.properties import DaemonSettings, daemon_properties

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OBJECTS: list[dict[str, Any]] = [
    each for path in MANIFESTS for each in yaml.safe_load_all(path.read_text("utf-8"))
]


def one(kind: str) -> dict[str, Any]:
    (found,) = (each for each in OBJECTS if each["kind"] == kind)
    return found


POD: dict[str, Any] = one("StatefulSet")["spec"]["template"]["spec"]
CONTAINERS: dict[str, dict[str, Any]] = {each["name"]: each for each in POD["containers"]}


@pytest.mark.parametrize("manifest", OBJECTS, ids=lambda each: each["kind"])
def test_a_manifest_has_the_published_schema(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_a_wrong_manifest_would_be_found() -> None:
    wrong = {**one("StatefulSet"), "spec": {**one("StatefulSet")["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_server_and_daemon_are_two_containers_of_one_image_with_commands_that_it_has() -> None:
    assert list(CONTAINERS) == ["server", "kcl"]
    assert {each["image"] for each in CONTAINERS.values()} == {f"mldserver:{mldserver.__version__}"}
    for name, container in CONTAINERS.items():
        assert container["args"][0] == {"server": "serve", "kcl": "kcl"}[name]
        command_line(container["args"]).parse_args(container["args"], exit_on_error=False)


def test_the_settings_are_settings_and_the_output_lies_on_the_volume(tmp_path: Path) -> None:
    text = one("ConfigMap")["data"]["mldserver.toml"]
    (tmp_path / "mldserver.toml").write_text(text)
    functions = resolve_functions({}, environ={}, folder=tmp_path, config=tmp_path / "mldserver.toml")
    mounts = {each["name"]: each["mountPath"] for each in CONTAINERS["server"]["volumeMounts"]}
    (claim,) = one("StatefulSet")["spec"]["volumeClaimTemplates"]
    assert [settings.pipeline for settings in functions] == ["hourly", "late"]
    for settings in functions:
        assert settings.workers == tomllib.loads(text)["workers"]
        assert str(settings.out).startswith(f"{mounts[claim['metadata']['name']]}/")
        # Both talk on the pod's loopback, where neither needs a certificate.
        assert str(settings.listen).startswith("127.0.0.1:")
        assert str(settings.admin) == "127.0.0.1:7071"
    for container in CONTAINERS.values():
        config = next(word for word in container["args"] if word.endswith(".toml")).rpartition("=")[2]
        assert Path(config).parent == Path(mounts["config"])


def test_the_name_of_the_pod_resolves_while_a_function_is_not_ready() -> None:
    service, pods = one("Service"), one("StatefulSet")["spec"]
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pods["serviceName"], "None")
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == pods["selector"]["matchLabels"]
    assert pods["podManagementPolicy"] == "Parallel"


def test_prometheus_may_scrape_the_port_for_metrics_and_nothing_else_may_be_reached() -> None:
    (port,) = CONTAINERS["server"]["ports"]
    config = tomllib.loads(one("ConfigMap")["data"]["mldserver.toml"])
    assert config["metrics_listen"] == f"0.0.0.0:{port['containerPort']}"
    annotations = one("StatefulSet")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    (rule,) = one("NetworkPolicy")["spec"]["ingress"]
    assert rule["ports"] == [{"port": port["name"]}]


def test_it_is_left_the_time_to_stop_in_order(tmp_path: Path) -> None:
    settings = resolve({"handler": "h"}, environ={}, folder=tmp_path, config=None)
    daemon = DaemonSettings(stream="s", app="a", region="r", executable="e", worker="w")
    grace_seconds = int(daemon_properties(daemon)["shutdownGraceMillis"]) / 1000
    assert POD["terminationGracePeriodSeconds"] > settings.grace_seconds + grace_seconds


def test_the_probes_ask_whether_it_lives_and_is_ready_as_the_image_does() -> None:
    server = CONTAINERS["server"]
    asked = {name: server[f"{name}Probe"]["exec"]["command"] for name in ("startup", "liveness", "readiness")}
    assert asked["startup"] == asked["liveness"]
    assert [word.replace("/readyz", "/livez") for word in asked["readiness"]] == asked["liveness"]
    assert "/readyz" in asked["readiness"][-1]
    # tests/deploy/test_image.py holds what that command does.
    (check,) = re.findall(r'CMD \["python3", "-c", "(.*)"\]', (DEPLOY / "Dockerfile").read_text("utf-8"))
    assert asked["liveness"][-1] == check


def test_a_loop_that_stands_still_has_longer_than_under_systemd_before_it_is_started_again() -> None:
    unit = (DEPLOY / "mldserver@.service").read_text("utf-8")
    (watchdog,) = re.findall(r"^WatchdogSec=(\d+)$", unit, re.MULTILINE)
    probe = CONTAINERS["server"]["livenessProbe"]
    assert probe["periodSeconds"] * (probe["failureThreshold"] - 1) > int(watchdog)


def test_no_container_may_more_than_it_needs() -> None:
    user = re.findall(r"--uid (\d+)", (DEPLOY / "Dockerfile").read_text("utf-8"))
    assert [str(POD["securityContext"]["runAsUser"])] == user
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["automountServiceAccountToken"] is False
    for container in CONTAINERS.values():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
