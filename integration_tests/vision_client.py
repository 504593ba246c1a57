# SPDX-License-Identifier: Apache-2.0
"""Requests with images and videos, and what comes back: prompt, tokens, logprobs, or a refusal."""

from __future__ import annotations

import base64
import http.client
import io
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from tools.server import VllmServer

Part = dict[str, Any]
_MILLISECOND = Fraction(1, 1000)


def data_url(media_type: str, data: bytes) -> str:
    """``data`` as a URL."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, media_type: str = "image/png") -> Part:
    """One image of a chat message."""
    return {"type": "image_url", "image_url": {"url": data_url(media_type, data)}}


def video_part(data: bytes, media_type: str = "video/mp4") -> Part:
    """One video of a chat message."""
    return {"type": "video_url", "video_url": {"url": data_url(media_type, data)}}


def text_part(text: str) -> Part:
    """Text of a chat message."""
    return {"type": "text", "text": text}


def encode(image: Any, form: str = "PNG") -> bytes:
    """A Pillow image as the bytes of a file."""
    out = io.BytesIO()
    image.save(out, form)
    return out.getvalue()


@lru_cache(maxsize=64)
def noise(height: int, width: int, seed: int, form: str = "PNG") -> bytes:
    """A picture of soft noise, the same for each seed."""
    from PIL import Image

    rng = random.Random(seed)
    small = Image.frombytes("RGB", (24, 24), rng.randbytes(24 * 24 * 3))
    return encode(small.resize((width, height), Image.Resampling.BICUBIC), form)


@lru_cache(maxsize=64)
def letter(character: str, side: int = 128) -> bytes:
    """A picture that shows one large letter."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (side, side), "white")
    font = ImageFont.load_default(side - 20)
    ImageDraw.Draw(image).text((20, 0), character, "black", font=font)
    return encode(image)


@lru_cache(maxsize=8)
def clip(
    frames: int,
    height: int,
    width: int,
    rate: Fraction = Fraction(1),
    times_s: tuple[float, ...] = (),
) -> bytes:
    """An MP4 whose frames differ, ``rate`` frames a second, or shown at ``times_s``."""
    import av
    import numpy as np

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        if times_s:
            stream.time_base = stream.codec_context.time_base = _MILLISECOND
        ramp = np.arange(height * width, dtype=np.int64).reshape(height, width, 1)
        for index in range(frames):
            picture = (ramp // 7 + index * 5 + np.array([0, 60, 120])) % 256
            frame = av.VideoFrame.from_ndarray(picture.astype(np.uint8), format="rgb24")
            if times_s:
                frame.pts, frame.time_base = round(times_s[index] * 1000), _MILLISECOND
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue()


@dataclass(frozen=True)
class Answer:
    """What a request got."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Refused:
    """A status that is not 200, and the reason."""

    status: int
    reason: str


class VisionClient:
    """Chat requests to one server, greedy."""

    def __init__(self, server: VllmServer, tokens: int = 8) -> None:
        self.server = server
        self.tokens = tokens

    def ask(self, *parts: Part, **options: Any) -> Answer | Refused:
        """One user message of ``parts``."""
        return self.chat([{"role": "user", "content": list(parts)}], **options)

    def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> Answer | Refused:
        """A whole chat."""
        body = {
            "model": self.server.model,
            "messages": list(messages),
            "max_tokens": self.tokens,
            "min_tokens": self.tokens,
            "temperature": 0,
            "logprobs": True,
            "return_token_ids": True,
            **options,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=240)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        if response.status != 200:
            return Refused(response.status, raw.decode(errors="replace"))
        answer = json.loads(raw)
        choice = answer["choices"][0]
        return Answer(
            answer["prompt_token_ids"],
            choice["token_ids"],
            [entry["logprob"] for entry in choice["logprobs"]["content"]],
        )

    def at_once(self, requests: Sequence[Sequence[Part]]) -> list[Answer | Refused]:
        """All requests side by side."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda parts: self.ask(*parts), requests))


def served(answer: Answer | Refused) -> Answer:
    """The answer, which must not be a refusal."""
    assert isinstance(answer, Answer), answer
    return answer


def text_of(model: Path, tokens: Sequence[int]) -> str:
    """Prompt tokens as text, special tokens and all."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False))
