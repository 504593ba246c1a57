# SPDX-License-Identifier: Apache-2.0
"""A Triton backend ``cpu`` for interpreted kernels only (see the README beside this package)."""
