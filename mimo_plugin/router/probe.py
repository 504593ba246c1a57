# SPDX-License-Identifier: Apache-2.0
"""What a worker says of itself: is it well, which models, which blocks, where its events are.

Both engines answer ``/health`` and ``/v1/models``. vLLM tells its version at ``/version``, its
blocks in the labels of the metric ``vllm:cache_config_info`` and its events at
``/kv_event_sources`` (one entry for each data-parallel rank, addresses as they are bound); SGLang
tells all that at ``/server_info``.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from mimo_plugin.router.settings import WorkerSpec, rank_address
from mimo_plugin.router.sglang_events import sglang_sizes

_MOST_BYTES = 16 << 20  # of an answer to a question
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(?P<labels>.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_BLOCK_LABELS = ("block_size", "effective_attention_block_size")
_WILDCARDS = ("*", "0.0.0.0", "[::]")


class ProbeError(Exception):
    """A worker that does not answer as it should; the message is one line.

    Attributes:
        slow: it did not answer in time; it may just have much to do.
    """

    def __init__(self, message: str, *, slow: bool = False) -> None:
        super().__init__(message)
        self.slow = slow


@dataclass(frozen=True, slots=True)
class Source:
    """Where the events of one rank are; addresses as a reader connects to them."""

    events: str
    replay: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker said.

    Attributes:
        engine: ``vllm`` or ``sglang``.
        version: of the engine; empty where it does not tell.
        models: cards by name, as it lists them.
        names: of these models.
        adapters: names of those that are LoRA adapters.
        ranks: data-parallel ranks, in order; ``(None,)`` where there is nothing to choose.
        hash_tokens: tokens of one of the engine's block hashes; None: not said.
        layout: the same for workers whose KV cache groups are the same.
        capacity_tokens, window_capacity_tokens: of the KV cache, for full attention and windows.
        chunk_tokens: of one prefill step, where SGLang keeps a window at its end.
        sources: of events, by rank.
        keeps_windows: it runs the plugin's feature ``kv``, which keeps a window at every message.
    """

    engine: str
    version: str
    models: Mapping[str, Mapping[str, Any]] = field(compare=False)  # with a time in them
    adapters: frozenset[str]
    ranks: tuple[int | None, ...] = (None,)
    hash_tokens: int | None = None
    layout: tuple[str, ...] = ()
    capacity_tokens: int | None = None
    window_capacity_tokens: int | None = None
    chunk_tokens: int | None = None
    sources: Mapping[int | None, Source] = field(default_factory=dict)
    keeps_windows: bool = False
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(self.models))


