# SPDX-License-Identifier: Apache-2.0
"""A stub of OpenAI's chat API, to try an LLM's endpoint as a policy without an LLM.

python chat_endpoint.py                                           prints its URL
openenv rollout echo --policy "openai:URL" --episodes 16 --max-steps 4 --out episodes

Whatever serves the same API takes its place: vLLM, SGLang, llama.cpp, or OpenAI itself.
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatEndpoint(BaseHTTPRequestHandler):
    """Answers each conversation with an action of `echo`, which says how long it has been."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer `/v1/chat/completions`."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        turns = sum(message["role"] == "assistant" for message in asked["messages"])
        content = json.dumps({"message": f"turn {turns + 1}"})
        choice = {"index": 0, "message": {"role": "assistant", "content": content}}
        body = json.dumps({"model": asked["model"], "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # as the base has it
        """Print nothing."""


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), ChatEndpoint) as server:
        print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
        server.serve_forever()
