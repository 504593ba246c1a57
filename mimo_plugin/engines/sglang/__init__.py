# SPDX-License-Identifier: Apache-2.0
"""Adapters for SGLang; modules here may import it."""
