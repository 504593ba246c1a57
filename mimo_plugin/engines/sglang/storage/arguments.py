# SPDX-License-Identifier: Apache-2.0
"""From the section ``tiers`` to SGLang's arguments, and from these to a store.

SGLang makes a backend that it doesn't know by name from a class path in a JSON argument. The
feature writes that argument, so the user has only the section; who writes the argument instead of
using the feature gets the same backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mimo_plugin.config_tiers import STORE_SETTINGS, TiersConfig, parse_tiers
from mimo_plugin.engines.sglang.register import STORAGE_FIELDS
from mimo_plugin.errors import nearest, setting_error
from mimo_plugin.tiers import open as opening
from mimo_plugin.tiers.store import PageStore

SECTION = "hicache-storage-backend-extra-config"
_ENGINE = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)


def backend_arguments(config: TiersConfig) -> dict[str, str]:
    """What the feature decides of SGLang's arguments."""
    extra = {
        "backend_name": "mimo",
        "module_path": "mimo_plugin.engines.sglang.storage.backend",
        "class_name": "MimoStorage",
        "interface_v1": 1,
        "prefetch_threshold": config.prefetch_tokens,
        **{name: getattr(config, name) for name in STORE_SETTINGS},
    }
    return dict(zip(STORAGE_FIELDS, ("dynamic", json.dumps(extra)), strict=True))


def open_store(extra: Mapping[str, Any]) -> PageStore:
    """The store that the settings name.

    Raises:
        ConfigError: a setting is unknown or out of range.
        StoreError: it can't be opened.
        RedisUnavailable: no client library.
        MooncakeUnavailable: no client library, or no master.
    """
    for setting in extra:
        if setting not in (*STORE_SETTINGS, *_ENGINE):
            hint = nearest(setting, STORE_SETTINGS)
            raise setting_error(
                f"{SECTION}.{setting}",
                extra[setting],
                f"one of {', '.join(STORE_SETTINGS)}",
                f"write {hint}" if hint else "remove it",
            )
    config = parse_tiers(SECTION, {name: extra[name] for name in STORE_SETTINGS if name in extra})
    return opening.open_store(config, where=SECTION)
