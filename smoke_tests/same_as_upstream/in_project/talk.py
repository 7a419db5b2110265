# SPDX-License-Identifier: Apache-2.0
"""One conversation by upstream's client, with a bystander before, beside and after it.

    PYTHON talk.py ADDRESS HABIT            HABIT: its description by `run.py`, as JSON

Prints the answers of each session as JSON. The failure of a session to begin is an answer, too.
"""

import asyncio
import json
import sys
import urllib.error
import urllib.request

from openenv import GenericEnvClient

ADDRESS, HABIT = sys.argv[1], json.loads(sys.argv[2])
SECONDS = HABIT["seconds"]  # a session waits for an answer


def client():
    return GenericEnvClient(ADDRESS, message_timeout_s=SECONDS)


async def answer(call):
    try:
        result = await call
    except Exception as exc:
        return {"raised": f"{type(exc).__name__}: {exc}"}
    if isinstance(result, dict):  # a state
        return {name: value for name, value in result.items() if name != "episode_id"}
    told = {"observation": result.observation, "reward": result.reward, "done": result.done}
    return {**told, "metadata": result.metadata}


async def episode(session, steps):
    answers = []
    if HABIT["resets"]:
        answers.append(await answer(session.reset(**HABIT["reset"])))
    return answers + [await answer(session.step({"how": how})) for how in steps]


async def close(session):
    try:
        await session.close()
    except Exception as exc:
        return [{"raised": f"{type(exc).__name__}: {exc}"}]
    return []


def post(path, body):
    data = json.dumps(body).encode()
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(ADDRESS + path, data, head)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return {"status": response.status, "body": json.loads(response.read())}
    except urllib.error.HTTPError as exc:
        return {"status": exc.code}
    except OSError as exc:
        return {"raised": f"{type(exc).__name__}: {exc}"}


async def main():
    said = {}
    bystander, session, later = client(), client(), client()
    said["bystander"] = [await answer(bystander.reset()), await answer(bystander.step(LOOK))]
    said["session"] = await episode(session, HABIT["steps"])
    said["session"].append(await answer(session.state()))
    said["bystander"].append(await answer(bystander.step(LOOK)))
    said["session"] += await close(session)
    said["posts"] = [await asyncio.to_thread(post, *each) for each in HABIT["posts"]]
    said["later"] = await episode(later, HABIT["steps"][:1])
    said["later"] += await close(later)
    said["bystander"].append(await answer(bystander.step(LOOK)))
    said["bystander"] += await close(bystander)
    print(json.dumps(said))


LOOK = {"how": "look"}
asyncio.run(main())
