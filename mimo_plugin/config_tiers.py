# SPDX-License-Identifier: Apache-2.0
"""Settings of the feature ``tiers``."""

from __future__ import annotations

from dataclasses import dataclass

from mimo_plugin.config_values import Validator, boolean, number, one_of, section, text, whole

STORES = ("file",)
"""Kinds of stores."""


@dataclass(frozen=True, kw_only=True)
class TiersConfig:
    """Settings of the feature ``tiers``.

    Attributes:
        store: kind of the store below host memory, one of ``STORES``.
        path: its folder; must be given.
        capacity_gib: of all its pages, GiB, > 0; must be given, None is refused where the feature
            is switched on.
        verify: what is read is checked against its checksum.
        name: engines with different names share nothing.
        prefetch_tokens: fewest stored tokens that are worth reading, >= 1.
        host_swa_share: part of the host memory for KV that sliding-window layers get, 0 < x < 1;
            None keeps SGLang's own split, which is that of the device's pools.
    """

    store: str = "file"
    path: str = ""
    capacity_gib: float | None = None
    verify: bool = True
    name: str = ""
    prefetch_tokens: int = 256
    host_swa_share: float | None = None


def _or_none(parse: Validator) -> Validator:
    return lambda setting, value: None if value is None else parse(setting, value)


_VALUES: dict[str, Validator] = {
    "store": one_of(STORES),
    "path": text,
    "capacity_gib": _or_none(number(over=0)),
    "verify": boolean,
    "name": text,
    "prefetch_tokens": whole(1, "tokens"),
    "host_swa_share": _or_none(number(over=0, below=1)),
}


def parse_tiers(where: str, raw: object) -> TiersConfig:
    """The settings of the section ``where``.

    Raises:
        ConfigError: unknown key, wrong type, value out of range.
    """
    return TiersConfig(**section(where, raw, _VALUES))
