# SPDX-License-Identifier: Apache-2.0
"""Adapters: the only code that names an engine's types."""
