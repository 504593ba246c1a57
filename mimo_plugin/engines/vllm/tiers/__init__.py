# SPDX-License-Identifier: Apache-2.0
"""Hybrid KV cache manager with SWA retention, and the SWA-safe prefix matcher, for vLLM."""
