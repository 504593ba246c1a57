# SPDX-License-Identifier: Apache-2.0
"""Feature ``scheduler`` for vLLM: the affinity order behind the scheduler's waiting queue."""
