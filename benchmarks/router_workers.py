# SPDX-License-Identifier: Apache-2.0
"""Workers of the router benchmark: real ``vllm serve`` processes with a tiny MiMo, on the CPU.

Each tells its KV events. Pools are small: what a router sends to a worker must fit, or is evicted.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.router_peers import Worker
from tools.server import ServerError, VllmServer, free_port

BLOCK_TOKENS = 16
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
RESET_S = 20.0


@dataclass(frozen=True)
class Counters:
    """What a worker has done so far, as its metrics say.

    Attributes:
        prompt_tokens: of all requests.
        hit_tokens: of those, found in its cache.
        requests: finished.
    """

    prompt_tokens: float
    hit_tokens: float
    requests: float

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens that were not found."""
        return self.prompt_tokens - self.hit_tokens

    def since(self, before: Counters) -> Counters:
        """What came after ``before``."""
        return Counters(
            self.prompt_tokens - before.prompt_tokens,
            self.hit_tokens - before.hit_tokens,
            self.requests - before.requests,
        )


class TinyWorker(VllmServer):
    """One worker, with the ZMQ endpoints of its events."""

    def __init__(
        self,
        model: Path,
        name: str,
        sockets: Path | None,
        logs: Path,
        blocks: int,
        more: Sequence[str],
    ) -> None:
        port = free_port()
        self.events = f"tcp://127.0.0.1:{port}" if sockets is None else f"ipc://{sockets / name}.e"
        self.replay = (
            f"tcp://127.0.0.1:{free_port()}" if sockets is None else f"ipc://{sockets / name}.r"
        )
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            # Of TCP addresses, vLLM binds those with a star and connects to the others.
            "endpoint": f"tcp://*:{port}" if sockets is None else self.events,
            "replay_endpoint": self.replay,
        }
        arguments = [
            "--enforce-eager",
            "--dtype=float32",
            "--max-model-len=4096",
            f"--block-size={BLOCK_TOKENS}",
            "--max-num-batched-tokens=1024",
            "--max-num-seqs=16",
            "--enable-prompt-tokens-details",
            "--enable-scale-out",  # vllm-router asks for tokens
            "--disable-uvicorn-access-log",
            f"--num-gpu-blocks-override={blocks}",
            f"--kv-events-config={json.dumps(events)}",
            *more,
        ]
        super().__init__(
            model, arguments=arguments, environment=ENVIRONMENT, log=logs / f"{name}.log", name=name
        )

    @property
    def as_worker(self) -> Worker:
        """What a router is told."""
        return Worker(self.base_url, self.events, self.replay)

    def counters(self) -> Counters:
        """As its metrics say."""
        found = self.metrics()

        def total(name: str) -> float:
            return sum(value for _, value in found.get(name, []))

        return Counters(
            total("vllm:prompt_tokens_total"),
            total("vllm:prefix_cache_hits_total"),
            total("vllm:request_success_total"),
        )

    def forget(self) -> None:
        """Empty its cache.

        The server's answer does not tell whether it did (a cache in use is left as it is), so the
        same prompt is asked before and after.

        Raises:
            ServerError: it is not empty in time.
        """
        deadline_s = time.monotonic() + RESET_S
        self._hit()
        while True:
            connection, response = self._open("POST", "/reset_prefix_cache", {}, RESET_S)
            response.read()
            connection.close()
            if not self._hit():
                return
            if time.monotonic() > deadline_s:
                raise ServerError(f"{self.name}: its cache is not emptied after {RESET_S:.0f} s")
            time.sleep(0.2)

    def _hit(self) -> int:
        body = {"prompt": [*range(300, 300 + 4 * BLOCK_TOKENS)], "max_tokens": 1}
        details = self.post("/v1/completions", body)["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens") or 0)


@contextlib.contextmanager
def tiny_workers(
    model: Path,
    count: int,
    *,
    logs: Path,
    blocks: int,
    sockets: Path | None = None,
    more: Sequence[str] = (),
) -> Iterator[list[TinyWorker]]:
    """Workers that serve; they are started and stopped at the same time.

    Args:
        blocks: of each pool.
        sockets: an empty folder for the sockets of events, which other machines don't reach; its
            path is short, as names of sockets have 107 bytes at most. None: TCP, which
            vllm-router wants.
    """
    made = [
        TinyWorker(model, f"worker{number}", sockets, logs, blocks, more) for number in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        try:
            for started in [pool.submit(worker.start) for worker in made]:
                started.result()
            yield made
        finally:
            for stopped in [pool.submit(worker.stop) for worker in made]:
                stopped.result()
