# SPDX-License-Identifier: Apache-2.0
"""Feature ``mtp`` for vLLM: MiMo's multi-token prediction with one layer per draft step."""
