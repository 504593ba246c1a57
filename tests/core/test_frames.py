# SPDX-License-Identifier: Apache-2.0
"""Which frames are taken: MiMo's numbers, stock's indices, real times, bounds."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.core.frames import (
    MAX_TAKEN_FRAMES,
    FrameRules,
    VideoError,
    frames_in_flight,
    mimo_rules,
    peak_bytes,
    plan_asked,
    plan_frames,
    plan_of,
    uniform_indices,
    workers_within,
)

RULES = FrameRules(
    fps=2.0,
    num_frames=None,
    min_frames=8,
    max_frames=256,
    temporal_patch_size=2,
)


def count(rules, total, fps=30.0):
    plan = plan_frames(rules, total, None, fps, total / fps)
    return len(plan.indices)


@pytest.mark.parametrize(
    ("seconds", "frames"),
    [
        (0.5, 8),  # min_frames
        (10, 20),  # two a second
        (10.4, 20),  # down to whole patches: 20.8
        (10.5, 20),  # 21 frames are no whole number of patches
        (11, 22),
        (3600, 256),  # max_frames
    ],
)
def test_number_of_frames_by_rate(seconds, frames):
    assert count(RULES, round(seconds * 30)) == frames


@pytest.mark.parametrize(
    ("changes", "total", "frames"),
    [
        ({"min_frames": 7}, 30, 8),  # up to whole patches
        ({"max_frames": 33}, 3000, 32),  # down to whole patches
        ({}, 5, 4),  # not more than there are
        ({}, 1, 1),  # less than a patch: all of it
        ({"temporal_patch_size": 4}, 3, 3),
        ({"num_frames": 32}, 3000, 32),  # goes before the rate
        ({"num_frames": 33}, 3000, 32),  # 16.5 patches: the even one
        ({"num_frames": 35}, 3000, 36),  # 17.5 patches: the even one
        ({"num_frames": 1}, 3000, 2),
        ({"num_frames": 999}, 101, 100),
        ({"num_frames": 512, "max_frames": 64}, 3000, 512),  # bounds are those of the rate
    ],
)
def test_number_of_frames_by_rules(changes, total, frames):
    assert count(replace(RULES, **changes), total) == frames


def test_a_request_goes_before_the_checkpoint():
    assert RULES.asked() == RULES
    assert count(RULES.asked(fps=1.0), 300) == 10
    assert count(RULES.asked(fps=1.0, num_frames=40), 300) == 40
    fixed = replace(RULES, num_frames=16)
    assert count(fixed, 300) == 16
    assert count(fixed.asked(fps=1.0), 300) == 10
    with pytest.raises(VideoError, match="num_frames: found 0; allowed: a whole number above 0"):
        RULES.asked(num_frames=0)


def asked(total=300, rules=RULES, **given):
    """Frames taken of a video of 30 frames a second."""
    return plan_asked(rules, total, None, 30.0, total / 30, **given).indices


def test_what_a_request_asks_for():
    assert asked() == plan_frames(RULES, 300, None, 30.0, 10.0).indices and len(asked()) == 20
    assert len(asked(num_frames=32)) == 32
    assert len(asked(num_frames=3)) == 4  # whole patches
    assert len(asked(asked_fps=1.0)) == 10
    # Both: the fewer frames, as with vLLM's own loader.
    assert asked(num_frames=32, asked_fps=1.0) == asked(asked_fps=1.0)
    assert asked(num_frames=6, asked_fps=1.0) == asked(num_frames=6)


@settings(max_examples=200, deadline=None)
@given(
    total=st.integers(1, 5000),
    number=st.one_of(st.none(), st.integers(1, 600)),
    rate=st.one_of(st.none(), st.floats(0.1, 60)),
)
def test_without_rules_the_frames_are_stock_s(total, number, rate):
    found = asked(total, None, num_frames=number, asked_fps=rate)
    assert list(found) == uniform_indices(
        total, total / 30, num_frames=number or -1, fps=rate or -1
    )


@pytest.mark.parametrize("rules", [None, RULES])
def test_no_request_gets_more_frames_than_fit_in_a_message(rules):
    assert len(asked(MAX_TAKEN_FRAMES, rules, num_frames=MAX_TAKEN_FRAMES)) == MAX_TAKEN_FRAMES
    with pytest.raises(VideoError, match=f"65538 frames are .* allowed: {MAX_TAKEN_FRAMES}"):
        asked(100_000, rules, num_frames=MAX_TAKEN_FRAMES + 2)


def test_workers_by_the_size_of_a_frame():
    assert workers_within(2 << 30, 4, 1280, 720, 3000) == 4
    assert 1 <= workers_within(2 << 30, 4, 3840, 2160, 3000) < 4
    assert workers_within(1, 4, 8192, 8192, 3000) == 1


def test_times_are_those_of_the_file():
    """Stock labels the frame at 400 s with 00:02, as it counts sampled frames."""
    times = [n * 0.5 for n in range(1000)]
    times[-1] = 777.25
    plan = plan_frames(replace(RULES, num_frames=32), 1000, times, 2.0, 500.0)
    assert plan.times_s == tuple(times[i] for i in plan.indices)
    assert plan.times_s[-1] == 777.25
    without = plan_frames(replace(RULES, num_frames=32), 1000, None, 2.0, 500.0)
    assert without.times_s == tuple(i / 2 for i in without.indices)


def test_spreads():
    rules = replace(RULES, num_frames=4)
    times = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 4.0, 8.0, 8.1]
    assert plan_frames(rules, 10, times, 1.2, 8.2).indices == (0, 3, 6, 9)
    steps = replace(rules, spread="steps")
    assert plan_frames(steps, 10, times, 1.2, 8.2).indices == (0, 2, 5, 8)  # 2.5 and 7.5 to even
    # By time a frame is taken once, although it is on screen for long: 0, 2.25, 4.5, 6.75 s.
    by_time = plan_frames(replace(rules, spread="time"), 10, times, 1.2, 8.2)
    assert by_time.indices == (0, 6, 7)
    even = [n / 30 for n in range(300)]
    by_time = plan_frames(replace(RULES, spread="time"), 300, even, 30.0, 10.0)
    assert by_time.indices == tuple(range(0, 300, 15))
    no_times = plan_frames(replace(rules, spread="time"), 10, None, 1.2, 8.2)
    assert no_times.indices == (0, 3, 6, 9)


@settings(max_examples=300, deadline=None)
@given(
    total=st.integers(1, 5000),
    fps=st.floats(1, 120),
    rate=st.floats(0.1, 60),
    fixed=st.one_of(st.none(), st.integers(1, 400)),
    spread=st.sampled_from(["ends", "steps", "time"]),
    patch=st.integers(1, 4),
)
def test_plans_are_well_formed(total, fps, rate, fixed, spread, patch):
    rules = replace(RULES, fps=rate, num_frames=fixed, spread=spread, temporal_patch_size=patch)
    times = [n / fps for n in range(total)]
    plan = plan_frames(rules, total, times, fps, total / fps)
    assert 1 <= len(plan.indices) <= total
    assert len(plan.times_s) == len(plan.indices)
    assert all(a < b for a, b in zip(plan.indices, plan.indices[1:], strict=False))
    assert plan.indices[0] == 0
    assert plan.indices[-1] < total
    if spread == "ends":
        assert len(plan.indices) % patch == 0 or total < patch
        number = len(plan.indices)
        assert list(plan.indices) == np.linspace(0, total - 1, number, dtype=np.int64).tolist()


@settings(max_examples=300, deadline=None)
@given(
    total=st.integers(1, 200_000),
    seconds=st.floats(0, 8000),
    number=st.one_of(st.just(-1), st.integers(1, 600)),
    rate=st.one_of(st.just(-1), st.floats(0.1, 60)),
)
def test_uniform_indices_are_those_of_numpy(total, seconds, number, rate):
    """vLLM 0.32, ``VideoBackend``: the lower of both numbers, ``linspace`` with integers."""
    wanted = total if number < 0 else min(number, total)
    if rate > 0:
        wanted = min(wanted, math.floor(seconds * rate))
    expected = np.linspace(0, total - 1, max(1, wanted), dtype=int).tolist()
    assert uniform_indices(total, seconds, num_frames=number, fps=rate) == expected


def test_a_plan_of_chosen_frames():
    plan = plan_of([0, 5, 5], [n / 10 for n in range(10)], 10.0)
    assert plan.indices == (0, 5, 5)
    assert plan.times_s == (0.0, 0.5, 0.5)
    assert plan_of([3], None, 0.0).times_s == (0.0,)


def test_rules_of_a_checkpoint():
    config = {
        "vision_config": {"patch_size": 16, "temporal_patch_size": 4},
        "processor_config": {
            "fps": 1.5,
            "max_frames": 100,
        },
    }
    assert mimo_rules(config) == FrameRules(
        fps=1.5,
        num_frames=None,
        min_frames=8,
        max_frames=100,
        temporal_patch_size=4,
    )
    config["processor_config"]["num_frames"] = 12
    assert mimo_rules(config).num_frames == 12
    assert mimo_rules({}).fps == mimo_rules({}).temporal_patch_size == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fps": None}, "fps, num_frames: found neither"),
        ({"fps": 0.0}, "fps: found 0.0; allowed: a number above 0"),
        ({"fps": math.inf}, "fps: found inf"),
        ({"fps": math.nan}, "fps: found nan"),
        ({"num_frames": -1}, "num_frames: found -1; allowed: a whole number above 0"),
        ({"min_frames": 0}, "min_frames: found 0"),
        ({"max_frames": 7}, r"max_frames: found 7; allowed: .* not below min_frames \(8\)"),
        ({"temporal_patch_size": True}, "temporal_patch_size: found True"),
        ({"spread": "random"}, "spread: found 'random'; allowed: one of ends, steps, time"),
    ],
)
def test_rules_out_of_range(changes, message):
    with pytest.raises(VideoError, match=message) as found:
        replace(RULES, **changes)
    assert isinstance(found.value, ValueError)
    assert "\n" not in str(found.value)


def test_videos_without_frames():
    for total in (0, -3):
        with pytest.raises(VideoError, match=f"the video has {total} frames; needed: at least 1"):
            plan_frames(RULES, total, None, 30.0, 1.0)
        with pytest.raises(VideoError, match="needed: at least 1"):
            uniform_indices(total, 1.0)
    with pytest.raises(VideoError, match="2 frame times for a video of 3 frames"):
        plan_frames(RULES, 3, [0.0, 1.0], 1.0, 3.0)


def test_an_hour_of_720p_stays_below_a_gigabyte():
    """Stock makes 39.8 GB of it at 1 fps, as it keeps full-resolution floats."""
    frames = 30 * 3600
    sampled = 3600
    rules = replace(RULES, fps=1.0, max_frames=sampled)
    plan = plan_frames(rules, frames, None, 30.0, 3600.0)
    assert len(plan.indices) == sampled
    kept = 16384 * 32 * 32 * 2 * 3 * 2  # the pixels that all frames share, as bfloat16
    found = peak_bytes(
        1280, 720, total_frames=frames, workers=4, file_bytes=450_000_000, kept_bytes=kept
    )
    assert found < 1e9
    assert found > 450_000_000 + kept


def test_memory_grows_with_workers_and_frames_not_with_length():
    base = peak_bytes(1280, 720, total_frames=3000, workers=1)
    assert peak_bytes(1280, 720, total_frames=30_000, workers=1) - base < 12e6
    assert peak_bytes(1280, 720, total_frames=3000, workers=2) > 1.5 * base
    assert peak_bytes(2560, 1440, total_frames=3000, workers=1) > 3 * base
    assert frames_in_flight(1) < frames_in_flight(2) < frames_in_flight(4) <= 10
