# SPDX-License-Identifier: Apache-2.0
"""The loader by vLLM's own way to it: frames of a full decode, options, damage, limits."""

from __future__ import annotations

import logging
from itertools import product

import numpy as np
import pytest
import torch

from mimo_plugin.core.frames import VideoError, uniform_indices
from mimo_plugin.core.pixels import Item, grid_of
from mimo_plugin.engines.vllm.video import loader
from mimo_plugin.engines.vllm.video.report import REPORT
from mimo_plugin.engines.vllm.video.setup import VideoSetup
from mimo_plugin.engines.vllm.vision.limits import Limits
from mimo_plugin.kernels.preprocess.cpu import patch_rows
from mimo_plugin.media.limits import MediaError
from tests.media.video_clips import Clip, decode_whole, make, with_sound
from tests.video.conftest import load, make_video_setup

pytestmark = pytest.mark.vllm
pytest.importorskip("av")

LONG = Clip(frames=300, gop=48, options=(("sc_threshold", "0"),))
LARGE = Clip(frames=40, width=640, height=480)
"""At eight frames and more it has over four times the pixels of its target."""

SETUP = make_video_setup()


@pytest.fixture(autouse=True)
def fresh_counters():
    REPORT.drain()
    loader._warn_of_audio.cache_clear()


def counters():
    """Counters since the last look, by name and label."""
    drained = REPORT.drain() or {"inc": []}
    return {(name, *labels): value for name, labels, value in drained["inc"]}


# --- which frames ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"num_frames": -1}, 10),  # one a second
        ({"num_frames": 6}, 6),
        ({"num_frames": 5}, 4),  # whole patches
        ({"fps": 2}, 20),  # vLLM says 32 frames, which nobody asked for
        ({"fps": 2, "num_frames": 6}, 6),
        ({"fps": 2, "num_frames": 31}, 20),
        ({}, 32),  # what vLLM says where the engine was not configured for us
    ],
)
@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
def test_frames_are_those_of_a_full_decode(local, options, count, variable):
    data = make(LONG if not variable else Clip(frames=300, variable=True))
    frames, metadata = load(data, SETUP, **options)
    reference, times = decode_whole(data)
    indices = metadata["frames_indices"]
    if not variable:
        assert len(indices) == count
    assert indices == np.linspace(0, 299, len(indices), dtype=int).tolist()
    assert np.array_equal(frames, np.stack([reference[i] for i in indices]))
    assert metadata["times_s"] == pytest.approx([times[i] for i in indices], abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"num_frames": 7}, {"fps": 2.5}, {"num_frames": -1}])
def test_stock_s_frames_where_they_are_asked_for(local, options):
    setup = make_video_setup(frames="stock")
    frames, metadata = load(make(LONG), setup, **options)
    asked = {"num_frames": 32, **options}
    assert metadata["frames_indices"] == uniform_indices(300, 10.0, **asked)
    assert len(frames) == len(metadata["frames_indices"])


def test_pixels_and_metadata_are_stock_s(local):
    """Beside vLLM's default loader: same frames to the bit, same metadata and more."""
    pytest.importorskip("cv2")
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

    for clip in (LONG, LARGE, Clip(codec="mpeg4", b_frames=0)):
        data = make(clip)
        theirs, known = VIDEO_LOADER_REGISTRY.load("opencv").load_bytes(data, num_frames=5)
        ours, metadata = load(data, make_video_setup(frames="stock", rows=None), num_frames=5)
        assert np.array_equal(ours, theirs)
        assert {**metadata, **known} == {**metadata, "video_backend": "opencv"}


def test_spread_is_the_user_s(local):
    _, ends = load(make(LONG), SETUP, num_frames=4)
    _, steps = load(make(LONG), make_video_setup(spread="steps"), num_frames=4)
    assert ends["frames_indices"] == [0, 99, 199, 299]
    assert steps["frames_indices"] == [0, 75, 150, 225]


# --- patch rows ------------------------------------------------------------------------------


