# SPDX-License-Identifier: Apache-2.0
"""Kernels: one folder per operation, with a reference, a CPU and a Triton version."""
