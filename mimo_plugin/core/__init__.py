# SPDX-License-Identifier: Apache-2.0
"""Decisions as pure functions and plain data: no torch, no numpy, no engine import."""
