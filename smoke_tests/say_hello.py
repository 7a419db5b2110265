# SPDX-License-Identifier: Apache-2.0
"""`python smoke_tests/say_hello.py ADDRESS`: one episode of `echo`, with only `websockets`.

This checks the README's first command where upstream's package is not installed.
"""

import json
import sys
from typing import Any

from websockets.sync.client import connect


def main(address: str) -> None:
    with connect(address.replace("http", "ws", 1) + "/ws") as socket:

        def ask(message: dict[str, Any]) -> dict[str, Any]:
            socket.send(json.dumps(message))
            answer: dict[str, Any] = json.loads(socket.recv())
            return answer

        assert ask({"type": "reset", "data": {}})["type"] == "observation"
        answer = ask({"type": "step", "data": {"message": "hello"}})
        assert answer["data"]["observation"]["echoed_message"] == "hello", answer
        print(f"{address} echoed hello")


if __name__ == "__main__":
    main(sys.argv[1])
