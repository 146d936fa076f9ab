"""What deploy/ and the Containerfile say is what the code does: names, ports, paths and times."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import click
import msgspec
import pytest
import yaml
from prometheus_client import CollectorRegistry

from tenure.cli.config import SETTINGS
from tenure.cli.serve import _metrics_app, gateway_command, worker_command
from tenure.dashboard.views import Backlog
from tenure.worker import Settings
from tests.tidy.reading import ROOT, text

KUBERNETES = ROOT / "deploy" / "kubernetes"
BASE = KUBERNETES / "base"
COMMANDS: dict[str, click.Command] = {"gateway": gateway_command, "worker": worker_command}
PARTS = tuple(COMMANDS)
# A setting, or the file that has its value.
VARIABLES = {each.variable for each in SETTINGS.values()}
VARIABLES |= {f"{each.variable}_FILE" for each in SETTINGS.values() if each.sensitive}
GATEWAY_PATHS = set(msgspec.json.decode(text(ROOT / "docs/reference/openapi.json"))["paths"])


def read(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text(path)))


def one(path: Path, kind: str, name: str = "") -> dict[str, Any]:
    (found,) = (
        each
        for each in read(path)
        if each["kind"] == kind and name in ("", each["metadata"]["name"])
    )
    return found


def pod(part: str) -> dict[str, Any]:
    template: dict[str, Any] = one(BASE / f"{part}.yaml", "Deployment")["spec"]["template"]
    return template


def container(part: str) -> dict[str, Any]:
    (only,) = pod(part)["spec"]["containers"]
    return dict(only)


def environment(part: str) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container(part)["env"]}


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


def time_to_stop_s(part: str, given: dict[str, str]) -> float:
    """How long a process may take to stop after SIGTERM."""
    drain_s = float(given.get(f"TENURE_{part.upper()}_DRAIN_TIMEOUT_S", 0))
    drain_s = drain_s or float(SETTINGS[f"{part}.drain_timeout_s"].default)  # type: ignore[arg-type]
    if part == "gateway":
        return drain_s
    usual = Settings()
    return drain_s + (usual.cancel_grace_ms + 1_000 + usual.flush_ms) / 1000


def answers(part: str, path: str) -> bool:
    """Whether a path exists in a gateway, or in the metrics server of a worker."""
    if part == "gateway":
        return path in GATEWAY_PATHS
    worker: Any = SimpleNamespace(
        registry=CollectorRegistry(), is_live=bool, is_ready=bool, health=dict
    )
    said: list[str] = []
    request = {"PATH_INFO": path, "REQUEST_METHOD": "GET"}
    _metrics_app(worker)(request, lambda status, headers: said.append(status))
    return not said[0].startswith("404")


# --- the image -----------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str, str]]:
    """Stage, instruction and arguments of every line of the Containerfile."""
    lines = [line for line in text(ROOT / "Containerfile").splitlines() if line[:1] != "#"]
    found, stage = [], ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            stage = rest.split()[-1] if name == "FROM" else stage
            found.append((stage, name, rest.strip()))
    return found


def of(stage: str, name: str) -> list[str]:
    return [rest for its, each, rest in instructions() if (its, each) == (stage, name)]


def test_the_image_runs_as_a_user_by_number_and_holds_no_build_tools() -> None:
    assert of("runtime", "FROM") == ["${PYTHON_IMAGE} AS runtime"]
    assert of("runtime", "USER") == ["65532:65532"]
    assert of("runtime", "RUN") == []
    assert of("runtime", "COPY") == ["--from=build /opt/tenure /opt/tenure"]
    assert [of(part, "FROM") for part in PARTS] == [[f"runtime AS {part}"] for part in PARTS]
    assert not [rest for stage in PARTS for rest in of(stage, "USER")]


@pytest.mark.parametrize("part", PARTS)
def test_the_command_and_port_of_an_image_are_ours(part: str) -> None:
    assert of("runtime", "ENTRYPOINT") == ['["tenure"]']
    (words,) = of(part, "CMD")
    name, *arguments = msgspec.json.decode(words)
    assert name == part
    COMMANDS[part].make_context(name, arguments)
    given = dict(pair.split("=", 1) for rest in of(part, "ENV") for pair in shlex.split(rest))
    assert set(given) <= VARIABLES
    port = given.get("TENURE_WORKER_METRICS_PORT") or str(SETTINGS["gateway.port"].default)
    assert of(part, "EXPOSE") == [port]


def test_the_build_copies_files_that_there_are_and_that_are_not_ignored() -> None:
    admitted = {line[1:] for line in text(ROOT / ".dockerignore").splitlines() if line[:1] == "!"}
    copied = {word for rest in of("build", "COPY") for word in rest.split()[:-1]}
    assert copied == admitted
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_has_extras_and_groups_that_there_are() -> None:
    project = tomllib.loads(text(ROOT / "pyproject.toml"))
    built = " ".join(rest for name in ("ARG", "RUN") for rest in of("build", name))
    extras = set(re.findall(r"--extra ([\w-]+)", built))
    assert extras
    assert extras <= set(project["project"]["optional-dependencies"])
    groups = set(re.findall(r"--only-group ([\w-]+)", built))
    assert groups <= set(project["dependency-groups"])


# --- compose -------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_compose_runs_the_images_read_only_and_lets_them_drain(part: str) -> None:
    service = read(ROOT / "deploy" / "compose.yaml")[0]["services"][part]
    assert service["build"]["target"] == part
    assert (ROOT / "deploy" / service["build"]["context"] / "Containerfile").exists()
    assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (
        True,
        ["ALL"],
        ["/tmp"],
    )
    assert set(service["environment"]) <= VARIABLES
    assert seconds(service["stop_grace_period"]) > time_to_stop_s(part, service["environment"])
    url = urlsplit(re.findall(r"http://[^']+", service["healthcheck"]["test"][-1])[0])
    assert of(part, "EXPOSE") == [str(url.port)]
    assert answers(part, url.path)
    for port in service.get("ports", []):
        assert port.split(":")[0] == "127.0.0.1"  # a port of docker's opens the firewall


# --- Kubernetes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", sorted(KUBERNETES.iterdir()), ids=lambda path: path.name)
def test_a_kustomization_names_every_file_beside_it(folder: Path) -> None:
    (kustomization,) = read(folder / "kustomization.yaml")
    there = {path.name for path in folder.iterdir()} - {"kustomization.yaml", "rules.test.yaml"}
    assert set(kustomization["resources"]) == there
    for patch in kustomization.get("patches", []):
        target = patch["target"]
        assert any(
            (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])
            for part in PARTS
            for each in read(BASE / f"{part}.yaml")
        )


@pytest.mark.parametrize("part", PARTS)
def test_a_pod_runs_a_command_of_ours_with_settings_of_ours(part: str) -> None:
    name, *arguments = container(part)["args"]
    assert name == part
    COMMANDS[part].make_context(name, arguments)
    assert set(environment(part)) - {"POD_NAME"} <= VARIABLES
    (kustomization,) = read(BASE / "kustomization.yaml")
    assert container(part)["image"] in {each["name"] for each in kustomization["images"]}


@pytest.mark.parametrize("part", PARTS)
def test_a_pod_listens_where_its_probes_ask(part: str) -> None:
    given, what = environment(part), container(part)
    name = "GATEWAY" if part == "gateway" else "WORKER_METRICS"
    assert given[f"TENURE_{name}_HOST"] == "0.0.0.0"
    assert [str(port["containerPort"]) for port in what["ports"]] == [given[f"TENURE_{name}_PORT"]]
    ports = {port["name"] for port in what["ports"]}
    probes = {
        kind: what[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")
    }
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/livez",
        "liveness": "/livez",
        "readiness": "/readyz",
    }
    assert all(probe["port"] in ports and answers(part, probe["path"]) for probe in probes.values())


@pytest.mark.parametrize("part", PARTS)
def test_a_pod_has_time_to_drain_before_it_is_killed(part: str) -> None:
    command = container(part).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    before_s = float(command[1]) if command else 0.0
    grace_s = pod(part)["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= before_s + time_to_stop_s(part, environment(part)) + 3


@pytest.mark.parametrize("part", PARTS)
def test_a_pod_meets_the_restricted_standard_and_writes_to_tmp_alone(part: str) -> None:
    spec, own = pod(part)["spec"], container(part)["securityContext"]
    user = int(of("runtime", "USER")[0].partition(":")[0])
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == user
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    mounts = {each["mountPath"]: each for each in container(part)["volumeMounts"]}
    writable = {path for path, each in mounts.items() if not each.get("readOnly")}
    assert writable == {"/tmp"}
    secret = Path(environment(part)["TENURE_QUEUE_URL_FILE"])
    assert str(secret.parent) in mounts
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert volumes["secret"]["secret"]["defaultMode"] & 0o007 == 0
    assert spec["securityContext"]["fsGroup"] == user


@pytest.mark.parametrize("part", PARTS)
def test_deployment_budget_and_service_choose_the_same_pods(part: str) -> None:
    labels = pod(part)["metadata"]["labels"]
    deployment = one(BASE / f"{part}.yaml", "Deployment")
    budget = one(BASE / f"{part}.yaml", "PodDisruptionBudget")["spec"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert budget["selector"]["matchLabels"] == labels
    assert budget.get("maxUnavailable") == 1 or (
        budget["minAvailable"] < deployment["spec"]["replicas"]
    ), "a budget that no eviction meets stops the drain of a node"
    if part == "gateway":
        service = one(BASE / "gateway.yaml", "Service")["spec"]
        assert service["selector"] == labels
        assert service["ports"][0]["targetPort"] in {p["name"] for p in container(part)["ports"]}


def test_the_scaler_asks_the_gateway_for_a_number_with_a_key() -> None:
    path = KUBERNETES / "keda" / "scaledobject.yaml"
    spec = one(path, "ScaledObject")["spec"]
    authentication = one(path, "TriggerAuthentication")
    (trigger,) = spec["triggers"]
    asked = trigger["metadata"]
    service = one(BASE / "gateway.yaml", "Service")
    url = urlsplit(asked["url"])
    assert (url.hostname, url.port) == (
        service["metadata"]["name"],
        service["spec"]["ports"][0]["port"],
    )
    assert re.sub(r"/[^/]+$", "/{queue}", url.path) in GATEWAY_PATHS
    assert set(parse_qs(url.query)) == {"per_worker"}
    assert asked["valueLocation"] in Backlog.__struct_fields__
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    (secret,) = authentication["spec"]["secretTargetRef"]
    assert (asked["authMode"], secret["parameter"]) == ("apiKey", "apiKey")
    assert (asked["method"], asked["keyParamName"].lower()) == ("header", "x-api-key")
    worker = one(BASE / "worker.yaml", "Deployment")
    assert spec["scaleTargetRef"]["name"] == worker["metadata"]["name"]


@pytest.mark.parametrize("part", PARTS)
def test_prometheus_scrapes_the_port_that_a_pod_has(part: str) -> None:
    monitor = one(KUBERNETES / "monitoring/podmonitor.yaml", "PodMonitor", f"tenure-{part}")["spec"]
    (kustomization,) = read(BASE / "kustomization.yaml")
    shared = kustomization["labels"][0]["pairs"]
    assert monitor["selector"]["matchLabels"] == shared | pod(part)["metadata"]["labels"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in container(part)["ports"]}
    assert answers(part, endpoint["path"])
    assert ("authorization" in endpoint) == (part == "gateway"), "only a gateway asks for a key"


# --- the page ------------------------------------------------------------------------------------


def test_the_page_names_files_settings_and_commands_that_there_are() -> None:
    page = text(ROOT / "docs" / "operating" / "kubernetes.md")
    assert set(re.findall(r"\bTENURE_[A-Z_]+", page)) <= VARIABLES
    paths = set(re.findall(r"`(deploy/[\w./-]+)`", page))
    assert paths
    assert all((ROOT / path).exists() for path in paths)
    made = re.findall(r"create secret generic (tenure[\w-]*) --from-\w+=([\w-]+)=", page)
    assert set(made) == {("tenure", "queue-url"), ("tenure-metrics", "api-key")}
