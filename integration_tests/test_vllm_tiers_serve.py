# SPDX-License-Identifier: Apache-2.0
"""``vllm serve --plugin mimo:tiers`` as users start it: chats, a restart, metrics, refusals."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from integration_tests.kv_client import alignment_tokens
from integration_tests.kv_scripts import words
from integration_tests.refusal import Refusal, check_refused, serve_all
from integration_tests.side_by_side import start_all, stop_all
from tools.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
LOGPROB_TOLERANCE = 1e-4
PATIENCE_S = 60.0
TURNS, OUTPUT_TOKENS = 3, 60
PLUGINS = {"alone": "mimo:tiers", "with kv": "mimo:kv,scheduler,tiers"}


@dataclass(frozen=True)
class Said:
    """One answer of a server."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


def ask(server: VllmServer, path: str, body: Mapping[str, Any]) -> tuple[Said, str]:
    """Greedy; also the text."""
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    logprobs: dict[str, Any] = {"logprobs": True} if "chat" in path else {"logprobs": 1}
    reply = server.post(path, {**fixed, **logprobs, "max_tokens": OUTPUT_TOKENS, **body})
    (choice,) = reply["choices"]
    if "chat" in path:
        prompt, text = reply["prompt_token_ids"], choice["message"]["content"]
        found = [each["logprob"] for each in choice["logprobs"]["content"]]
    else:
        prompt, text = body["prompt"], choice["text"]
        found = choice["logprobs"]["token_logprobs"]
    cached = (reply["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return Said(tuple(prompt), tuple(choice["token_ids"]), tuple(found), cached), text


def talk(server: VllmServer) -> list[Said]:
    """A chat of some turns, always the same."""
    messages = [{"role": "system", "content": words(1, 200)}]
    answers = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": words(2 + turn, 40)})
        answer, text = ask(server, "/v1/chat/completions", {"messages": messages})
        messages.append({"role": "assistant", "content": text})
        answers.append(answer)
    return answers


def follow(server: VllmServer, before: Said) -> Said:
    """A question behind an answer, as the engine has its tokens."""
    prompt = [*before.prompt, *before.tokens, *range(400, 430)]
    return ask(server, "/v1/completions", {"prompt": prompt})[0]


def check(answers: Sequence[Said], expected: Sequence[Said]) -> None:
    """They are the same."""
    assert [each.prompt for each in answers] == [each.prompt for each in expected]
    assert [each.tokens for each in answers] == [each.tokens for each in expected]
    for answer, other in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_TOLERANCE)


def settle(server: VllmServer) -> None:
    """Wait until nothing more is written to the store; a step lets the engine say what was."""
    end_s, seen, same = time.monotonic() + PATIENCE_S, -1.0, 0
    while same < 3:
        assert time.monotonic() < end_s, "no end of pages"
        ask(server, "/v1/completions", {"prompt": [300] * 5, "max_tokens": 1})
        time.sleep(0.5)
        now = server.metric("mimo:tier_pages_total", what="written") or 0.0
        same = same + 1 if now == seen and now else 0
        seen = now


def forget_device(server: VllmServer) -> None:
    """The device's cache is emptied; the tiers below it are not."""
    connection, response = server._open("POST", "/reset_prefix_cache", {}, 60.0)
    response.read()
    connection.close()


@dataclass
class Served:
    """What one kind of server answered, and what it counted then."""

    first: list[Said]
    log: str
    again: list[Said]
    next_turn: Said
    restarted: list[Said]
    host_hit_tokens: float
    host_read: dict[str, float]
    touched: float
    store_hit_tokens: float
    names: set[str]
    unit: int


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    folder = tmp_path_factory.mktemp("stores")

    def make(name: str) -> list[str]:
        section = {"host_gib": 0.05, "path": str(folder / name), "capacity_gib": 0.5}
        config = json.dumps({"mimo": {"tiers": section}})
        return ["--plugin", PLUGINS[name], "--additional-config", config]

    return make


@pytest.fixture(scope="module")
def served(
    tiny_model: Path, serve_module: Any, arguments: Callable[[str], list[str]]
) -> dict[str, Any]:
    """Answers of stock (``stock``: the chat and the turn behind it) and of each kind of server."""

    def start(name: str) -> VllmServer:
        more = arguments(name) if name in PLUGINS else []
        server: VllmServer = serve_module(tiny_model, *more, environment=DEVELOPMENT)
        return server

    def once(name: str) -> dict[str, Any]:
        server = start(name)
        first = talk(server)
        if name == "stock":
            found: dict[str, Any] = {"first": first, "next_turn": follow(server, first[-1])}
            stop_all([server])
            return found
        settle(server)
        forget_device(server)
        found = {"first": first, "again": talk(server), "unit": alignment_tokens(server)}
        settle(server)
        found["host_hit_tokens"] = server.metric("mimo:tier_host_hit_tokens_total")
        forget_device(server)
        found["next_turn"] = follow(server, first[-1])
        settle(server)
        found["host_read"] = {
            kind: server.metric("mimo:tier_host_bytes_total", direction="read", kind=kind)
            for kind in ("full", "swa")
        }
        found["touched"] = server.metric("mimo:tier_pages_total", what="touched")
        found["names"] = set(server.metrics())
        found["log"] = server.log_text()
        stop_all([server])
        server = start(name)
        found["restarted"] = talk(server)
        ask(server, "/v1/completions", {"prompt": [300] * 5, "max_tokens": 1})
        found["store_hit_tokens"] = server.metric("mimo:tier_hit_tokens_total")
        stop_all([server])
        return found

    found = start_all({name: (lambda name=name: once(name)) for name in ("stock", *PLUGINS)})
    return {name: Served(**each) if name in PLUGINS else each for name, each in found.items()}


@pytest.mark.parametrize("name", PLUGINS)
def test_every_answer_is_that_of_stock(served: dict[str, Any], name: str) -> None:
    mine, stock = served[name], served["stock"]
    for answers in (mine.first, mine.again, mine.restarted):
        check(answers, stock["first"])
    check([mine.next_turn], [stock["next_turn"]])


@pytest.mark.parametrize("name", PLUGINS)
def test_a_chat_comes_back_from_host_memory(served: dict[str, Any], name: str) -> None:
    mine = served[name]
    hits = [whole(len(each.prompt) - 1, mine.unit) for each in mine.first]
    assert [each.cached for each in mine.again] == hits
    assert mine.host_hit_tokens >= hits[0]
    last = mine.first[-1]
    turn_end = whole(len(last.prompt) + len(last.tokens) - 1, mine.unit)
    assert mine.next_turn.cached == turn_end > hits[-1]
    assert min(mine.host_read.values()) > 0


@pytest.mark.parametrize("name", PLUGINS)
def test_a_chat_comes_back_from_the_store_after_a_restart(
    served: dict[str, Any], name: str
) -> None:
    mine = served[name]
    hits = [whole(len(each.prompt) - 1, mine.unit) for each in mine.first]
    assert [each.cached for each in mine.restarted] == hits
    assert mine.store_hit_tokens >= hits[0]


@pytest.mark.parametrize("name", PLUGINS)
def test_the_log_and_the_metrics_tell(served: dict[str, Any], name: str) -> None:
    mine = served[name]
    features = PLUGINS[name].removeprefix("mimo:")
    assert f"features={features} | contracts ok" in mine.log
    assert mine.touched > 0
    wanted = ("hit_tokens", "host_hit_tokens", "host_bytes", "bytes", "pages", "missed_tokens")
    assert {f"mimo:tier_{each}_total" for each in wanted} <= mine.names
    assert {"mimo:tier_held_bytes", "mimo:tier_stores_down"} <= mine.names


def whole(tokens: int, unit: int) -> int:
    return tokens // unit * unit


# --- refusals -------------------------------------------------------------------------------


def section(**settings: Any) -> str:
    return "--additional-config=" + json.dumps({"mimo": {"tiers": settings}})


OTHER_CONNECTOR = "--kv-transfer-config=" + json.dumps(
    {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
    }
)
ON = "--plugin=mimo:tiers"
REFUSALS = {
    "another connector": Refusal(
        [ON, section(host_gib=1), OTHER_CONNECTOR], ["--kv-transfer-config", "OffloadingConnector"]
    ),
}
WINDOWLESS = Refusal([ON, section(host_gib=1)], ["0 sliding-window layers", "leave tiers out"])
LITTLE = Refusal([ON, section(host_gib=1e-6)], [])
"""How large a block is comes out in the engine's process only."""


@pytest.fixture(scope="module")
def refused(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """How the commands that must not start ended."""
    plain = tmp_path_factory.mktemp("plain") / "model"
    shutil.copytree(tiny_model, plain)
    config = json.loads((plain / "config.json").read_text())
    config["hybrid_layer_pattern"] = [0] * len(config["hybrid_layer_pattern"])
    (plain / "config.json").write_text(json.dumps(config))
    windowless = replace(WINDOWLESS, model=plain)
    return serve_all(tiny_model, {**REFUSALS, "windowless": windowless, "little": LITTLE})


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_refused_in_one_line(refused: Any, name: str) -> None:
    check_refused(refused[name], REFUSALS[name].words)


def test_host_memory_for_no_block_is_refused(refused: Any) -> None:
    done = refused["little"]
    log = done.stdout + done.stderr
    assert done.returncode not in (0, None)
    (line, *_) = [each for each in log.splitlines() if "mimo.tiers.host_gib: found 1e-06" in each]
    assert "at least one block of" in line and "fix: give more host memory" in line


def test_a_model_without_windows_is_refused_in_one_line(refused: Any) -> None:
    done = refused["windowless"]
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode not in (0, None)
    assert all(word in line for word in WINDOWLESS.words), line
    assert "EngineCore" not in done.stdout + done.stderr
