"""What `deploy/` holds is accepted by what reads it (Redis, S3, our own settings), and what `docs/` names exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
import redis
import yaml
from redis_server import HOST, free_port
from s3_server import S3Server

from vllm_hicache.cli import main as front
from vllm_hicache.config import Config
from vllm_hicache.metrics import SPECS
from vllm_hicache.secrets import PEER_KEY_VARIABLE
from vllm_hicache.storage.registry import open_store
from vllm_hicache.storage.s3 import S3Store
from vllm_hicache.storage.s3_lifecycle import lifecycle_rule
from vllm_hicache.units import parse_bytes

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
START_LIMIT_S = 20.0
OVERRIDDEN = {"bind", "port", "unixsocket", "include"}
PASSWORD = "a pass word: #1"
PREFILL = ("pair.yaml", "vllm-prefill")
DECODE = ("pair.yaml", "vllm-decode")
ENGINES = (("engines.yaml", "vllm"), PREFILL, DECODE)
SIZE = re.compile(r"([0-9]+)([kmg]b)", re.ASCII)


@contextmanager
def answering(process: subprocess.Popen[bytes], client: redis.Redis) -> Iterator[redis.Redis]:
    """The client once its server answers; the server's end afterwards."""
    with process, client:
        try:
            wait_for_answer(process, client)
            yield client
        finally:
            process.terminate()


def wait_for_answer(process: subprocess.Popen[bytes], client: redis.Redis) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            time.sleep(0.01)
    pytest.fail(f"redis-server does not answer; its exit code is {process.poll()}")


def settings_of(text: str) -> dict[str, str]:
    """The lines of a redis.conf, sizes in bytes and quotes taken off, as CONFIG GET shows them."""
    lines = (line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: SIZE.sub(in_bytes, value.strip('"')) for name, value in lines}


def in_bytes(match: re.Match[str]) -> str:
    return str(int(match[1]) * {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}[match[2]])


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def the(kind: str, name: str, called: str = "") -> dict[str, Any]:
    """The one object of a kind in a file, or the one of that name."""
    found = [each for each in documents(name) if each["kind"] == kind]
    (only,) = [each for each in found if called in ("", each["metadata"]["name"])]
    return only


def pods(name: str, called: str = "") -> dict[str, Any]:
    """What a Deployment starts: metadata and spec of its pods."""
    template: dict[str, Any] = the("Deployment", name, called)["spec"]["template"]
    return template


def container(name: str, called: str = "") -> dict[str, Any]:
    (only,) = pods(name, called)["spec"]["containers"]
    return dict(only)


def environment(name: str, called: str = "") -> dict[str, Mapping[str, str]]:
    """Each variable's secret, by name."""
    sources = {each["name"]: each["valueFrom"] for each in container(name, called)["env"]}
    return {name: source["secretKeyRef"] for name, source in sources.items() if "secretKeyRef" in source}


def transfer_config(name: str = "engines.yaml", called: str = "") -> dict[str, Any]:
    arguments = container(name, called)["args"]
    found: dict[str, Any] = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return found


def extra_config(name: str = "engines.yaml", called: str = "") -> Config:
    return Config.parse(transfer_config(name, called)["kv_connector_extra_config"])


def documented(name: str) -> str:
    return (DEPLOY.parent / "docs" / name).read_text()


def test_every_setting_and_its_default_are_documented() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", documented("configuration.md"), re.MULTILINE))
    for field in fields(Config):
        if isinstance(field.default, int | float):
            assert rows[field.name] == f"{field.default:g}", field.name
        assert field.name in rows


def test_every_metric_is_documented_with_its_label() -> None:
    table = documented("configuration.md").split("## Metrics")[1]
    for spec in SPECS:
        name = f"{spec.name}_total" if spec.kind == "counter" else spec.name
        (row,) = re.findall(rf"^\|[^|]*`{name}`.*$", table, re.MULTILINE)
        assert spec.label is None or f"`{spec.label}`" in row, name


