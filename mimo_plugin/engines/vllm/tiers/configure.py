# SPDX-License-Identifier: Apache-2.0
"""From the section ``tiers`` to vLLM's ``kv_transfer_config``, and back.

The feature writes that argument, so the user has only the section; who writes the argument instead
of using the feature gets the same connector.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mimo_plugin.config import MimoConfig
from mimo_plugin.config_tiers import (
    SGLANG_ONLY,
    STORE_SETTINGS,
    TiersConfig,
    parse_tiers,
    refuse_foreign,
)
from mimo_plugin.engines.vllm.tiers.names import (
    CONNECTOR,
    CONNECTOR_MODULE,
    SETTINGS,
    SPEC,
    SPEC_MODULE,
    TIER,
    TIER_MODULE,
)
from mimo_plugin.errors import setting_error
from mimo_plugin.tiers.open import require_store

WHERE = "mimo.tiers"
"""What the settings are called in messages."""


def transfer_config(config: TiersConfig) -> dict[str, Any]:
    """What ``--kv-transfer-config`` has to say.

    Raises:
        ConfigError: a setting is missing, or only SGLang has it.
    """
    require_host(WHERE, config)
    tiers = []
    if config.path:
        store = {name: value for name, value in _given(config).items() if name in STORE_SETTINGS}
        tiers.append({"type": TIER, "module_path": TIER_MODULE, "settings": store})
    assert config.host_gib is not None
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": SPEC,
            "spec_module_path": SPEC_MODULE,
            "cpu_bytes_to_use": int(config.host_gib * (1 << 30)),
            "offload_prompt_only": not config.outputs,
            "secondary_tiers": tiers,
            SETTINGS: _given(config),
        },
    }


def settings_from(extra_config: dict[str, Any]) -> TiersConfig:
    """The feature's settings in a connector's configuration.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """
    where = f"kv_connector_extra_config.{SETTINGS}"
    config = parse_tiers(where, extra_config.get(SETTINGS, {}))
    refuse_foreign(where, config, SGLANG_ONLY, "vLLM")
    return config


def require_host(where: str, config: TiersConfig) -> None:
    """Refuse settings of the section ``where`` with which the feature can't run on vLLM.

    Raises:
        ConfigError: which one.
    """
    refuse_foreign(where, config, SGLANG_ONLY, "vLLM")
    if config.host_gib is None:
        raise setting_error(
            f"{where}.host_gib",
            None,
            "a number > 0: GiB of host memory for KV",
            'set "host_gib": 64 in that section, or as much as the machine can spare',
        )


def complete_arguments(engine_args: Any, config: MimoConfig) -> None:
    """Put the connector into vLLM's arguments.

    Raises:
        ConfigError: another connector is there already, or a setting is missing.
        StoreError: a folder of the store can't be written to.
        RedisUnavailable: no client library.
        MooncakeUnavailable: no client library, or no master.
    """
    given = getattr(engine_args, "kv_transfer_config", None)
    wanted = transfer_config(config.tiers)
    if given is not None:
        found = _field(given, "kv_connector")
        if found == CONNECTOR:
            return
        raise setting_error(
            "--kv-transfer-config",
            f"kv_connector {found}",
            "none with feature 'tiers', which sets it",
            "drop it, or leave tiers out of --plugin mimo:…",
        )
    if config.tiers.path:
        require_store(config.tiers)
    from vllm.config import KVTransferConfig

    engine_args.kv_transfer_config = KVTransferConfig(**wanted)


def _field(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, dict) else getattr(given, name, None)


def _given(config: TiersConfig) -> dict[str, Any]:
    """The settings that differ from the defaults, fit for JSON."""
    default = asdict(TiersConfig())
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(config).items()
        if value != default[name]
    }
