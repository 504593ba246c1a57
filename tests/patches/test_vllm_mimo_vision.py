# SPDX-License-Identifier: Apache-2.0
"""Patches 0006 to 0009: MiMo-V2 Omni prepares images and videos as its checkpoint wants them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.server import is_cpu_build
from tools.tiny_omni import CLIP_MEAN, CLIP_STD, make

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not is_cpu_build(), reason="needs the CPU build of vLLM"),
]
PATCHES = {"pixels": "0006", "times": "0007", "prompt": "0008", "kwargs": "0009"}
"""What the probe reports, and the patch that mends it."""

COLOR = (10, 100, 200)
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)
MEAN_STD: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "clip": (tuple(255 * m for m in CLIP_MEAN), tuple(255 * s for s in CLIP_STD)),
    "none": (IMAGENET_MEAN, IMAGENET_STD),
    "silent": (IMAGENET_MEAN, IMAGENET_STD),
    "scalar": ((127.5,) * 3, (63.75,) * 3),
    "rescaled": ((127.5,) * 3, (63.75,) * 3),
    "raw": ((128.0,) * 3, (64.0,) * 3),
}
"""Preprocessor configs of the probe: mean and standard deviation of values 0..255."""

TIMES = {
    "sampled": "00:00 06:40",  # frames at 0, 199.97, 400 and 599.97 s
    "with bytes": "00:00 06:40",
    "uneven": "00:00 00:07 06:41 60:00",
    "explicit": "00:03 01:01",
    "odd": "00:50 01:30",
    "one": "01:40",
    "repeated": "00:09 00:09",
    "without": "00:00 00:02",
    "no fps": "00:00 00:02",
}
DTYPES = ("float32", "bfloat16")
"""Of the model. Floating-point outputs of a processor are cast to it; 401 s isn't a bfloat16."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def patched(
    probe: Callable[..., Any], vllm_patched: Callable[[str], Path], model: str
) -> Callable[[str], Any]:
    """A part of the probe's report with the series up to the patch of that part."""
    return lambda part: probe("mimo_vision.py", vllm_patched(PATCHES[part]), model, part)[part]


@pytest.fixture
def plain(probe: Callable[..., Any], vllm_plain: Path, model: str) -> Any:
    return probe("mimo_vision.py", vllm_plain, model, *PATCHES)


def seen(name: str) -> list[float]:
    """What the model must see of ``COLOR``."""
    return [(c - m) / s for c, m, s in zip(COLOR, *MEAN_STD[name], strict=True)]


@pytest.mark.parametrize("name", MEAN_STD)
def test_pixels_follow_the_checkpoint(patched: Callable[[str], Any], name: str) -> None:
    found = patched("pixels")[name]
    assert found["image"] == pytest.approx(seen(name), abs=1e-6)
    assert found["video"] == pytest.approx(seen(name), abs=1e-6)


def test_plain_source_normalizes_with_imagenet(plain: Any) -> None:
    """When this fails, the engine is mended: drop patch 0006."""
    for name in MEAN_STD:
        assert plain["pixels"][name]["image"] == pytest.approx(seen("none"), abs=1e-6)
    assert plain["pixels"]["clip"]["image"] != pytest.approx(seen("clip"), abs=0.01)


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_frames_have_their_real_time(patched: Callable[[str], Any], name: str, dtype: str) -> None:
    assert patched("times")[f"{name}/{dtype}"] == {
        "engine": TIMES[name],
        "reference": TIMES[name],
    }


def test_same_frames_at_other_times_are_another_item(patched: Callable[[str], Any]) -> None:
    first, other, again = patched("times")["cached"]
    assert first == again and first[0] != other[0]
    assert [first[1], other[1]] == ["00:00 06:40", "00:00 00:20"]


def test_videos_of_a_prompt_keep_their_own_times(patched: Callable[[str], Any]) -> None:
    assert patched("times")["two"] == "00:05 00:00 00:20 00:40"


def test_metadata_of_other_frames_is_refused(patched: Callable[[str], Any]) -> None:
    error = patched("times")["wrong length"]["error"]
    assert "4 frames" in error and "3 timestamps or frames_indices" in error


def test_plain_source_takes_frames_as_a_second_apart(plain: Any) -> None:
    """When this fails, the engine is mended: drop patch 0007."""
    found = plain["times"]
    for dtype in DTYPES:
        assert found[f"sampled/{dtype}"]["engine"] == "00:00 00:02"
        assert found[f"uneven/{dtype}"]["engine"] == "00:00 00:02 00:04 00:06"
        assert found[f"explicit/{dtype}"]["engine"] == "00:00 00:02"
    first, other, _ = found["cached"]
    assert first == other  # the second request gets the first one's prompt


