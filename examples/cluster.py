# SPDX-License-Identifier: Apache-2.0
"""A small cluster with one command: workers, Redis, routers, and chats through them.

    .venv-vllm/bin/python -m examples.cluster              # from the repository, after `make setup`
    .venv-vllm/bin/python -m examples.cluster --keep       # … and serve until Ctrl-C

Starts two vLLM servers with a tiny MiMo (made here, random weights), a Redis server and two
``mimo router`` processes that share their state in it, and prints the command of each. Then some
chats with one system prompt go through the routers in turn, and each line says where a turn went,
why, and how much of its prompt was reused there: as the router thought, and as the worker says.
All of it ends with this process.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shlex
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.router_peers import RouterServer
from benchmarks.router_replay import words
from benchmarks.router_workers import TinyWorker, tiny_workers
from benchmarks.tiers_services import redis_servers
from tools import tiny_mimo


@dataclass(frozen=True)
class Turn:
    """What became of one question."""

    worker: str
    reason: str
    predicted_tokens: int
    cached_tokens: int
    prompt_tokens: int
    text: str


def ask(port: int, model: str, messages: list[dict[str, str]], session: str) -> Turn:
    """One turn of a chat. Any client of the OpenAI API does; the headers are the router's."""
    body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
    headers = {"Content-Type": "application/json", "X-Session-ID": session}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        data: dict[str, Any] = json.loads(response.read())
        if response.status != 200:
            raise SystemExit(f"HTTP {response.status}: {data}")
        usage = data["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return Turn(
            response.headers["X-Mimo-Worker"],
            response.headers["X-Mimo-Reason"],
            int(response.headers["X-Mimo-Predicted-Hit"]),
            int(details.get("cached_tokens") or 0),
            int(usage["prompt_tokens"]),
            data["choices"][0]["message"]["content"],
        )
    finally:
        connection.close()


def router_command(model: str, workers: list[TinyWorker], state: str) -> list[str]:
    """What starts a router; host and port are added."""
    command = [sys.executable, "-m", "mimo_plugin.cli", "router", "--model", model]
    for worker in workers:
        command += ["--worker", f"{worker.base_url},events={worker.events},replay={worker.replay}"]
    return [*command, "--state", state]


def talk(routers: list[RouterServer], model: str, chats: int, turns: int) -> tuple[int, int]:
    """Print each turn; prompt tokens that were reused, and all of them."""
    rnd = random.Random(0)
    system = {"role": "system", "content": words(rnd, 300)}
    talks: list[list[dict[str, str]]] = [[system] for _ in range(chats)]
    reused = asked = 0
    print(f"{'chat':>4} {'turn':>4} {'router':>6}  {'worker':24} {'why':8} {'thought':>7}  reused")
    for turn in range(turns):
        for chat, messages in enumerate(talks):
            number = (turn + chat) % len(routers)
            messages.append({"role": "user", "content": words(rnd, 40)})
            found = ask(routers[number].port, model, messages, f"chat-{chat}")
            messages.append({"role": "assistant", "content": found.text})
            print(
                f"{chat:4} {turn:4} {number:6}  {found.worker:24} {found.reason:8}"
                f" {found.predicted_tokens:7}  {found.cached_tokens} of {found.prompt_tokens}",
                flush=True,
            )
            reused += found.cached_tokens
            asked += found.prompt_tokens
            time.sleep(0.2)  # events come just behind the answer
    return reused, asked


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.cluster", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", type=Path, help="a model's folder (default: a tiny one is made)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--chats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2000, help="of each worker's KV pool")
    parser.add_argument("--keep", action="store_true", help="then serve until Ctrl-C")
    arguments = parser.parse_args(argv)
    for name in ("workers", "routers", "chats", "turns"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: found {getattr(arguments, name)}; allowed: 1 or more")
    if arguments.model is not None and not (arguments.model / "config.json").is_file():
        parser.error(f"--model: found {arguments.model}; allowed: a folder with a config.json")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    arguments = parse(argv)
    # What a service manager sends ends it as Ctrl-C does: everything that was started is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as started:
        folder = Path(started.enter_context(tempfile.TemporaryDirectory(prefix="mimo-cl-")))
        model = arguments.model or tiny_mimo.make(folder / "model", tiny_mimo.TinyMiMo())
        (redis,) = started.enter_context(redis_servers(1))
        print(f"Redis   {redis.url}", flush=True)
        workers = started.enter_context(
            tiny_workers(
                model, arguments.workers, logs=folder, blocks=arguments.blocks, sockets=folder
            )
        )
        routers = []
        for worker in workers:
            print(f"worker  {shlex.join(worker.command)}", flush=True)
        for number in range(arguments.routers):
            command = router_command(str(model), workers, redis.url)
            log = folder / f"router{number}.log"
            router = RouterServer(command, str(model), log, f"router{number}")
            routers.append(started.enter_context(router))
            print(f"router  {shlex.join(router.command)}", flush=True)
        reused, asked = talk(routers, str(model), arguments.chats, arguments.turns)
        print(f"reused {reused} of {asked} prompt tokens ({reused / asked:.0%})", flush=True)
        if arguments.keep:
            for router in routers:
                print(f"page and API: {router.base_url}/ and {router.base_url}/v1", flush=True)
            try:
                signal.pause()
            except KeyboardInterrupt:
                print("stopping", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
