# SPDX-License-Identifier: Apache-2.0
"""From the section ``tiers`` to the store that it names, for all engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mimo_plugin.config_tiers import FILE, MOONCAKE, REDIS, TiersConfig, require_place
from mimo_plugin.tiers.file_store import FileStore, prepare
from mimo_plugin.tiers.folders import open_folders
from mimo_plugin.tiers.mooncake_store import open_mooncake, require_mooncake
from mimo_plugin.tiers.redis_store import open_redis, require_redis
from mimo_plugin.tiers.store import PageStore

SECTION = "mimo.tiers"


def open_store(config: TiersConfig, *, where: str = SECTION) -> PageStore:
    """The store that the settings name.

    Args:
        config: its section.
        where: what that is called in messages.

    Raises:
        ConfigError: a setting is missing, or contradicts others.
        StoreError: a folder can't be written to.
        RedisUnavailable: no client library.
        MooncakeUnavailable: no client library, or no master.
    """
    require_place(where, config)
    if config.store == REDIS:
        return open_redis(config.paths, verify=config.verify)
    if config.store == MOONCAKE:
        return open_mooncake(config.paths, setting=f"{where}.path", verify=config.verify)
    folders, sizes = [Path(folder) for folder in config.paths], _bytes(config.capacity_gib)
    if isinstance(config.path, str):
        return FileStore(folders[0], capacity_bytes=sizes[0], verify=config.verify)
    each = isinstance(config.capacity_gib, tuple)
    return open_folders(folders, sizes if each else sizes[0], verify=config.verify)


def each_guarded(config: TiersConfig) -> TiersConfig:
    """The same with a single folder as a list of one: one of a list has a guard of its own.

    For who must not wait, neither for a folder nor for room to be made in it.
    """
    return replace(config, path=config.paths) if config.path else config


def require_store(config: TiersConfig, *, where: str = SECTION) -> None:
    """Refuse settings that no store can be made of, before an engine loads its model.

    Args:
        config: its section.
        where: what that is called in messages.

    Raises:
        ConfigError: a setting is missing, or contradicts others.
        StoreError: a folder can't be written to.
        RedisUnavailable: no client library.
        MooncakeUnavailable: no client library, or no master.
    """
    require_place(where, config)
    if config.store == REDIS:
        require_redis(config.paths)
    elif config.store == MOONCAKE:
        require_mooncake(f"{where}.path", config.paths)
    elif config.store == FILE:
        for folder in config.paths:
            prepare(Path(folder))


def share_memory(store: PageStore, memory: memoryview, file: int) -> bool:
    """Have pages that lie in this memory moved in place, where the store can do so safely.

    Args:
        store: any.
        memory: a writable mapping of a file, from its start, until the store is closed.
        file: its number; it may be closed after the call.

    Returns:
        Whether it can; without that, pages are copied, and all works the same.
    """
    share = getattr(store, "share", None)
    return bool(share is not None and share(memory, file))


def _bytes(capacity_gib: float | tuple[float, ...] | None) -> list[int]:
    given = capacity_gib if isinstance(capacity_gib, tuple) else (capacity_gib or 0.0,)
    return [max(1, int(gib * (1 << 30))) for gib in given]
