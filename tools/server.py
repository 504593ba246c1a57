# SPDX-License-Identifier: Apache-2.0
"""Start, watch and stop one real engine, served as users serve it, on a free loopback port.

    with VllmServer(model, arguments=["--plugin", "mimo:kv"], log=Path("server.log")) as server:
        answer = server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4})
        hits = server.metric("mimo:full_hit_tokens_total")

The server never outlives its user. It runs under a small supervisor in its own process group; the
supervisor holds the reading end of a pipe whose writing end only the user's process has, so that
the end of that process for any reason (return, exception, signal, kill) stops the whole group.

Standard library only, except :meth:`VllmServer.metrics`, which uses the parser of the Prometheus
client that vLLM brings.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

READY_TIMEOUT_S = 300.0
STOP_GRACE_S = 20.0
LOG_TAIL_LINES = 25
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Settings that let several engines share the cores of one machine; the user's own values win."""
SGLANG_CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""The same for SGLang on its reference platform, which has no compiler either."""
SGLANG_CPU_ARGUMENTS = (
    "--device=cpu",
    "--attention-backend=torch_sink",
    "--mem-fraction-static=0.3",
    "--sampling-backend=pytorch",
    "--disable-cuda-graph",
    "--watchdog-timeout=3000",
)
"""What ``sglang serve`` needs on the reference platform of ``integration_tests/sglang_cpu``."""


class ServerError(Exception):
    """The server did not start, died, or refused a request; the message holds the log's tail."""


def is_cpu_build() -> bool:
    """Whether the vLLM of this interpreter is the CPU build."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version
    return False


def has_reference_platform() -> bool:
    """Whether SGLang runs on the reference platform here."""
    try:
        metadata.version("mimo-sglang-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def engine_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of an engine process: this process's own, offline, with ``extra`` on top."""
    environment = dict(os.environ)
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    if is_cpu_build():
        defaults.update(CPU_ENVIRONMENT)
    if has_reference_platform():
        defaults.update(SGLANG_CPU_ENVIRONMENT)
    for name, value in defaults.items():
        environment.setdefault(name, value)
    environment.update(extra or {})
    return environment


