# SPDX-License-Identifier: Apache-2.0
"""Routers of others, from PyPI, as the benchmark starts them in front of the same workers.

They get an environment of their own, ``.router-peers`` in the repository, which is made when it is
asked for (20 s, 220 MB). Each gets what it needs to do its best: a session's name in the headers
that it reads, the workers' events and their block size, and thresholds that a small cluster reaches
beside its own defaults.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.server import EngineServer, free_port

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".router-peers"
PACKAGES = ("vllm-router==0.1.17", "sglang-router==0.3.2")
START_S = 60.0

#: vllm-router's and sglang-router's policies that are not about chance alone; ``tight`` lets
#: their rule of balance act at a difference of 2 requests in place of 64
VLLM_POLICIES = (
    "round_robin",
    "power_of_two",
    "consistent_hash",
    "sticky_least_loaded",
    "cache_aware",
    "cache_aware tight",
    "kv_aware",
    "kv_aware sessions",
)
SGLANG_POLICIES = (
    "round_robin",
    "power_of_two",
    "manual",
    "manual min_load",
    "cache_aware",
    "cache_aware tight",
)
TIGHT = ("--balance-abs-threshold=2", "--balance-rel-threshold=1.1")


@dataclass(frozen=True)
class Worker:
    """A worker as a router is told of it.

    Attributes:
        url: of its HTTP API.
        events: ZMQ endpoint of its KV events.
        replay: ZMQ endpoint that repeats them.
    """

    url: str
    events: str
    replay: str


def session_headers(session: str) -> dict[str, str]:
    """The headers by which routers know a session: vllm-router's and ours, and sglang-router's."""
    return {"X-Session-ID": session, "X-SMG-Routing-Key": session}


def install(folder: Path = FOLDER) -> Path:
    """The environment, made where it is missing or holds other versions; its ``bin``."""
    mark = folder / "packages.txt"
    wanted = "\n".join(PACKAGES)
    if not mark.is_file() or mark.read_text(encoding="utf-8") != wanted:
        print(f"installing {', '.join(PACKAGES)} in {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq"]
        subprocess.run([*pip, "--disable-pip-version-check", *PACKAGES], check=True)
        mark.write_text(wanted, encoding="utf-8")
    return folder / "bin"


def vllm_router(
    programs: Path, policy: str, workers: Sequence[Worker], model: str, block_tokens: int
) -> list[str]:
    """Command of ``vllm-router``, without host and port."""
    name, _, variant = policy.partition(" ")
    command = [str(programs / "vllm-router"), f"--policy={name}", "--log-level=warning"]
    command += [f"--prometheus-port={free_port()}", "--worker-startup-check-interval=1"]
    command += ["--worker-urls", *(worker.url for worker in workers)]
    if variant == "tight":
        command += TIGHT
    if name == "kv_aware":
        # A value that begins with its URL; the last one of a list of words ends at an option.
        for worker in workers:
            command.append(f"--kv-event-source={worker.url}={worker.events}")
            command.append(f"--kv-event-replay-source={worker.url}={worker.replay}")
        command += [f"--kv-event-block-size={block_tokens}", f"--kv-event-model={model}"]
    if variant == "sessions":
        command.append("--kv-aware-session-affinity-ttl-secs=600")
    return command


def sglang_router(programs: Path, policy: str, workers: Sequence[Worker]) -> list[str]:
    """Command of ``sglang-router``, without host and port."""
    name, _, variant = policy.partition(" ")
    command = [str(programs / "sglang-router"), "launch", f"--policy={name}", "--log-level=warn"]
    command += [f"--prometheus-port={free_port()}", "--prometheus-host=127.0.0.1"]
    command += ["--worker-startup-check-interval=1"]
    command += ["--worker-urls", *(worker.url for worker in workers)]
    if variant == "tight":
        command += TIGHT
    if variant == "min_load":
        command.append("--assignment-mode=min_load")
    return command


class RouterServer(EngineServer):
    """One router process; it ends with its user, as engines do."""

    stop_grace_s = 3.0

    def __init__(
        self,
        command: Sequence[str],
        model: str,
        log: Path,
        name: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._before = list(command)
        super().__init__(
            model, log=log, name=name, environment=environment, ready_timeout_s=START_S
        )

    def _serve(self) -> list[str]:
        return self._before

    def cpu_s(self) -> float:
        """CPU time of the process and its children so far."""
        import psutil  # type: ignore[import-untyped]

        assert self.pid is not None
        total = 0.0
        for process in psutil.Process(self.pid).children(recursive=True):
            times = process.cpu_times()
            total += times.user + times.system
        return total


@contextmanager
def running(
    command: Sequence[str],
    model: str,
    log: Path,
    name: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RouterServer]:
    """A router that answers ``/health``."""
    with RouterServer(command, model, log, name, environment) as server:
        yield server
