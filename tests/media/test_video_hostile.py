# SPDX-License-Identifier: Apache-2.0
"""Broken and hostile files: one line that says why, and never a wrong frame."""

import io
import logging

import numpy as np
import pytest

from tests.media.video_clips import (
    Clip,
    damaged,
    decode_by_time,
    decode_whole,
    index_first,
    make,
    same,
    sound_only,
)

av = pytest.importorskip("av")

from mimo_plugin.media.video import VideoError, VideoFile, VideoLimits, sample  # noqa: E402
from tests.media.test_video import RULES  # noqa: E402

PLAIN = Clip(frames=90, gop=30, options=(("sc_threshold", "0"),))


def refused(data, **limits):
    """The message of the error, which is one line."""
    with pytest.raises(VideoError) as found:
        VideoFile(data, limits=VideoLimits(**limits))
    assert isinstance(found.value, ValueError)
    message = str(found.value)
    assert "\n" not in message
    assert len(message) < 200
    return message


def test_cut_off_files():
    data = make(PLAIN)
    assert "MP4 file without a readable index" in refused(data[: len(data) // 2])
    front = index_first(data)
    assert len(VideoFile(front).info.times_s) == 90
    for share in (0.3, 0.6, 0.99):
        message = refused(front[: int(len(front) * share)])
        assert "the video is cut off: its index has 90 frames, the file holds" in message
    matroska = make(Clip(container="matroska"))
    assert refused(matroska[:-100]) == (
        f"the video is cut off: 100 of {len(matroska)} bytes are missing"
    )
    assert "cut off or broken behind frame" in refused(make(Clip(container="flv"))[:15_003])


def test_a_transport_stream_is_what_is_there():
    """It does not say how long it is: a recording may end anywhere."""
    data = make(Clip(container="mpegts"))
    part = data[: len(data) // 188 // 2 * 188]
    reference, _ = decode_whole(part)
    file = VideoFile(part)
    assert 10 < file.info.total_frames < 60
    wanted = list(range(0, len(reference), 3))
    assert same(dict(file.frames(wanted)), reference, wanted)


def test_files_that_are_no_video():
    from PIL import Image

    def still(kind):
        file = io.BytesIO()
        Image.new("RGB", (40, 40)).save(file, kind)
        return file.getvalue()

    assert refused(b"") == "the video is empty: 0 bytes"
    assert refused(still("PNG")) == "the video can't be opened: it is a PNG image, no video"
    assert refused(still("JPEG")) == "the video can't be opened: it is a JPEG image, no video"
    assert "it is a RIFF file other than AVI" in refused(still("WEBP"))
    assert "Invalid data" in refused(b"hello world" * 20)
    assert "(2000 bytes)" in refused(bytes(2000))
    assert refused(sound_only()) == "the file has no video stream; found: audio"


def test_the_name_does_not_matter(tmp_path):
    (tmp_path / "picture.mp4").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    assert "it is a PNG image" in refused(tmp_path / "picture.mp4")
    (tmp_path / "video.txt").write_bytes(make(Clip(container="matroska")))
    assert VideoFile(tmp_path / "video.txt").info.total_frames == 60
    assert "No such file" in refused(tmp_path / "none.mp4")
    assert "the video can't be" in refused(f"concat:{tmp_path / 'video.txt'}")


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{path}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{path}'\n",
        "<?xml version='1.0'?><MPD xmlns='urn:mpeg:dash:schema:mpd:2011'>{path}</MPD>",
    ],
)
def test_a_file_can_not_make_us_read_another(text, tmp_path):
    """Playlists name other files and addresses; FFmpeg would follow them."""
    secret = tmp_path / "secret.ts"
    secret.write_bytes(make(Clip(container="mpegts")))
    assert VideoFile(secret).info.total_frames == 60
    playlist = tmp_path / "list.m3u8"
    playlist.write_text(text.format(path=secret))
    for data in (playlist.read_bytes(), playlist):
        assert "the video can't be opened" in refused(data)


def test_no_frames():
    data = bytearray(index_first(make(PLAIN)))
    start = data.find(b"mdat") + 8
    data[start:] = bytes(len(data) - start)
    message = refused(bytes(data))
    assert message == "the video has no frame that can be decoded; found 90 packets of h264"
    empty = io.BytesIO()
    with av.open(empty, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.start_encoding()
    assert "no video stream" in refused(empty.getvalue())


def test_limits_hold_before_anything_is_decoded():
    """A header's claim is enough: a bomb need not be decoded."""
    data = make(Clip(width=640, height=480, frames=10))
    assert refused(data, max_pixels=640 * 480 - 1).startswith("the video has 307200 pixels a frame")
    assert "seconds; allowed: 0.1" in refused(data, max_duration_s=0.1)
    assert "11 frames; allowed: 10" in refused(make(PLAIN), max_frames=10)
    # Without times and lengths in the container, frames are counted.
    bare = make(Clip(container="h264"))
    assert "frames; allowed: 59" in refused(bare, max_frames=59)


def test_a_stream_that_changes_its_size():
    small = Clip(container="mpegts", frames=30)
    large = Clip(container="mpegts", frames=30, width=128, height=96)
    data = make(small) + make(large)
    file = VideoFile(data)
    assert file.info.why_linear is not None, "times turn back where the second clip begins"
    total = file.info.total_frames
    assert total == len(decode_whole(data)[0])
    assert len(list(file.frames(range(20)))) == 20
    with pytest.raises(VideoError, match="changes its size from 64x48 to 128x96; allowed: one"):
        list(file.frames([0, total - 1]))
    # The decoder itself refuses what is beyond the limit, before it makes room for the frame.
    limited = VideoFile(data, limits=VideoLimits(max_pixels=64 * 48))
    assert limited.info.total_frames <= total


def test_two_clips_one_behind_the_other():
    clip = Clip(container="mpegts", frames=30)
    data = make(clip) * 2
    reference, _ = decode_whole(data)
    file = VideoFile(data)
    assert file.info.total_frames == len(reference)
    wanted = [0, 17, len(reference) - 20, len(reference) - 1]
    assert same(dict(file.frames(wanted, workers=2)), reference, wanted)


def test_a_frame_that_is_broken_is_left_out_with_a_warning(caplog):
    data = bytearray(index_first(make(PLAIN)))
    file = VideoFile(bytes(data))
    whole, _ = decode_whole(bytes(data))
    number = next(n for n in range(31, 60) if file._index.packet_pts[n] > 0)
    with av.open(io.BytesIO(bytes(data))) as container:
        packets = [p for p in container.demux(video=0) if p.size]
        at, size = packets[number].pos, packets[number].size
        hit = file._index.frame_pts.index(packets[number].pts)
    data[at + 8 : at + size] = bytes(size - 8)
    broken = VideoFile(bytes(data))
    assert broken.info.total_frames == 90, "the index is whole"
    reference = decode_by_time(bytes(data))
    for workers in (1, 2):
        caplog.clear()
        found = dict(broken.frames(range(90), workers=workers))
        assert hit not in found
        assert len(found) > 60
        assert "can't be decoded and are left out; the first is frame" in caplog.text
        for index, pixels in found.items():
            assert np.array_equal(pixels, reference[broken._index.frame_pts[index]])
            if index < 30 or index >= 60:
                assert np.array_equal(pixels, whole[index]), "other GOPs are not touched"
    with pytest.raises(VideoError, match="none of the 1 frames asked for can be decoded"):
        list(broken.frames([hit]))


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize("kind", ["flips", "hole", "cut"])
def test_damage_gives_an_error_or_the_frames_of_a_full_decode(container, b_frames, kind):
    logging.getLogger("libav").setLevel(logging.CRITICAL)
    data = make(Clip(90, gop=30, b_frames=b_frames, container=container, options=PLAIN.options))
    served = 0
    for seed in range(16):
        bad = damaged(data, kind, seed)
        try:
            plan, frames = sample(bad, RULES, workers=1 + seed % 2)
            found = dict(frames)
            pts = VideoFile(bad)._index.frame_pts
        except VideoError as error:
            assert "\n" not in str(error)
            continue
        served += 1
        reference = decode_by_time(bad)
        for position, pixels in found.items():
            assert np.array_equal(pixels, reference[pts[plan.indices[position]]]), seed
    assert (served == 0) is (kind == "cut")
