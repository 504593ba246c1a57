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


def test_shared_memory_comes_free_with_the_frames(pool):
    frames, _ = load(make(LARGE), SETUP)
    assert pool.stats().outstanding_bytes == frames.nbytes
    del frames
    assert pool.stats().outstanding_bytes == 0


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


def test_a_full_pool_is_the_server_s_fault_not_the_client_s(monkeypatch):
    from vllm.exceptions import GracefulHTTPError

    full = MediaPool(PoolSettings(workers=1, memory_bytes=1 << 30, queue_timeout_s=0.2))
    monkeypatch.setattr(loader, "media_pool", lambda: full)
    try:
        held = full._budget.acquire((1 << 30) - 1000, 1.0)
        assert held
        with pytest.raises(GracefulHTTPError, match="no shared memory free") as caught:
            load(make(LARGE), SETUP)
        assert caught.value.http_status == 503
        full._budget.release((1 << 30) - 1000)
        assert load(make(LARGE), SETUP)[0].size
    finally:
        full.close(grace_s=0.0)
