# SPDX-License-Identifier: Apache-2.0
"""From the engine's configuration over the loader to the processor; no engine runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mimo_plugin.core.pixels import PixelError
from mimo_plugin.engines.vllm.video import setup as setups
from mimo_plugin.errors import FeatureUnavailable
from tests.media.video_clips import Clip, make
from tools import tiny_omni

pytestmark = pytest.mark.vllm
pytest.importorskip("av")

VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
LARGE = Clip(frames=40, width=640, height=480)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_omni.make(tmp_path_factory.mktemp("tiny-omni"))


@pytest.fixture(scope="module")
def config_of(model):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    def make(*, mimo: dict[str, Any] | None = None, **arguments: Any) -> Any:
        section = {"vision": {"host_resize_ratio": 4}, "video": {}} if mimo is None else mimo
        arguments = {"dtype": "float32", "max_model_len": 4096} | arguments
        return EngineArgs(
            model=str(model), additional_config={"mimo": section}, **arguments
        ).create_engine_config()

    return make


class Way:
    """The way of a video in one engine."""

    def __init__(self, config: Any) -> None:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        self.config = config
        self.options = config.model_config.multimodal_config.media_io_kwargs["video"]
        self.processor = MULTIMODAL_REGISTRY.create_processor(config.model_config)

    def load(self, data: bytes, **asked: Any) -> Any:
        from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

        merged = VideoMediaIO.merge_kwargs(self.options, asked)
        return VideoMediaIO(ImageMediaIO(), **merged).load_bytes(data)

    def process(self, *videos: Any, **kwargs: Any) -> Any:
        items = self.processor.info.parse_mm_data({"video": list(videos)})
        return self.processor(VIDEO * len(videos), items, hf_processor_mm_kwargs=kwargs)

    def rows(self, out: Any) -> Any:
        from mimo_plugin.engines.vllm.vision.packing import unpack

        items = [item.get_data() for item in out["mm_kwargs"]["video"]]
        return unpack(
            torch.cat([item["video_pixels"] for item in items]),
            torch.stack([item["video_sizes"] for item in items]),
            self.processor.setup.spec,
            dtype=torch.float32,
            backend="cpu",
            once=False,
        )


@pytest.fixture(scope="module")
def rows_way(config_of):
    return Way(config_of())


@pytest.fixture(scope="module")
def pixels_way(config_of):
    never = {"vision": {"host_resize_ratio": 1e9}, "video": {}}
    return Way(config_of(mimo=never))


def test_the_configuration_says_the_loader_its_key_and_the_rule(config_of, rows_way):
    options = rows_way.options
    assert options["video_backend"] == "mimo" and options["num_frames"] == -1
    assert options["mimo_setup"] == setups.key_of(rows_way.config.model_config.hf_config)
    user = {"video": {"num_frames": 6}, "image": {"image_mode": None}}
    given = Way(config_of(media_io_kwargs=user))
    assert given.options["num_frames"] == 6
    assert given.config.model_config.multimodal_config.media_io_kwargs["image"] == user["image"]
    assert user == {"video": {"num_frames": 6}, "image": {"image_mode": None}}
    stock = Way(config_of(mimo={"vision": {}, "video": {"frames": "stock"}}))
    assert "num_frames" not in stock.options


def test_a_second_engine_from_the_same_arguments(model):
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(model),
        dtype="float32",
        max_model_len=4096,
        media_io_kwargs={"video": {"fps": 2}},
        additional_config={"mimo": {"vision": {}, "video": {}}},
    )
    keys = {Way(arguments.create_engine_config()).options["mimo_setup"] for _ in range(2)}
    assert len(keys) == 1


@pytest.mark.parametrize("asked", [{}, {"num_frames": 12}, {"fps": 20}], ids=str)
def test_rows_and_pixels_are_the_same_video(local, rows_way, pixels_way, asked):
    data = make(LARGE)
    rows, pixels = rows_way.load(data, **asked), pixels_way.load(data, **asked)
    assert ("mimo_rows" in rows[1], "mimo_rows" in pixels[1]) == (True, False)
    one, other = rows_way.process(rows), pixels_way.process(pixels)
    assert one["prompt_token_ids"] == other["prompt_token_ids"]
    assert one["mm_placeholders"] == other["mm_placeholders"]
    assert torch.equal(rows_way.rows(one), pixels_way.rows(other))
    assert one["mm_hashes"] != other["mm_hashes"]


def test_two_videos_of_either_form_in_one_request(local, rows_way):
    small = make(Clip(frames=40, width=96, height=64))
    first, second = rows_way.load(small, num_frames=4), rows_way.load(make(LARGE), num_frames=12)
    together = rows_way.rows(rows_way.process(first, second))
    apart = [rows_way.rows(rows_way.process(one)) for one in (first, second)]
    assert torch.equal(together, torch.cat(apart))


def test_times_of_a_variable_rate_are_in_the_prompt(local, rows_way):
    """The second patch begins with the frame that is really shown then."""
    clip = Clip(frames=300, variable=True)
    out = rows_way.process(media := rows_way.load(make(clip), num_frames=4))
    time_s = media[1]["times_s"][2]
    assert time_s != pytest.approx(200 / 30, abs=0.5)
    text = rows_way.processor.info.get_tokenizer().decode(out["prompt_token_ids"])
    assert f"<|vision_end|>00:{int(time_s):02d}<|vision_start|>" in text


def test_limits_of_a_request_must_be_the_loader_s_as_well(local, rows_way, pixels_way):
    data = make(LARGE)
    for kwargs in ({"max_pixels": 10_000}, {"videos_kwargs": {"max_pixels": 10_000}}):
        with pytest.raises(PixelError, match="fix: give them under media_io_kwargs.video as well"):
            rows_way.process(rows_way.load(data, num_frames=8), **kwargs)
        both = rows_way.process(rows_way.load(data, num_frames=8, max_pixels=10_000), **kwargs)
        pixels = pixels_way.process(pixels_way.load(data, num_frames=8), **kwargs)
        assert torch.equal(rows_way.rows(both), pixels_way.rows(pixels))
    with pytest.raises(PixelError, match="the same limits for both"):
        rows_way.process(rows_way.load(data, num_frames=8, max_pixels=10_000))


def test_limits_of_the_engine_are_the_loader_s_too(local, config_of):
    way = Way(config_of(mm_processor_kwargs={"max_pixels": 10_000}))
    media = way.load(make(LARGE), num_frames=8)
    assert np.prod(media[1]["mimo_rows"]["target"]) <= 10_000
    way.process(media)


def test_a_video_read_for_another_engine_is_refused(local, rows_way, pixels_way):
    for media in (rows_way.load(make(LARGE)), rows_way.load(make(Clip()))):
        with pytest.raises(PixelError, match="another engine's"):
            pixels_way.process(media)
    frames, metadata = rows_way.load(make(LARGE)).media
    without = {name: value for name, value in metadata.items() if name != "mimo_setup"}
    with pytest.raises(PixelError, match="found None"):
        rows_way.process((frames, without))
    with pytest.raises(PixelError, match="patch rows of a video: found"):
        rows_way.process((frames[:1], metadata))


def test_what_the_processor_hands_on_is_no_shared_memory(local, rows_way):
    media = rows_way.load(make(LARGE))
    (item,) = rows_way.process(media)["mm_kwargs"]["video"]
    travels = item.get_data()["video_pixels"].numpy()
    assert not np.shares_memory(travels, media[0])


def test_a_process_that_was_not_configured_learns_from_the_model_s_configuration(
    local, rows_way, monkeypatch
):
    monkeypatch.setattr(setups, "_setups", {})
    with pytest.raises(ValueError, match="mimo_setup"):
        rows_way.load(make(LARGE))
    Way(rows_way.config).load(make(LARGE))


def test_another_loader_is_left_alone_or_refused(config_of, caplog):
    """Named, the feature stops start-up; taken along, it leaves the user's choice."""
    chosen = {"media_io_kwargs": {"video": {"video_backend": "opencv"}}}
    with pytest.raises(FeatureUnavailable, match="'opencv'.*fix: drop it"):
        config_of(**chosen)
    config = config_of(mimo={}, **chosen)
    left = config.model_config.multimodal_config.media_io_kwargs["video"]
    assert left == chosen["media_io_kwargs"]["video"]
    features = config.additional_config["mimo"]["features"]
    assert "vision" in features and "video" not in features
    assert "leaves out feature 'video'" in caplog.text


def test_a_video_without_the_feature_is_as_before(local, config_of):
    config = config_of(mimo={"vision": {}})
    assert "video" not in config.model_config.multimodal_config.media_io_kwargs
    with pytest.raises(FeatureUnavailable, match="add vision to --plugin"):
        config_of(mimo={"features": ["video"]})
