# SPDX-License-Identifier: Apache-2.0
"""The server helper with a stand-in for the engine: readiness, requests, and certain ends."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tools.server import STOP_GRACE_S, ServerError, VllmServer, engine_environment, free_port

ROOT = Path(__file__).resolve().parent.parent

STAND_IN = textwrap.dedent(
    """
    import json, subprocess, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())
        def do_GET(self):
            self.reply('mimo:x_total{a="1"} 2\\nmimo:x_total{a="2"} 3\\n')
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/bad":
                self.reply("no such thing", 400)
            elif body.get("stream"):
                end = "" if self.path == "/cut" else "data: [DONE]\\n\\n"
                self.reply('data: {"n": 1}\\n\\ndata: {"n": 2}\\n\\n' + end)
            else:
                self.reply(json.dumps(body))

    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
)


def stand_in(tmp_path, code=STAND_IN, **options):
    server = VllmServer("some-model", log=tmp_path / "server.log", **options)
    server.command = [sys.executable, "-c", code, str(server.port)]
    return server


def exists(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_gone(*pids):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not any(map(exists, pids)):
            return True
        time.sleep(0.05)
    return False


def child_of(log):
    return int(log.split("child ", 1)[1].split()[0])


def test_requests_and_metrics(tmp_path):
    pytest.importorskip("prometheus_client")
    with stand_in(tmp_path) as server:
        assert server.alive()
        assert server.post("/echo", {"a": 1}) == {"model": "some-model", "a": 1}
        assert list(server.stream("/echo", {})) == [{"n": 1}, {"n": 2}]
        assert server.metric("mimo:x_total") == 5
        assert server.metric("mimo:x_total", a="2") == 3
        assert server.metric("mimo:y_total") is None
        with pytest.raises(ServerError, match="HTTP 400: no such thing"):
            server.post("/bad", {})
        with pytest.raises(ServerError, match="ended early"):
            list(server.stream("/cut", {}))


def test_the_end_of_the_block_ends_the_whole_group(tmp_path):
    with pytest.raises(RuntimeError), stand_in(tmp_path) as server:
        pids = (server.pid, child_of(server.log_text()))
        raise RuntimeError
    assert wait_gone(*pids)
    assert not server.alive()
    server.stop()


def test_a_server_that_dies_at_start_shows_its_log(tmp_path):
    server = stand_in(tmp_path, "print('the reason'); raise SystemExit(3)")
    with pytest.raises(ServerError, match="(?s)status 3 at start.*the reason"):
        server.start()
    assert server.pid is None


def test_a_server_that_never_answers_is_stopped(tmp_path):
    server = stand_in(tmp_path, "import time; time.sleep(600)", ready_timeout_s=1.5)
    with pytest.raises(ServerError, match="not ready after 2 s"):
        server.start()
    assert server.pid is None


@pytest.mark.parametrize("by", ["supervisor", "user"])
def test_a_server_that_ignores_sigterm_is_killed(tmp_path, by):
    """The supervisor gives it its grace, and whoever stops it another 10 s."""
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAND_IN
    server = stand_in(tmp_path, code)
    server.stop_grace_s = 0.2 if by == "supervisor" else STOP_GRACE_S
    with server:
        pids = (server.pid, child_of(server.log_text()))
        if by == "user":
            server.stop_grace_s = -9.5
    assert wait_gone(*pids)
    assert ("killing it" in server.log_text()) == (by == "supervisor")


def test_a_killed_user_leaves_no_server(tmp_path):
    program = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from tools.server import VllmServer
        server = VllmServer("m", log=Path({str(tmp_path / "server.log")!r}))
        server.command = [sys.executable, "-c", {STAND_IN!r}, str(server.port)]
        server.start()
        print(server.pid, flush=True)
        time.sleep(600)
        """
    )
    user = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    supervisor = int(user.stdout.readline())
    child = child_of((tmp_path / "server.log").read_text())
    assert exists(supervisor) and exists(child)
    user.kill()
    user.communicate()
    assert wait_gone(supervisor, child)


def test_starting_twice_is_refused(tmp_path):
    with stand_in(tmp_path) as server, pytest.raises(ServerError, match="runs already"):
        server.start()


def test_environment_is_offline_and_the_users_values_win(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    environment = engine_environment({"EXTRA": "1"})
    assert environment["HF_HUB_OFFLINE"] == "0" and environment["EXTRA"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


def test_free_port_is_a_port():
    assert 1024 < free_port() < 65536
