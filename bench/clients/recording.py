"""Records the requests of clients on their way to a server, without long texts and personal details."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

from moestro.web.adapters.paths import chat_body

KEPT_CHARS = 48  # of each text; recorded requests keep their shape, and not their prompts
# Names and ids of people, machines and sessions.
_PERSONAL = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{32,}|/(?:tmp|root|home|work)/[^\s\"',]*|ses_\w+")


def without_details(value: Any) -> Any:
    """Return JSON with short texts, and with placeholders for what names a person, a machine or a session."""
    if isinstance(value, dict):
        return {key: without_details(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_details(each) for each in value]
    if not isinstance(value, str):
        return value
    text = _PERSONAL.sub("NAME", value)
    return text if len(text) <= KEPT_CHARS or _is_json(text) else f"{text[:KEPT_CHARS]}…"


def _is_json(text: str) -> bool:
    return text.startswith(("{", "[")) and len(text) < 500


def yields(path: str, body: bytes) -> dict[str, Any]:
    """Return what a request must yield: the roles and the functions that reach the model."""
    chat = json.loads(chat_body(path.partition("?")[0], body) or body)
    roles = [message["role"] for message in chat.get("messages", [])]
    tools = [tool["function"]["name"] for tool in chat.get("tools", [])]
    return {"yields": {"ignored": [], "roles": roles, "tools": tools}}


def ignored(warning: str) -> list[str]:
    """Return the fields that an answer's `Warning` header names."""
    named = warning.removeprefix('299 moestro "fields were ignored: ').removesuffix('"')
    return list(filter(None, named.split(", ")))


@contextlib.contextmanager
def recording(url: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Pass requests on to the server `url`. Yields the address for clients, and the requests with a body so far."""
    found: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._pass_on(None)

        def do_HEAD(self) -> None:
            self._pass_on(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent = {"path": self.path, "body": without_details(json.loads(body))} | yields(self.path, body)
            found.append(sent)
            self._pass_on(body, sent["yields"])

        def log_message(self, *args: object) -> None:
            pass

        def _pass_on(self, body: bytes | None, expected: dict[str, Any] | None = None) -> None:
            hop = ("host", "connection", "accept-encoding", "content-length")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in hop}
            with contextlib.suppress(ConnectionError):
                answer = urlopen(Request(url + self.path, body, headers, method=self.command))
                if expected is not None:
                    expected["ignored"] = ignored(answer.headers.get("Warning", ""))
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
                self.send_header("Connection", "close")
                self.end_headers()
                while piece := answer.read1():
                    self.wfile.write(piece)
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", found
    finally:
        server.shutdown()
