# SPDX-License-Identifier: Apache-2.0
"""The examples run: the scripts with the real ``mimo flags``, the client against an HTTP server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mimo_plugin.config import parse_config
from tests.published_models import MIMO_V2_FLASH
from tests.test_flags import model_dir

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

_MIMO = """#!/bin/sh
if [ "$1" = doctor ]; then shift; echo "DOCTOR $*" >&2; exit ${DOCTOR:-0}; fi
exec "$PYTHON" -m mimo_plugin.cli "$@"
"""
_VLLM = """#!/bin/sh
exec "$PYTHON" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"
"""


def serve(tmp_path: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the script; in place of vLLM its arguments are printed."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("mimo", _MIMO), ("vllm", _VLLM)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    path = f"{commands}{os.pathsep}{os.defpath}"
    return subprocess.run(
        [EXAMPLES / "serve_tiers.sh", *words],
        env={"PATH": path, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("store", "place", "expected"),
    [
        ("file", "/kv of all", {"path": "/kv of all", "capacity_gib": 5.0}),
        ("redis", "redis://h:6379", {"store": "redis", "path": "redis://h:6379"}),
        ("mooncake", "h:50051", {"store": "mooncake", "path": "h:50051"}),
    ],
)
def test_serving_with_tiers(
    tmp_path: Path, store: str, place: str, expected: dict[str, Any]
) -> None:
    model = model_dir(tmp_path / "a model", MIMO_V2_FLASH)
    done = serve(tmp_path, model, store, place, "--port", "1", HOST_GIB="32", STORE_GIB="5")
    assert done.returncode == 0, done.stderr
    words = json.loads(done.stdout)
    assert words[:2] == ["serve", model] and words[-2:] == ["--port", "1"]
    assert "--enable-prompt-tokens-details" in words
    section = json.loads(words[words.index("--additional-config") + 1])["mimo"]
    assert section["tiers"] == {"host_gib": 32.0, **expected}
    assert parse_config(section, environ={}, engine="vllm")
    assert "DOCTOR -- vllm serve" in done.stderr


@pytest.mark.parametrize(
    ("words", "environ", "code", "said"),
    [
        ((), {}, 2, "examples/serve_tiers.sh MODEL file"),
        (("MODEL", "disk", "/kv"), {}, 2, "invalid choice: 'disk'"),
        (("MODEL", "file", "/kv"), {"DOCTOR": "1"}, 1, "DOCTOR"),
    ],
)
def test_what_can_not_work_starts_nothing(
    tmp_path: Path, words: tuple[str, ...], environ: dict[str, str], code: int, said: str
) -> None:
    model = model_dir(tmp_path / "m", MIMO_V2_FLASH)
    given = [model if word == "MODEL" else word for word in words]
    done = serve(tmp_path, *given, HOST_GIB="32", **environ)
    assert done.returncode == code and said in done.stderr
    assert done.stdout == ""


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {
            "prompt_tokens": len(body["prompt"].split()),
            "prompt_tokens_details": {"cached_tokens": 7} if body["model"] == "m" else None,
        }
        self._answer({"usage": usage, "choices": [{"text": "so\n"}]})

    def _answer(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        pass


def test_asking_for_a_hit() -> None:
    server = HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = subprocess.run(
            [sys.executable, EXAMPLES / "hit_after_restart.py", "--url", url, "--paragraphs", "2"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert done.stdout.splitlines() == ["reused 7 of 50 prompt tokens", "'so\\n'"], done.stderr
