# SPDX-License-Identifier: Apache-2.0
"""The loader's job in real processes of the media pool."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mimo_plugin.engines.vllm import media
from mimo_plugin.engines.vllm.video import loader
from mimo_plugin.engines.vllm.video.report import REPORT
from mimo_plugin.media.limits import DecoderCrashed, DecodeTimeout, MediaError
from mimo_plugin.media.pool import MediaPool, PoolSettings
from tests.media.video_clips import Clip, make
from tests.video import jobs
from tests.video.conftest import Local, load, make_video_setup

pytestmark = pytest.mark.vllm
pytest.importorskip("av")

LARGE = Clip(frames=40, width=640, height=480)
SETUP = make_video_setup(workers=2)


@pytest.fixture
def pool(monkeypatch):
    made = MediaPool(PoolSettings(workers=2, queue_timeout_s=5.0))
    monkeypatch.setattr(loader, "media_pool", lambda: made)
    yield made
    made.close(grace_s=0.0)


def test_the_loader_s_pool_is_that_of_the_pictures():
    assert loader.media_pool is media.media_pool


def test_videos_side_by_side_are_those_read_alone(pool, monkeypatch):
    clips = [make(LARGE), make(Clip()), make(Clip(frames=90, width=96, variable=True))]
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(lambda data: load(data, SETUP), clips * 2))
    alone = Local()
    monkeypatch.setattr(loader, "media_pool", lambda: alone)
    for data, (frames, metadata) in zip(clips * 2, together, strict=True):
        expected, known = load(data, SETUP)
        assert np.array_equal(frames, expected) and metadata == known
    assert "mimo_rows" in together[0][1]


def test_no_torch_and_no_vllm_in_the_worker(pool):
    found = pool.run_sync(
        jobs.modules, make(LARGE), order=loader.order_of(SETUP, loader.parse({"num_frames": 12}))
    ).meta
    assert {"av", "numba", "numpy"} <= set(found)
    assert not {"torch", "vllm", "transformers"} & set(found)


def test_a_crash_or_a_hang_costs_its_own_request(pool, monkeypatch):
    REPORT.drain()
    with monkeypatch.context() as patched:
        patched.setattr(loader, "read_video", jobs.crash)
        with pytest.raises(DecoderCrashed, match="SIGSEGV"):
            load(make(LARGE), SETUP)
    with pytest.raises(DecodeTimeout, match=r"allowed: 0\.001 s"):
        load(make(LARGE), make_video_setup(job_timeout_s=0.001))
    assert load(make(LARGE), SETUP)[0].size
    with pytest.raises(MediaError, match="it is a playlist"):
        load(b"#EXTM3U\nhttp://x/y.ts\n" * 9, SETUP)
    refused = [entry for entry in REPORT.drain()["inc"] if entry[0] == "video_refused"]
    assert [(*labels, value) for _, labels, value in refused] == [("input", 3)]


def test_a_full_pool_is_the_server_s_fault_and_frames_that_go_free_their_memory(monkeypatch):
    from vllm.exceptions import GracefulHTTPError

    alone, data = Local(), make(LARGE)
    monkeypatch.setattr(loader, "media_pool", lambda: alone)
    size = load(data, SETUP)[0].nbytes
    full = MediaPool(PoolSettings(workers=1, memory_bytes=size * 3 // 2, queue_timeout_s=0.2))
    monkeypatch.setattr(loader, "media_pool", lambda: full)
    REPORT.drain()
    try:
        frames, _ = load(data, SETUP)
        with pytest.raises(GracefulHTTPError, match="no shared memory free") as caught:
            load(data, SETUP)
        assert caught.value.http_status == 503
        assert ["video_refused", ["busy"], 1] in [list(e) for e in REPORT.drain()["inc"]]
        del frames
        assert load(data, SETUP)[0].nbytes == size
    finally:
        full.close(grace_s=0.0)
