# SPDX-License-Identifier: Apache-2.0
"""Pixels of MiMo's images and videos in SGLang, and which encoder gets which item."""
