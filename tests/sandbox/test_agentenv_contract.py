"""What keeps the test server honest: AgentENV's own OpenAPI description, and the official e2b client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from agentenv_server import AgentEnvServer

from sandbox_client import SandboxSpec
from sandbox_client.errors import InvalidRequest, SandboxError, SandboxPaused

DESCRIPTION = Path(__file__).parents[3] / "shared" / "agentenv" / "openapi.yml"


def schema(node: Any) -> Any:
    """OpenAPI 3.0 -> JSON Schema: ``nullable`` becomes a second type."""
    if isinstance(node, list):
        return [schema(n) for n in node]
    if not isinstance(node, dict):
        return node
    found = {
        k: schema(v) for k, v in node.items() if k not in ("nullable", "example", "discriminator", "xml")
    }
    if node.get("nullable"):
        return {"anyOf": [found, {"type": "null"}]}
    return found


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    if not DESCRIPTION.exists():
        pytest.skip("AgentENV's interface description is not on this machine")
    import yaml

    return yaml.safe_load(DESCRIPTION.read_text())


def check(value: Any, node: dict[str, Any], description: dict[str, Any]) -> None:
    import jsonschema

    whole = {**schema(node), "components": schema(description["components"])}
    jsonschema.Draft202012Validator(whole).validate(value)


def resolve(node: dict[str, Any], description: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in node:
        return node
    found: Any = description
    for part in node["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return found


async def exercise(backend) -> None:
    sandbox = await backend.create(SandboxSpec(ttl_s=60, env={"A": "1"}, metadata={"run": "contract"}))
    await backend.create(SandboxSpec(template="image:python:3.12"))
    await sandbox.exec("echo hi")
    await sandbox.extend(90)
    await sandbox.fork(2)
    snapshot = await sandbox.snapshot("named")
    await backend.list({"run": "contract"})
    await backend.list_snapshots()
    await sandbox.pause()
    for refused in (sandbox.snapshot, sandbox.fork, lambda: sandbox.extend(5)):
        with pytest.raises(SandboxPaused):
            await refused()
    await sandbox.resume()
    await backend._connect_call(sandbox.id, {"timeout": 60})
    await sandbox.info()
    with pytest.raises(InvalidRequest):
        await backend.create(SandboxSpec(template="nope"))
    await backend.delete_snapshot(snapshot.id)
    await sandbox.kill()
    with pytest.raises(SandboxError):
        await sandbox.info()


async def test_every_exchange_fits_the_interface_description(
    server: AgentEnvServer, agentenv, description
) -> None:
    await exercise(agentenv)
    assert {e["path"] for e in server.exchanges} >= {
        "/sandboxes",
        "/sandboxes-cold",
        "/v2/sandboxes",
        "/snapshots",
    }
    refused_elsewhere = {("/sandboxes/{sandboxID}/timeout", 500)}  # spec/07: a disguised 400
    for exchange in server.exchanges:
        where = (exchange["path"], exchange["status"])
        operation = description["paths"][exchange["path"]][exchange["method"].lower()]
        if exchange["request"] is not None:
            body = resolve(operation["requestBody"], description)
            check(exchange["request"], body["content"]["application/json"]["schema"], description)
        responses = operation["responses"]
        assert str(exchange["status"]) in responses or where in refused_elsewhere, where
        response = resolve(responses[str(exchange["status"])], description)
        if "content" in response:
            check(exchange["response"], response["content"]["application/json"]["schema"], description)
        else:
            assert exchange["response"] is None, where


async def test_the_validation_can_fail(description) -> None:
    import jsonschema

    with pytest.raises(jsonschema.ValidationError):
        check({"templateID": 7}, {"$ref": "#/components/schemas/NewSandbox"}, description)
    with pytest.raises(jsonschema.ValidationError):
        check({"sandboxID": "x"}, {"$ref": "#/components/schemas/Sandbox"}, description)


def test_the_official_client_works_against_the_server(server: AgentEnvServer, monkeypatch) -> None:
    e2b = pytest.importorskip("e2b")
    from importlib.metadata import version

    if tuple(map(int, version("e2b").split(".")[:2])) >= (2, 51):
        pytest.skip("this e2b creates by POST /v2/sandboxes, which AgentENV has not: pip install 'e2b<2.51'")
    monkeypatch.setenv("E2B_API_URL", server.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", server.url)
    monkeypatch.setenv("E2B_API_KEY", server.api_key)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    sandbox = e2b.Sandbox.create("base", timeout=60, metadata={"by": "e2b"}, envs={"A": "1"})
    assert sandbox.is_running()
    done = sandbox.commands.run("echo out $A; echo err >&2")
    assert (done.stdout, done.stderr, done.exit_code) == ("out 1\n", "err\n", 0)
    with pytest.raises(e2b.CommandExitException) as caught:
        sandbox.commands.run("exit 3")
    assert caught.value.exit_code == 3
    sandbox.files.write("folder/file.txt", "written by e2b")
    assert sandbox.files.read("folder/file.txt") == "written by e2b"
    assert [e.name for e in sandbox.files.list("folder")] == ["file.txt"]
    assert sandbox.files.exists("folder/file.txt")
    sandbox.files.rename("folder/file.txt", "folder/other.txt")
    sandbox.files.make_dir("made")
    sandbox.files.remove("made")
    assert not sandbox.files.exists("made")
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "typed\n")
    assert [p.pid for p in sandbox.commands.list()] == [handle.pid]
    handle.kill()
    listed = e2b.Sandbox.list(query=e2b.SandboxQuery(metadata={"by": "e2b"})).next_items()
    assert [i.sandbox_id for i in listed] == [sandbox.sandbox_id]
    sandbox.set_timeout(120)
    sandbox.beta_pause()
    again = e2b.Sandbox.connect(sandbox.sandbox_id, timeout=60)
    # A handle from `connect` sends no routing headers to a custom address in this version of the client.
    assert sandbox.files.read("folder/other.txt") == "written by e2b"
    assert again.kill()
    assert not again.kill()


def test_both_clients_see_one_world(server: AgentEnvServer) -> None:
    """JSON that the client sends must survive a round trip through the server's records."""
    from agentenv_client import client_config

    from sandbox_client.agentenv import AgentEnvBackend

    async def run() -> None:
        async with AgentEnvBackend(client_config(server)) as backend:
            odd = {"run": "ä b+c&d=e", "quote": '"', "empty-ish": " "}
            sandbox = await backend.create(SandboxSpec(metadata=odd))
            (found,) = await backend.list(odd)
            assert found.id == sandbox.id
            assert odd.items() <= found.metadata.items()

    asyncio.run(run())
    assert json.dumps(server.exchanges)
