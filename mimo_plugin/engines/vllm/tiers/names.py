# SPDX-License-Identifier: Apache-2.0
"""Names under which vLLM finds the feature's parts; imports nothing."""

from __future__ import annotations

CONNECTOR = "MimoTieredConnector"
CONNECTOR_MODULE = "mimo_plugin.engines.vllm.tiers.connector"
SPEC = "MimoTieringSpec"
SPEC_MODULE = "mimo_plugin.engines.vllm.tiers.spec"
TIER = "StoreTier"
TIER_MODULE = "mimo_plugin.engines.vllm.tiers.store_tier"
SETTINGS = "mimo_tiers"
"""Key of the feature's settings in ``kv_connector_extra_config``."""
