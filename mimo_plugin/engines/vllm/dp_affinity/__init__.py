# SPDX-License-Identifier: Apache-2.0
"""Feature ``dp_affinity`` on vLLM."""
