"""The manifests in docs/kubernetes: valid for Kubernetes, and in agreement with the code and with each other."""

import copy
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from genserve.cli import make_parser
from genserve.cli.route import make_config
from genserve.cli.serve import check_flags
from genserve.net import split_name
from genserve.placement.config import CLOSE_S

DIRECTORY = Path(__file__).parents[2] / "docs" / "kubernetes"
OLDEST = "1.30"
"""The first version whose preStop can sleep without a feature gate."""

Manifest = dict[str, Any]


def manifests() -> dict[str, Manifest]:
    """By kind and name."""
    found = [each for path in sorted(DIRECTORY.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    by_name = {f"{each['kind']} {each['metadata']['name']}": each for each in found}
    assert len(by_name) == len(found)
    return by_name


ALL = manifests()
WORKLOADS = {"replica": ALL["StatefulSet genserve-replica"], "router": ALL["Deployment genserve-router"]}
SERVICES = {"replica": ALL["Service genserve-replicas"], "router": ALL["Service genserve-router"]}
POLICIES = {"replica": ALL["NetworkPolicy genserve-replicas"], "router": ALL["NetworkPolicy genserve-router"]}


def pod(component: str) -> Manifest:
    """The pod of a workload."""
    spec: Manifest = WORKLOADS[component]["spec"]["template"]["spec"]
    return spec


def container(component: str) -> Manifest:
    """Its only container."""
    (only,) = pod(component)["containers"]
    found: Manifest = only
    return found


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("name", ALL)
def test_a_manifest_is_valid(name: str, version: str) -> None:
    """Unknown fields included."""
    kubernetes_validate.validate(ALL[name], version, strict=True)


def test_a_field_that_does_not_exist_is_noticed() -> None:
    """The validator is strict inside of containers too."""
    wrong = copy.deepcopy(WORKLOADS["router"])
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["exec"]["prot"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


def test_the_commands_are_ours() -> None:
    """Their flags are, and what they listen on is what everything else names."""
    replica, router = container("replica")["command"], container("router")["command"]
    assert (replica[:2], router[:2]) == (["genserve", "serve"], ["genserve", "route"])
    served = check_flags([flag for flag in replica[2:] if not flag.startswith("--model=")], "genserve serve")
    assert served is not None
    routed = make_config(make_parser().parse_args(router[1:]), dns=["genserve-replicas:50051"])
    for component, port in (("replica", served.port), ("router", routed.port)):
        it = container(component)
        assert it["ports"] == [{"name": "grpc", "containerPort": port}]
        assert SERVICES[component]["spec"]["ports"] == [{"name": "grpc", "port": port, "targetPort": "grpc"}]
        assert f"-addr=127.0.0.1:{port}" in probe_of(it, "readinessProbe")
    assert f"-addr=127.0.0.1:{served.port}" in probe_of(container("replica"), "startupProbe")
    assert POLICIES["router"]["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": routed.port}]


def probe_of(it: Manifest, kind: str) -> list[str]:
    """The command of a probe."""
    command: list[str] = it[kind]["exec"]["command"]
    return command


@pytest.mark.parametrize("component", ["replica", "router"])
def test_the_files_of_the_flags_are_those_of_the_secrets(component: str) -> None:
    """Also those of the commands that Kubernetes runs in the container. The names are those of the page."""
    it, text = container(component), yaml.safe_dump(container(component))
    secrets = {each["name"]: each["secret"]["secretName"] for each in pod(component)["volumes"] if "secret" in each}
    mounted = {each["mountPath"]: secrets[each["name"]] for each in it["volumeMounts"] if each["name"] in secrets}
    page = (DIRECTORY.parent / "kubernetes.md").read_text()
    created = {
        name: set(re.findall(r"--from-file ([\w.]+)", files))
        for name, files in re.findall(r"create secret generic (\S+) (.*)", page)
    }
    used = re.findall(r"(/tls|/access)/([\w.]+)", text)
    assert len(used) > 5 and all(file in created[mounted[directory]] for directory, file in used)
    assert "--allow-insecure" not in it["command"]


def test_a_certificate_is_for_the_name_of_the_router() -> None:
    """Under which clients call it. Replicas and probes are told that name."""
    name = SERVICES["router"]["metadata"]["name"]
    for component in ("replica", "router"):
        it = container(component)
        assert f"--peer-name={name}" in it["command"]
        assert f"-tls-server-name={name}" in probe_of(it, "readinessProbe")


def test_the_router_finds_the_replicas_by_their_service() -> None:
    """A headless one: its name resolves to all pods."""
    (dns,) = [flag.removeprefix("--dns=") for flag in container("router")["command"] if flag.startswith("--dns=")]
    service = SERVICES["replica"]
    assert split_name(dns) == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])
    assert service["spec"]["clusterIP"] == "None"
    assert WORKLOADS["replica"]["spec"]["serviceName"] == service["metadata"]["name"]


@pytest.mark.parametrize("component", ["replica", "router"])
def test_selectors_select_the_pods(component: str) -> None:
    """Those of the workload, of the service and of the policy."""
    labels = WORKLOADS[component]["spec"]["template"]["metadata"]["labels"]
    assert WORKLOADS[component]["spec"]["selector"]["matchLabels"] == labels
    assert SERVICES[component]["spec"]["selector"] == labels
    assert POLICIES[component]["spec"]["podSelector"]["matchLabels"] == labels


def test_kubernetes_waits_for_the_drain() -> None:
    """That of preStop and that of SIGTERM; a daemon has to end its engine as well."""
    served = check_flags(["--drain-timeout=60s"], "genserve serve")
    assert served is not None and "--drain-timeout=60s" in container("replica")["command"]
    command = container("replica")["lifecycle"]["preStop"]["exec"]["command"][-1]
    drains = make_parser().parse_args(
        [word.replace('"$POD_IP:', "10.0.0.1:").strip('"') for word in command.split()[1:]]
    )
    assert (drains.action, drains.address) == ("drain", "10.0.0.1:50051")
    assert drains.target == f"{SERVICES['router']['metadata']['name']}:50050"
    assert pod("replica")["terminationGracePeriodSeconds"] >= drains.timeout + served.drain_timeout_s + CLOSE_S
    routed = make_parser().parse_args(container("router")["command"][1:])
    slept_s = container("router")["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod("router")["terminationGracePeriodSeconds"] > slept_s + routed.drain_timeout
