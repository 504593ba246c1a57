# SPDX-License-Identifier: Apache-2.0
"""Media on the host: fetching, limits, content keys, shared memory, and decoding of video."""
