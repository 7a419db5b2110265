# SPDX-License-Identifier: Apache-2.0
"""Uses an environment through its project's own client, and prints what came back as JSON.

    PYTHON typed_client.py FOLDER ADDRESS... < CALLS

The program has the same conversation with each address, one after the other. CALLS are
`[["reset", {"seed": 1}], ["step", {"message": "hello"}], ["state", {}]]`, and `call_tool`. The
fields of a step become the client's own action. The answer to each call has the client's result or
exception, and the messages that it received. Runs in the project's own virtual environment.
"""

import asyncio
import dataclasses
import importlib
import inspect
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, get_args


async def converse(folder: Path, address: str, calls: list[Any]) -> list[dict[str, Any]]:
    module = importlib.import_module(f"{folder.name}.client")
    client_class, action_class = client_of(module)
    messages: list[Any] = []
    client = recording(client_class, messages)(base_url=address)
    answers = []
    try:
        for name, values in calls:
            answers.append(await answer_of(client, action_class, name, values))
            answers[-1]["messages"] = messages.copy()
            messages.clear()
    finally:
        await maybe(client.close())
    return answers


async def answer_of(
    client: Any, action_class: Any, name: str, values: dict[str, Any]
) -> dict[str, Any]:
    try:
        if name == "step":
            returned = await maybe(client.step(action_class(**values)))
        else:
            returned = await maybe(getattr(client, name)(**values))
    except Exception as exc:
        return {"call": [name, values], "raised": f"{type(exc).__name__}: {exc}"}
    return {"call": [name, values], "returned": plain(returned)}


async def maybe(value: Any) -> Any:
    """Await a result if needed: older clients are synchronous."""
    return await value if inspect.isawaitable(value) else value


def client_of(module: Any) -> tuple[Any, Any]:
    """Return the module's client, and the class of its actions if there is one."""
    own = [
        c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__
    ]
    found = next(c for c in own if hasattr(c, "reset") and hasattr(c, "step"))
    arguments = [get_args(base) for base in getattr(found, "__orig_bases__", ())]
    declared = next((a[0] for a in arguments if a), None)
    named = (
        c for name, c in vars(module).items() if name.endswith("Action") and inspect.isclass(c)
    )
    return found, declared or next(named, None)


def recording(client_class: Any, messages: list[Any]) -> Any:
    """Return a subclass of the client that records the messages it receives."""
    if not hasattr(client_class, "_receive"):  # a client of HTTP
        return client_class

    class Recording(client_class):  # type: ignore[misc,valid-type,unused-ignore]
        def _receive(self) -> Any:
            received = super()._receive()  # older clients are synchronous
            return noted(received) if inspect.isawaitable(received) else note(received)

    def note(message: Any) -> Any:
        messages.append(message)
        return message

    async def noted(message: Any) -> Any:
        return note(await message)

    return Recording


def plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json", fallback=repr))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def installed_openenv() -> str:
    """Return the version of upstream's package, which has had two names."""
    for name in ("openenv", "openenv-core"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def main() -> None:
    folder = Path(sys.argv[1])
    sys.path += [str(folder.parent), str(folder)]
    calls = json.load(sys.stdin)
    said = [asyncio.run(converse(folder, address, calls)) for address in sys.argv[2:]]
    print(json.dumps({"openenv": installed_openenv(), "conversations": said}))


if __name__ == "__main__":
    main()
