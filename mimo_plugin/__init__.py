# SPDX-License-Identifier: Apache-2.0
"""KV-cache features for hybrid sliding-window models on vLLM and SGLang."""

__version__ = "0.1.0"
