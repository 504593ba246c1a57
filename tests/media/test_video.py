# SPDX-License-Identifier: Apache-2.0
"""Videos give the frames of a full decode, whatever the clip, and memory stays bounded."""

import gc
import io
import random
import threading
import time
import weakref
from multiprocessing import shared_memory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mimo_plugin.core.frames import FrameRules, frames_in_flight, uniform_indices
from tests.media.video_clips import Clip, decode_whole, make, same, turned

av = pytest.importorskip("av")

from mimo_plugin.media.video import VideoError, VideoFile, VideoLimits, sample  # noqa: E402
from mimo_plugin.media.video_decode import RunDecoder, _Reader, plan_runs  # noqa: E402

FIXED_GOP = (("sc_threshold", "0"),)
OPEN_GOP = (*FIXED_GOP, ("x264-params", "open-gop=1:b-pyramid=normal"))
X265 = (("x265-params", "log-level=none:pools=none:frame-threads=1"),)
X265_OPEN = (("x265-params", f"{X265[0][1]}:open-gop=1:keyint=12:min-keyint=12:scenecut=0"),)
RULES = FrameRules(
    fps=1.0,
    num_frames=None,
    min_frames=2,
    max_frames=64,
    temporal_patch_size=2,
)


def read(data, wanted, workers=1):
    return dict(VideoFile(data).frames(wanted, workers=workers))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "vfr"])
