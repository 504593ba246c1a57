# SPDX-License-Identifier: Apache-2.0
"""Reads where a video's frames lie, without decoding them.

A packet's number counts packets in decode order, a frame's index counts frames in display order.
Where the container does not tell which packet holds which frame, the index says so and frames are
counted as the decoder puts them out.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import av.error

from mimo_plugin.core.frames import VideoError
from mimo_plugin.errors import one_line
from mimo_plugin.media import video_nal
from mimo_plugin.media.video_source import Source

if TYPE_CHECKING:
    from fractions import Fraction

    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_ONE_FRAME_PER_PACKET = frozenset({"h264", "hevc", "av1", "vp9", "mpeg4", "mjpeg"})
"""Codecs whose packets hold one shown frame each. VP8 has packets of hidden frames, GIF and others
have key frames that are none."""

_COMPLETE_INDEX = frozenset({"mov", "mp4"})
_DECODE_ORDER_TIMES = frozenset({"avi"})
"""Containers that count packets instead of saying when a frame is shown."""

_RATE_TOLERANCE = 0.01
_MOST_REORDERED = 64
"""Packets by which a frame may stand elsewhere in display than in decode order; codecs allow 16,
and hidden ones come on top."""


@dataclass
class VideoIndex:
    """Frames of a video and the packets that hold them.

    Attributes:
        frame_pts: of the frames in display order, in units of ``time_base``; empty when the video
            has no times.
        total_frames: frames of the video.
        time_base: seconds of a unit.
        rate: mean frames per second as the container states it; 0 when it does not.
        width: of a frame as stored.
        height: of a frame as stored.
        rotation: degrees counter-clockwise by which frames must be turned: 0, 90, 180, 270.
        has_audio: the file has an audio track; nothing reads it.
        why_linear: why frames are counted as they come out of the decoder from the start of the
            file on; None when packets are found by their times.
        may_skip: non-reference frames that are no targets need no decoding.
        packet_pts: of all packets in decode order.
        seek_times: where to seek for a packet, in units of ``time_base``.
        clean_starts: numbers of packets at which decoding may begin, rising.
    """

    time_base: Fraction
    width: int
    height: int
    frame_pts: array[int] = field(default_factory=lambda: array("q"))
    total_frames: int = 0
    rate: float = 0.0
    rotation: int = 0
    has_audio: bool = False
    why_linear: str | None = None
    may_skip: bool = False
    packet_pts: array[int] = field(default_factory=lambda: array("q"))
    seek_times: array[int] = field(default_factory=lambda: array("q"))
    clean_starts: list[int] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict, repr=False)

    def number_of(self, pts: int) -> int | None:
        """The packet with this time."""
        if not self._numbers:
            self._numbers = {pts: number for number, pts in enumerate(self.packet_pts)}
        return self._numbers.get(pts)

    def start_for(self, number: int) -> int:
        """The packet from which decoding must begin for the one with ``number``.

        A leading picture, one that is shown before the key frame it follows, may refer to frames
        before that key frame.
        """
        at = bisect_right(self.clean_starts, number) - 1
        while at > 0 and self.packet_pts[number] < self.packet_pts[self.clean_starts[at]]:
            at -= 1
        return self.clean_starts[at]


def read_index(source: Source) -> VideoIndex:
    """Read the packets of a video, and decode its first frame.

    Raises:
        VideoError: no video, no frames, cut off, or beyond the limits.
    """
    with source.open() as (container, stream):
        assert stream.time_base is not None
        context = stream.codec_context
        index = VideoIndex(stream.time_base, context.width, context.height)
        index.has_audio = bool(container.streams.audio)
        index.rate = float(stream.average_rate or 0)
        _check_duration(source, container, stream)
        first = _scan(source, container, stream, index)
    index.width, index.height = first.width, first.height
    source.limits.check("pixels a frame", first.width * first.height, source.limits.max_pixels)
    index.rotation = round(first.rotation / 90) * 90 % 360
    if index.why_linear is not None:
        _count_frames(source, index)
    if not index.total_frames:
        raise VideoError("the video has no frame that can be decoded")
    if index.frame_pts:
        span = (index.frame_pts[-1] - index.frame_pts[0]) * float(index.time_base)
        source.limits.check("seconds", span, source.limits.max_duration_s)
    return index


def mean_rate(index: VideoIndex) -> float:
    """Frames per second: the container's figure where the frames' times agree, else the times'."""
    if len(index.frame_pts) < 2:
        return index.rate
    span_s = (index.frame_pts[-1] - index.frame_pts[0]) * float(index.time_base)
    if span_s <= 0:
        return index.rate
    measured = (len(index.frame_pts) - 1) / span_s
    agrees = abs(index.rate - measured) <= _RATE_TOLERANCE * measured
    return index.rate if agrees else measured


