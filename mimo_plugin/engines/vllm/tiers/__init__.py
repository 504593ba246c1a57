# SPDX-License-Identifier: Apache-2.0
"""The feature ``tiers`` on vLLM: host memory and stores below the device's KV cache."""
