# SPDX-License-Identifier: Apache-2.0
"""Compare SWA look-ups of the source under test with those of a reference file.

Usage: ``swa_scan.py REFERENCE_FILE``, the plain ``single_type_kv_cache_manager.py``. It is loaded
beside the module under test, so both look at the same blocks in the same process. Prints JSON:
``source`` (file under test); ``probes`` and ``reference_probes`` by residency, ``seconds`` and
``reference_seconds`` by timed look-up; and, unless the two files are one, ``exhaustive`` and
``random`` (numbers of compared look-ups) and ``mismatch`` (null or the first differing case).
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import swa_spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

GROUPS = [1, 2, 3]


class Pool:
    """Pool whose blocks' residency is given: ``resident[i]`` for block i of every group."""

    null_block = "null"

    def __init__(self, resident: Sequence[bool], hash_block_tokens: int) -> None:
        self.resident = resident
        self.hash_block_size = hash_block_tokens
        self.probes = 0

    def get_cached_block(self, block_hash: int, groups: list[int]) -> list[Any] | None:
        """Block of each group, or None if one lacks it."""
        self.probes += 1
        return [(block_hash, group) for group in groups] if self.resident[block_hash] else None


def load_reference(path: Path) -> Any:
    """Load the plain module under another name; returns its manager class."""
    spec = importlib.util.spec_from_file_location("plain_single_type_managers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.SlidingWindowManager


def look_up(
    manager: Any,
    resident: Sequence[bool],
    *,
    max_tokens: int,
    window_tokens: int,
    block_tokens: int,
    alignment_tokens: int,
    eagle: bool,
    pool: Pool | None = None,
) -> tuple[Any, int]:
    """Run one look-up; a block's hash is its index."""
    return manager.find_longest_cache_hit(
        block_hashes=range(len(resident)),
        max_length=max_tokens,
        kv_cache_group_ids=GROUPS,
        block_pool=pool or Pool(resident, block_tokens),
        kv_cache_spec=swa_spec(block_tokens, window_tokens),
        drop_eagle_block=eagle,
        alignment_tokens=alignment_tokens,
    )


def compare(reference: Any, resident: Sequence[bool], **case: Any) -> dict[str, Any] | None:
    """Return the case if both look-ups differ in blocks or length."""
    wanted = look_up(reference, resident, **case)
    found = look_up(SlidingWindowManager, resident, **case)
    if (list(map(list, wanted[0])), wanted[1]) == (list(map(list, found[0])), found[1]):
        return None
    return {"resident": list(resident), **case, "want": str(wanted), "found": str(found)}


def exhaustive(reference: Any, longest: int) -> tuple[int, dict[str, Any] | None]:
    """Every residency of up to ``longest`` blocks x window x alignment x EAGLE."""
    count = 0
    for length in range(longest + 1):
        cases = [
            {
                "max_tokens": length * 16,
                "window_tokens": window,
                "block_tokens": 16,
                "alignment_tokens": alignment,
                "eagle": eagle,
            }
            for window in (1, 2, 17, 18, 40, 64, 100)
            for alignment in (8, 16, 24, 32, 48, 64)
            for eagle in (False, True)
        ]
        for resident in itertools.product((False, True), repeat=length):
            for case in cases:
                count += 1
                if mismatch := compare(reference, resident, **case):
                    return count, mismatch
    return count, None


def randomised(reference: Any, examples: int) -> tuple[int, dict[str, Any] | None]:
    """Long sequences made of runs, as evictions leave them."""
    seen: dict[str, Any] = {"count": 0, "mismatch": None}
    runs = st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=24)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        runs=runs,
        block=st.sampled_from((8, 16, 32, 64)),
        window=st.integers(1, 1100),
        unit=st.integers(1, 8),
        eagle=st.booleans(),
        short=st.integers(0, 130),
    )
    def check(
        runs: list[tuple[bool, int]], block: int, window: int, unit: int, eagle: bool, short: int
    ) -> None:
        resident = [value for value, length in runs for _ in range(length)]
        seen["count"] += 1
        mismatch = compare(
            reference,
            resident,
            max_tokens=max(len(resident) * block - short, 0),
            window_tokens=window,
            block_tokens=block,
            alignment_tokens=block * unit,
            eagle=eagle,
        )
        if mismatch:
            seen["mismatch"] = mismatch
            raise AssertionError(mismatch)

    with contextlib.suppress(AssertionError):
        check()
    return seen["count"], seen["mismatch"]


def patterns(blocks: int, need: int) -> dict[str, list[bool]]:
    """Residencies to count probes and time on."""
    return {
        "miss": [False] * blocks,
        "hit_at_end": [False] * (blocks - need) + [True] * need,
        "hit_at_start": [True] * need + [False] * (blocks - need),
        "runs_one_short": ([False] + [True] * (need - 1)) * (blocks // need),
        "every_second": [bool(i % 2) for i in range(blocks)],
        "full_runs_unaligned": [True] * blocks,
    }


def timed(call: Callable[[], object], repeats: int) -> float:
    """Least CPU time of ``repeats`` calls, in seconds."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def real_pool_times(reference: Any, tokens: int, repeats: int) -> tuple[float, float]:
    """CPU seconds of a miss in vLLM's own pool: (under test, reference)."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
    hashes = [index.to_bytes(32, "big") for index in range(tokens // 16)]

    def call(manager: Any) -> Callable[[], object]:
        return lambda: manager.find_longest_cache_hit(
            block_hashes=hashes,
            max_length=tokens,
            kv_cache_group_ids=[1, 2, 3, 4, 5, 6],
            block_pool=pool,
            kv_cache_spec=swa_spec(16, 128),
            drop_eagle_block=False,
            alignment_tokens=32,
        )

    return timed(call(SlidingWindowManager), repeats), timed(call(reference), repeats)


def main() -> None:
    """Compare, count probes, time."""
    reference = load_reference(Path(sys.argv[1]))
    result: dict[str, Any] = {"mismatch": None}
    result["source"] = sys.modules[SlidingWindowManager.__module__].__file__
    if result["source"] != sys.argv[1]:
        result["exhaustive"], result["mismatch"] = exhaustive(reference, longest=8)
        result["random"], mismatch = randomised(reference, examples=3000)
        result["mismatch"] = result["mismatch"] or mismatch
    need, blocks = 8, 4096
    result["need"], result["blocks"] = need, blocks
    result["probes"], result["reference_probes"] = {}, {}
    for name, resident in patterns(blocks, need).items():
        for key, manager in (("probes", SlidingWindowManager), ("reference_probes", reference)):
            pool = Pool(resident, 16)
            look_up(
                manager,
                resident,
                max_tokens=blocks * 16,
                window_tokens=128,
                block_tokens=16,
                alignment_tokens=16,
                eagle=False,
                pool=pool,
            )
            result[key][name] = pool.probes
    result["seconds"], result["reference_seconds"] = {}, {}
    for tokens in (65_536, 1_048_576):
        name = f"miss_{tokens}_tokens"
        result["seconds"][name], result["reference_seconds"][name] = real_pool_times(
            reference, tokens, repeats=5
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
