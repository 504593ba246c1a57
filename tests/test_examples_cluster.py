# SPDX-License-Identifier: Apache-2.0
"""The example of a cluster: its arguments, the commands it shows, what it prints of a chat."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import cluster
from mimo_plugin.router.settings import parse_worker


class _Router(BaseHTTPRequestHandler):
    """Answers as a router does; a session's second turn hits what its first one was."""

    asked: list[tuple[str, int]]
    status = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = self.headers["X-Session-ID"]
        length = len(body["messages"])
        self.asked.append((session, length))
        hit = 10 * (length - 2)
        usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": hit}}
        data = json.dumps({"usage": usage, "choices": [{"message": {"content": "so"}}]}).encode()
        self.send_response(self.status)
        self.send_header("X-Mimo-Worker", "http://127.0.0.1:1")
        self.send_header("X-Mimo-Reason", "session")
        self.send_header("X-Mimo-Predicted-Hit", str(hit + 1))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def serving(status: int = 200) -> Iterator[tuple[Any, list[tuple[str, int]]]]:
    asked: list[tuple[str, int]] = []
    handler = type("Handler", (_Router,), {"asked": asked, "status": status})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield SimpleNamespace(port=server.server_port), asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "0"], "--workers: found 0; allowed: 1 or more"),
        (["--turns", "-1"], "--turns: found -1; allowed: 1 or more"),
        (["--model", "/nowhere"], "--model: found /nowhere; allowed: a folder with a config.json"),
        (["--routers", "two"], "invalid int value: 'two'"),
    ],
)
def test_what_can_not_work_starts_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "redis_servers", lambda count: pytest.fail("it was started"))
    with pytest.raises(SystemExit) as stopped:
        cluster.main(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_the_routers_command_names_the_workers_and_where_they_tell() -> None:
    worker: Any = SimpleNamespace(
        base_url="http://127.0.0.1:8001", events="ipc:///tmp/e", replay="ipc:///tmp/r"
    )
    command = cluster.router_command("/m", [worker, worker], "unix:///tmp/s")
    assert command[1:6] == ["-m", "mimo_plugin.cli", "router", "--model", "/m"]
    assert command[-2:] == ["--state", "unix:///tmp/s"]
    named = [parse_worker(command[i + 1]) for i, word in enumerate(command) if word == "--worker"]
    assert [(w.url, w.events, w.replay) for w in named] == [
        ("http://127.0.0.1:8001", "ipc:///tmp/e", "ipc:///tmp/r")
    ] * 2


def test_chats_go_through_the_routers_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as (first, asked_first), serving() as (second, asked_second):
        routers: Any = [first, second]
        assert cluster.talk(routers, "m", chats=2, turns=2) == (40, 400)
    # A system prompt and a question; then that, the answer and another question.
    assert asked_first == [("chat-0", 2), ("chat-1", 4)]
    assert asked_second == [("chat-1", 2), ("chat-0", 4)]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 4
    assert lines[-1].split() == [
        *("1", "1", "0", "http://127.0.0.1:1", "session", "21", "20", "of", "100"),
    ]


def test_a_refused_turn_ends_it(tmp_path: Path) -> None:
    with serving(503) as (router, _), pytest.raises(SystemExit, match="HTTP 503"):
        cluster.ask(router.port, "m", [{"role": "user", "content": "so"}], "chat")