def _scan(
    source: Source, container: InputContainer, stream: VideoStream, index: VideoIndex
) -> VideoFrame:
    """Fill the index from the packets; returns the first frame."""
    context = stream.codec_context
    codec, extradata = context.name, bytes(context.extradata or b"")
    codec = {"libdav1d": "av1", "libvpx-vp9": "vp9"}.get(codec, codec)
    if codec not in _ONE_FRAME_PER_PACKET:
        index.why_linear = f"packets of {codec} may hold no frame of their own"
    first: VideoFrame | None = None
    seen = _Seen()
    try:
        for packet in container.demux(stream):
            if not packet.size:
                continue
            source.limits.check("frames", seen.packets + 1, source.limits.max_frames)
            if first is None:
                first = _decode_first(stream, packet)
            if packet.pts is None:
                seen.without_time = True
            else:
                index.packet_pts.append(packet.pts)
                index.seek_times.append(packet.pts if packet.dts is None else packet.dts)
                if packet.is_discard:
                    seen.hidden.add(packet.pts)
            if packet.dts is not None:
                seen.turns_back |= packet.dts <= seen.dts
                seen.dts = packet.dts
            if packet.is_keyframe and index.why_linear is None:
                data = memoryview(packet)
                seen.broken_link |= video_nal.is_broken_link(codec, data, extradata)
                if video_nal.is_clean_start(codec, data, extradata):
                    index.clean_starts.append(seen.packets)
            seen.last_corrupt = bool(packet.is_corrupt)
            seen.corrupt |= seen.last_corrupt
            seen.packets += 1
    except av.error.FFmpegError as error:
        seen.last_corrupt, seen.reason = True, f" ({one_line(error.strerror)})"
    _check_whole(source, container, stream, seen)
    first = first or _decode_first(stream, None)
    if first is None:
        raise VideoError(
            f"the video has no frame that can be decoded; found {seen.packets} packets of {codec}"
        )
    order = sorted(range(len(index.packet_pts)), key=index.packet_pts.__getitem__)
    counts_packets = container.format.name in _DECODE_ORDER_TIMES
    if index.why_linear is None:
        if seen.without_time or counts_packets and stream.codec_context.has_b_frames:
            index.why_linear = "packets have no times of display"
        elif first.interlaced_frame:
            index.why_linear = "it is interlaced"
        else:
            index.why_linear = _why_unordered(index, order, seen, stream)
    index.may_skip = index.why_linear is None and video_nal.may_skip(codec, extradata)
    times = (index.packet_pts[number] for number in order)
    index.frame_pts = array("q", (pts for pts in times if pts not in seen.hidden))
    index.total_frames = len(index.frame_pts)
    return first


@dataclass
class _Seen:
    """What the packets of a file were like."""

    packets: int = 0
    dts: int = -(2**63)
    hidden: set[int] = field(default_factory=set)
    without_time: bool = False
    turns_back: bool = False
    broken_link: bool = False
    corrupt: bool = False
    last_corrupt: bool = False
    reason: str = ""


def _why_unordered(
    index: VideoIndex, order: list[int], seen: _Seen, stream: VideoStream
) -> str | None:
    """Why the packets' times don't tell the order in which frames come out of the decoder."""
    pts = index.packet_pts
    if any(pts[a] == pts[b] for a, b in zip(order, order[1:], strict=False)):
        return "packets share their times"
    if seen.turns_back or any(abs(n - at) > _MOST_REORDERED for at, n in enumerate(order)):
        return "its times turn back"
    if stream.codec_context.has_b_frames and len(order) > 2 and order == sorted(order):
        # Either nothing is reordered in fact, or times were made up from the order of packets.
        return "it has B frames, but times in the order of packets"
    if index.clean_starts[:1] != [0]:
        return "it does not begin with a clean key frame"
    end = index.clean_starts[1] if len(index.clean_starts) > 1 else len(pts)
    if any(pts[number] < pts[0] for number in range(end)):
        return "it begins in an open GOP"
    if seen.corrupt:
        return "packets are marked as broken"
    return "it has broken links" if seen.broken_link else None


def _decode_first(stream: VideoStream, packet: Packet[VideoStream] | None) -> VideoFrame | None:
    try:
        return next(iter(stream.codec_context.decode(packet)), None)
    except av.error.FFmpegError:
        return None


def _count_frames(source: Source, index: VideoIndex) -> None:
    """Decode the whole video to learn how many frames come out, and when they are shown."""
    times: list[int | None] = []
    with source.open() as (container, stream):
        for frame in decode_all(container, stream):
            times.append(frame.pts)
            source.limits.check("frames", len(times), source.limits.max_frames)
    known = [pts for pts in times if pts is not None]
    rising = all(a < b for a, b in zip(known, known[1:], strict=False))
    index.total_frames = len(times)
    index.frame_pts = array("q", known if rising and len(known) == len(times) else [])


def decode_all(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """All frames that the decoder puts out; packets that it refuses are left out."""
    context = stream.codec_context
    try:
        for packet in container.demux(stream):
            if packet.size:
                try:
                    yield from context.decode(packet)
                except av.error.FFmpegError:
                    continue
    except av.error.FFmpegError:
        pass
    try:
        yield from context.decode(None)
    except av.error.FFmpegError:
        return


def _check_duration(source: Source, container: InputContainer, stream: VideoStream) -> None:
    assert stream.time_base is not None
    if stream.duration:
        seconds = float(stream.duration * stream.time_base)
    else:
        seconds = (container.duration or 0) / av.time_base
    source.limits.check("seconds", seconds, source.limits.max_duration_s)


def _check_whole(
    source: Source,
    container: InputContainer,
    stream: VideoStream,
    seen: _Seen,
) -> None:
    """Refuse a file that was cut off; its frames would be spread over the wrong length.

    Transport streams and the like don't say how long they are: what is there is the video.
    """
    named = set(container.format.name.split(","))
    promised = len(stream.index_entries) if named & _COMPLETE_INDEX else 0
    if promised > seen.packets:
        raise VideoError(
            f"the video is cut off: its index has {promised} frames, the file holds "
            f"{seen.packets}{seen.reason}"
        )
    if source.missing_bytes:
        raise VideoError(
            f"the video is cut off: {source.missing_bytes} of "
            f"{source.size_bytes + source.missing_bytes} bytes are missing"
        )
    if seen.last_corrupt:
        raise VideoError(f"the video is cut off or broken behind frame {seen.packets}{seen.reason}")
