"""The AgentENV client against a server that misbehaves: by the facts of its API, and on purpose."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import httpx
import pytest
from agentenv_client import client_config
from agentenv_server import AgentEnvServer, Fault

from sandbox_client import SandboxSpec, State
from sandbox_client.agentenv import AgentEnvBackend, AgentEnvConfig
from sandbox_client.agentenv.envd import FrameParser, exit_of, frame
from sandbox_client.agentenv.http import classify
from sandbox_client.agentenv.records import CREATE_KEY
from sandbox_client.errors import (
    AuthenticationFailed,
    BrokenStream,
    Conflict,
    InvalidRequest,
    SandboxError,
    SandboxNotFound,
    SandboxPaused,
    SandboxTimeout,
    ServerFault,
    Unavailable,
)

SPEC = SandboxSpec(ttl_s=120, metadata={"run": "faults"})


def count(server: AgentEnvServer, method: str, path: str) -> int:
    return sum(r == f"{method} {path}" for r in server.requests)


# ------------------------------------------------------------ pure parts


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (500, b'{"code": 400, "message": "paused"}', InvalidRequest),
        (500, b'{"code": 503, "message": "shutting down"}', Unavailable),
        (500, b'{"code": 500, "message": "x"}', ServerFault),
        (404, b'{"code": 404, "message": "x"}', SandboxNotFound),
        (409, b"{}", Conflict),
        (502, b"<html>bad gateway</html>", Unavailable),
        (503, b"", Unavailable),
        (504, b"upstream timed out", Unavailable),
        (401, b"no", AuthenticationFailed),
        (410, b"paused", SandboxPaused),
        (400, b'["not", "an object"]', InvalidRequest),
        (418, b'{"code": "word"}', InvalidRequest),
        (500, b"\xff\xfe", ServerFault),
    ],
)
def test_errors_are_classified_by_the_bodys_code_first(status: int, body: bytes, kind: type) -> None:
    error = classify(status, body, "POST /x")
    assert type(error) is kind
    assert "POST /x" in str(error)


def test_frames_are_found_however_the_bytes_are_cut() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    payloads = [{"event": {"n": n, "x": "y" * rng.randrange(300)}} for n in range(50)]
    data = b"".join(frame(p, flags=2 * (p is payloads[-1])) for p in payloads)
    parser, found = FrameParser(), []
    while data:
        size = rng.randrange(1, 40)
        found += parser.feed(data[:size])
        data = data[size:]
    assert b"".join(frame_bytes(f) for f in found) == b"".join(
        frame(p, 2 * (p is payloads[-1])) for p in payloads
    )
    with pytest.raises(BrokenStream):
        FrameParser().feed(b"\x00\xff\xff\xff\xff")


def frame_bytes(found: tuple[int, bytes]) -> bytes:
    flags, payload = found
    return bytes([flags]) + len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ({"exited": True, "status": "exit status 0"}, 0),  # proto3 leaves zeros out
        ({}, 0),
        ({"exitCode": 3, "exited": True}, 3),
        ({"exitCode": -1, "status": "signal: killed"}, 137),
        ({"exitCode": -1, "status": "signal: segmentation fault (core dumped)"}, 139),
        ({"exitCode": -1, "status": "signal: terminated"}, 143),
        ({"exitCode": -1, "status": "odd"}, 137),
    ],
)
def test_exit_codes_are_read_as_a_shell_counts(end: dict, code: int) -> None:
    assert exit_of(end, False).exit_code == code


def test_configuration_is_checked_and_hides_the_key() -> None:
    with pytest.raises(ValueError, match="not an http address"):
        AgentEnvConfig(api_url="127.0.0.1:8000")
    assert "secret" not in repr(AgentEnvConfig(api_key="secret"))


# ------------------------------------------------------------ the API's own habits


def test_configuration_comes_from_the_environment(monkeypatch) -> None:
    for name in ("URL", "API_KEY", "DATA_URL", "DOMAIN"):
        monkeypatch.delenv(f"AGENTENV_{name}", raising=False)
    for name in ("API_URL", "API_KEY", "SANDBOX_URL"):
        monkeypatch.delenv(f"E2B_{name}", raising=False)
    assert AgentEnvConfig.from_environment() == AgentEnvConfig()
    monkeypatch.setenv("E2B_API_URL", "http://gateway:8080")
    monkeypatch.setenv("E2B_API_KEY", "e2b_key")
    assert AgentEnvConfig.from_environment() == AgentEnvConfig("http://gateway:8080", "e2b_key")
    monkeypatch.setenv("AGENTENV_URL", "http://node:8000")
    assert AgentEnvConfig.from_environment() == AgentEnvConfig("http://node:8000", "e2b_key")


async def test_wrong_key_is_refused_and_keys_stay_out_of_sandboxes(server: AgentEnvServer) -> None:
    async with AgentEnvBackend(replace(client_config(server), api_key="e2b_wrong")) as backend:
        with pytest.raises(AuthenticationFailed):
            await backend.create(SPEC)
    async with AgentEnvBackend(client_config(server)) as backend:
        assert "x-api-key" not in backend.data.headers


async def test_status_codes_on_the_wire_follow_the_state_table(server: AgentEnvServer) -> None:
    """Checks the test server itself against spec/07 §4 and §10, without the client."""
    async with httpx.AsyncClient(base_url=server.url, headers={"X-API-Key": server.api_key}) as http:

        async def call(method: str, path: str, body=None) -> tuple[int, object]:
            response = await http.request(method, path, json=body)
            try:
                return response.status_code, response.json()
            except ValueError:
                return response.status_code, None

        assert (await http.get("/health")).status_code == 204
        assert (await call("POST", "/sandboxes", {"templateID": "nope"}))[0] == 400
        status, made = await call("POST", "/sandboxes", {"templateID": "base", "timeout": 60, "secure": True})
        assert status == 201
        at = f"/sandboxes/{made['sandboxID']}"
        steps = [
            ("GET", "", None, 200),
            ("POST", "/pause", None, 204),
            ("POST", "/pause", None, 204),
            ("POST", "/snapshots", {}, 400),
            ("POST", "/fork", {"count": 1}, 404),
            ("POST", "/timeout", {"timeout": 60}, 500),
            ("POST", "/refreshes", {"duration": 60}, 500),
            ("POST", "/resume", {"timeout": 60}, 201),
            ("POST", "/resume", {"timeout": 60}, 201),
            ("POST", "/connect", {"timeout": 60}, 200),
            ("POST", "/connect", {}, 400),
            ("POST", "/snapshots", {"name": "n"}, 201),
            ("POST", "/fork", {"count": 2}, 201),
            ("DELETE", "", None, 204),
            ("GET", "", None, 404),
        ]
        for method, path, body, expected in steps:
            status, said = await call(method, at + path, body)
            assert status == expected, (method, path, said)
            if status == 500:
                assert said["code"] == 400
        twice = httpx.Headers([("X-API-Key", server.api_key), ("X-API-Key", server.api_key)])
        async with httpx.AsyncClient(base_url=server.url, headers=twice) as double:
            assert (await double.get("/v2/sandboxes")).status_code == 401
        async with httpx.AsyncClient(base_url=server.url) as bearer:
            answer = await bearer.get("/v2/sandboxes", headers={"Authorization": "Bearer x"})
            assert answer.status_code == 401


async def test_ttl_is_always_sent_and_forks_inherit_the_marks(server: AgentEnvServer, agentenv) -> None:
    sandbox = await agentenv.create(replace(SPEC, ttl_s=90.2))
    (child,) = await sandbox.fork()
    info = await child.info()
    assert info.ends_at - info.started_at > 60
    sent = [e["request"] for e in server.exchanges if e["path"] == "/sandboxes"]
    assert sent[0]["timeout"] == 91
    assert sent[0]["autoPause"] is True
    assert sent[0]["allow_internet_access"] is False
    assert CREATE_KEY in sent[0]["metadata"]
    assert child._envd.tokens["envd"] != sandbox._envd.tokens["envd"]


async def test_cold_create_has_its_own_spelling(server: AgentEnvServer, agentenv) -> None:
    await agentenv.create(replace(SPEC, template="image:docker.io/library/python:3.12"))
    (sent,) = [e["request"] for e in server.exchanges if e["path"] == "/sandboxes-cold"]
    assert sent["allowInternetAccess"] is False
    assert "allow_internet_access" not in sent
    assert "templateID" not in sent
    assert sent["diskSizeMB"] % 1024 == 0
    assert sent["image"] == "docker.io/library/python:3.12"


async def test_listing_follows_all_pages(server: AgentEnvServer, agentenv, monkeypatch) -> None:
    made = [await agentenv.create(SPEC) for _ in range(5)]
    await made[0].pause()
    original = agentenv._pages
    monkeypatch.setattr(agentenv, "_pages", lambda path, params: original(path, {**params, "limit": "2"}))
    assert {i.id for i in await agentenv.list({"run": "faults"})} == {s.id for s in made}
    assert count(server, "GET", "/v2/sandboxes") == 3
    assert [i.id for i in await agentenv.list(state=State.PAUSED)] == [made[0].id]


async def test_forks_are_asked_for_in_batches(server: AgentEnvServer, agentenv, monkeypatch) -> None:
    monkeypatch.setattr("sandbox_client.agentenv.sandbox.FORK_BATCH", 2)
    sandbox = await agentenv.create(SPEC)
    children = await sandbox.fork(5)
    assert len({c.id for c in children}) == 5
    sizes = [e["request"]["count"] for e in server.exchanges if e["path"].endswith("/fork")]
    assert sizes == [2, 2, 1]


async def test_one_failed_child_undoes_the_fork(server: AgentEnvServer, agentenv) -> None:
    sandbox = await agentenv.create(SPEC)
    server.fail_fork_child = 1
    with pytest.raises(ServerFault, match="no room"):
        await sandbox.fork(3)
    await eventually(lambda: set(server.records) == {sandbox.id})


# ------------------------------------------------------------ transitions


@pytest.mark.parametrize(
    ("call", "passing", "then"),
    [
        ("pause", "Resuming", "Running"),
        ("pause", "Creating", "Running"),
        ("pause", "Forking", "Running"),
        ("pause", "Pausing", "Paused"),
        ("resume", "Pausing", "Paused"),
        ("resume", "Snapshotting", "Running"),
        ("resume", "Resuming", "Running"),
        ("snapshot", "Snapshotting", "Running"),
        ("fork", "Resuming", "Running"),
        ("extend", "Snapshotting", "Running"),
    ],
)
async def test_calls_outlast_passing_states(server, agentenv, call: str, passing: str, then: str) -> None:
    sandbox = await agentenv.create(SPEC)
    if then == "Paused":
        await server.records[sandbox.id].sandbox.pause()
    server.hold(sandbox.id, passing)
    asyncio.get_running_loop().call_later(0.15, server.release, sandbox.id, then)
    arguments = (60,) if call == "extend" else ()
    await getattr(sandbox, call)(*arguments)
    assert server.records[sandbox.id].state in ("Running", "Paused")


async def test_a_409_storm_ends_in_a_typed_conflict(server, agentenv) -> None:
    sandbox = await agentenv.create(SPEC)
    agentenv.config = replace(agentenv.config, patience_s=1.0)
    server.faults.append(Fault("POST", r"/sandboxes/.*/pause", times=1000, status=409, code=409))
    began = time.monotonic()
    with pytest.raises(Conflict):
        await sandbox.pause()
    assert time.monotonic() - began < 3
    assert 3 <= count(server, "POST", f"/sandboxes/{sandbox.id}/pause") <= 20  # it backs off
    server.faults.clear()
    server.faults.append(Fault("POST", r"/sandboxes/.*/pause", times=3, status=409, code=409))
    await sandbox.pause()
    assert (await sandbox.info()).state is State.PAUSED


# ------------------------------------------------------------ outages


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_gateway_errors_are_waited_out_where_repeating_is_safe(server, agentenv, status: int) -> None:
    sandbox = await agentenv.create(SPEC)
    server.faults.append(Fault("POST|GET|DELETE", "x"))
    for method, path, call in [
        ("POST", ".*/pause", sandbox.pause),
        ("POST", ".*/resume", sandbox.resume),
        ("POST", ".*/timeout", lambda: sandbox.extend(60)),
        ("GET", ".*/sandboxes/.*", sandbox.info),
        ("DELETE", ".*", sandbox.kill),
    ]:
        server.faults[:] = [Fault(method, path, times=2, status=status)]
        await call()
        assert server.faults[0].times == 0


async def test_disguised_shutdown_is_waited_out(server, agentenv) -> None:
    sandbox = await agentenv.create(SPEC)
    server.faults.append(Fault("POST", ".*/pause", times=2, status=500, code=503))
    await sandbox.pause()


@pytest.mark.parametrize("call", ["start", "fork", "snapshot"])
async def test_calls_that_must_not_run_twice_are_not_repeated(server, agentenv, call: str) -> None:
    sandbox = await agentenv.create(SPEC)
    await sandbox.exec("true")
    path = {"start": "/process.Process/Start", "fork": ".*/fork", "snapshot": ".*/snapshots"}[call]
    server.faults.append(Fault("POST", path, times=1, status=500, code=500))
    with pytest.raises(SandboxError):
        await {"start": lambda: sandbox.exec("true"), "fork": sandbox.fork, "snapshot": sandbox.snapshot}[
            call
        ]()
    assert sum(
        r.startswith("POST") and r.rsplit("/", 1)[1] == path.rsplit("/", 1)[1] for r in server.requests
    ) == (2 if call == "start" else 1)


async def test_lost_answer_of_a_create_is_found_by_its_mark(server, agentenv) -> None:
    server.faults.append(Fault("POST", "/sandboxes", drop="after"))
    sandbox = await agentenv.create(SPEC)
    assert count(server, "POST", "/sandboxes") == 1
    assert set(server.records) == {sandbox.id}
    assert (await sandbox.exec("echo adopted")).stdout == "adopted\n"


async def test_create_that_never_happened_is_made_again(server, agentenv) -> None:
    server.faults.append(Fault("POST", "/sandboxes", drop="before"))
    sandbox = await agentenv.create(SPEC)
    assert count(server, "POST", "/sandboxes") == 2
    assert set(server.records) == {sandbox.id}


async def test_slow_create_is_found_after_the_client_gave_up(server) -> None:
    server.faults.append(Fault("POST", "/sandboxes", delay_s=1.2))
    async with AgentEnvBackend(client_config(server, request_s=0.5, lookup_s=3.0)) as backend:
        sandbox = await backend.create(SPEC)
        assert set(server.records) == {sandbox.id}


async def test_cancelled_create_leaves_nothing(server, agentenv) -> None:
    server.faults.append(Fault("POST", "/sandboxes", delay_s=0.3))
    task = asyncio.ensure_future(agentenv.create(SPEC))
    await asyncio.sleep(0.15)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await agentenv.close()
    assert count(server, "DELETE", "/v2/sandboxes") == 0
    await eventually(lambda: not server.records and "POST /sandboxes" in server.requests)


async def test_lost_answer_of_a_fork_leaves_no_children(server, agentenv) -> None:
    sandbox = await agentenv.create(SPEC)
    other = await agentenv.create(SPEC)
    (earlier,) = await sandbox.fork()
    server.faults.append(Fault("POST", ".*/fork", drop="after"))
    with pytest.raises(Unavailable):
        await sandbox.fork(2)
    await agentenv.close()
    assert set(server.records) == {sandbox.id, other.id, earlier.id}


async def test_lost_answer_of_a_snapshot_is_found_by_its_name(server, agentenv) -> None:
    sandbox = await agentenv.create(SPEC)
    server.faults.append(Fault("POST", ".*/snapshots", drop="after"))
    found = await sandbox.snapshot()
    assert list(server.snapshots) == [found.id]


async def test_pause_that_outlasts_the_client_is_polled(server) -> None:
    async with AgentEnvBackend(client_config(server, request_s=0.3)) as backend:
        sandbox = await backend.create(SPEC)
        server.faults.append(Fault("POST", ".*/pause", delay_s=0.6))
        await sandbox.pause()
        assert (await sandbox.info()).state is State.PAUSED


# ------------------------------------------------------------ the data plane


async def test_a_stream_cut_half_way_is_never_a_result(server, agentenv) -> None:
    sandbox = await agentenv.create(SPEC)
    await sandbox.exec("true")
    for after_bytes in (1, 60, 3000):
        server.faults[:] = [Fault("POST", "/process.Process/Start", drop="stream", after_bytes=after_bytes)]
        with pytest.raises(BrokenStream):
            await sandbox.exec("for i in $(seq 400); do echo line $i; done; sleep 0.3")
        assert server.faults[0].times == 0
    assert (await sandbox.exec("echo fine")).ok


async def test_first_call_after_create_and_resume_is_waited_for(tmp_path, needs_isolation) -> None:
    with AgentEnvServer(tmp_path / "slow", first_call_delay_s=0.3) as server:
        async with AgentEnvBackend(client_config(server, first_call_pause_s=0.1)) as backend:
            sandbox = await backend.create(SPEC)
            assert (await sandbox.exec("echo up")).stdout == "up\n"
            await sandbox.pause()
            await sandbox.resume()
            assert (await sandbox.exec("echo up")).stdout == "up\n"
            assert count(server, "POST", "/process.Process/Start") == 2


async def test_expired_sandbox_fails_alone_with_its_reason(server, agentenv) -> None:
    dies = await agentenv.create(replace(SPEC, ttl_s=1, auto_pause=False))
    lives = await agentenv.create(SPEC)
    await asyncio.sleep(1.2)
    with pytest.raises(SandboxNotFound, match=dies.id):
        await dies.exec("true")
    with pytest.raises(SandboxNotFound, match=dies.id):
        await dies.read_file("x")
    assert (await lives.exec("true")).ok


async def test_trajectories_survive_a_restart_of_the_server(server, agentenv) -> None:
    sandbox = await agentenv.create(SPEC)
    await sandbox.write_file("kept", "yes")
    await sandbox.pause()
    server.stop()
    resuming = asyncio.ensure_future(sandbox.resume())
    await asyncio.sleep(0.5)
    server.start()
    await resuming
    assert await sandbox.read_file("kept") == b"yes"


async def test_server_that_is_away_is_a_typed_failure(server, agentenv) -> None:
    sandbox = await agentenv.create(SPEC)
    agentenv.config = replace(agentenv.config, patience_s=0.5)
    server.stop()
    try:
        for call in (sandbox.info, sandbox.pause, sandbox.kill, lambda: agentenv.create(SPEC)):
            with pytest.raises(Unavailable):
                await asyncio.wait_for(call(), 10)
        with pytest.raises(SandboxError):
            await sandbox.exec("true")
    finally:
        server.start()
    await sandbox.kill()


async def test_silent_server_is_bounded(server) -> None:
    async with AgentEnvBackend(client_config(server, request_s=0.3, patience_s=0.5)) as backend:
        sandbox = await backend.create(SPEC)
        server.faults.append(Fault("GET", ".*", times=100, delay_s=2))
        began = time.monotonic()
        with pytest.raises(SandboxTimeout):
            await sandbox.info()
        assert time.monotonic() - began < 3


async def eventually(condition, limit_s: float = 8.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        await asyncio.sleep(0.05)