class Probe:
    """Asks workers.

    Args:
        session: without limits of its own.
        key: sent as a bearer token, or None.
        timeout_s: of one question.
    """

    def __init__(
        self, session: aiohttp.ClientSession, key: str | None = None, timeout_s: float = 5.0
    ) -> None:
        self._session = session
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def healthy(self, url: str) -> None:
        """Return if ``/health`` says so.

        Raises:
            ProbeError: it does not.
        """
        status, _ = await self._get(url + "/health")
        if status != 200:
            raise ProbeError(f"/health answers {status}")

    async def models(self, url: str) -> dict[str, Mapping[str, Any]]:
        """Cards of the models that a worker serves, adapters included.

        Raises:
            ProbeError: no list of models.
        """
        status, body = await self._get(url + "/v1/models")
        if status != 200:
            raise ProbeError(f"/v1/models answers {status}")
        try:
            cards = msgspec.json.decode(body)["data"]
            return {card["id"]: card for card in cards if isinstance(card["id"], str)}
        except (msgspec.DecodeError, KeyError, TypeError):
            raise ProbeError("/v1/models is no list of models") from None

    async def facts(self, spec: WorkerSpec) -> Facts:
        """All of it.

        Raises:
            ProbeError: a worker that does not say which models it has.
        """
        models = await self.models(spec.url)
        adapters = frozenset(name for name, card in models.items() if card.get("parent"))
        info = None
        if spec.engine != "vllm":
            version = await self._json(spec.url + "/version") if spec.engine is None else None
            if version is None:
                info = await self._json(spec.url + "/server_info")
        engine = spec.engine or ("sglang" if info is not None else "vllm")
        if engine == "sglang":
            return _sglang_facts(spec, models, adapters, info or {})
        version, metrics, sources = await asyncio.gather(
            self._json(spec.url + "/version"),
            self._text(spec.url + "/metrics"),
            self._json(spec.url + "/kv_event_sources"),
        )
        return _vllm_facts(spec, models, adapters, version or {}, metrics, sources or {})

    async def _get(self, url: str) -> tuple[int, bytes]:
        try:
            async with self._session.get(
                url, headers=self._headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > _MOST_BYTES:
                        raise ProbeError(f"more than {_MOST_BYTES >> 20} MiB from {url}")
                return response.status, bytes(body)
        except (aiohttp.ClientError, OSError) as error:
            raise ProbeError(f"{type(error).__name__}: {error}") from None
        except asyncio.TimeoutError:
            text = f"no answer within {self._timeout.total:g} s"
            raise ProbeError(text, slow=True) from None

    async def _text(self, url: str) -> str:
        try:
            status, body = await self._get(url)
        except ProbeError:
            return ""
        return body.decode("utf-8", "replace") if status == 200 else ""

    async def _json(self, url: str) -> dict[str, Any] | None:
        text = await self._text(url)
        try:
            value = json.loads(text) if text else None
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


def _vllm_facts(
    spec: WorkerSpec,
    models: Mapping[str, Mapping[str, Any]],
    adapters: frozenset[str],
    version: Mapping[str, Any],
    metrics: str,
    sources: Mapping[str, Any],
) -> Facts:
    infos = [dict(_LABEL.findall(found["labels"])) for found in _CACHE_INFO.finditer(metrics)]
    said: dict[int, Source] = {}
    for rank, config in sources.items():
        if rank.isdigit() and isinstance(config, dict) and config.get("publisher") == "zmq":
            said[int(rank)] = Source(
                reachable(str(config["endpoint"]), spec.url),
                reachable(str(config["replay_endpoint"]), spec.url)
                if config.get("replay_endpoint")
                else None,
                str(config.get("topic") or ""),
            )
    if spec.ranks is not None:
        numbers = list(range(spec.ranks))
    else:
        numbers = sorted(said) or sorted(int(i["engine"]) for i in infos if _digits(i, "engine"))
    # The unit of hashes is told where one was set; else it is the greatest common divisor of the
    # groups' blocks, of which these two are told.
    set_sizes = [int(i["prefix_match_unit"]) for i in infos if _digits(i, "prefix_match_unit")]
    sizes = [int(i[key]) for i in infos for key in _BLOCK_LABELS if _digits(i, key)]
    capacities = [
        int(i["kv_cache_size_tokens"]) for i in infos if _digits(i, "kv_cache_size_tokens")
    ]
    ranks, found = _ranked(spec, numbers, said)
    return Facts(
        "vllm",
        str(version.get("version", "")),
        models,
        adapters,
        ranks=ranks,
        sources=found,
        hash_tokens=min(set_sizes, default=0) or gcd(*sizes) or None,
        layout=tuple(infos[0].get(key, "") for key in _BLOCK_LABELS) if infos else (),
        capacity_tokens=min(capacities, default=0) or None,
        keeps_windows="\nmimo:checkpoints_created" in metrics,
    )


def _sglang_facts(
    spec: WorkerSpec,
    models: Mapping[str, Mapping[str, Any]],
    adapters: frozenset[str],
    info: Mapping[str, Any],
) -> Facts:
    size = info.get("dp_size")
    count = spec.ranks if spec.ranks is not None else size if isinstance(size, int) else 1
    said: dict[int, Source] = {}
    events = info.get("kv_events_config")
    try:
        config = json.loads(events) if isinstance(events, str) else events
    except ValueError:
        config = None
    if isinstance(config, dict) and config.get("publisher") == "zmq":
        endpoint = reachable(str(config.get("endpoint") or "tcp://*:5557"), spec.url)
        replay = config.get("replay_endpoint")
        for rank in range(count):
            said[rank] = Source(
                rank_address(endpoint, rank),
                rank_address(reachable(str(replay), spec.url), rank) if replay else None,
                str(config.get("topic") or ""),
            )
    sizes = sglang_sizes(info)
    ranks, sources = _ranked(spec, list(range(count)), said)
    return Facts(
        "sglang",
        str(info.get("version", "")),
        models,
        adapters,
        ranks=ranks,
        sources=sources,
        hash_tokens=sizes.page_tokens,
        capacity_tokens=sizes.capacity_tokens,
        window_capacity_tokens=sizes.window_capacity_tokens,
        chunk_tokens=sizes.chunk_tokens,
        keeps_windows=sizes.keeps_windows,
    )


def _ranked(
    spec: WorkerSpec, numbers: list[int], said: Mapping[int, Source]
) -> tuple[tuple[int | None, ...], dict[int | None, Source]]:
    """Ranks to choose from and their sources; what was set goes before what was said."""
    numbers = numbers or [0]
    alone = len(numbers) == 1
    sources: dict[int | None, Source] = {}
    for place, rank in enumerate(numbers):
        if spec.events is not None:
            source = Source(
                rank_address(spec.events, place),
                rank_address(spec.replay, place) if spec.replay else None,
                said[rank].topic if rank in said else "",
            )
        elif rank in said:
            source = said[rank]
        else:
            continue
        sources[None if alone else rank] = source
    return ((None,) if alone else tuple(numbers)), sources


def _digits(labels: Mapping[str, str], key: str) -> bool:
    return labels.get(key, "").isdigit()


def reachable(endpoint: str, url: str) -> str:
    """An address that was bound to every interface, with the worker's host in it."""
    scheme, separator, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme == "tcp" and colon and host in _WILDCARDS:
        name = urlsplit(url).hostname or ""
        return f"tcp://{f'[{name}]' if ':' in name else name}:{port}"
    return endpoint
