# SPDX-License-Identifier: Apache-2.0
"""The daemon as a process, spoken to over its real sockets."""

import contextlib
import http.client
import json
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.client import daemon
from openenvd.client.api import DaemonClient
from openenvd.client.errors import ApiRefused
from openenvd.client.following import follow, run, wait
from openenvd.client.http import HttpClient
from openenvd.env_host.ipc.reports import render_metrics as metrics_of_shards
from openenvd.environments.sources.resolve import resolve
from openenvd.schema.errors import EnvironmentsError
from openenvd.schema.settings import Paths
from openenvd.server.operations import registry
from openenvd.system.text.json_lines import Json

from ..conftest import WAIT_SECONDS

ROOT = Path(__file__).resolve().parents[3]
ONE_WORKER = {"port": 0, "max_long_workers": 1, "cancel_grace_seconds": 1.0}
NEVER_READY = "import time\nprint('never', flush=True)\ntime.sleep(3600)\n"
TALKING = """
from openenvd.env_host.bundled.echo.environment import EchoEnvironment
print("imported", flush=True)
class Talking(EchoEnvironment):
    pass
"""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    return Paths(tmp_path_factory.mktemp("daemon") / "home")


@pytest.fixture(scope="module")
def client(paths: Paths) -> Iterator[DaemonClient]:
    """A daemon with a single LONG worker, so that a second launch has to wait."""
    client = daemon.connect(paths, settings=ONE_WORKER)
    yield client
    take_all_down(client)
    daemon.stop(paths)


@pytest.fixture
def http_client(client: DaemonClient) -> HttpClient:
    return client._http


