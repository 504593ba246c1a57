# SPDX-License-Identifier: Apache-2.0
"""Changes of workers at run time: which one of two is later, and who has to hear of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mimo_plugin.router.state import Listener, WorkerChanged

_FORGET_US = 7 * 24 * 3600 * 1_000_000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WorkerChanged).decode


class SharedWorkers:
    """The last change of each worker.

    Args:
        listener: hears of those that others made.
        process: this one.
        given: settings by URL of the workers on this process's command line.
    """

    def __init__(
        self, listener: Listener, process: str, given: Mapping[str, dict[str, str]]
    ) -> None:
        self._listener, self._process, self._given = listener, process, given
        self._all: dict[str, WorkerChanged] = {}
        self._begun = False

    def stamp(self, change: WorkerChanged, now_us: int) -> WorkerChanged:
        """A change that was made here: it is later than all that is known of its worker."""
        known = self._all.get(change.url)
        if known is not None:
            now_us = max(now_us, known.at_us + 1)
            if not change.removed:
                settings = change.settings or known.settings
                change = msgspec.structs.replace(
                    change, added=change.added or known.added, settings=settings
                )
        change = msgspec.structs.replace(change, at_us=now_us, by=self._process)
        self._all[change.url] = change
        return change

    def merge(self, change: WorkerChanged) -> None:
        """A change that another process made."""
        known = self._all.get(change.url)
        if known is not None and _rank(change) <= _rank(known):
            return
        self._all[change.url] = change
        if change.added or change.removed or change.url in self._given:
            self._listener.worker_changed(change)

    def meet(
        self, fields: Mapping[bytes, bytes], now_us: int
    ) -> tuple[dict[str, bytes], list[str]]:
        """Take what the server has.

        Returns:
            What it has to be given, and the URLs that it can forget.
        """
        theirs: dict[str, WorkerChanged] = {}
        for field, data in fields.items():
            try:
                theirs[field.decode()] = _decode(data)
            except (msgspec.MsgspecError, ValueError):
                continue  # of a later version: left alone
        for change in theirs.values():
            if not self._begun and change.removed and change.url in self._given:
                # It is on the command line again.
                self._all[change.url] = change
                back = WorkerChanged(change.url, self._given[change.url])
                self.stamp(back, now_us)
            else:
                self.merge(change)
        self._begun = True
        old = [
            url
            for url, change in self._all.items()
            if change.removed and change.at_us < now_us - _FORGET_US
        ]
        for url in old:
            del self._all[url]
        written = {
            url: _encode(change)
            for url, change in self._all.items()
            if url not in theirs or _rank(theirs[url]) < _rank(change)
        }
        return written, old


def _rank(change: WorkerChanged) -> tuple[int, str]:
    return change.at_us, change.by
