# SPDX-License-Identifier: Apache-2.0
"""One real ``sglang serve`` process of ``.venv-sglang`` on a free loopback port, for the tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.server import free_port

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"
COMMAND = PYTHON.with_name("sglang")

#: every slot is accounted for after each step, and the tree is checked whenever the engine is idle
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
}

CPU_ARGUMENTS = (
    "--trust-remote-code",
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_sink",
    "--page-size=16",
    "--chunked-prefill-size=512",
    "--max-running-requests=8",
    "--mem-fraction-static=0.3",
    "--random-seed=0",
    "--sampling-backend=pytorch",
    "--skip-server-warmup",
    "--disable-cuda-graph",
    "--watchdog-timeout=3000",
)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of an SGLang process on a CPU; nothing of the caller's plugin settings."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MIMO_")}
    return {
        **own,
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(REPOSITORY),
        **(extra or {}),
    }


class LocalSglang:
    """A server as a context manager; stopped by the id of its process group."""

    def __init__(
        self,
        model: Path,
        *arguments: str,
        log: Path,
        extra: Mapping[str, str] | None = None,
        ready_timeout_s: float = 300.0,
    ) -> None:
        self.port = free_port()
        self.log = log
        self.ready_timeout_s = ready_timeout_s
        self.environment = environment(extra)
        self.command = [
            str(COMMAND),
            "serve",
            f"--model-path={model}",
            "--host=127.0.0.1",
            f"--port={self.port}",
            *CPU_ARGUMENTS,
            *arguments,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalSglang:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self) -> None:
        assert self.process is not None
        until = time.monotonic() + self.ready_timeout_s
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health", timeout_s=2)
            except (OSError, urllib.error.URLError):
                time.sleep(0.5)
            else:
                return
        raise RuntimeError(f"not ready: {self.tail()}")

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the whole group, gently first."""
        if self.process is None:
            return
        for sign, grace_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                continue
            break
        with contextlib.suppress(ProcessLookupError):  # children that outlived the main process
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process = None

    def get(self, path: str, timeout_s: float = 30) -> str:
        """Body of a GET request."""
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            body: bytes = answer.read()
        return body.decode()

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 300) -> Any:
        """Answer to a JSON POST request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.loads(answer.read())

    def flush(self) -> None:
        """Empty the cache; only an idle engine does it."""
        for _ in range(60):
            request = urllib.request.Request(
                f"http://127.0.0.1:{self.port}/flush_cache", method="POST"
            )
            try:
                with urllib.request.urlopen(request, timeout=30):
                    return
            except urllib.error.HTTPError:
                time.sleep(0.5)
        raise RuntimeError(f"the cache can't be flushed: {self.tail()}")

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that carry ``labels``."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            found = re.fullmatch(rf"{re.escape(name)}\{{(.*)\}} (\S+)", line)
            if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
                total += float(found[2])
        return total

    def text(self) -> str:
        """Everything that was logged so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log."""
        return "\n".join(self.text().splitlines()[-lines:])

    def alive(self) -> bool:
        """Whether the server still runs."""
        return self.process is not None and self.process.poll() is None


def refused(model: Path, arguments: Sequence[str], extra: Mapping[str, str]) -> tuple[int, str]:
    """Exit status and last line of a server that does not start."""
    done = subprocess.run(
        [str(COMMAND), "serve", f"--model-path={model}", f"--port={free_port()}"]
        + [*CPU_ARGUMENTS, "--max-total-tokens=2048", *arguments],
        env=environment(extra),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""
