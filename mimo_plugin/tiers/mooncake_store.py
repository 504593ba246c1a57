# SPDX-License-Identifier: Apache-2.0
"""Pages of KV in a Mooncake store, whose memory machines share.

The master decides what goes. It goes by leases: a page that was looked up, read or renewed is
spared for a time (the master's ``--default_kv_lease_ttl``), and when memory is short, pages go that
have no lease any more. So ``exists`` keeps pages alive here, unlike elsewhere, and ``touch`` asks
the same of the master.

A page goes through memory that is shared with the library's process and registered there, so it is
copied once, between the engine's memory and that one, and never by the library. The copy is what
lets a call be given up: a transfer that comes late finds the memory of a process that has ended,
not the engine's. Each call ends in time by itself, so ``tiers/breaker.py`` needs no copies of its
own.

The store raises where Mooncake fails: it is for use through ``tiers/breaker.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from urllib.parse import quote

from mimo_plugin.errors import setting_error
from mimo_plugin.tiers.breaker import Breaker, BreakerLimits
from mimo_plugin.tiers.framing import (
    HEADER_BYTES,
    checksum_in,
    checksum_of,
    header_of,
    scatter,
    size_of,
)
from mimo_plugin.tiers.mooncake_client import (
    LANES,
    START_S,
    Client,
    MooncakeUnavailable,
    reach,
    require_library,
)
from mimo_plugin.tiers.mooncake_url import MooncakeSettings, parse_mooncake
from mimo_plugin.tiers.ring import RingStore
from mimo_plugin.tiers.store import PageStore, Parts, StoreStats

logger = logging.getLogger("mimo_plugin.tiers")

STEP_BYTES = 16 << 20
"""Of the pages of one call: the library moves the pages of a call side by side."""
_PREFIX = "mimo-kv:"
_ALIGN = 64
_STORED = 0
_ALREADY_THERE = -705
_NOT_THERE = frozenset((-703, -704, -707))
"""Codes of pages that are not to be had: being written, absent, or gone while it was read."""
_NO_ROOM = frozenset((-200, -703, -714, -1700))
"""Codes of pages that are not taken: memory is short, others write them, or a quota."""


class MooncakeStore:
    """See the module.

    Args:
        settings: of the store.
        timeout_s: longest time that a call may take, > 0.
        verify: check what is read against its checksum.
    """

    def __init__(
        self, settings: MooncakeSettings, *, timeout_s: float, verify: bool = True
    ) -> None:
        self.name = settings.name
        self._client = Client(settings)
        self._timeout_s = timeout_s
        self._verify = verify
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("put", "got", "missed", "damaged", "touched", "dropped"), 0)
        self._said_large = False

    def start(self, limit_s: float = START_S) -> None:
        """Connect now rather than when it is first used.

        Raises:
            MooncakeUnavailable: why that is not possible.
        """
        self._client.connect(time.monotonic() + limit_s)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are there; keeps them alive."""
        return self._exist(keys, time.monotonic() + self._timeout_s)

    def touch(self, keys: Sequence[str]) -> list[bool]:
        """Renew the leases of pages."""
        return self._touch(keys, time.monotonic() + self._timeout_s)

    def get(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Read pages; the memory of one that is missed stays as it was."""
        end_s = time.monotonic() + self._timeout_s
        names, found = [_name(key) for key in keys], [False] * len(keys)
        damaged: list[str] = []
        for batch, places in self._batches(pages, range(len(pages))):
            with self._client.lane(end_s) as lane:
                codes = lane.ask("get", [names[index] for index in batch], places, end_s)
                for index, code, (start, size) in zip(batch, codes, places, strict=True):
                    if code >= 0:
                        value = lane.memory[start : start + size]
                        found[index] = code == size and self._unpack(value, pages[index])
                        if not found[index]:
                            damaged.append(names[index])
                    elif code not in _NOT_THERE:
                        self._fail(f"get ended with {code}")
        self._count("got", sum(found))
        self._count("missed", len(keys) - sum(found) - len(damaged))
        if damaged:
            self._count("damaged", len(damaged))
            with self._client.lane(end_s) as lane:
                lane.ask("remove", damaged, (), end_s)
        return found

    def put(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Write pages that are not there yet."""
        end_s = time.monotonic() + self._timeout_s
        done = self._touch(keys, end_s)
        absent = [index for index, there in enumerate(done) if not there]
        for batch, places in self._batches(pages, absent):
            with self._client.lane(end_s) as lane:
                for index, (start, _) in zip(batch, places, strict=True):
                    _pack(lane.memory, start, pages[index])
                names = [_name(keys[index]) for index in batch]
                codes = lane.ask("put", names, places, end_s)
            for index, code in zip(batch, codes, strict=True):
                done[index] = code in (_STORED, _ALREADY_THERE)
                if not done[index] and code not in _NO_ROOM:
                    self._fail(f"put ended with {code}")
        written = sum(done[index] for index in absent)
        self._count("put", written)
        self._count("dropped", len(absent) - written)
        return done

    def stats(self) -> StoreStats:
        """Counters of this process; what the store holds is not asked for."""
        with self._lock:
            counts = {f"pages_{name}": number for name, number in self._counts.items()}
        return StoreStats(bytes_held=None, pages_evicted=0, **counts)

    def close(self) -> None:
        """Let go of the library's process."""
        self._client.close()

    def _touch(self, keys: Sequence[str], end_s: float) -> list[bool]:
        found = self._exist(keys, end_s)
        self._count("touched", sum(found))
        return found

    def _exist(self, keys: Sequence[str], end_s: float) -> list[bool]:
        if not keys:
            return []
        with self._client.lane(end_s) as lane:
            codes = lane.ask("exist", [_name(key) for key in keys], (), end_s)
        bad = [code for code in codes if code < 0]
        if bad:
            self._fail(f"batch_is_exist ended with {bad[0]}")
        return [code == 1 for code in codes]

    def _batches(
        self, pages: Sequence[Parts], wanted: Sequence[int]
    ) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Pages that fit into a lane together, by index, with offset and size of each there."""
        batch: list[int] = []
        places: list[tuple[int, int]] = []
        used = 0
        for index in wanted:
            size = HEADER_BYTES + size_of(pages[index])
            if size > self._client.lane_bytes:
                self._say_large(size)
                continue
            if used + size > self._client.lane_bytes:
                yield batch, places
                batch, places, used = [], [], 0
            batch.append(index)
            places.append((used, size))
            used += -(-size // _ALIGN) * _ALIGN
        if batch:
            yield batch, places

    def _unpack(self, value: memoryview, page: Parts) -> bool:
        body = value[HEADER_BYTES:]
        checksum = checksum_in(bytes(value[:HEADER_BYTES]), body.nbytes)
        if checksum is None or (self._verify and checksum_of([body]) != checksum):
            return False
        scatter(body, page)
        return True

    def _fail(self, problem: str) -> None:
        """What is still on its way may end late, so the library's process goes."""
        self._client.fail()
        raise MooncakeUnavailable(problem)

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] += number

    def _say_large(self, size: int) -> None:
        with self._lock:
            said, self._said_large = self._said_large, True
        if not said:
            logger.warning(
                "mimo tiers: store %s takes no page of %d bytes, as a part of its buffer has %d; "
                "fix: buffer_mib=%d in its URL",
                self.name,
                size,
                self._client.lane_bytes,
                -(-size * LANES >> 20),
            )


