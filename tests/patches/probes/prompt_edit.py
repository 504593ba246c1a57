# SPDX-License-Identifier: Apache-2.0
"""Serve a prompt, then the prompt edited or grown near its end; print the hits as JSON.

One list per case: ``[alignment, block, window, groups, eagle, chunk, retention, prompt, common,
hit, cached SWA blocks]`` (tokens; the last one is a count per group).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from common import hybrid_manager, serve
from vllm.v1.core.kv_cache_utils import get_group_id

GEOMETRIES = (
    # (full block, SWA block, window, SWA groups)
    (64, 64, 128, 1),  # case B01
    (32, 16, 128, 6),  # MiMo-V2: full layers have half the KV heads
    (32, 16, 1024, 5),  # Gemma
    (64, 16, 128, 2),  # alignment of half a window
)


def swa_blocks(manager: Any) -> int:
    """Cached blocks of one SWA group."""
    count = Counter(
        get_group_id(block.block_hash)
        for block in manager.block_pool.blocks
        if block.block_hash is not None
    )
    return count.get(1, 0)


def measure(
    geometry: tuple[int, int, int, int],
    prompt: int,
    kept: int,
    added: int,
    *,
    eagle: bool,
    chunk: int = 8192,
    retention: int | None = 0,
) -> list[Any]:
    """Serve ``prompt`` tokens, then its first ``kept`` followed by ``added`` new ones."""
    full, block, window, groups = geometry
    manager = hybrid_manager(
        full_block_tokens=full,
        swa_block_tokens=block,
        window_tokens=window,
        swa_groups=groups,
        retention_tokens=retention,
        eagle=eagle,
    )
    tokens = list(range(1000, 1000 + prompt))
    serve(manager, "first", tokens, min(full, block), chunk)
    cached = swa_blocks(manager)
    edited = tokens[:kept] + list(range(90_000, 90_000 + added))
    hit = serve(manager, "second", edited, min(full, block), chunk)
    return [full, block, window, groups, eagle, chunk, retention, prompt, kept, hit, cached]


def main() -> None:
    """Run all cases."""
    rows = []
    for eagle in (False, True):
        for prompt in range(256, 385):
            rows.append(measure(GEOMETRIES[0], prompt, prompt - 10, 40, eagle=eagle))
            rows.append(measure(GEOMETRIES[0], prompt, prompt, 40, eagle=eagle))
        for geometry in GEOMETRIES[1:]:
            for prompt in range(2048, 2048 + 2 * geometry[0], 3):
                for chunk in (8192, 256):
                    rows.append(
                        measure(geometry, prompt, prompt - 10, 40, eagle=eagle, chunk=chunk)
                    )
        for retention in (None, 512):
            for prompt in range(256, 385, 5):
                rows.append(
                    measure(
                        GEOMETRIES[0], prompt, prompt - 10, 40, eagle=eagle, retention=retention
                    )
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