@pytest.mark.parametrize("gop", [12, 48, 250, 300])
def test_one_frame_per_second_and_32_frames_are_those_of_a_full_decode(gop, variable, workers):
    data = make(Clip(frames=620, gop=gop, b_frames=3, variable=variable, options=FIXED_GOP))
    reference, times = decode_whole(data)
    file = VideoFile(data)
    assert file.info.why_linear is None
    assert len(file._index.clean_starts) == -(-620 // gop)
    plan, frames = sample(data, RULES, workers=workers)
    assert len(plan.indices) >= 20
    assert same(dict(frames), reference, plan.indices)
    assert plan.times_s == pytest.approx([times[i] for i in plan.indices], abs=1e-6)
    wanted = uniform_indices(file.info.total_frames, file.info.duration_s, num_frames=32)
    assert same(dict(file.frames(wanted, workers=workers)), reference, wanted)


CLIPS = {
    "matroska": Clip(container="matroska"),
    "mpegts": Clip(container="mpegts"),
    "flv": Clip(container="flv"),
    "key frames only": Clip(gop=1, b_frames=0),
    "no B frames": Clip(b_frames=0),
    "one frame": Clip(frames=1),
    "two frames": Clip(frames=2),
    "open GOP": Clip(frames=120, gop=24, b_frames=3, options=OPEN_GOP),
    "intra refresh": Clip(b_frames=0, options=(("intra-refresh", "1"),)),
    "interlaced": Clip(height=64, options=(("flags", "+ildct+ilme"),)),
    "full chroma": Clip(pixels="yuv444p"),
    "odd size": Clip(width=70, height=50),
    "hevc": Clip(codec="libx265", options=X265, b_frames=4),
    "hevc open GOP": Clip(codec="libx265", options=X265_OPEN, b_frames=4, frames=90),
    "hevc in mpegts": Clip(codec="libx265", options=X265, container="mpegts"),
    "mpeg4": Clip(codec="mpeg4"),
    "mpeg2": Clip(codec="mpeg2video", container="mpegts"),
    "mjpeg": Clip(codec="mjpeg", pixels="yuvj420p", b_frames=0, container="matroska"),
    "vp9": Clip(codec="libvpx-vp9", container="webm", b_frames=0, options=(("cpu-used", "8"),)),
    "vp8, hidden frames": Clip(
        codec="libvpx",
        container="webm",
        b_frames=0,
        options=(("auto-alt-ref", "1"), ("lag-in-frames", "16")),
    ),
    "avi, B frames without times": Clip(container="avi"),
    "bare stream without times": Clip(container="h264"),
}
LINEAR = {
    "interlaced",
    "mpeg2",
    "vp8, hidden frames",
    "avi, B frames without times",
    "bare stream without times",
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", CLIPS)
def test_kinds_of_files(name, workers):
    data = make(CLIPS[name])
    reference, _ = decode_whole(data)
    file = VideoFile(data)
    assert file.info.total_frames == len(reference) == CLIPS[name].frames
    assert (file.info.why_linear is not None) is (name in LINEAR), file.info.why_linear
    wanted = [*range(0, len(reference), 7), len(reference) - 1]
    assert same(dict(file.frames(wanted, workers=workers)), reference, wanted)
    everything = range(len(reference))
    assert same(dict(file.frames(everything, workers=workers)), reference, everything)


@st.composite
def clips(draw):
    codec = draw(st.sampled_from(["libx264"] * 3 + ["libx265"]))
    # x265 writes broken files where there are next to no frames or only key frames.
    few = codec == "libx264"
    gop = draw(st.sampled_from([1, 2, 5, 12, 30, 60, 300] if few else [12, 30, 60]))
    open_gop = draw(st.booleans())
    if codec == "libx264":
        options = OPEN_GOP if open_gop else draw(st.sampled_from([(), FIXED_GOP]))
        options += draw(st.sampled_from([(), (("bf", "5"),), (("refs", "6"),)]))
    else:
        options = (("x265-params", f"{X265[0][1]}:keyint={gop}:open-gop={open_gop:d}"),)
    return Clip(
        frames=draw(st.integers(1 if few else 10, 90)),
        gop=gop,
        b_frames=draw(st.integers(0, 4)),
        variable=draw(st.booleans()),
        audio=draw(st.booleans()),
        container=draw(st.sampled_from(["mp4", "matroska", "mpegts"])),
        codec=codec,
        options=options,
        seed=draw(st.integers(0, 3)),
    )


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(clip=clips(), workers=st.integers(1, 3), seed=st.integers(0, 1 << 30))
def test_any_indices_of_any_clip(clip, workers, seed):
    data = make(clip)
    reference, times = decode_whole(data)
    file = VideoFile(data)
    assert file.info.total_frames == len(reference)
    assert file.info.times_s == pytest.approx(times, abs=1e-6)
    chooser = random.Random(seed)
    wanted = chooser.choices(range(len(reference)), k=chooser.randint(1, 2 * len(reference)))
    assert same(dict(file.frames(wanted, workers=workers)), reference, wanted)


def test_only_what_is_needed_is_decoded():
    data = make(Clip(frames=600, gop=60, b_frames=3, options=FIXED_GOP))
    file = VideoFile(data)

    def decoded(wanted):
        decoder = RunDecoder(file._source, file._index)
        found = list(decoder.decode(iter(plan_runs(file._index, wanted))))
        assert len(found) == len(wanted)
        return decoder.packets, decoder.decoded

    assert decoded([0]) == (1, 1)
    assert decoded([0, 240, 540]) == (3, 3), "key frames need nothing else"
    packets, frames = decoded([59])
    assert packets <= 60
    assert frames <= 45, "frames that nothing refers to are skipped"
    assert decoded(range(600)) == (600, 600)
    packets, frames = decoded(range(0, 600, 30))
    assert packets <= 10 * 34, "a GOP is left behind its last wanted frame"
    assert frames <= 0.8 * packets


def test_an_open_gop_is_decoded_from_the_last_clean_key_frame():
    file = VideoFile(make(CLIPS["open GOP"]))
    assert file._index.clean_starts == [0]
    hevc = VideoFile(make(CLIPS["hevc open GOP"]))._index
    leading = [
        n
        for n, pts in enumerate(hevc.packet_pts)
        if any(n > start and pts < hevc.packet_pts[start] for start in hevc.clean_starts)
    ]
    assert leading, "the clip has no leading picture"
    for number in leading:
        assert hevc.packet_pts[hevc.start_for(number)] < hevc.packet_pts[number]


@pytest.mark.parametrize("workers", [1, 2])
def test_where_seeking_fails_the_file_is_read_from_its_start(workers, monkeypatch, caplog):
    data = make(Clip(frames=300, gop=30, options=FIXED_GOP))
    reference, _ = decode_whole(data)
    real = _Reader._seek

    def lands_too_late(self, start):
        real(self, start)
        self._next = start + 1

    monkeypatch.setattr(_Reader, "_seek", lands_too_late)
    wanted = [3, 155, 275]
    assert same(read(data, wanted, workers), reference, wanted)
    assert "from the start of the file" in caplog.text


def test_a_key_frame_that_is_not_clean_costs_no_wrong_frame(monkeypatch):
    """Frames behind a recovery point come out broken or not at all: both are done again."""
    data = make(CLIPS["open GOP"])
    reference, _ = decode_whole(data)
    file = VideoFile(data)
    number = next(n for n in range(60, 120) if file._index.number_of(file._index.frame_pts[n]) == n)
    file._index.clean_starts = [0, number]
    wanted = list(range(120))
    assert same(dict(file.frames(wanted)), reference, wanted)


def test_repeated_indices_share_one_array():
    data = make(Clip())
    reference, _ = decode_whole(data)
    wanted = [5, 5, 40, 5, 0]
    found = read(data, wanted)
    assert same(found, reference, wanted)
    assert found[0] is found[1] is found[3]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_frames_in_memory_are_bounded(workers, monkeypatch):
    data = make(Clip(frames=240, gop=12, options=FIXED_GOP))
    file = VideoFile(data)
    lock, alive, most = threading.Lock(), 0, 0
    real = VideoFile._pixels

    def gone():
        nonlocal alive
        with lock:
            alive -= 1

    def counted(self, frame):
        nonlocal alive, most
        pixels = real(self, frame)
        with lock:
            alive += 1
            most = max(most, alive)
        weakref.finalize(pixels, gone)
        return pixels

    monkeypatch.setattr(VideoFile, "_pixels", counted)
    seen = 0
    pixels = None
    for _, pixels in file.frames(range(240), workers=workers):  # noqa: B007
        seen += 1
        time.sleep(0.0005)  # the consumer is slower than the workers
    assert seen == 240
    assert 1 < most <= frames_in_flight(workers)
    del pixels
    gc.collect()
    assert alive == 0


@pytest.mark.parametrize("workers", [1, 3])
def test_a_consumer_may_stop_early(workers):
    file = VideoFile(make(Clip(frames=240, gop=12, options=FIXED_GOP)))
    before = threading.active_count()
    frames = file.frames(range(240), workers=workers)
    next(frames)
    frames.close()
    assert threading.active_count() == before
    assert len(list(file.frames(range(240), workers=workers))) == 240


def test_an_error_in_a_worker_reaches_the_consumer(monkeypatch):
    file = VideoFile(make(Clip(frames=120, gop=12, options=FIXED_GOP)))

    def fails(self, frame):
        raise VideoError("this frame is odd")

    monkeypatch.setattr(VideoFile, "_pixels", fails)
    before = threading.active_count()
    with pytest.raises(VideoError, match="this frame is odd"):
        list(file.frames(range(120), workers=2))
    assert threading.active_count() == before


def test_bytes_views_shared_memory_and_paths(tmp_path):
    data = make(Clip())
    reference, _ = decode_whole(data)
    wanted = [0, 31, 59]
    assert same(read(bytearray(data), wanted), reference, wanted)
    (tmp_path / "clip.mkv").write_bytes(data)  # the name does not matter, the content does
    assert same(read(tmp_path / "clip.mkv", wanted, 2), reference, wanted)
    assert same(read(str(tmp_path / "clip.mkv"), wanted), reference, wanted)
    memory = shared_memory.SharedMemory(create=True, size=len(data) + 4096)
    try:
        memory.buf[: len(data)] = data
        view = memory.buf[: len(data)]
        assert same(read(view, wanted, 2), reference, wanted)
        gc.collect()
        view.release()
    finally:
        memory.close()
        memory.unlink()


def test_nothing_is_written_to_disk(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    data = make(Clip())
    real = io.open

    def read_only(file, mode="r", *args, **kwargs):
        assert not set(mode) & set("wax+"), file
        return real(file, mode, *args, **kwargs)

    monkeypatch.setattr("builtins.open", read_only)
    assert len(read(data, range(60), 2)) == 60
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
def test_an_audio_track_changes_nothing(container):
    """Case B43: MiMo-V2.5 failed on videos with sound."""
    silent = VideoFile(make(Clip(container=container)))
    assert not silent.info.has_audio
    data = make(Clip(container=container, audio=True))
    file = VideoFile(data)
    assert file.info.has_audio
    assert file.info.total_frames == silent.info.total_frames
    assert file.info.times_s == pytest.approx(silent.info.times_s, abs=1e-3)
    wanted = range(60)
    assert same(dict(file.frames(wanted, workers=2)), decode_whole(data)[0], wanted)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_frames_stand_upright(degrees):
    data = make(Clip())
    plain = read(data, [0, 30])
    file = VideoFile(turned(data, degrees))
    turns = degrees // 90
    upright = (48, 64) if degrees == 180 else (64, 48)
    assert (file.info.height, file.info.width) == upright
    assert file.info.rotation == 360 - degrees
    for position, pixels in file.frames([0, 30]):
        assert np.array_equal(pixels, np.rot90(plain[position], -turns))
        assert pixels.flags.c_contiguous


@pytest.mark.parametrize("clip", [Clip(), Clip(width=70, height=50, pixels="yuv444p")])
@pytest.mark.parametrize("degrees", [0, 90, 270])
def test_pixels_are_those_of_stock_vllm(clip, degrees):
    """OpenCV is its default decoder: colours, chroma and rotation are the same."""
    cv2 = pytest.importorskip("cv2")
    data = make(clip)
    data = turned(data, degrees) if degrees else data
    capture = cv2.VideoCapture(io.BytesIO(data), cv2.CAP_FFMPEG, [])
    assert capture.isOpened()
    assert capture.get(cv2.CAP_PROP_FPS) == VideoFile(data).info.fps == 30
    found = read(data, range(60), 2)
    for index in range(60):
        ok, pixels = capture.read()
        assert ok
        assert np.array_equal(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), found[index])


def test_rate_and_length_of_a_clip_with_a_variable_rate():
    data = make(Clip(variable=True, frames=100))
    info = VideoFile(data).info
    span = info.times_s[-1]
    assert info.fps == pytest.approx(99 / span, rel=0.011)
    assert info.duration_s == pytest.approx(span * 100 / 99, rel=0.011)
    assert info.times_s[0] == 0
    gaps = np.diff(info.times_s)
    assert gaps.min() < 0.03 < 0.07 < gaps.max()
    even = np.arange(100) / info.fps
    assert np.abs(even - info.times_s).max() > 0.05, "times of frames are not index / fps"


def test_arguments_out_of_range():
    file = VideoFile(make(Clip()))
    for wanted in ([60], [-1], [0, 1000]):
        with pytest.raises(VideoError, match=r"frame -?\d+ is not there: the video has 60 frames"):
            file.frames(wanted)
    with pytest.raises(VideoError, match="workers: found 0; allowed: 1 to"):
        file.frames([0], workers=0)
    assert list(file.frames([])) == []
    with pytest.raises(TypeError, match="a video is bytes or a path, found int"):
        VideoFile(3)


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("max_bytes", 100, r"the video has \d+ bytes; allowed: 100"),
        ("max_pixels", 3071, "the video has 3072 pixels a frame; allowed: 3071"),
        ("max_frames", 59, "the video has 60 frames; allowed: 59"),
        ("max_duration_s", 1.9, "the video has 2 seconds; allowed: 1.9"),
    ],
)
def test_limits(limit, value, message):
    data = make(Clip())
    VideoFile(data, limits=VideoLimits(**{limit: None}))
    with pytest.raises(VideoError, match=message):
        VideoFile(data, limits=VideoLimits(**{limit: value}))
