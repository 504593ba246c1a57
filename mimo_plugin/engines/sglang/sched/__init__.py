# SPDX-License-Identifier: Apache-2.0
"""The affinity order of SGLang's waiting queue."""
