# SPDX-License-Identifier: Apache-2.0
"""One script per claim; each prints plugin/stock ratios and writes JSON and a plot."""
