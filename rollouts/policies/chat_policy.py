# SPDX-License-Identifier: Apache-2.0
"""Lets a model decide: an OpenAI-compatible chat endpoint (`--policy openai:URL`).

    observation ─▶ user message ─▶ POST …/chat/completions ─▶ the model's text ─▶ action

Each episode is one conversation, so the model sees its earlier actions. It gets the schema of the
actions, and answers with one as JSON; if an action is a single text, any answer is one. Repeating a
question to a busy server (429, 5xx) is harmless: no step was played. `httpx` comes with the extra
`openai`; the key is in `OPENAI_API_KEY`, the model in `OPENAI_MODEL` or `?model=` of the URL.
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import orjson

from ...system.files.installation import install_command
from ...system.text.json_lines import Json
from ..answers import Answer
from ..episodes import FailureReason
from ..errors import EpisodeFailed, PolicyNotFound
from .policy import Act, CpuThreads, Decision, Encoded, Policy, Turn, encoded

KEY_VARIABLE = "OPENAI_API_KEY"
MODEL_VARIABLE = "OPENAI_MODEL"
ANSWER_SECONDS = 600.0
ASK_AT_MOST = 4
SHOWN_CHARACTERS = 200  # of an endpoint's error
PAUSE_SECONDS = 0.5  # before a repetition; doubled each time
_BUSY = frozenset({429, 500, 502, 503, 504})
_FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)


class ChatPolicy(Policy):
    """One endpoint, for all episodes."""

    def __init__(self, url: str, schema: Json, *, pause_seconds: float = PAUSE_SECONDS) -> None:
        """Prepare a policy, which connects at its first call."""
        self._url, in_url = endpoint_of(url)
        self._schema = schema
        self._pause_seconds = pause_seconds
        self._model = in_url or os.environ.get(MODEL_VARIABLE, "default")
        self._key = os.environ.get(KEY_VARIABLE, "")
        self._client: Any = None
        _httpx()

    def memory(self) -> list[Json]:
        """Begin a conversation."""
        content = (
            "You act in an environment. Each message is an observation, as JSON. Answer with your "
            "next action and nothing else: a JSON object by this schema.\n"
        )
        content += orjson.dumps(self._schema).decode()
        return [{"role": "system", "content": content}]

    def player(self, threads: CpuThreads, memory: list[Json]) -> Act:
        """Continue a conversation."""

        async def act(answer: Answer, turn: Turn) -> Encoded:
            memory.append({"role": "user", "content": bytes(answer.observation_json).decode()})
            text, info = _said(await self.complete(memory))
            memory.append({"role": "assistant", "content": text})
            return encoded(Decision(action_of(text, self._schema), info))

        return act

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def complete(self, messages: list[Json]) -> Json:
        """Return the endpoint's answer to a conversation."""
        httpx = _httpx()
        if self._client is None:
            self._client = httpx.AsyncClient(
                headers={"authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=ANSWER_SECONDS,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            )
        body = {"model": self._model, "messages": messages}
        try:
            for attempt in range(ASK_AT_MOST):
                response = await self._client.post(self._url, json=body)
                if response.status_code not in _BUSY or attempt == ASK_AT_MOST - 1:
                    break
                await asyncio.sleep(self._pause_seconds * 2**attempt)
            response.raise_for_status()
            found: Json = response.json()
        except (httpx.HTTPError, ValueError) as exc:
            raise EpisodeFailed(FailureReason.POLICY_ERROR, self._error_text(exc)) from exc
        return found

    def _error_text(self, exc: Exception) -> str:
        """Describe an error of the endpoint, whose URL is shown without its password."""
        httpx, parts = _httpx(), urlsplit(self._url)
        where = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        if isinstance(exc, httpx.HTTPStatusError):
            answer = exc.response
            said = f"{where} answered {answer.status_code} {answer.reason_phrase}"
            return f"{said}: {answer.text[:SHOWN_CHARACTERS]}" if answer.text else said
        if isinstance(exc, httpx.HTTPError):
            return f"{where} does not answer: {type(exc).__name__}: {exc}"
        return f"{where} did not answer with JSON: {exc}"


def endpoint_of(url: str) -> tuple[str, str]:
    """Return the address to post to, and the URL's model, which may be empty."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise PolicyNotFound(f"{url!r} is not the URL of a chat endpoint")
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path = f"{path}/chat/completions"
    model = parse_qs(parts.query).get("model", [""])[0]
    return urlunsplit((parts.scheme, parts.netloc, path, "", "")), model


def action_of(text: str, schema: Json) -> Any:
    """Read a model's answer as an action."""
    fenced = _FENCE.search(text)
    braced = text[text.find("{") : text.rfind("}") + 1]
    for candidate in (text, fenced[1] if fenced else "", braced):
        try:
            found = orjson.loads(candidate)
        except orjson.JSONDecodeError:
            continue
        if isinstance(found, dict):
            return found
    required, fields = schema.get("required") or [], schema.get("properties", {})
    if len(required) == 1 and fields.get(required[0], {}).get("type") == "string":
        return {required[0]: text}
    message = f"the model's answer is not an action: {text[:200]}"
    raise EpisodeFailed(FailureReason.POLICY_ERROR, message)


def _said(completion: Json) -> tuple[str, Json]:
    """Return the text of an answer, and the info that is kept with the step."""
    try:
        choice = completion["choices"][0]
        text = choice["message"]["content"] or ""
    except (KeyError, IndexError, TypeError) as exc:
        message = "the endpoint's answer is not a chat completion"
        raise EpisodeFailed(FailureReason.POLICY_ERROR, message) from exc
    kept = {"text": text, "finish_reason": choice.get("finish_reason")}
    more = {"usage": completion.get("usage"), "logprobs": choice.get("logprobs")}
    return text, kept | {key: value for key, value in more.items() if value is not None}


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as exc:
        why = "a policy of openai:URL needs httpx"
        raise PolicyNotFound(why, install_command("openai")) from exc
    return httpx