@pytest.fixture
def name(client: DaemonClient, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of this test's environment, which is taken down after it."""
    yield re.sub(r"[^a-z0-9]+", "-", request.node.name)[-40:].strip("-")
    take_all_down(client)


@pytest.fixture
def stuck(client: DaemonClient, tmp_path: Path, name: str) -> Json:
    """A launch that runs, occupies the only LONG worker, and never gets ready."""
    (tmp_path / "stuck_env.py").write_text(NEVER_READY)
    payload = {"source": "stuck_env:Stuck", "cwd": str(tmp_path), "name": f"{name}-stuck"}
    request = client.submit("launch", payload)
    until(lambda: client.environment(payload["name"])["replicas"])
    return client.request(request["id"])


def take_all_down(client: DaemonClient) -> None:
    for environment in client.environments():
        payload = {"name": environment["name"]}
        with contextlib.suppress(ApiRefused):  # stopped meanwhile
            wait(lambda: client, client.submit("down", payload)["id"])


def until(check: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def becomes(client: DaemonClient, name: str, state: str) -> Json:
    environment: Json = {}

    def holds() -> bool:
        environment.update(client.environment(name))
        return bool(environment["state"] == state)

    until(holds)
    return environment


# Requests.


def test_a_request_can_be_waited_for_in_one_call_and_is_kept_with_its_result(
    http_client: HttpClient,
) -> None:
    body = {"operation": "check", "payload": {}}
    request_id = http_client.request("POST", "/v1/requests", body)["request_id"]
    path = f"/v1/requests/{request_id[:8]}"
    answer = http_client.request("GET", path, query={"wait_seconds": WAIT_SECONDS})
    assert answer["request"]["state"] == "SUCCEEDED"
    assert answer["request"]["result"]["python"]["version"]


@pytest.mark.parametrize(
    ("seconds", "status"), [("5", 404), ("61", 422), ("-1", 422), ("soon", 422)]
)
def test_a_wait_for_an_unknown_request_is_refused(
    http_client: HttpClient, seconds: str, status: int
) -> None:
    with pytest.raises(ApiRefused) as caught:
        http_client.request("GET", "/v1/requests/0123456789abcdef", query={"wait_seconds": seconds})
    assert caught.value.status == status


def test_a_launch_that_fails_is_shown_as_a_request_and_as_no_environment(
    client: DaemonClient, name: str, tmp_path: Path
) -> None:
    run(client, "launch", {"source": "echo", "name": name})
    payload = {"source": "json:Missing", "cwd": str(tmp_path), "name": f"{name}-missing"}
    failed = wait(lambda: client, client.submit("launch", payload)["id"])
    becomes(client, payload["name"], "FAILED")
    assert set(listed(client)) == {name}
    for found in (client.status(), client.status(all_failed=True)):
        assert failed["id"] in [request["id"] for request in found["requests"]]
        assert found["failed_launches_left_out"] == 0
    assert payload["name"] in [each["name"] for each in client.environments()]


@pytest.mark.parametrize(
    ("source", "module"),
    [
        *((source, "") for source in ("ech", "/nope", "./nope", "~nobody-here/x")),
        ("no_such:Env", "no_such"),
        ("no.such:Env", "no"),
        ("helper_env.sub:Env", "helper_env"),
    ],
)
@pytest.mark.parametrize("operation", ["launch", "build_image"])
def test_a_source_that_names_nothing_is_refused_before_it_is_queued(
    client: DaemonClient, name: str, tmp_path: Path, operation: str, source: str, module: str
) -> None:
    before = [request["id"] for request in client.requests()]
    payload = {"source": source, "cwd": str(tmp_path)}
    with pytest.raises(ApiRefused) as refused:
        client.submit(operation, payload | ({"name": name} if operation == "launch" else {}))
    told = refused.value
    assert (told.status, told.kind) == (422, "invalid")
    if module:
        assert f"there is no module {module} in " in told.message
    else:
        with pytest.raises(EnvironmentsError) as caught:
            resolve(source, tmp_path)
        assert (told.message, told.hint) == (caught.value.message, caught.value.hint)
    assert [request["id"] for request in client.requests()] == before
    assert name not in [each["name"] for each in client.environments()]


def test_openapi_shows_every_operation_with_its_fields(http_client: HttpClient) -> None:
    schemas = http_client.request("GET", "/openapi.json")["components"]["schemas"]
    for operation in registry.OPERATIONS.values():
        body = schemas[f"{operation.name.title()}Request"]["properties"]
        assert body["operation"]["const"] == operation.name
        fields = schemas[operation.Payload.__name__].get("properties", {})
        assert set(fields) == set(operation.Payload.model_fields)


# Streams.


def test_a_stream_sends_states_progress_and_log_in_order(client: DaemonClient, name: str) -> None:
    request = client.submit("launch", {"source": "echo", "name": name})
    events = list(client.request_events(request["id"], logs=True, after=None))
    assert {event.name for event in events} == {"state", "progress", "log"}
    places = [tuple(map(int, event.id.split(":"))) for event in events]
    assert places == sorted(places)
    assert [e.data["state"] for e in events if e.name == "state"][-1] == "SUCCEEDED"
    log = "".join(event.data["text"] for event in events if event.name == "log")
    assert log == "".join(client.request_log(request["id"]))
    assert f"{name} is ready at" in log
    events = list(client.request_events(request["id"], logs=True, after=None))
    assert [event.name for event in events] == ["progress", "state", "log"]
    whole = "".join(client.request_log(request["id"])).splitlines()
    assert "".join(client.request_log(request["id"], tail=1)).splitlines() == whole[-1:]
    assert "".join(client.request_log(request["id"], tail=0)) == ""


def test_a_stream_continues_where_it_was(client: DaemonClient, name: str) -> None:
    launch = client.submit("launch", {"source": "echo", "name": name})
    stream = client.request_events(launch["id"], logs=True, after=None)
    first = []
    for event in stream:
        first.append(event)
        if event.name == "progress":
            break
    wait(lambda: client, launch["id"])  # everything else happens while nobody listens
    rest = list(client.request_events(launch["id"], logs=True, after=first[-1].id))
    log = [event.data["text"] for event in [*first, *rest] if event.name == "log"]
    assert "".join(log) == "".join(client.request_log(launch["id"]))
    assert rest[-1].data["state"] == "SUCCEEDED"


def test_a_log_is_followed_to_the_end_of_its_request(client: DaemonClient, stuck: Json) -> None:
    pieces = client.request_log(stuck["id"], follow=True)
    text = next(pieces)
    client.cancel(stuck["id"])
    text += "".join(pieces)
    assert text == "".join(client.request_log(stuck["id"]))


# Cancelling, waiting, dying.


def test_a_request_without_a_worker_waits_says_so_and_is_cancelled_at_once(
    client: DaemonClient, stuck: Json, name: str
) -> None:
    """SkyPilot #7703: a cancel waited in the queue behind what it was to cancel."""
    waiting = client.submit("launch", {"source": "echo", "name": name})
    waiting = client.request(waiting["id"])
    assert (waiting["state"], bool(waiting["pending_reason"])) == ("PENDING", True)
    assert run(client, "check", {})["state"] == "SUCCEEDED"  # SHORT ones do not wait for it
    answer = client.cancel(waiting["id"])
    assert (answer["cancelled"], answer["request"]["state"]) == (True, "CANCELLED")
    assert becomes(client, name, "STOPPED")["replicas"] == []
    assert client.cancel(waiting["id"])["cancelled"] is False
    assert client.request(stuck["id"])["state"] == "RUNNING"


def test_a_worker_that_is_killed_is_named_and_harms_no_other(
    client: DaemonClient, tmp_path: Path, name: str
) -> None:
    """SkyPilot #5048: the request of a killed worker stayed RUNNING and could not be cancelled."""
    run(client, "launch", {"source": "echo", "name": name})
    payload = {"name": name, "out": str(tmp_path / "out"), "episodes": 1_000_000}
    played = client.submit("rollout", payload)
    until(lambda: "".join(client.request_log(played["id"])))
    info = client.info()
    [worker] = [w for w in info["workers"] if w["task_id"] == played["id"]]
    others = {w["pid"] for w in info["workers"]} - {worker["pid"]}
    os.kill(worker["pid"], signal.SIGKILL)
    ended = wait(lambda: client, played["id"])
    assert (ended["state"], ended["error"]["kind"]) == ("FAILED", "worker_lost")
    assert "SIGKILL" in ended["error"]["message"]
    assert ended["error"]["evidence"]["pid"] == worker["pid"]
    assert ended["error"]["log_tail"]
    answer = client.cancel(played["id"])
    assert (answer["cancelled"], answer["cancelling"]) == (False, False)
    assert all(psutil.pid_exists(pid) for pid in others)
    assert run(client, "launch", {"source": "echo", "name": "afterwards"})


def test_a_request_past_its_timeout_fails_as_timed_out(
    client: DaemonClient, tmp_path: Path, name: str
) -> None:
    (tmp_path / "stuck_env.py").write_text(NEVER_READY)
    payload = {"source": "stuck_env:Stuck", "cwd": str(tmp_path), "name": name}
    ended = wait(lambda: client, client.submit("launch", payload, timeout_seconds=0.5)["id"])
    assert (ended["state"], ended["error"]["kind"]) == ("FAILED", "timed_out")
    becomes(client, name, "FAILED")


# Environments.


def listed(client: DaemonClient) -> dict[str, tuple[str, str]]:
    """State and address of each environment that `status` tells of; how full they are changes."""
    environments = client.status()["environments"]
    return {each["name"]: (each["state"], each["address"]) for each in environments}


def test_a_taken_name_is_refused_with_where_it_is_and_an_unknown_one_with_near_matches(
    client: DaemonClient, name: str
) -> None:
    run(client, "launch", {"source": "echo", "name": name})
    address = becomes(client, name, "READY")["address"]
    with pytest.raises(ApiRefused) as caught:
        client.submit("launch", {"source": "echo", "name": name, "update": False})
    assert (caught.value.status, caught.value.kind) == (409, "name_taken")
    assert caught.value.details["address"] == address
    with pytest.raises(ApiRefused) as caught:
        client.environment(f"{name}x")
    assert (caught.value.status, caught.value.kind) == (404, "not_found")
    assert caught.value.details["near"][0] == name


def test_the_log_of_a_replica_is_not_that_of_one_whose_number_begins_alike(
    client: DaemonClient, paths: Paths, name: str
) -> None:
    launched = run(client, "launch", {"source": "echo", "name": name})
    launch_id = launched["id"]
    folder = paths.environment_logs / name
    for ordinal in (1, 11, 20, 21):  # the last is the newest
        log = folder / f"{name}-{ordinal}-{launch_id}.log"
        log.touch(mode=0o600)  # as all files of a home
        log.write_text(f"replica {ordinal}\n")
    for replica, ordinal in [("1", 1), ("11", 11), (f"1-{launch_id}", 1), ("20", 20)]:
        found = "".join(client.environment_log(name, replica=f"{name}-{replica}"))
        assert found == f"replica {ordinal}\n"
    log = folder / f"{name}-21-{launch_id}.log"
    marks = log.with_name(f"{log.name}.times")
    marks.touch(mode=0o600)
    marks.write_text(f"{time.time() - 600} {len('replica 21')}\n")
    with log.open("a") as file:
        file.write("and now\n")
    of = partial(client.environment_log, name, replica=f"{name}-21")
    assert "".join(of(since=1200)) == "replica 21\nand now\n"
    assert "".join(of(since=300)) == "replica 21\nand now\n"  # the mark is within its line
    assert "".join(of(since=300, tail=1)) == "and now\n"
    marks.write_text(f"{time.time() - 600} {len('replica 21') + 1}\n")
    assert "".join(of(since=300)) == "and now\n"
    os.utime(log, (1, 1))
    assert "".join(of(since=300)) == ""
    with pytest.raises(ApiRefused, match=f"{name} has no replica '{name}-2'") as refused:
        "".join(client.environment_log(name, replica=f"{name}-2"))
    assert f"its replicas are {name}-0-" in str(refused.value.hint)


def test_the_line_of_a_log_in_the_progress_has_no_secret_of_the_launch(
    client: DaemonClient, tmp_path: Path, name: str
) -> None:
    text = "import os, time\nprint('with', os.environ['API_KEY'], flush=True)\ntime.sleep(2)\n"
    (tmp_path / "slow_env.py").write_text(text + TALKING)
    payload = {"source": "slow_env:Talking", "cwd": str(tmp_path), "name": name}
    request = client.submit("launch", {**payload, "env": {"API_KEY": "hunter2hunter2"}})
    events = [*follow(client, request["id"], reconnect=lambda: client)]
    progress = [str(each.data) for each in events if each.name == "progress"]
    assert any("ready: with ***" in each for each in progress), progress
    assert not any("hunter2hunter2" in each for each in progress)
    run(client, "down", {"name": name})


def test_a_log_that_is_followed_goes_on_after_an_update_and_ends_when_it_is_down(
    client: DaemonClient, tmp_path: Path, name: str
) -> None:
    (tmp_path / "talking_env.py").write_text(TALKING)
    payload = {"source": "talking_env:Talking", "cwd": str(tmp_path), "name": name}
    wait(lambda: client, client.submit("launch", payload)["id"])
    [first] = client.environment(name)["replicas"]
    seen: list[str | None] = []
    pieces = client.environment_log(name, follow=True, on_change=seen.append)
    assert "imported" in next(pieces)
    wait(lambda: client, client.submit("launch", payload)["id"])
    until(lambda: first["id"] not in [r["id"] for r in client.environment(name)["replicas"]])
    [second] = client.environment(name)["replicas"]
    assert "imported" in next(pieces)
    assert seen == [second["id"]]
    run(client, "down", {"name": name})
    assert "".join(pieces) == ""
    assert seen == [second["id"], None]


# Security.


def tcp(client: DaemonClient, path: str, **headers: str) -> tuple[int, str]:
    port = int(client.identity["port"])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()


@pytest.fixture
def metrics(client: DaemonClient, paths: Paths) -> Callable[[], str]:
    token = f"Bearer {paths.token.read_text().strip()}"
    return lambda: tcp(client, "/metrics", Authorization=token)[1]


def test_no_secret_is_shown_and_every_file_is_private(
    client: DaemonClient, paths: Paths, name: str
) -> None:
    env = {"API_TOKEN": "hush-1", "DATABASE": "postgres://me:hush-2@db/x", "MODEL": "small"}
    request = run(client, "launch", {"source": "echo", "name": name, "env": env})
    answer = json.dumps([request, client.status(), client.info(), client.environment(name)])
    answer += "".join(client.request_log(request["id"])) + paths.daemon_log.read_text()
    answer += "".join(
        json.dumps(event.data)
        for event in client.request_events(request["id"], logs=True, after="1:0")
    )
    assert "hush" not in answer
    assert request["payload"]["env"] == {"API_TOKEN": "***", "DATABASE": "***", "MODEL": "small"}
    for path in [paths.home, *paths.home.rglob("*")]:
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_secrets_in_the_reason_of_a_failure_are_shown_nowhere(
    client: DaemonClient, paths: Paths, name: str, tmp_path: Path
) -> None:
    (tmp_path / "leaky.py").write_text("import os\nraise KeyError(os.environ['API_TOKEN'])\n")
    env = {"API_TOKEN": "hush-hush"}
    payload = {"source": "leaky:Leaky", "cwd": str(tmp_path), "name": name, "env": env}
    failed = wait(lambda: client, client.submit("launch", payload)["id"])
    assert "KeyError: '***'" in failed["error"]["message"]
    becomes(client, name, "FAILED")
    with pytest.raises(ApiRefused, match=f"{name} has no address, it is FAILED: ") as refused:
        client.base_url(name)
    assert "KeyError" in refused.value.message
    told = [client.status(), client.environment(name), refused.value.details]
    answer = json.dumps([failed, *told])
    assert "hush" not in answer + paths.daemon_log.read_text()


# The daemon itself.


def test_prometheus_reads_all_that_grafana_shows(
    client: DaemonClient, name: str, metrics: Callable[[], str]
) -> None:
    run(client, "launch", {"source": "echo", "name": name})
    [replica] = becomes(client, name, "READY")["replicas"]
    labels = f'environment="{name}",replica="{replica["id"]}"'
    until(lambda: f"openenvd_replica_waiting{{{labels}}} 0\n" in metrics())
    page = metrics()
    assert f"openenvd_replica_steps_total{{{labels}}} 0\n" in page
    samples = [line for line in page.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'openenvd_\w+(\{(\w+="[^"]*",?)*\})? \S+', line) for line in samples)
    assert f'openenvd_environment_info{{environment="{name}",state="READY"}} 1' in samples
    lag = [line for line in samples if line.startswith("openenvd_loop_lag_seconds")]
    assert re.findall(r'quantile="([\d.]+)"', "".join(lag)) == ["0.5", "0.99", "1"]
    nothing: Json = {"shards": [], "isolated": 0, "branches": 0, "checkpoints": 0}
    page = metrics() + metrics_of_shards("any", nothing)
    known = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    panels = json.loads((ROOT / "docs" / "deploy" / "grafana.json").read_text())["panels"]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for expression in shown for name in re.findall(r"openenvd_\w+", expression)}
    assert len(names) >= 10
    assert names <= known