def rows_by_pixels(data, setup, metadata):
    """Rows as the processor makes them of full-size frames, in the loader's type, as bytes."""
    reference = decode_whole(data)[0]
    frames = np.stack([reference[i] for i in metadata["frames_indices"]])
    source, target = metadata["mimo_rows"]["source"], metadata["mimo_rows"]["target"]
    item = Item(len(frames), *source, *target)
    dtype = getattr(torch, setup.rows_dtype)
    rows = patch_rows(torch.from_numpy(frames.reshape(-1)), [item], setup.spec, dtype=dtype)
    return rows.view(torch.uint8).numpy(), item


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("frames", "workers"), [(8, 1), (12, 2), (40, 3)])
def test_rows_are_those_made_of_the_pixels(local, dtype, frames, workers):
    setup = make_video_setup(rows=dtype, workers=workers)
    data = make(LARGE)
    rows, metadata = load(data, setup, num_frames=frames)
    expected, item = rows_by_pixels(data, setup, metadata)
    depth, down, across = grid_of(setup.spec, item)
    assert rows.shape == (depth, down * across, expected.shape[1]) and rows.dtype == np.uint8
    assert np.array_equal(rows.reshape(expected.shape), expected)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_an_odd_count_repeats_the_last_frame(local, count):
    """Only stock's rule gives one: the checkpoint's takes whole patches, or a very short video."""
    setup = make_video_setup(frames="stock", ratio=0.0)
    data = make(Clip(frames=20, width=96, height=64))
    rows, metadata = load(data, setup, num_frames=count)
    expected, _ = rows_by_pixels(data, setup, metadata)
    assert np.array_equal(rows.reshape(expected.shape), expected)
    assert len(metadata["frames_indices"]) == count and rows.shape[0] == -(-count // 2)


def test_small_sources_and_no_compiled_kernel_mean_pixels(local):
    assert load(make(LARGE), make_video_setup(ratio=1e9), num_frames=12)[0].shape == (
        12,
        480,
        640,
        3,
    )
    frames, metadata = load(make(LARGE), make_video_setup(rows=None, ratio=0.0), num_frames=12)
    assert frames.shape == (12, 480, 640, 3) and "mimo_rows" not in metadata


def test_limits_of_the_request_decide_the_target(local):
    def target(**options):
        return load(make(LARGE), SETUP, num_frames=8, **options)[1]["mimo_rows"]["target"]

    assert target() != target(max_pixels=10_000)
    assert np.prod(target(max_pixels=10_000)) <= 10_000


# --- the key ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "", "0" * 32, 7, ["x"], {"a": 1}])
def test_an_unknown_key_is_refused(local, key):
    with pytest.raises(VideoError, match="mimo_setup: found .*; allowed: what the feature video"):
        load(make(LARGE), SETUP, mimo_setup=key)
    assert not local.shapes


def test_two_engines_in_one_process_keep_to_their_own(local):
    other = make_video_setup(frames="stock")
    first, second = load(make(LONG), SETUP, num_frames=5), load(make(LONG), other, num_frames=5)
    again = load(make(LONG), SETUP, num_frames=5)
    assert len(first[0]) == len(again[0]) == 4 and len(second[0]) == 5
    assert first[1]["mimo_setup"] == SETUP.key != second[1]["mimo_setup"]


def test_the_key_says_everything_and_survives_the_way():
    assert make_video_setup().key == SETUP.key  # replicas of one engine share hashes
    others = [
        make_video_setup(rows="bfloat16"),
        make_video_setup(ratio=5.0),
        make_video_setup(frames="stock"),
        make_video_setup(spread="time"),
        make_video_setup(max_file_bytes=5),
    ]
    assert len({setup.key for setup in (SETUP, *others)}) == len(others) + 1
    import json

    for setup in (SETUP, *others):
        assert VideoSetup.from_dict(json.loads(json.dumps(setup.to_dict()))) == setup


# --- damage, hostile input, limits ------------------------------------------------------------


def dropping(monkeypatch, passes):
    """Let ``VideoFile`` lose the frames at these positions: a set for each pass."""
    from mimo_plugin.media.video import VideoFile

    left, whole = [set(lost) for lost in passes], VideoFile.frames

    def frames(self, indices, *, workers=1):
        lost = left.pop(0) if left else set()
        return (pair for pair in whole(self, indices, workers=workers) if pair[0] not in lost)

    monkeypatch.setattr(VideoFile, "frames", frames)


@pytest.mark.parametrize("lost", [{0}, {3}, {11}, {2, 7}, set(range(1, 12))], ids=str)
@pytest.mark.parametrize("ratio", [0.0, 4.0, 1e9])
def test_missing_frames_leave_a_shorter_video(local, monkeypatch, lost, ratio):
    """Patches, times, and the pixels that frames share follow what is really there."""
    setup, data = make_video_setup(ratio=ratio), make(LARGE)
    whole = load(data, setup, num_frames=12)[1]
    dropping(monkeypatch, [lost])
    frames, metadata = load(data, setup, num_frames=12)
    kept = [i for position, i in enumerate(whole["frames_indices"]) if position not in lost]
    assert metadata["frames_indices"] == kept
    assert len(metadata["times_s"]) == len(kept)
    if "mimo_rows" in metadata:
        share = setup.limits.of_frames(len(kept), 2)
        target = metadata["mimo_rows"]["target"]
        assert share.min_pixels <= np.prod(target) <= share.max_pixels
        expected, _ = rows_by_pixels(data, setup, metadata)
        assert np.array_equal(frames.reshape(expected.shape), expected)
    else:
        reference = decode_whole(data)[0]
        assert np.array_equal(frames, np.stack([reference[i] for i in kept]))
    assert counters()["video_frames", "dropped"] == len(lost)


def test_a_target_that_grows_with_the_frames_that_are_left(local, monkeypatch):
    setup, data = make_video_setup(ratio=0.0), make(LARGE)
    before = load(data, setup, num_frames=12)[1]["mimo_rows"]["target"]
    dropping(monkeypatch, [set(range(4, 12))])
    after = load(data, setup, num_frames=12)[1]["mimo_rows"]["target"]
    assert np.prod(after) > np.prod(before)


def test_a_file_that_never_settles_is_refused(local, monkeypatch):
    dropping(monkeypatch, [{0}] * 9)
    with pytest.raises(MediaError, match="the video is damaged"):
        load(make(LARGE), SETUP, num_frames=12)


HOSTILE = {
    "empty": (b"", "the video is empty"),
    "text": (b"hello, I am text" * 100, "the video can't be opened"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), "it is a PNG image, no video"),
    "playlist": (b"#EXTM3U\nfile:///etc/passwd\n" * 10, "it is a playlist, no video"),
    "cut off": (make(LARGE)[: len(make(LARGE)) // 2], "a download that broke off"),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_files_are_refused_with_the_reason(local, name):
    data, words = HOSTILE[name]
    with pytest.raises(MediaError, match=words):
        load(data, SETUP)
    assert counters() == {("video_refused", "input"): 1}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_file_bytes": 100}, "bytes; allowed: 100"),
        ({"max_duration_s": 0.5}, "allowed: 0.5"),
        ({"max_output_bytes": 10_000}, "10000 .max_output_bytes.; fix: ask for fewer frames"),
    ],
)
def test_limits_are_the_user_s(local, settings, words):
    with pytest.raises(MediaError, match=words):
        load(make(LARGE), make_video_setup(**settings))


def test_frames_that_no_target_fits(local):
    narrow = make(Clip(frames=10, width=8, height=2400, options=(("preset", "ultrafast"),)))
    setup = make_video_setup()
    tiny = VideoSetup(**{**vars_of(setup), "limits": Limits(1, 1024, 1024)})
    with pytest.raises(MediaError, match="no target"):
        load(narrow, tiny)


def vars_of(setup):
    return {name: getattr(setup, name) for name in setup.__dataclass_fields__}


# --- sound, counters --------------------------------------------------------------------------


def test_sound_is_ignored_and_said_once(local, caplog):
    """Case B43: the answer is that of the video without its sound."""
    with caplog.at_level(logging.WARNING, logger="vllm.mimo_plugin"):
        silent = load(make(Clip()), SETUP, num_frames=4)
        assert not caplog.records
        loud = [load(with_sound(make(Clip()), 2.0), SETUP, num_frames=4) for _ in range(2)]
    for frames, metadata in loud:
        assert np.array_equal(frames, silent[0])
        assert metadata["frames_indices"] == silent[1]["frames_indices"]
        assert metadata["times_s"] == pytest.approx(silent[1]["times_s"], abs=1e-3)
    assert [r.getMessage() for r in caplog.records] == [
        "mimo video: audio tracks of videos are not read"
    ]


def test_counters(local):
    load(make(LONG), SETUP, num_frames=4)
    found = counters()
    assert found["video_files", "pixels"] == 1
    assert found["video_bytes", "pixels"] == 4 * 64 * 48 * 3
    assert found["video_frames", "file"] == 300
    assert found["video_frames", "taken"] == 4
    assert 4 <= found["video_frames", "decoded"] < 300
    assert found["video_frames", "dropped"] == 0
    assert found[("video_decode_seconds",)] > 0
    load(make(LARGE), SETUP, num_frames=12)
    assert counters()["video_files", "rows"] == 1


def test_hashes_differ_where_the_frames_do(local):
    """vLLM's key covers the file and the metadata; the metadata must say what decides the rest."""
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.media import MediaWithBytes

    data, keys = make(LARGE), set()
    ways = [
        (setup, options)
        for setup, options in product(
            (SETUP, make_video_setup(ratio=1e9), make_video_setup(rows="bfloat16")),
            ({"num_frames": 8}, {"num_frames": 12}, {"num_frames": 8, "max_pixels": 10_000}),
        )
    ]
    for setup, options in ways:
        frames, metadata = load(data, setup, **options)
        item = (MediaWithBytes(frames, data), metadata)
        keys.add(MultiModalHasher.hash_kwargs("sha256", video=item))
    # Limits do not change frames that travel as pixels: the processor has them in its own key.
    assert len(keys) == len(ways) - 1
