# SPDX-License-Identifier: Apache-2.0
"""L3: stores for pages of KV that outlive an engine, behind one small protocol."""
