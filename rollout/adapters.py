"""Environments of other libraries behind our protocol: reasoning-gym, and anything shaped like Prime
Intellect's verifiers. Neither library is imported before a problem asks for it."""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

from k3rl.chat.messages import as_message
from k3rl.data.gym import gym_dataset
from k3rl.errors import UserError
from k3rl.types import Message, Problem, StopReason
from rollout.environment import Opening, Reply, Turn, register_environment

Json = dict[str, Any]


@register_environment("reasoning_gym")
class ReasoningGymEnvironment:
    """One turn; the task's own verifier scores the answer into ``environment_state["environment"]["score"]``.

    The problem's ``reward`` names task, arguments and index, as `k3rl.data.gym` writes them.
    """

    def __init__(self, problem: Problem) -> None:
        reward = problem.reward
        if missing := [k for k in ("task", "arguments", "index") if k not in reward]:
            raise UserError(
                f"problem '{problem.id}': reward.{missing[0]} is missing, which reasoning-gym needs"
            )
        self._dataset = gym_dataset(reward["task"], reward["arguments"])
        self._entry = self._dataset[reward["index"]]
        self._state: Json = {}

    async def reset(self) -> Opening:
        return Opening()

    async def step(self, turn: Turn) -> Reply:
        answer = turn.response.content.strip()
        self._state = {"score": float(self._dataset.score_answer(answer=answer, entry=self._entry))}
        return Reply(done=True)

    async def pause(self) -> None: ...

    async def resume(self, state: Json) -> None:
        self._state = state

    async def close(self) -> None: ...

    def state(self) -> Json:
        return self._state

    def sandbox(self) -> dict[str, str] | None:
        return None


@register_environment("verifiers")
class VerifiersEnvironment:
    """One rollout of an environment shaped like verifiers' ``MultiTurnEnv``.

    What is used of it: ``setup_state(state)``, ``is_completed(state)`` or ``is_completed(messages, state)``,
    ``env_response(messages, state)`` giving messages or ``(messages, state)``, ``oai_tools``,
    ``system_prompt``; each sync or async. Of the state, what is JSON survives a process; the rest is made
    again by ``setup_state``.

    ``environment`` is such an object, or ``package.module`` with ``load_environment(**arguments)``.
    """

    def __init__(self, problem: Problem, environment: Any, arguments: Json | None = None) -> None:
        if isinstance(environment, str):
            environment = _load(environment, json.dumps(arguments or {}, sort_keys=True))
        for name in ("env_response", "is_completed"):
            if not callable(getattr(environment, name, None)):
                raise UserError(f"problem '{problem.id}': its verifiers environment has no {name}()")
        self._environment, self._problem = environment, problem
        self._messages: list[Message] = list(problem.messages)
        system = getattr(environment, "system_prompt", None)
        if system and not any(m["role"] == "system" for m in self._messages):
            self._messages.insert(0, {"role": "system", "content": system})
        self._prompt_length = len(self._messages)
        self._state: Json = {}

    async def reset(self) -> Opening:
        await self._setup()
        tools = [*self._problem.tools, *(getattr(self._environment, "oai_tools", None) or [])]
        return Opening(messages=list(self._messages), tools=tools)

    async def _setup(self) -> None:
        self._state = {
            "prompt": list(self._messages[: self._prompt_length]),
            "completion": [],
            "answer": self._problem.reward.get("answer", ""),
            "task": self._problem.metadata.get("task", self._problem.domain),
            "info": dict(self._problem.metadata),
            "trajectory": [],
            "turn": 0,
        }
        setup = getattr(self._environment, "setup_state", None)
        if setup is not None:
            self._state = await _maybe(setup(self._state)) or self._state

    async def step(self, turn: Turn) -> Reply:
        said = as_message(turn.response)
        for call in said.get("tool_calls", ()):  # OpenAI's form has the arguments as a string
            if not isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        before = list(self._messages)
        self._messages.append(said)
        self._state["trajectory"].append({"prompt": before, "completion": [said]})
        self._state["turn"] = turn.number
        self._state["completion"] = self._messages[self._prompt_length :]
        if await self._completed():
            return Reply(done=True, stop_reason=StopReason.END_OF_TURN)
        answer = await _maybe(self._environment.env_response(list(self._messages), self._state))
        if isinstance(answer, tuple):
            answer, state = answer
            self._state = state if state is not None else self._state
        self._messages += answer
        if not answer or self._state.get("final_env_response") is not None:
            return Reply(done=True)
        return Reply(messages=list(answer))

    async def _completed(self) -> bool:
        method = self._environment.is_completed
        names = [p for p in inspect.signature(method).parameters.values() if p.kind is not p.VAR_KEYWORD]
        given = (self._state,) if len(names) == 1 else (list(self._messages), self._state)
        return bool(await _maybe(method(*given)))

    async def pause(self) -> None: ...

    async def resume(self, state: Json) -> None:
        self._messages = list(state["messages"])
        self._prompt_length = state["prompt_length"]
        await self._setup()
        self._state |= state["state"]

    async def close(self) -> None:
        for name in ("cleanup", "destroy_sandbox"):
            method = getattr(self._environment, name, None)
            if callable(method):
                await _maybe(method(self._state))
                return

    def state(self) -> Json:
        kept = {k: v for k, v in self._state.items() if _is_json(v)}
        snapshot = {"messages": self._messages, "prompt_length": self._prompt_length, "state": kept}
        return json.loads(json.dumps(snapshot))

    def sandbox(self) -> dict[str, str] | None:
        sandbox = self._state.get("sandbox_id")
        return {"id": sandbox} if isinstance(sandbox, str) else None


_loaded: dict[tuple[str, str], Any] = {}


def _load(module: str, arguments: str) -> Any:
    """``load_environment`` of a module, once per process and arguments."""
    if (module, arguments) not in _loaded:
        try:
            load = importlib.import_module(module).load_environment
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"agent.arguments.environment: '{module}' has no load_environment: {error}"
            ) from error
        _loaded[module, arguments] = load(**json.loads(arguments))
    return _loaded[module, arguments]


async def _maybe(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
