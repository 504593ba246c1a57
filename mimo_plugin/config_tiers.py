# SPDX-License-Identifier: Apache-2.0
"""Settings of the feature ``tiers``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mimo_plugin.config_values import (
    CHECKPOINT_CLASSES,
    Validator,
    boolean,
    number,
    one_of,
    section,
    subset,
    text,
    token_ids_or_none,
    whole,
    whole_or_none,
)
from mimo_plugin.errors import setting_error

FILE, REDIS, MOONCAKE = "file", "redis", "mooncake"
STORES = (FILE, REDIS, MOONCAKE)
"""Kinds of stores."""

STORE_SETTINGS = ("store", "path", "capacity_gib", "verify", "name")
"""Settings that name a store; the rest is about how an engine uses it."""

VLLM_ONLY = (
    "host_gib",
    "classes",
    "message_start_token_ids",
    "ladder_min_tokens",
    "ladder_growth",
    "outputs",
    "touch_interval_s",
)
SGLANG_ONLY = ("prefetch_tokens", "host_swa_share")
"""Settings that the other engine has no use for."""


@dataclass(frozen=True, kw_only=True)
class TiersConfig:
    """Settings of the feature ``tiers``.

    Attributes:
        store: kind of the store below host memory, one of ``STORES``.
        path: its folder, or the URL of its server or master; or several, each once, over which its
            pages are spread; must be given.
        capacity_gib: of all its pages, GiB, > 0; or of the pages in each of several folders. Where
            the feature is switched on, None is refused for files, and all else for servers.
        verify: what is read is checked against its checksum.
        name: engines with different names share nothing.
        prefetch_tokens: SGLang: fewest stored tokens that are worth reading, >= 1.
        host_swa_share: SGLang: part of the host memory for KV that sliding-window layers get,
            0 < x < 1; None keeps SGLang's own split, which is that of the device's pools.
        host_gib: vLLM: host memory for KV, of all ranks together, GiB, > 0; must be given there.
        classes: vLLM: the checkpoint classes of which windows are stored.
        message_start_token_ids: vLLM: ids of the tokens that open a chat message; None takes those
            of the feature ``kv`` or of the tokenizer's chat template.
        ladder_min_tokens: vLLM: smallest distance between two ladder rungs; None: a window.
        ladder_growth: vLLM: a rung's distance is at most
            ``max(ladder_min_tokens, ladder_growth * position)``, 0 < x <= 1.
        outputs: vLLM: KV of generated tokens is stored too.
        touch_interval_s: vLLM: what is kept alive in the store is not touched again sooner, >= 0.
    """

    store: str = FILE
    path: str | tuple[str, ...] = ""
    capacity_gib: float | tuple[float, ...] | None = None
    verify: bool = True
    name: str = ""
    prefetch_tokens: int = 256
    host_swa_share: float | None = None
    host_gib: float | None = None
    classes: tuple[str, ...] = tuple(name for name in CHECKPOINT_CLASSES if name != "tail")
    message_start_token_ids: tuple[int, ...] | None = None
    ladder_min_tokens: int | None = None
    ladder_growth: float = 0.5
    outputs: bool = True
    touch_interval_s: float = 30.0

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders or URLs; of folders the absolute paths."""
        given = (self.path,) if isinstance(self.path, str) else self.path
        return tuple(map(os.path.abspath, given)) if self.store == FILE else given


def _or_none(parse: Validator) -> Validator:
    return lambda setting, value: None if value is None else parse(setting, value)


def _places(setting: str, value: object) -> str | tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        return str(text(setting, value))
    allowed = "a text, or a list of different ones"
    if not value or not all(isinstance(item, str) and item for item in value):
        raise setting_error(setting, value, allowed, "name at least one, each in quotes")
    if len({os.path.abspath(item) for item in value}) < len(value):
        raise setting_error(setting, value, allowed, "name each once")
    return tuple(value)


def _capacity(setting: str, value: object) -> float | tuple[float, ...] | None:
    one = number(over=0)
    if isinstance(value, (list, tuple)):
        return tuple(one(setting, item) for item in value)
    return None if value is None else float(one(setting, value))


_VALUES: dict[str, Validator] = {
    "store": one_of(STORES),
    "path": _places,
    "capacity_gib": _capacity,
    "verify": boolean,
    "name": text,
    "prefetch_tokens": whole(1, "tokens"),
    "host_swa_share": _or_none(number(over=0, below=1)),
    "host_gib": _or_none(number(over=0)),
    "classes": subset(CHECKPOINT_CLASSES, "class"),
    "message_start_token_ids": token_ids_or_none,
    "ladder_min_tokens": whole_or_none(1, "tokens", "null takes the model's window"),
    "ladder_growth": number(over=0, most=1),
    "outputs": boolean,
    "touch_interval_s": number(least=0),
}


def parse_tiers(where: str, raw: object) -> TiersConfig:
    """The settings of the section ``where``.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, or not one capacity for each
            folder.
    """
    config = TiersConfig(**section(where, raw, _VALUES))
    folders = len(config.path) if isinstance(config.path, tuple) else None
    if isinstance(config.capacity_gib, tuple) and len(config.capacity_gib) != folders:
        needed = f"or a list of {folders}, one for each folder" if folders else "as path is no list"
        raise setting_error(
            f"{where}.capacity_gib",
            list(config.capacity_gib),
            f"a number, {needed}",
            "give one number for all folders together, or one for each",
        )
    return config


def refuse_foreign(where: str, config: TiersConfig, settings: tuple[str, ...], engine: str) -> None:
    """Refuse settings of the section ``where`` that only the other engine has.

    Raises:
        ConfigError: which one.
    """
    for name in settings:
        found = getattr(config, name)
        if found != getattr(TiersConfig(), name):
            raise setting_error(f"{where}.{name}", found, f"no value on {engine}", "remove it")


def require_place(where: str, config: TiersConfig) -> None:
    """Refuse settings of the section ``where`` that leave open where and how much is stored.

    Raises:
        ConfigError: which one.
    """
    what, example = _PLACES[config.store]
    if not config.path:
        fix = f'set "path": "{example}" in that section'
        raise setting_error(f"{where}.path", config.path, f"{what}, or a list of them", fix)
    if config.store == FILE and config.capacity_gib is None:
        raise setting_error(
            f"{where}.capacity_gib", None, "a number > 0", "say how much may be stored there"
        )
    if config.store != FILE and config.capacity_gib is not None:
        raise setting_error(
            f"{where}.capacity_gib",
            config.capacity_gib,
            f"null with store {config.store!r}, whose server decides",
            f"leave it out, and set {_ROOM[config.store]}",
        )


_PLACES = {
    FILE: ("a folder", "/data/kv"),
    REDIS: ("the URL of a server", "redis://HOST:6379/0"),
    MOONCAKE: ("the address of a master", "HOST:50051"),
}
_ROOM = {
    REDIS: "maxmemory there",
    MOONCAKE: "--global_segment_size of the mooncake_client processes that hold its memory",
}