PROMPTS = ("alone", "in text", "two", "mixed", "images", "bare")


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_is_that_of_the_reference(patched: Callable[[str], Any], name: str) -> None:
    found = patched("prompt")[name]
    assert found["engine"] == found["reference"]


@pytest.mark.parametrize("name", PROMPTS)
def test_placeholders_lie_on_their_media(patched: Callable[[str], Any], name: str) -> None:
    """Independent of the reference: read from the prompt's text."""
    found = patched("prompt")[name]
    text, places = found["text"], found["placeholders"]
    count = {kind: [p["kind"] for p in places].count(kind) for kind in ("image", "video")}
    assert text.count("<|video_start|>") == text.count("<|video_end|>") == count["video"]
    # Vision tokens: a pair around each image, and one around each pair of frames.
    pairs = count["image"] + 2 * count["video"]
    assert text.count("<|vision_start|>") == text.count("<|vision_end|>") == pairs
    assert "<|vision_start|><|video_start|>" not in text
    ends = {"image": ["<|image_pad|>"] * 2, "video": ["<|video_start|>", "<|video_end|>"]}
    for place in places:
        assert place["ends"] == ends[place["kind"]]
    for kind in count:
        embeds = sum(place["embeds"] for place in places if place["kind"] == kind)
        assert embeds == text.count(f"<|{kind}_pad|>")


def test_plain_source_leaves_vision_tokens_around_a_video(plain: Any) -> None:
    """When this fails, the engine is mended: drop patch 0008."""
    found = plain["prompt"]
    for name in ("alone", "in text", "two", "mixed"):
        assert found[name]["engine"] != found[name]["reference"]
        assert "<|vision_start|><|video_start|>" in found[name]["text"]
    for name in ("images", "bare"):
        assert found[name]["engine"] == found[name]["reference"]


@pytest.mark.parametrize(
    ("name", "image", "video"),
    [
        ("default", 256, 64),
        ("max", 16, 16),
        ("min", 1024, 1024),
        ("size", 16, 16),
        ("max before size", 9, 9),
        ("image", 16, 64),
        ("video", 16, 9),
        ("startup", 16, 16),
        ("startup, request", 9, 9),
    ],
)
def test_pixel_limits_are_followed(
    patched: Callable[[str], Any], name: str, image: int, video: int
) -> None:
    """Merged tokens of 512x512 and of a pair of frames of 256x256; a token is 32x32 pixels."""
    assert patched("kwargs")[name] == {"image": image, "video": video, "planned": image}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("crossed", ("min_pixels=32768", "max_pixels=16384")),
        ("tiny", ("max_pixels=1023", "1024")),
        ("negative", ("min_pixels=-1",)),
        ("word", ("many",)),
    ],
)
def test_limits_that_no_size_meets_are_refused(
    patched: Callable[[str], Any], name: str, says: tuple[str, ...]
) -> None:
    error = patched("kwargs")[name]["error"]
    assert all(word in error for word in says)


def test_the_device_is_that_of_the_startup(patched: Callable[[str], Any]) -> None:
    # Without and with kwargs at startup; of each, without and with a device in the request.
    assert patched("kwargs")["device"] == ["None", "None", "cpu", "cpu"]


def test_plain_source_ignores_processor_kwargs(plain: Any) -> None:
    """When this fails, the engine is mended: drop patch 0009."""
    found = plain["kwargs"]
    for name in ("max", "min", "size", "image", "video", "startup", "crossed", "negative"):
        assert (found[name]["image"], found[name]["video"]) == (256, 64)
    assert found["max"]["planned"] == found["startup"]["planned"] == 16
    assert found["device"] == ["None"] * 4


def test_the_feature_on_a_patched_engine(
    probe: Callable[..., Any], vllm_patched: Callable[[str], Path], model: str
) -> None:
    """Patches and the feature ``vision`` agree to the bit; its settings hold there as well."""
    found = probe("vision_feature.py", vllm_patched(PATCHES["kwargs"]), model)
    outer = found.pop("outer")
    assert found == {name: {"prompt": True, "rows": True} for name in ("images", "video", "kwargs")}
    assert outer.startswith("a <|vision_start|><|video_start|>00:00") and "06:40" in outer
    assert outer.endswith("<|video_end|><|vision_end|> b")