def example(page: str, begins: str) -> Json:
    for block in re.findall(r"```json\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        if block.startswith(begins):
            found: Json = json.loads(block)
            return found
    raise AssertionError(f"{page} has no example {begins}")


def test_answers_have_the_documented_shapes(client: DaemonClient, name: str) -> None:
    request = wait(lambda: client, client.submit("probe", {"name": "nobody"})["id"])
    assert request["state"] == "FAILED"
    assert "nobody has no replica" in request["error"]["message"]
    assert request["error"]["hint"]
    documented = example("docs/api.md", '{"id"')
    assert set(request) == set(documented)
    assert set(request["error"]) == set(documented["error"])
    run(client, "launch", {"source": "echo", "name": name})
    environment = becomes(client, name, "READY")
    documented = example("docs/api.md", '{"name"')
    assert set(environment) == set(documented)
    assert set(environment["generations"][0]) == set(documented["generations"][0])
    assert set(environment["replicas"][0]) == set(documented["replicas"][0])


def test_a_daemon_that_stops_ends_its_streams_itself(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "home")
    client = daemon.connect(paths, settings=ONE_WORKER)
    (tmp_path / "stuck_env.py").write_text(NEVER_READY)
    payload = {"source": "stuck_env:Stuck", "cwd": str(tmp_path), "name": "stuck"}
    request = client.submit("launch", payload)
    until(lambda: client.environment("stuck")["replicas"])
    streams: list[Iterator[Any]] = [
        client.changes(after="1:0"),
        client.request_events(request["id"], logs=True, after=None),
        client.request_log(request["id"], follow=True),
    ]
    for stream in streams:
        next(stream)
    os.kill(client.identity["pid"], signal.SIGTERM)
    for stream in streams:
        list(stream)  # a connection that is cut would raise
    until(lambda: daemon.find(paths) is None)
    client = daemon.connect(paths, settings=ONE_WORKER)
    take_all_down(client)
    daemon.stop(paths)
