# SPDX-License-Identifier: Apache-2.0
"""SWA retention on SGLang's unified radix cache: the radix backend ``mimo``."""
