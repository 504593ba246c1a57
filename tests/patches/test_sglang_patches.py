# SPDX-License-Identifier: Apache-2.0
"""SGLang's patches: what each mends fails on the published source and works with the series.

Run in SGLang's environment, by the tier ``sglang``; the queue itself is checked in
``test_patch_queue.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

Measured = tuple[Any, Any]
PAGE_TOKENS, WHOLE_TOKENS = 16, 384


# -- 0001 ----------------------------------------------------------------------------------------


def test_a_registered_policy_is_a_choice(sglang_measured: Measured) -> None:
    plain, patched = (found["policy"] for found in sglang_measured)
    assert plain["registry"] is False and plain["accepted"] is False
    assert patched["accepted"] == [False, True, False], "before, after, and a name nobody gave"
    assert patched["refused"] == ["by-length", "lpm", " "]


def test_a_policy_that_scales_is_used_for_any_queue(sglang_measured: Measured) -> None:
    found = sglang_measured[1]["policy"]
    assert found["short"] == sorted(found["short"]) and len(found["short"]) == 100
    assert found["scales"] == sorted(found["arrival"])
    assert found["fallback"] == found["arrival"] != found["scales"]


def test_a_cache_aware_policy_knows_all_hits(sglang_measured: Measured) -> None:
    found = sglang_measured[1]["policy"]
    assert found["knows_hits"] is True
    # Half of the requests have a hit of 64 tokens, but for the few that are too short.
    assert found["hits"] == sorted(found["hits"], reverse=True)
    assert found["hits"].count(64) >= 90 and found["hits"].count(0) == 100


def test_built_in_policies_sort_as_before(sglang_measured: Measured) -> None:
    plain, patched = (found["policy"] for found in sglang_measured)
    assert plain["own"] == patched["own"] and len(plain["own"]) == 6
    assert plain["arrival"] == patched["arrival"]


# -- 0002 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "without", "with_patch"),
    [
        ("300 of 360", 0, 288),
        ("600 of 660", 512, 592),
        ("4 sharing 400", [0, 0, 48, 48], [0, 0, 400, 400]),
    ],
)
def test_a_shared_prefix_hits(
    sglang_measured: Measured, case: str, without: Any, with_patch: Any
) -> None:
    plain, patched = (found["retention"][case] for found in sglang_measured)
    assert (plain, patched) == (without, with_patch)


def test_a_prompt_cut_anywhere_keeps_three_quarters(sglang_measured: Measured) -> None:
    plain, patched = (found["retention"]["long"] for found in sglang_measured)
    for cut in plain:
        whole = int(cut) // PAGE_TOKENS * PAGE_TOKENS
        assert whole >= patched[cut] >= max(plain[cut], 0.75 * whole), cut
    assert plain["1000"] < 0.75 * 992 and patched["1000"] == 992
    again = [found["retention"]["again"] for found in sglang_measured]
    assert again[0] == again[1]


def test_the_plugins_retention_is_not_touched(sglang_measured: Measured) -> None:
    plain, patched = sglang_measured
    assert plain["retention"]["plugin"] == patched["retention"]["plugin"]
    assert plain["contracts"] == patched["contracts"] == []


def test_random_histories_end_well(sglang_measured: Measured) -> None:
    """No slot is lost and no foreign KV read, or the probe would have stopped."""
    for found in sglang_measured:
        assert all(row[0] == 40 and row[1] > 0 for row in found["retention"]["histories"].values())


# -- 0003 ----------------------------------------------------------------------------------------


def test_flat_pages_carry_unequal_widths(sglang_measured: Measured) -> None:
    plain, patched = (found["storage"] for found in sglang_measured)
    assert plain["flat"] == [False, False] and patched["flat"] == [True, True]


def test_unequal_widths_come_back_from_the_folder(sglang_measured: Measured) -> None:
    """Two pools, through host and file and back, equal to the bit."""
    plain, patched = (found["storage"] for found in sglang_measured)
    assert plain["unequal widths"] == [0, 0, False]
    assert patched["unequal widths"] == [WHOLE_TOKENS, WHOLE_TOKENS, True]
    assert plain["equal widths"] == patched["equal widths"] == [WHOLE_TOKENS, WHOLE_TOKENS, True]


# -- 0004 ----------------------------------------------------------------------------------------


def test_what_the_device_answers_stays_in_the_storage(sglang_measured: Measured) -> None:
    """The hot prompt, and one that was stored after it and never asked for again."""
    plain, patched = (found["storage"] for found in sglang_measured)
    assert plain["hot"] == [0, 0]
    assert patched["hot"] == [WHOLE_TOKENS, 0]
    assert patched["never asked again"][0] == 0, "the storage was not short of room"


def test_a_wrapped_backend_is_touched_too(sglang_measured: Measured) -> None:
    plain, patched = (found["storage"] for found in sglang_measured)
    assert plain["injected"] is False and patched["injected"] is True
