# SPDX-License-Identifier: Apache-2.0
"""The file store over one folder or several, such as the drives of a server or several mounts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mimo_plugin.core.ring import points_for
from mimo_plugin.tiers.breaker import Breaker, BreakerLimits
from mimo_plugin.tiers.file_store import FileStore
from mimo_plugin.tiers.ring import RingStore
from mimo_plugin.tiers.store import PageStore


def open_folders(
    folders: Sequence[Path],
    capacity_bytes: int | Sequence[int],
    *,
    verify: bool = True,
    limits: BreakerLimits | None = None,
) -> RingStore:
    """A ring over the folders, each of which may fail without failing a request.

    Args:
        folders: at least one, each once; made where they are not there. All who share them must
            name them alike: where a page lies follows from the names.
        capacity_bytes: of all of them together, in equal parts; or of each, which then decides what
            part of the pages it gets too.
        verify: check what is read against its checksum.
        limits: what each folder may cost where it fails; None: the usual ones.

    Raises:
        StoreError: a folder can't be written to.
    """
    names = [str(folder) for folder in folders]
    points: dict[str, int] | None = None
    if isinstance(capacity_bytes, int):
        capacities = [max(1, capacity_bytes // len(folders))] * len(folders)
    else:
        capacities = list(capacity_bytes)
        points = {name: points_for(size) for name, size in zip(names, capacities, strict=True)}
    stores: dict[str, PageStore] = {}
    for name, folder, size in zip(names, folders, capacities, strict=True):
        store = FileStore(folder, capacity_bytes=size, verify=verify, guarded=True)
        stores[name] = Breaker(store, name, limits=limits)
    return RingStore(stores, points)
