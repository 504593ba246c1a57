# SPDX-License-Identifier: Apache-2.0
"""Clips for the video benchmark, made with PyAV's x264: a noisy camera pans over a scene."""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

FPS = 30
_TICKS_PER_S = 30_000
_GRAIN = 3.0
"""Deviation of the noise that a sensor adds to each frame, of values 0..255."""


@dataclass(frozen=True)
class Clip:
    """What a clip shall be; key frames come every ``gop`` frames exactly."""

    frames: int
    width: int
    height: int
    gop: int
    b_frames: int = 3
    variable: bool = False
    preset: str = "veryfast"

    @property
    def name(self) -> str:
        """Short text for tables."""
        rate = "variable" if self.variable else f"{FPS} fps"
        return f"{self.width}x{self.height} {rate} GOP {self.gop} B {self.b_frames}"


def make(clip: Clip) -> bytes:
    """The clip as an MP4 file."""
    random = np.random.default_rng(clip.gop)
    scene = _scene(clip.width + 256, clip.height + 256, random)
    grain = random.normal(0, _GRAIN, (clip.height + 64, clip.width + 64, 1)).round().astype(np.int8)
    gaps = random.integers(10, 100, clip.frames) * (_TICKS_PER_S // 1000)
    gaps = gaps if clip.variable else np.full(clip.frames, _TICKS_PER_S // FPS)
    ticks = np.cumsum(gaps) - gaps[0]
    file = io.BytesIO()
    options = {"preset": clip.preset, "crf": "26", "sc_threshold": "0", "threads": "1"}
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, _TICKS_PER_S)
        stream.codec_context.gop_size = clip.gop
        stream.codec_context.max_b_frames = clip.b_frames
        for number in range(clip.frames):
            frame = av.VideoFrame.from_ndarray(_view(clip, scene, grain, number), format="rgb24")
            frame.pts, frame.time_base = int(ticks[number]), stream.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def repeat(data: bytes, times: int, path: Path) -> None:
    """Write the clip ``times`` times behind itself, without encoding it again."""
    with av.open(path.as_posix(), "w", format="mp4") as target:
        stream = None
        shift = 0
        for _ in range(times):
            with av.open(io.BytesIO(data)) as source:
                video = source.streams.video[0]
                if stream is None:
                    stream = target.add_stream_from_template(video)
                end = 0
                for packet in source.demux(video):
                    if packet.dts is None or packet.pts is None:
                        continue
                    end = max(end, packet.pts + (packet.duration or 0))
                    packet.pts += shift
                    packet.dts += shift
                    packet.stream = stream
                    target.mux(packet)
                shift += end


def full_decode(data: bytes, wanted: set[int]) -> dict[int, Any]:
    """Decode every frame with one thread, and convert those that are wanted."""
    found = {}
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        for index, frame in enumerate(container.decode(stream)):
            if index in wanted:
                found[index] = frame.to_ndarray(format="rgb24")
    return found


def _scene(width: int, height: int, random: np.random.Generator) -> Any:
    """A texture with detail of several sizes."""
    total = np.zeros((height, width, 3))
    for size, weight in ((64, 0.5), (16, 0.3), (4, 0.15), (1, 0.05)):
        coarse = random.integers(0, 256, (height // size + 1, width // size + 1, 3))
        total += weight * coarse.repeat(size, 0).repeat(size, 1)[:height, :width]
    return total.clip(0, 255).astype(np.uint8)


def _view(clip: Clip, scene: Any, grain: Any, number: int) -> Any:
    """What the camera sees: it goes round, and a bright block crosses the picture."""
    angle = number * 2 * np.pi / 300
    left, top = int(128 + 120 * np.cos(angle)), int(128 + 120 * np.sin(angle))
    view = scene[top : top + clip.height, left : left + clip.width].copy()
    at = number * 5 % max(1, clip.width - 32)
    view[clip.height // 3 : clip.height // 3 + 32, at : at + 32] = 240
    down, right = number * 23 % 64, number * 41 % 64
    noise = grain[down : down + clip.height, right : right + clip.width]
    return (view.astype(np.int16) + noise).clip(0, 255).astype(np.uint8)
