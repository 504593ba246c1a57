# SPDX-License-Identifier: Apache-2.0
"""Makes small videos with the encoders of PyAV's wheel, and decodes them whole as the reference."""

from __future__ import annotations

import io
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import av
import av.error
import numpy as np

FPS = 30
TICKS_PER_S = 30_000
"""Units of time of a clip with a variable rate; one with a fixed rate counts frames."""


@dataclass(frozen=True)
class Clip:
    """What a clip shall be.

    Attributes:
        frames: frames to encode.
        gop: the most frames from a key frame to the next; x264 also cuts scenes.
        b_frames: the most B frames in a row.
        variable: distances between frames vary between 10 and 100 ms.
        audio: with a track of silence.
        options: of the encoder, as pairs.
    """

    frames: int = 60
    width: int = 64
    height: int = 48
    gop: int = 12
    b_frames: int = 2
    variable: bool = False
    audio: bool = False
    container: str = "mp4"
    codec: str = "libx264"
    options: tuple[tuple[str, str], ...] = ()
    seed: int = 0
    pixels: str = "yuv420p"


def picture(clip: Clip, number: int, background: np.ndarray) -> np.ndarray:
    """A frame that differs from all others: a moving view of noise with its number in bits."""
    top, left = number * 3 % 61, number * 7 % 67
    view = background[top : top + clip.height, left : left + clip.width].copy()
    for bit in range(12):
        view[4:12, 4 * bit : 4 * bit + 4] = 255 * (number >> bit & 1)
    return view


def frame_ticks(clip: Clip) -> list[int]:
    """When each frame is shown, in units of the clip's time base."""
    if not clip.variable:
        return list(range(clip.frames))
    # Whole milliseconds, which every container can hold.
    gaps = np.random.default_rng(clip.seed).integers(10, 100, clip.frames) * (TICKS_PER_S // 1000)
    return [0, *np.cumsum(gaps)[:-1].tolist()]


@lru_cache(maxsize=64)
def make(clip: Clip) -> bytes:
    """The file."""
    file = io.BytesIO()
    noise = np.random.default_rng(clip.seed).integers(0, 256, (40, 44, 3), dtype=np.uint8)
    background = noise.repeat(8, 0).repeat(8, 1)
    if clip.height + 61 > background.shape[0] or clip.width + 67 > background.shape[1]:
        background = np.tile(background, (clip.height // 250 + 2, clip.width // 250 + 2, 1))
    with av.open(file, "w", format=clip.container) as container:
        stream = container.add_stream(clip.codec, rate=FPS, options=dict(clip.options))
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, clip.pixels
        context = stream.codec_context
        context.gop_size, context.max_b_frames, context.thread_count = clip.gop, clip.b_frames, 1
        time_base = Fraction(1, TICKS_PER_S if clip.variable else FPS)
        stream.time_base = context.time_base = time_base
        sound = container.add_stream("aac", rate=16_000) if clip.audio else None
        for number, ticks in enumerate(frame_ticks(clip)):
            frame = av.VideoFrame.from_ndarray(picture(clip, number, background), format="rgb24")
            frame.pts, frame.time_base = ticks, time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if sound is not None:
            _add_silence(container, sound, clip.frames / FPS)
    return file.getvalue()


def _add_silence(container, stream, seconds: float) -> None:
    for start in range(0, int(seconds * 16_000), 1024):
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate, frame.pts = 16_000, start
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def decode_whole(data: bytes) -> tuple[list[np.ndarray], list[float] | None]:
    """All frames as RGB, and their times in seconds behind the first, by the plain loop."""
    frames, times = [], []
    with av.open(io.BytesIO(data)) as container:
        for frame in container.decode(video=0):
            frames.append(frame.to_ndarray(format="rgb24"))
            times.append(frame.time)
    return frames, None if None in times else [t - times[0] for t in times]


def turned(mp4: bytes, degrees: int) -> bytes:
    """The file with a display matrix that turns its picture clockwise."""
    a, b, c, d = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]
    out = bytearray(mp4)
    box = out.find(b"tkhd")
    at = box + 8 + (20 if out[box + 4] == 0 else 32) + 16
    values = (a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    struct.pack_into(">9i", out, at, *values)
    return bytes(out)


def same(
    ours: dict[int, np.ndarray], reference: Sequence[np.ndarray], wanted: Sequence[int]
) -> bool:
    """Whether each position holds exactly the frame that was asked for."""
    return sorted(ours) == list(range(len(wanted))) and all(
        np.array_equal(ours[position], reference[index]) for position, index in enumerate(wanted)
    )


def index_first(mp4: bytes) -> bytes:
    """The same clip with its index before its frames, as servers have it."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/clip.mp4"
        options = {"movflags": "+faststart"}
        with av.open(io.BytesIO(mp4)) as source, av.open(path, "w", options=options) as target:
            stream = target.add_stream_from_template(source.streams.video[0])
            for packet in source.demux(video=0):
                if packet.dts is not None:
                    packet.stream = stream
                    target.mux(packet)
        return Path(path).read_bytes()


def with_sound(mp4: bytes, seconds: float) -> bytes:
    """The same frames, not encoded again, beside a track of silence."""
    file = io.BytesIO()
    with av.open(io.BytesIO(mp4)) as source, av.open(file, "w", format="mp4") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        sound = target.add_stream("aac", rate=16_000)
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
        _add_silence(target, sound, seconds)
    return file.getvalue()


def sound_only() -> bytes:
    """An MP4 file with one audio track."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        _add_silence(container, container.add_stream("aac", rate=16_000), 1.0)
    return file.getvalue()


def damaged(data: bytes, kind: str, seed: int) -> bytes:
    """The file with bytes turned over, with a hole of zeros, or cut off."""
    random = np.random.default_rng(seed)
    if kind == "cut":
        return data[: int(random.integers(1, len(data)))]
    out = bytearray(data)
    if kind == "hole":
        at = int(random.integers(0, len(data) - 600))
        out[at : at + 500] = bytes(500)
    else:
        for at in random.integers(0, len(data), random.integers(1, 6)):
            out[at] ^= int(random.integers(1, 256))
    return bytes(out)


def decode_by_time(data: bytes) -> dict[int, np.ndarray]:
    """All frames by their time stamps; packets that the decoder refuses are left out."""
    found = {}
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        try:
            for packet in container.demux(stream):
                try:
                    for frame in stream.codec_context.decode(packet if packet.size else None):
                        found[frame.pts] = frame.to_ndarray(format="rgb24")
                except av.error.FFmpegError:
                    continue
        except av.error.FFmpegError:
            pass
    return found
