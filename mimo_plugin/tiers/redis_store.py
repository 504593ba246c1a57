# SPDX-License-Identifier: Apache-2.0
"""Pages of KV in a Redis server, which any number of engines may share.

The server decides what goes: give it ``maxmemory`` and ``maxmemory-policy allkeys-lru``. Pages are
kept alive by TOUCH, and by reading; EXISTS leaves their age alone, as the server's manual says of
both. A value is a page behind its header, so one that is not what was written is a miss, and goes.

The store raises where the server fails: it is for use through ``tiers/breaker.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from mimo_plugin.errors import MimoError, setting_error
from mimo_plugin.tiers.breaker import Breaker, BreakerLimits
from mimo_plugin.tiers.framing import (
    HEADER_BYTES,
    checksum_in,
    checksum_of,
    header_of,
    scatter,
    size_of,
)
from mimo_plugin.tiers.ring import RingStore
from mimo_plugin.tiers.store import PageStore, Parts, StoreStats

_PREFIX = b"mimo-kv:"
_SCHEMES = ("redis", "rediss", "unix")


class RedisUnavailable(MimoError):
    """The client library is missing or too old; one line that says so."""


def name_of(url: str) -> str:
    """What a server is called: its URL without user, password and options.

    Raises:
        ConfigError: it is no URL of a server.
    """
    allowed = "redis://HOST:PORT/DB, rediss:// or unix:///PATH"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme == "unix" and parts.path:
        return f"unix://{parts.path}"
    if parts.scheme not in _SCHEMES or not host:
        # What was found may hold a password, and is not shown.
        raise setting_error("Redis URL", "…", allowed, "write it like that")
    return f"{parts.scheme}://{host}:{port or 6379}/{parts.path.strip('/') or 0}"


class RedisStore:
    """See the module.

    Args:
        url: of the server, as redis-py takes it; user and password may be in it.
        timeout_s: longest time that the server may take to accept, to answer or to take something,
            > 0.
        verify: check what is read against its checksum.

    Raises:
        ConfigError: it is no URL of a server.
        RedisUnavailable: no client library.
    """

    def __init__(self, url: str, *, timeout_s: float, verify: bool = True) -> None:
        self.name = name_of(url)
        self._verify = verify
        self._client, self._full = _connect(url, timeout_s)
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("put", "got", "missed", "damaged", "touched", "dropped"), 0)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are there."""
        return [bool(found) for found in self._each("exists", keys)]

    def touch(self, keys: Sequence[str]) -> list[bool]:
        """Renew the age of pages."""
        found = [bool(found) for found in self._each("touch", keys)]
        self._count("touched", sum(found))
        return found

    def get(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Read pages; the memory of one that is missed stays as it was."""
        if not keys:
            return []
        values = self._client.mget([_name(key) for key in keys])
        found, damaged = [], []
        for key, value, page in zip(keys, values, pages, strict=True):
            well = value is not None and self._unpack(memoryview(value), page)
            if not well and value is not None:
                damaged.append(key)
            found.append(well)
        self._count("got", sum(found))
        self._count("missed", len(found) - sum(found) - len(damaged))
        if damaged:
            self._count("damaged", len(damaged))
            self._client.unlink(*(_name(key) for key in damaged))
        return found

    def put(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Write pages that are not there yet."""
        done = self.touch(keys)
        absent = [index for index, there in enumerate(done) if not there]
        if not absent:
            return done
        with self._client.pipeline(transaction=False) as batch:
            for index in absent:
                page = pages[index]
                batch.set(_name(keys[index]), b"".join((header_of(page), *page)))
            answers = batch.execute(raise_on_error=False)
        for index, answer in zip(absent, answers, strict=True):
            if isinstance(answer, Exception) and not isinstance(answer, self._full):
                raise answer
            done[index] = answer is True
        written = sum(done[index] for index in absent)
        self._count("put", written)
        self._count("dropped", len(absent) - written)
        return done

    def stats(self) -> StoreStats:
        """Counters of this process; what the server holds is not asked for."""
        with self._lock:
            counts = {f"pages_{name}": number for name, number in self._counts.items()}
        return StoreStats(bytes_held=None, pages_evicted=0, **counts)

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()

    def _each(self, command: str, keys: Sequence[str]) -> list[Any]:
        """The answers to one command for each key, in one journey."""
        if not keys:
            return []
        with self._client.pipeline(transaction=False) as batch:
            for key in keys:
                getattr(batch, command)(_name(key))
            return list(batch.execute())

    def _unpack(self, value: memoryview, page: Parts) -> bool:
        size = size_of(page)
        body = value[HEADER_BYTES:]
        checksum = checksum_in(bytes(value[:HEADER_BYTES]), size)
        if checksum is None or body.nbytes != size:
            return False
        if self._verify and checksum_of([body]) != checksum:
            return False
        scatter(body, page)
        return True

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] += number


def open_redis(
    urls: Sequence[str], *, verify: bool = True, limits: BreakerLimits | None = None
) -> RingStore:
    """A ring over servers, each of which may fail without failing a request.

    Nothing is connected to yet: a server that is not there costs hits, and is tried again.

    Args:
        urls: at least one, each server once. All who share them must name them alike.
        verify: check what is read against its checksum.
        limits: what each server may cost where it fails; None: the usual ones.

    Raises:
        ConfigError: a URL is none, or a server is named twice.
        RedisUnavailable: no client library.
    """
    limits = limits or BreakerLimits()
    stores: dict[str, PageStore] = {}
    for name, url in require_redis(urls).items():
        store = RedisStore(url, timeout_s=limits.timeout_s, verify=verify)
        stores[name] = Breaker(store, name, limits=limits)
    return RingStore(stores)


def require_redis(urls: Sequence[str]) -> dict[str, str]:
    """The URLs by the names of their servers, when a store can be made of them.

    Raises:
        ConfigError: a URL is none, or a server is named twice.
        RedisUnavailable: no client library.
    """
    found: dict[str, str] = {}
    for url in urls:
        name = name_of(url)
        if name in found:
            raise setting_error("Redis URL", name, "each server once", "drop one")
        found[name] = url
    _library()
    return found


def _name(key: str) -> bytes:
    return _PREFIX + key.encode("utf-8", "surrogatepass")


def _library() -> Any:
    try:
        import redis
        from redis.exceptions import OutOfMemoryError  # noqa: F401 - a client that is recent enough
    except ImportError as error:
        raise RedisUnavailable(
            f"Redis store: no client library ({error}); fix: pip install 'mimo-plugin[tiers]'"
        ) from error
    return redis


def _connect(url: str, timeout_s: float) -> tuple[Any, type[Exception]]:
    """A client, which connects when it is used, and the error of a server without room."""
    redis = _library()
    client = redis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        # The breaker decides when to try again.
        retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        decode_responses=False,
    )
    return client, redis.exceptions.OutOfMemoryError