def test_every_option_of_the_documented_verbs_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("ls", "stat", "verify", "gc"):
        with pytest.raises(SystemExit):
            front.main(["store", verb, "--help"])
    for command in ("doctor", "ranks"):
        with pytest.raises(SystemExit):
            front.main([command, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) | {"--kv-transfer-config", "--kv-events-config"}
    for name in ("operations.md", "configuration.md"):
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", documented(name))) <= known


def test_every_variable_of_the_environment_that_is_documented_is_read() -> None:
    sources = "".join(path.read_text() for path in (DEPLOY.parent / "vllm_hicache").rglob("*.py"))
    for name in ("configuration.md", "operations.md"):
        for variable in set(re.findall(r"VLLM_HICACHE_[A-Z_]+", documented(name))):
            assert variable in sources or variable.startswith("VLLM_HICACHE_LMCACHE_"), variable


def test_a_redis_server_takes_every_line_of_its_configuration(tmp_path: Path) -> None:
    path, port = DEPLOY / "redis" / "redis.conf", free_port()
    expected = settings_of(path.read_text())
    command = ["redis-server", path, "--port", str(port), "--bind", HOST, "--dir", tmp_path]
    process = subprocess.Popen([*command, "--unixsocket", tmp_path / "s"], stdout=subprocess.DEVNULL)
    with answering(process, redis.Redis(HOST, port, decode_responses=True)) as client:
        found = client.config_get("*")
    # All classes of clients are shown, the one that is set comes first.
    limits = found.pop("client-output-buffer-limit")
    assert limits.startswith(expected.pop("client-output-buffer-limit"))
    shown = {name: found[name] for name in expected.keys() - OVERRIDDEN}
    assert shown == {name: expected[name] for name in shown}
    assert expected["maxmemory-policy"] == "allkeys-lru"
    assert list(tmp_path.glob("*.rdb")) == []


def test_every_setting_of_the_configuration_says_why() -> None:
    lines = (DEPLOY / "redis" / "redis.conf").read_text().splitlines()
    bare = [line for before, line in zip(["", *lines], lines, strict=False) if line and line[0] != "#" and not before]
    assert bare == []


def test_the_clusters_redis_starts_with_its_password_and_its_policy(tmp_path: Path) -> None:
    port, (script,) = free_port(), container("redis.yaml")["args"]
    script = script.replace("--port 6379", f"--port {port} --bind {HOST} --dir {tmp_path}")
    process = subprocess.Popen(
        [*container("redis.yaml")["command"], script],
        env={**os.environ, "REDIS_PASSWORD": PASSWORD},
        stdout=subprocess.DEVNULL,
    )
    with answering(process, redis.Redis(HOST, port, password=PASSWORD, decode_responses=True)) as client:
        found = client.config_get("*")
        assert found["maxmemory-policy"] == "allkeys-lru"
        assert found["save"] == ""
        assert found["lazyfree-lazy-eviction"] == "yes"
        limit = parse_bytes(container("redis.yaml")["resources"]["limits"]["memory"])
        assert int(found["maxmemory"]) * 1.25 <= limit
        with redis.Redis(HOST, port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_the_life_cycle_rule_is_accepted_and_is_the_one_that_the_store_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = json.loads((DEPLOY / "s3" / "lifecycle.json").read_text())
    assert rules["Rules"] == [lifecycle_rule("hicache/", 14)]
    with S3Server(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with closing(boto3.client("s3", endpoint_url=server.endpoint)) as client:
            client.put_bucket_lifecycle_configuration(Bucket=server.bucket, LifecycleConfiguration=rules)
        with closing(open_store(f"s3://{server.bucket}/hicache?endpoint={server.endpoint}")) as store:
            assert isinstance(store, S3Store)
            assert store.lifecycle() == 14


def test_the_engines_settings_and_their_stores_url_are_accepted() -> None:
    option = transfer_config()
    assert option["kv_connector"] == "HiCacheConnector"
    assert option["kv_load_failure_policy"] == "recompute"
    store = open_store(extra_config().store)
    store.close()
    assert store.describe().startswith("redis://hicache-redis:6379")


def test_the_engines_reach_the_store_by_its_services_name_and_port() -> None:
    service, url = the("Service", "redis.yaml"), urlsplit(extra_config().store)
    assert url.hostname == service["metadata"]["name"]
    assert url.port in {each["port"] for each in service["spec"]["ports"]}
    assert url.password is None


def test_the_password_comes_from_the_secret_on_both_sides() -> None:
    secret = the("Secret", "redis.yaml")
    wanted = {"name": secret["metadata"]["name"], "key": "password"}
    assert wanted["key"] in secret["stringData"]
    assert environment("redis.yaml") == {"REDIS_PASSWORD": wanted}
    assert environment("engines.yaml") == {"VLLM_HICACHE_REDIS_PASSWORD": wanted}


def test_the_policy_lets_all_engines_in_and_selects_the_store() -> None:
    policy = the("NetworkPolicy", "redis.yaml")["spec"]
    assert policy["podSelector"]["matchLabels"] == pods("redis.yaml")["metadata"]["labels"]
    (rule,) = policy["ingress"]
    allowed = [each["podSelector"]["matchLabels"] for each in rule["from"]]
    assert allowed == [pods(*engine)["metadata"]["labels"] for engine in ENGINES]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_has_room_for_its_host_memory_and_shared_memory(engine: tuple[str, str]) -> None:
    one = container(*engine)
    (shm,) = [
        parse_bytes(each["emptyDir"]["sizeLimit"]) for each in pods(*engine)["spec"]["volumes"] if each["name"] == "shm"
    ]
    assert {"name": "shm", "mountPath": "/dev/shm"} in one["volumeMounts"]
    wanted = extra_config(*engine).host_memory.num_bytes
    assert wanted is not None
    assert parse_bytes(one["resources"]["requests"]["memory"]) >= wanted + shm + (16 << 30)
    assert one["resources"]["requests"]["memory"] == one["resources"]["limits"]["memory"]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_probe_of_an_engine_asks_its_health_and_a_stop_leaves_time_to_flush(engine: tuple[str, str]) -> None:
    probes = [container(*engine)[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert probes == [{"path": "/health", "port": "http"}] * 3
    grace_s = pods(*engine)["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > extra_config(*engine).shutdown_timeout_s + 30


def test_there_are_two_engines_that_share_the_store() -> None:
    assert the("Deployment", "engines.yaml")["spec"]["replicas"] == 2


def test_prefill_and_decode_differ_in_their_roles_alone() -> None:
    prefill, decode = transfer_config(*PREFILL), transfer_config(*DECODE)
    assert (prefill.pop("kv_role"), decode.pop("kv_role")) == ("kv_producer", "kv_consumer")
    serving = {"peer_host", "peer_port"}
    extra = prefill["kv_connector_extra_config"]
    assert serving <= extra.keys()
    prefill["kv_connector_extra_config"] = {name: value for name, value in extra.items() if name not in serving}
    assert prefill == decode
    same = [(container(*engine)["image"], container(*engine)["args"][0]) for engine in ENGINES]
    assert same == same[:1] * 3


def test_prefill_serves_pages_at_its_pods_address_and_the_port_that_decode_may_reach() -> None:
    settings, one = extra_config(*PREFILL), container(*PREFILL)
    address = [each["valueFrom"] for each in one["env"] if f"$({each['name']})" == settings.peer_host]
    assert address == [{"fieldRef": {"fieldPath": "status.podIP"}}]
    assert {"name": "pages", "containerPort": settings.peer_port} in one["ports"]
    policy = the("NetworkPolicy", "pair.yaml")["spec"]
    assert policy["podSelector"]["matchLabels"] == pods(*PREFILL)["metadata"]["labels"]
    allowed = {rule["ports"][0]["port"]: rule["from"][0]["podSelector"]["matchLabels"] for rule in policy["ingress"]}
    assert allowed == {
        "pages": pods(*DECODE)["metadata"]["labels"],
        "http": pods("pair.yaml", "vllm-router")["metadata"]["labels"],
    }


def test_prefill_and_decode_have_one_key_from_the_secret() -> None:
    secret = the("Secret", "pair.yaml")
    wanted = {"name": secret["metadata"]["name"], "key": "key"}
    assert wanted["key"] in secret["stringData"]
    for engine in (PREFILL, DECODE):
        assert environment(*engine)[PEER_KEY_VARIABLE] == wanted
        assert environment(*engine)["VLLM_HICACHE_REDIS_PASSWORD"] == environment("engines.yaml").popitem()[1]


def test_the_router_takes_its_arguments_and_finds_both_engines_by_their_services() -> None:
    router_args = pytest.importorskip("vllm_router.launch_router")
    parsed = router_args.parse_router_args(container("pair.yaml", "vllm-router")["args"])
    assert parsed.vllm_pd_disaggregation
    found = {"vllm-prefill": [url for url, _ in parsed.prefill_urls], "vllm-decode": parsed.decode_urls}
    for name, urls in found.items():
        service = the("Service", "pair.yaml", name)
        (port,) = service["spec"]["ports"]
        assert urls == [f"http://{name}:{port['port']}"]
        assert service["spec"]["selector"] == pods("pair.yaml", name)["metadata"]["labels"]


def test_the_routers_service_and_probes_reach_the_port_that_it_listens_at() -> None:
    router = container("pair.yaml", "vllm-router")
    (port,) = router["ports"]
    assert f"--port={port['containerPort']}" in router["args"]
    assert "--host=0.0.0.0" in router["args"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert router[name]["httpGet"] == {"path": "/health", "port": port["name"]}
    assert the("Service", "pair.yaml", "vllm-router")["spec"]["ports"][0]["targetPort"] == port["name"]
