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
own. Pages in memory that the engine shares (``share``) are not copied at all; there a call that is
given up ends the process before it returns.

The store raises where Mooncake fails: it is for use through ``tiers/breaker.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn
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
    Lane,
    MooncakeUnavailable,
    reach,
    require_library,
)
from mimo_plugin.tiers.mooncake_url import MooncakeSettings, parse_mooncake
from mimo_plugin.tiers.mooncake_worker import Piece
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


@dataclass(frozen=True)
class _Value:
    """Where a page with its header is, for one call.

    Attributes:
        start: in the lane, bytes.
        own: of the lane, bytes.
        size: bytes.
        pieces: of which it consists.
        copied: all of it lies in the lane, else the page in the engine's memory.
    """

    start: int
    own: int
    size: int
    pieces: tuple[Piece, ...]
    copied: bool


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
        found = [False] * len(keys)
        damaged: list[str] = []
        for lane, batch, values in self._batches(pages, range(len(pages)), end_s):
            names = [_name(keys[index]) for index in batch]
            codes = lane.ask("get", names, [value.pieces for value in values], end_s)
            for index, name, code, value in zip(batch, names, codes, values, strict=True):
                if code >= 0:
                    found[index] = code == value.size and self._unpack(lane, value, pages[index])
                    if not found[index]:
                        damaged.append(name)
                elif code not in _NOT_THERE:
                    _fail(lane, f"get ended with {code}")
        self._count("got", sum(found))
        self._count("missed", len(keys) - sum(found) - len(damaged))
        self._count("damaged", len(damaged))
        if damaged:
            with self._client.lane(end_s) as lane:
                lane.ask("remove", damaged, (), end_s)
        return found

    def put(self, keys: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Write pages that are not there yet."""
        end_s = time.monotonic() + self._timeout_s
        done = self._touch(keys, end_s)
        absent = [index for index, there in enumerate(done) if not there]
        for lane, batch, values in self._batches(pages, absent, end_s):
            for index, value in zip(batch, values, strict=True):
                _pack(lane.memory, value, pages[index])
            names = [_name(keys[index]) for index in batch]
            codes = lane.ask("put", names, [value.pieces for value in values], end_s)
            for index, code in zip(batch, codes, strict=True):
                done[index] = code in (_STORED, _ALREADY_THERE)
                if not done[index] and code not in _NO_ROOM:
                    _fail(lane, f"put ended with {code}")
        written = sum(done[index] for index in absent)
        self._count("put", written)
        self._count("dropped", len(absent) - written)
        return done

    def share(self, memory: memoryview, file: int) -> bool:
        """Have pages that lie in this memory moved in place: the library reads and writes it.

        The memory of a page that is missed may then have been written to. A call that fails returns
        when the library's process has gone, however long that takes.

        Args:
            memory: a writable mapping of a file, from its start, until this store is closed.
            file: its number; it may be closed after the call.
        """
        self._client.share(memory, file)
        return True

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
                _fail(lane, f"batch_is_exist ended with {bad[0]}")
        return [code == 1 for code in codes]

    def _batches(
        self, pages: Sequence[Parts], wanted: Sequence[int], end_s: float
    ) -> Iterator[tuple[Lane, list[int], list[_Value]]]:
        """Pages that one call can move, by index; the lane is theirs until more are asked for."""
        at = 0
        while at < len(wanted):
            with self._client.lane(end_s) as lane:
                batch: list[int] = []
                values: list[_Value] = []
                used = 0
                while at < len(wanted):
                    value = _value(lane, used, pages[wanted[at]])
                    if used + value.own > len(lane.memory):
                        if used:
                            break
                        self._say_large(value.size)
                    else:
                        batch.append(wanted[at])
                        values.append(value)
                        used += -(-value.own // _ALIGN) * _ALIGN
                    at += 1
                if batch:
                    yield lane, batch, values

    def _unpack(self, lane: Lane, value: _Value, page: Parts) -> bool:
        """Is it what was written? If so, it lies in the page from now on."""
        whole = lane.memory[value.start : value.start + value.own]
        checksum = checksum_in(bytes(whole[:HEADER_BYTES]), value.size - HEADER_BYTES)
        body = [whole[HEADER_BYTES:]] if value.copied else page
        if checksum is None or (self._verify and checksum_of(body) != checksum):
            return False
        if value.copied:
            scatter(body[0], page)
        return True

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


def _fail(lane: Lane, problem: str) -> NoReturn:
    """What is still on its way may end late, so the library's process goes."""
    lane.end()
    raise MooncakeUnavailable(problem)


def _value(lane: Lane, start: int, page: Parts) -> _Value:
    size = HEADER_BYTES + size_of(page)
    there = lane.in_place(page)
    own = size if there is None else HEADER_BYTES
    return _Value(start, own, size, (lane.piece(start, own), *(there or ())), there is None)


def _pack(memory: memoryview, value: _Value, page: Parts) -> None:
    """The header of a page, and where it is copied the page behind it."""
    start = value.start
    for part in (memoryview(header_of(page)), *(page if value.copied else ())):
        if part.nbytes:
            memory[start : start + part.nbytes] = part.cast("B")
        start += part.nbytes
