# SPDX-License-Identifier: Apache-2.0
"""Adapters for SGLang. Importing this package imports no engine."""
