# SPDX-License-Identifier: Apache-2.0
"""Decodes the wanted frames of a video, and as little else as gives the same pixels.

A run begins at a clean key frame and ends with the last wanted frame before the next one. Frames
within it that are neither wanted nor referred to are skipped by the decoder; behind the last wanted
packet the decoder is drained instead of fed. Several workers share the runs of a file.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import av.error

from mimo_plugin.media.video_index import VideoIndex, decode_all
from mimo_plugin.media.video_source import Source

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

logger = logging.getLogger("vllm.mimo_plugin.media")

_SEEK_GAP_PACKETS = 64
"""Packets from which on seeking is cheaper than reading over them."""


@dataclass(frozen=True)
class Run:
    """Packets to decode without a break.

    Attributes:
        start: number of the packet at which decoding begins.
        targets: frame index by number of its packet, in decode order.
    """

    start: int
    targets: Mapping[int, int]

    @property
    def last(self) -> int:
        """Number of the last packet to decode."""
        return max(self.targets)


def plan_runs(index: VideoIndex, wanted: Sequence[int]) -> list[Run]:
    """Runs for the frames ``wanted`` (indices, all within the video)."""
    groups: dict[int, dict[int, int]] = {}
    for frame in wanted:
        number = index.number_of(index.frame_pts[frame])
        assert number is not None  # frame_pts are times of packets
        groups.setdefault(index.start_for(number), {})[number] = frame
    return [Run(start, dict(sorted(groups[start].items()))) for start in sorted(groups)]


def decode_linear(source: Source, wanted: Sequence[int]) -> Iterator[tuple[int, VideoFrame]]:
    """Frames with these indices, counted as the decoder puts them out, but for broken ones."""
    left = set(wanted)
    with source.open() as (container, stream):
        for count, frame in enumerate(decode_all(container, stream)):
            if count in left:
                if not frame.is_corrupt:
                    yield count, frame
                left.discard(count)
                if not left:
                    return


class RunDecoder:
    """Decodes runs of one file, one after the other, with a container and decoder of its own.

    Attributes:
        packets: packets given to the decoder so far.
        decoded: frames that it put out; the rest of the packets was skipped.
    """

    def __init__(self, source: Source, index: VideoIndex) -> None:
        self._source, self._index = source, index
        self.packets = self.decoded = 0

    def decode(self, runs: Iterator[Run]) -> Iterator[tuple[int, VideoFrame]]:
        """Index and frame of each target that can be decoded.

        Where a run meets an error, its other targets are decoded once more at the end, in one pass
        from the start of the file with nothing skipped: what a decoder makes of broken data depends
        on all that it saw before. A frame that is broken then as well is left out.
        """
        missing: dict[int, int] = {}
        with self._source.open() as (container, stream):
            reader = _Reader(container, stream, self._index)
            for run in runs:
                missing.update(run.targets)
                for number, frame in self._run(reader, run, self._index.may_skip):
                    yield missing.pop(number), frame
        if not missing:
            return
        logger.warning(
            "video: %d frame(s) did not come out of their GOP; decoding from the start of the file",
            len(missing),
        )
        with self._source.open() as (container, stream):
            reader = _Reader(container, stream, self._index)
            for number, frame in self._run(reader, Run(0, missing), False, go_on=True):
                yield missing[number], frame

    def _run(
        self, reader: _Reader, run: Run, may_skip: bool, *, go_on: bool = False
    ) -> Iterator[tuple[int, VideoFrame]]:
        """Number of the packet and frame of each target, as they come out.

        The first error ends it unless it shall ``go_on``. Until then a target is held back while
        frames that it may refer to, those before it in decode order, are to come out yet: one of
        them may turn out to be broken.
        """
        context = reader.stream.codec_context
        left, skipping, broken = set(run.targets), False, False
        highest, needs = -(2**63), {}  # number of a target -> latest frame that it may refer to
        held: list[tuple[int, VideoFrame]] = []
        context.skip_frame = "DEFAULT"
        for number, packet in reader.fed(run):
            if packet is not None and packet.pts is not None:
                self.packets += 1
                highest = max(highest, packet.pts)
                if number in left:
                    needs[number] = highest
            skip = may_skip and number not in run.targets
            if skip is not skipping:
                context.skip_frame = "NONREF" if skip else "DEFAULT"
                skipping = skip
            try:
                frames = context.decode(packet)
            except av.error.FFmpegError as error:
                logger.debug("video: the decoder refused packet %d: %s", number, error)
                frames, broken = [], True
            for frame in frames:
                self.decoded += 1
                broken |= frame.is_corrupt
                if frame.pts is None:
                    continue
                found = reader.index.number_of(frame.pts)
                if found in left and not frame.is_corrupt:
                    left.discard(found)
                    held.append((found, frame))
                if not broken:
                    ready = [pair for pair in held if needs[pair[0]] <= frame.pts]
                    held = [pair for pair in held if needs[pair[0]] > frame.pts]
                    yield from ready
            if go_on:
                yield from held
                held = []
            elif broken:
                break
        if not broken:
            yield from held
        context.flush_buffers()


class _Reader:
    """Packets of a file with their numbers, from any number on."""

    def __init__(self, container: InputContainer, stream: VideoStream, index: VideoIndex) -> None:
        self.stream, self.index = stream, index
        self._container = container
        self._numbered = self._read()
        self._next = 0

    def packets(self, start: int) -> Iterator[tuple[int, Packet[VideoStream]]]:
        """Packets from number ``start`` on; none when the file can't be read from there."""
        if not 0 <= start - self._next <= _SEEK_GAP_PACKETS:
            self._seek(start)
        if self._next > start:
            return
        for number, packet in self._numbered:
            self._next = number + 1
            if number >= start:
                yield number, packet

    def fed(self, run: Run) -> Iterator[tuple[int, Packet[VideoStream] | None]]:
        """Packets of a run, and None behind the last, which drains the decoder."""
        last = run.last
        for number, packet in self.packets(run.start):
            yield number, packet
            if number >= last:
                break
        yield last, None

    def _read(self) -> Iterator[tuple[int, Packet[VideoStream]]]:
        for packet in self._container.demux(self.stream):
            if packet.size and packet.pts is not None:
                number = self.index.number_of(packet.pts)
                if number is not None:
                    yield number, packet

    def _seek(self, start: int) -> None:
        """Go to packet ``start`` or a little before it.

        Containers look up a key frame by either of its times; one that lands behind it is asked for
        earlier key frames.
        """
        index = self.index
        at = bisect_left(index.clean_starts, start)
        earlier = [index.packet_pts[n] for n in reversed(index.clean_starts[max(0, at - 3) : at])]
        for time in (index.packet_pts[start], index.seek_times[start], *earlier):
            try:
                self._container.seek(time, stream=self.stream, backward=True, any_frame=False)
                found = self._read()
                number, packet = next(found)
            except (av.error.FFmpegError, StopIteration):
                continue
            if number <= start:
                self._numbered, self._next = chain([(number, packet)], found), number
                return
        self._numbered, self._next = iter(()), start + 1
