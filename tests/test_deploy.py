"""The files of deploy/: schemas hold, every flag exists, and a rolling update of routers fails no request."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import threading
from collections import Counter
from pathlib import Path

import pytest
import yaml
from support.running import MOESTRO, PATIENCE_S, Running, free_port, wait_until

from moestro.cli import main
from moestro.gateway.discovery.lists import parse_file

DEPLOY = Path(__file__).parents[1] / "deploy"
MANIFESTS = sorted(set((DEPLOY / "kubernetes").glob("*.yaml")) - {DEPLOY / "kubernetes" / "kustomization.yaml"})
KUBERNETES = "1.33"


def documents(path: Path) -> list[dict]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def all_documents() -> list[dict]:
    return [each for path in MANIFESTS for each in documents(path)]


def test_kustomization_names_every_manifest():
    named = documents(DEPLOY / "kubernetes" / "kustomization.yaml")[0]["resources"]
    assert sorted(named) == [path.name for path in MANIFESTS]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_what_the_page_applies():
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    named = sorted((each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(built))
    assert named == sorted((each["kind"], each["metadata"]["name"]) for each in all_documents())


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_pool_of_a_gateway_names_the_routers_as_its_picker(tmp_path, capsys):
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes-picker")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    found = list(yaml.safe_load_all(built))
    [pool], [route], [deployment] = (by_kind(kind, found) for kind in ("InferencePool", "HTTPRoute", "Deployment"))
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
    ports = {
        each["name"]: each["containerPort"] for each in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    picker = pool["spec"]["endpointPickerRef"]
    [service] = [each for each in by_kind("Service", found) if each["metadata"]["name"] == picker["name"]]
    [port] = service["spec"]["ports"]
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    [config], [policy] = by_kind("ConfigMap", found), by_kind("NetworkPolicy", found)
    settings = yaml.safe_load(config["data"]["route.yaml"])
    assert picker["port"]["number"] == port["port"] == ports[port["targetPort"]] == settings["ext_proc"]
    assert settings["inference_pool"] == pool["metadata"]["name"]
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == set(ports.values())
    file = tmp_path / "route.yaml"
    file.write_text(config["data"]["route.yaml"] + "\nadmin_api_key: x\napi_key: [x]\npeer_key: x\n")
    with pytest.raises(SystemExit) as end:
        main(["route", "--config", str(file), "--print-config"])
    assert end.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_obey_the_schemas_of_kubernetes(path):
    validate = pytest.importorskip("kubernetes_validate")
    for each in documents(path):
        if each["kind"] != "ServiceMonitor":  # the Prometheus operator's own kind
            validate.validate(each, KUBERNETES, strict=True)


def by_kind(kind: str, among: list[dict] | None = None) -> list[dict]:
    return [each for each in among or all_documents() if each["kind"] == kind]


def test_names_and_ports_of_the_manifests_fit_together():
    [deployment] = by_kind("Deployment")
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    labels = pod["metadata"]["labels"]
    for service in by_kind("Service"):
        assert service["spec"]["selector"].items() <= labels.items()
        assert all(port["targetPort"] in ports for port in service["spec"]["ports"])
    [policy], [budget] = by_kind("NetworkPolicy"), by_kind("PodDisruptionBudget")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == set(ports.values())
    assert budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]
    [monitor] = by_kind("ServiceMonitor")
    monitored = [s for s in by_kind("Service") if s["metadata"]["labels"] == monitor["spec"]["selector"]["matchLabels"]]
    assert [port["name"] for port in monitored[0]["spec"]["ports"]] == [monitor["spec"]["endpoints"][0]["port"]]
    [secret] = by_kind("Secret")
    assert monitor["spec"]["endpoints"][0]["authorization"]["credentials"]["key"] in secret["stringData"]


def test_the_role_allows_what_discovery_reads_and_no_more():
    [role], [account], [binding] = by_kind("Role"), by_kind("ServiceAccount"), by_kind("RoleBinding")
    [deployment] = by_kind("Deployment")
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    allowed = {(group, each) for rule in role["rules"] for group in rule["apiGroups"] for each in rule["resources"]}
    source = (DEPLOY.parent / "src/moestro/gateway/discovery/kubernetes.py").read_text()
    assert {each for _, each in allowed} == {"pods", "endpointslices", "inferencepools"}
    assert all(group in source and f"/{each}" in source for group, each in allowed)
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}


def test_the_engines_of_the_unit_are_a_list_that_the_router_reads():
    settings = yaml.safe_load((DEPLOY / "systemd" / "route.yaml").read_text())
    file = DEPLOY / "systemd" / Path(settings["engine_file"]).name
    assert [each.name for each in parse_file(file.read_bytes(), file.parent).entries] == ["a", "b"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_commands_of_the_page_make_a_routed_pool_that_grows(fake, tmp_path):
    """The commands of docs/deploy.md as printed, but for the ports and the installation."""
    page = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    section = page.partition("## Try it\n")[2].partition("\n## ")[0]
    [first, second] = [block.partition("```")[0] for block in section.split("```sh\n")[1:]]
    script = (first + second).replace("pip install moestro\n", "").replace("moestro route", f"{MOESTRO} route")
    host, port = fake.address
    ports = {"8001": str(port), "8002": str(port), "8080": str(free_port()), "8081": str(free_port())}
    for printed, real in ports.items():
        script = script.replace(f":{printed}", f":{real}").replace(f"port {printed}", f"port {real}")
    # One server stands for both: its other name is another engine.
    script = script.replace(f"'- http://{host}:{port}' >>", f"'- http://localhost:{port}' >>")
    script += "\nkill %1\nwait\n"
    done = subprocess.run(
        ["bash", "-me", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    answer, engines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith(('{"id', '{"engines')))
    assert answer["usage"]["completion_tokens"] == 4
    assert [each["condition"] for each in engines["engines"]] == ["up", "up"]


def test_a_router_stops_within_the_time_that_each_platform_gives_it():
    [deployment] = by_kind("Deployment")
    pod = deployment["spec"]["template"]["spec"]
    [config] = by_kind("ConfigMap")
    drain_s = yaml.safe_load(config["data"]["route.yaml"])["shutdown_timeout"]
    before_s = float(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= before_s + drain_s + 10
    unit = (DEPLOY / "systemd" / "moestro-route.service").read_text()
    stop_s = float(unit.partition("TimeoutStopSec=")[2].split()[0])
    assert stop_s >= yaml.safe_load((DEPLOY / "systemd" / "route.yaml").read_text())["shutdown_timeout"] + 10


@pytest.mark.parametrize("name", ["systemd", "kubernetes"])
def test_every_setting_of_a_configuration_is_a_flag(name, tmp_path, monkeypatch, capsys):
    text = (DEPLOY / "systemd" / "route.yaml").read_text()
    if name == "kubernetes":
        text = by_kind("ConfigMap")[0]["data"]["route.yaml"]
        for key, value in by_kind("Secret")[0]["stringData"].items():
            monkeypatch.setenv(key, value)
    file = tmp_path / "route.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["route", "--config", str(file), "--print-config"])
    assert end.value.code == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert all(f"{key}:" in shown for key in yaml.safe_load(text))


def test_the_commands_of_the_containerfile_exist():
    text = (DEPLOY / "Containerfile").read_text()
    assert 'ENTRYPOINT ["moestro"]' in text
    for extra in ("tokenizer", "envoy", "otel", "serve"):
        assert f"{extra}" in (DEPLOY.parent / "pyproject.toml").read_text().partition("optional-dependencies")[2]


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_haproxy_takes_its_file():
    subprocess.run(["haproxy", "-c", "-f", DEPLOY / "proxies" / "haproxy.cfg"], check=True)


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_takes_its_file(tmp_path):
    trustme = pytest.importorskip("trustme")
    issued = trustme.CA().issue_cert("example.org")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    issued.private_key_pem.write_to_path(tmp_path / "server.key")
    server = (DEPLOY / "proxies" / "nginx.conf").read_text().replace("/etc/nginx/server", f"{tmp_path}/server")
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\n{server}\n}}\n")
    subprocess.run(["nginx", "-t", "-q", "-c", tmp_path / "nginx.conf"], check=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_its_unit(tmp_path):
    unit = (DEPLOY / "systemd" / "moestro-route.service").read_text().replace("/opt/moestro/bin/moestro", "/bin/true")
    (tmp_path / "moestro-route.service").write_text(unit)
    subprocess.run(["systemd-analyze", "verify", tmp_path / "moestro-route.service"], check=True)


class Address:
    """The address of a service in Kubernetes: a client reaches any pod that is ready, and never one that is not."""

    def __init__(self) -> None:
        self._routers: list[Running] = []
        self._next = 0

    def add(self, router: Running) -> None:
        self._routers.append(router)

    def drop(self, router: Running) -> None:
        self._routers.remove(router)

    def pick(self) -> Running:
        self._next += 1
        routers = list(self._routers)
        return routers[self._next % len(routers)]


def test_three_routers_are_replaced_one_after_another_under_load_without_a_failure(fake, tmp_path):
    """A rolling update as deployment.yaml describes it: a new router is ready before an old one drains."""
    address, statuses, ends = Address(), Counter(), threading.Event()

    def start(name: str) -> Running:
        directory = tmp_path / name
        directory.mkdir()
        router = Running((MOESTRO, "route", "--engine", fake.url), directory, admin_port=free_port())
        wait_until(lambda: status_of(router, "/ready") == 200)
        return router

    def send() -> None:
        while not ends.is_set():
            router = address.pick()
            statuses[status_of(router, "/v1/completions", '{"prompt": "def f(x):", "max_tokens": 4}')] += 1

    routers = [start(f"old-{number}") for number in range(3)]
    for each in routers:
        address.add(each)
    senders = [threading.Thread(target=send) for _ in range(4)]
    for each in senders:
        each.start()
    replaced = []
    try:
        for number, old in enumerate(routers):
            new = start(f"new-{number}")
            replaced.append(new)
            address.add(new)
            address.drop(old)  # preStop: endpoints forget the pod before SIGTERM comes
            before = sum(statuses.values())
            wait_until(lambda before=before: sum(statuses.values()) > before + 20)
            os.kill(old.process.pid, signal.SIGTERM)
            assert old.process.wait(PATIENCE_S) == 0
    finally:
        ends.set()
        for each in senders:
            each.join()
        for each in (*routers, *replaced):
            each.kill()
    assert set(statuses) == {200}, statuses
    assert statuses[200] > 60


def status_of(router: Running, path: str, body: str | None = None) -> int:
    connection = http.client.HTTPConnection(*router.address, timeout=PATIENCE_S)
    try:
        connection.request("GET" if body is None else "POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return 0
    else:
        return response.status
    finally:
        connection.close()