def open_mooncake(
    urls: Sequence[str],
    *,
    setting: str = "Mooncake URL",
    verify: bool = True,
    limits: BreakerLimits | None = None,
) -> RingStore:
    """A ring over stores, each of which may fail without failing a request.

    Each is connected to.

    Args:
        urls: at least one, each master once. All who share them must name them alike.
        setting: in messages, where the URLs stand.
        verify: check what is read against its checksum.
        limits: what each store may cost where it fails; None: the usual ones.

    Raises:
        ConfigError: a URL is none, or a master is named twice.
        MooncakeUnavailable: the library can't be loaded, or a master does not answer.
    """
    limits = limits or replace(BreakerLimits(), step_bytes=STEP_BYTES)
    stores: dict[str, PageStore] = {}
    try:
        for settings in _parsed(setting, urls):
            store = MooncakeStore(settings, timeout_s=limits.timeout_s, verify=verify)
            stores[settings.name] = Breaker(store, settings.name, limits=limits, bounded=True)
            try:
                store.start()
            except MooncakeUnavailable as error:
                raise MooncakeUnavailable(f"{setting}: {settings.name}: {error}") from error
    except BaseException:
        for each in stores.values():
            each.close()
        raise
    return RingStore(stores)


def require_mooncake(setting: str, urls: Sequence[str]) -> None:
    """Refuse URLs that no store can be made of; see ``open_mooncake``.

    Raises:
        ConfigError: a URL is none, or a master is named twice.
        MooncakeUnavailable: the library can't be loaded, or a master does not answer.
    """
    every = _parsed(setting, urls)
    try:
        require_library()
        for settings in every:
            reach(settings)
    except MooncakeUnavailable as error:
        raise MooncakeUnavailable(f"{setting}: {error}") from error


def _parsed(setting: str, urls: Sequence[str]) -> list[MooncakeSettings]:
    found: dict[str, MooncakeSettings] = {}
    for url in urls:
        settings = parse_mooncake(setting, url)
        if settings.name in found:
            raise setting_error(setting, settings.name, "each master once", "drop one")
        found[settings.name] = settings
    return list(found.values())


def _name(key: str) -> str:
    return _PREFIX + quote(key, safe="/:", errors="surrogatepass")


def _pack(memory: memoryview, start: int, page: Parts) -> None:
    """A page behind its header."""
    for part in (memoryview(header_of(page)), *page):
        if part.nbytes:
            memory[start : start + part.nbytes] = part.cast("B")
        start += part.nbytes