def free_port() -> int:
    """A loopback TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def vllm_command() -> list[str]:
    """The ``vllm`` command of this interpreter's environment."""
    script = Path(sys.executable).parent / "vllm"
    if script.exists():
        return [str(script)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def sglang_command() -> list[str]:
    """The ``sglang`` command of this interpreter's environment."""
    return [str(Path(sys.executable).parent / "sglang")]


class EngineServer:
    """One server process. Use it as a context manager, or ``start`` and ``stop`` it.

    Attributes:
        stop_grace_s: how long the engine may take to end by itself before it is killed.
    """

    stop_grace_s = STOP_GRACE_S

    def __init__(
        self,
        model: Path | str,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log: Path,
        ready_timeout_s: float = READY_TIMEOUT_S,
        name: str = "",
    ) -> None:
        self.model = str(model)
        self.name = name or type(self).__name__
        self.log = log
        self.port = free_port()
        self.ready_timeout_s = ready_timeout_s
        self.start_up_s = 0.0
        self.command = [
            *self._serve(),
            "--host=127.0.0.1",
            f"--port={self.port}",
            *arguments,
        ]
        self._environment = engine_environment(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None

    def _serve(self) -> list[str]:
        """The command up to and including the model."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor (also the process group), None while not running."""
        return self._process.pid if self._process else None

    @property
    def base_url(self) -> str:
        """Root of the server's HTTP API."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start the process and wait until it answers.

        Raises ServerError when it exits first or is not ready within ``ready_timeout_s``.
        """
        if self._process is not None:
            raise ServerError(f"{self.name}: the server runs already (pid {self.pid})")
        started = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        reading, self._lifeline = os.pipe()
        supervisor = [sys.executable, "-S", str(Path(__file__).resolve())]
        supervisor += [str(reading), str(self.stop_grace_s)]
        try:
            with open(self.log, "wb") as log:
                self._process = subprocess.Popen(
                    [*supervisor, *self.command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    pass_fds=(reading,),
                    start_new_session=True,
                )
        finally:
            os.close(reading)
        try:
            self._wait_until_ready(started)
        except BaseException:
            self.stop()
            raise
        self.start_up_s = time.monotonic() - started
        return self

    def _wait_until_ready(self, started: float) -> None:
        assert self._process is not None
        while time.monotonic() - started < self.ready_timeout_s:
            code = self._process.poll()
            if code is not None:
                raise ServerError(f"{self.name}: ended with status {code} at start{self._tail()}")
            try:
                self.text("/health", timeout_s=5.0)
                return
            except (OSError, http.client.HTTPException, ServerError):
                time.sleep(0.25)
        raise ServerError(
            f"{self.name}: not ready after {self.ready_timeout_s:.0f} s{self._tail()}"
        )

    def stop(self) -> None:
        """Stop the whole process group; safe to call more than once."""
        process, self._process = self._process, None
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)
        if process is None:
            return
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=self.stop_grace_s + 10)
        finally:
            kill_group(process.pid)
            process.wait()

    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def log_text(self) -> str:
        """Everything the server printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def _tail(self) -> str:
        lines = self.log_text().splitlines()[-LOG_TAIL_LINES:]
        return f"; log {self.log}:\n" + "\n".join(f"    {line}" for line in lines)

    def _open(
        self, method: str, path: str, body: Any, timeout_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        payload = None if body is None else json.dumps(body).encode()
        headers = {} if payload is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read().decode(errors="replace")[:2000]
                raise ServerError(f"{self.name}: {method} {path}: HTTP {response.status}: {text}")
        except BaseException:
            connection.close()
            raise
        return connection, response

    def text(self, path: str, timeout_s: float = 60.0) -> str:
        """Body of a GET request."""
        connection, response = self._open("GET", path, None, timeout_s)
        try:
            return response.read().decode()
        finally:
            connection.close()

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 300.0) -> Any:
        """Answer of a JSON POST request; ``model`` is filled in."""
        connection, response = self._open("POST", path, {"model": self.model, **body}, timeout_s)
        try:
            return json.loads(response.read())
        finally:
            connection.close()

    def stream(
        self, path: str, body: Mapping[str, Any], timeout_s: float = 300.0
    ) -> Iterator[dict[str, Any]]:
        """Chunks of a streamed POST request, as they arrive; ``model`` and ``stream`` are set."""
        full = {"model": self.model, "stream": True, **body}
        connection, response = self._open("POST", path, full, timeout_s)
        try:
            for line in response:
                data = line.strip()
                if data == b"data: [DONE]":
                    return
                if data.startswith(b"data: "):
                    chunk = json.loads(data[len(b"data: ") :])
                    if "error" in chunk:
                        raise ServerError(f"{self.name}: {path}: {chunk['error']}")
                    yield chunk
            raise ServerError(f"{self.name}: {path}: the stream ended early{self._tail()}")
        finally:
            connection.close()

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Samples of ``/metrics`` by name (counters end in ``_total``): (labels, value) pairs."""
        from prometheus_client.parser import text_string_to_metric_families

        samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(self.text("/metrics")):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
        return samples

    def metric(self, name: str, **labels: str) -> float | None:
        """Sum of the samples called ``name`` that carry ``labels``; None when there is none."""
        values = [
            value
            for found, value in self.metrics().get(name, [])
            if all(found.get(key) == wanted for key, wanted in labels.items())
        ]
        return sum(values) if values else None


class VllmServer(EngineServer):
    """One ``vllm serve`` process."""

    def _serve(self) -> list[str]:
        return [*vllm_command(), "serve", self.model]


class SglangServer(EngineServer):
    """One ``sglang serve`` process; on the reference platform with the options that it needs.

    Told to end, an idle SGLang sleeps for many seconds; what it has answered loses nothing by a
    kill.
    """

    stop_grace_s = 3.0

    def _serve(self) -> list[str]:
        needed = SGLANG_CPU_ARGUMENTS if has_reference_platform() else ()
        return [*sglang_command(), "serve", "--model-path", self.model, *needed]

    def flush(self, timeout_s: float = 30.0) -> None:
        """Empty the cache, which only an idle engine does."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._open("POST", "/flush_cache", None, timeout_s)[0].close()
                return
            except ServerError:
                if time.monotonic() > deadline or not self.alive():
                    raise
                time.sleep(0.5)


def kill_group(group: int) -> None:
    """Kill what is left of a process group; nothing to do is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def supervise(lifeline: int, grace_s: float, command: Sequence[str]) -> int:
    """Run ``command`` until it ends or the other end of the pipe ``lifeline`` closes.

    Runs as a process of its own, the leader of the server's process group.
    """
    import select

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(command, preexec_fn=_default_signals)
    while child.poll() is None:
        if select.select([lifeline], [], [], 0.2)[0]:
            child.terminate()
            try:
                child.wait(timeout=grace_s)
            except subprocess.TimeoutExpired:
                print("supervisor: the server did not stop in time; killing it", flush=True)
            kill_group(os.getpgrp())
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
