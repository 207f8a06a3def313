"""An imitation of the Hugging Face hub: repositories of models, each a local directory, at the hub's own paths.

Programs reach it with HF_ENDPOINT. It answers what `huggingface_hub` requests for a download: the files of a revision,
and the head and the bytes of each file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """A hub that listens on loopback.

    Attributes:
        repositories: Directory of each repository's files, by name. None stands for a gated repository.
        downloaded: (repository, file) of each download, in order.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Path | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = dict(repositories)
        self.downloaded: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def log_request(self, *_: object) -> None:
        """Tests read what was downloaded in place of a log."""

    def _answer(self, *, has_body: bool) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        is_listing = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_listing else parts[:2])
        if name not in self.server.repositories:
            # The hub answers so, too, when a repository is private.
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, has_body=has_body)
        directory = self.server.repositories[name]
        if directory is None:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, has_body=has_body)
        if is_listing:
            paths = sorted(directory.iterdir())
            listing = (
                [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _oid(path)} for path in paths]
                if parts[4] == "tree"
                else {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path.name} for path in paths]}
            )
            headers = {"Content-Type": "application/json"}
            return self._send(200, json.dumps(listing).encode(), headers, has_body=has_body)
        data = (directory / parts[4]).read_bytes()
        if has_body:
            self.server.downloaded.append((name, parts[4]))
        headers = {"ETag": f'"{_oid(directory / parts[4])}"', "X-Repo-Commit": COMMIT}
        return self._send(200, data, headers, has_body=has_body)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], *, has_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(data)


def _oid(path: Path) -> str:
    """Name of a file's content, as git has it."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def hub(repositories: Mapping[str, Path | None]) -> Iterator[Hub]:
    """Run a hub with `repositories` while the block runs."""
    server = Hub(repositories)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
