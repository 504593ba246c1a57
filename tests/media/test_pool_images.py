# SPDX-License-Identifier: Apache-2.0
"""Pictures from the pool: the same pixels, hash and settings as from vLLM's own loader."""

import copy
import io
import pickle

import numpy as np
import pytest
from PIL import Image

from mimo_plugin.media.images import SharedImage, decode_image, image_of
from mimo_plugin.media.limits import MediaError, MediaLimits
from mimo_plugin.media.pool import MediaPool, PoolSettings
from tests.media.pictures import HOSTILE, SOUND, encoded, noise, png_that_claims

LIMITS = MediaLimits()
SETTINGS = {
    "rgb": {},
    "blue-background": {"rgba_background_color": [0, 0, 255]},
    "grey": {"image_mode": "L"},
    "rgba": {"image_mode": "RGBA"},
    "as-it-is": {"image_mode": None},
}


@pytest.fixture(scope="module")
def pool():
    made = MediaPool(PoolSettings(workers=2))
    yield made
    made.close(grace_s=0.0)


def local(data, **options):
    """Decode in this process: what is tested then is the decoding alone."""
    arrays = []

    def allocate(shape):
        arrays.append(np.empty(shape, dtype=np.uint8))
        return arrays[-1]

    meta = decode_image(data, allocate, limits=options.pop("limits", LIMITS), **options)
    return image_of(meta, arrays[0])


@pytest.mark.vllm
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", SOUND)
def test_pixels_settings_and_hash_are_vllms(name, settings, media):
    data = SOUND[name]
    stock_io = media.ImageMediaIO(**{"image_mode": "RGB", **settings})
    stock = stock_io.load_bytes(data)
    connector = media.MimoMediaConnector(media_io_kwargs={"image": settings})
    ours = connector.fetch_image(data_url(data))
    assert ours.media.mode == stock.media.mode
    assert ours.media.size == stock.media.size
    np.testing.assert_array_equal(np.asarray(ours.media), np.asarray(stock.media))
    np.testing.assert_array_equal(
        np.asarray(ours.media.convert("RGBA")), np.asarray(stock.media.convert("RGBA"))
    )
    assert ours.original_bytes == data
    assert ours.io_config == stock.io_config
    assert hash_of(ours) == hash_of(stock)


def data_url(data):
    import pybase64

    return "data:image/png;base64," + pybase64.b64encode(data).decode()


def hash_of(item):
    from vllm.multimodal.hasher import MultiModalHasher

    return MultiModalHasher.hash_kwargs("blake3", image=item, model="m")


@pytest.fixture(scope="module")
def media():
    pytest.importorskip("vllm")
    from mimo_plugin.engines.vllm import media as module
    from mimo_plugin.engines.vllm import media_pool

    yield module
    module.media_pool().close(grace_s=0.0)
    media_pool._pools.clear()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_gives_one_line_and_the_worker_goes_on(name, pool):
    data, said = HOSTILE[name]
    from_vllm = ("JPEG", "PNG", "WEBP", "GIF")
    with pytest.raises(MediaError, match=said) as caught:
        pool.run_sync(decode_image, data, limits=LIMITS, formats=from_vllm)
    assert "\n" not in str(caught.value)
    assert "allowed: " in str(caught.value)
    assert type(caught.value) is MediaError  # not a crash, not a time-out
    meta = pool.run_sync(decode_image, SOUND["jpeg"], limits=LIMITS, formats=from_vllm).meta
    assert meta["size"] == [47, 33]


def test_a_hundred_megapixels_are_refused_before_they_are_decoded(pool):
    data = encoded(Image.new("1", (10_000, 10_000)), "PNG")
    with pytest.raises(MediaError, match=r"10000x10000 = 100000000 pixels; .*50000000"):
        pool.run_sync(decode_image, data, limits=MediaLimits(max_pixels=50_000_000))
    assert pool.stats().outstanding_bytes == 0


def test_a_bomb_is_refused_by_its_expansion():
    data = encoded(Image.new("RGB", (5000, 5000)), "WEBP", lossless=True)
    with pytest.raises(MediaError, match=r"times; allowed: up to 2000 \(max_expansion\)"):
        local(data)
    assert local(data, limits=MediaLimits(max_expansion=None)).size == (5000, 5000)


@pytest.mark.parametrize("name", ["jpeg", "png-rgb", "gif-animated", "webp-alpha"])
def test_the_content_counts_not_the_claimed_type(name):
    # nothing about the name or the type of a file reaches the decoder
    assert local(SOUND[name], formats=("JPEG", "PNG", "GIF", "WEBP")).size[0] > 1
    with pytest.raises(MediaError, match="supported format"):
        local(SOUND[name], formats=("BMP",))


def test_limits_of_pillow_are_not_used_and_are_left_as_they_were(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert local(SOUND["jpeg"]).size == (47, 33)
    assert Image.MAX_IMAGE_PIXELS == 10


def test_damage_is_an_error_even_where_pillow_was_told_to_pad(monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(MediaError, match="damaged"):
        local(HOSTILE["truncated-jpeg"][0])


def test_each_prefix_of_a_picture_is_refused_or_decoded_whole():
    for name in ("png-rgb", "jpeg", "webp", "gif"):
        data = SOUND[name]
        whole = np.asarray(local(data))
        for length in range(0, len(data), max(1, len(data) // 40)):
            try:
                part = np.asarray(local(data[:length]))
            except MediaError:
                continue
            np.testing.assert_array_equal(part, whole)


# -- the image over shared memory ------------------------------------------------------------


@pytest.fixture
def shared(pool):
    result = pool.run_sync(decode_image, SOUND["jpeg"], limits=LIMITS)
    return image_of(result.meta, result.arrays[0]), result.arrays[0]


def test_numpy_sees_the_shared_pixels_without_a_copy(shared):
    image, array = shared
    seen = np.asarray(image)
    assert isinstance(image, SharedImage)
    assert np.shares_memory(seen, array)
    assert not seen.flags.writeable
    np.testing.assert_array_equal(seen, np.asarray(Image.open(io.BytesIO(SOUND["jpeg"]))))


def test_the_pixels_live_as_long_as_someone_looks_at_them(pool):
    before = pool.stats().outstanding_bytes
    result = pool.run_sync(decode_image, SOUND["jpeg"], limits=LIMITS)
    seen = np.asarray(image_of(result.meta, result.arrays[0]))
    del result
    assert pool.stats().outstanding_bytes == before + 47 * 33 * 3
    assert int(seen.sum()) > 0
    del seen
    assert pool.stats().outstanding_bytes == before


def test_pillow_works_on_a_copy(shared):
    image, array = shared
    before = array.copy()
    image.putpixel((0, 0), (1, 2, 3))
    assert image.getpixel((0, 0)) == (1, 2, 3)
    assert tuple(np.asarray(image)[0, 0]) == (1, 2, 3)
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize(
    "through",
    [
        lambda image: pickle.loads(pickle.dumps(image)),
        copy.deepcopy,
        lambda image: image.copy(),
        lambda image: image.resize(image.size),
        lambda image: image.convert("RGB"),
        lambda image: image.crop((0, 0, *image.size)),
        lambda image: Image.open(io.BytesIO(encoded(image, "PNG"))),
    ],
    ids=["pickle", "deepcopy", "copy", "resize", "convert", "crop", "save"],
)
def test_it_is_an_ordinary_image_to_pillow(shared, through):
    image, array = shared
    assert (image.size, image.mode, image.width) == ((47, 33), "RGB", 47)
    other = through(image)
    np.testing.assert_array_equal(np.asarray(other), array)
    assert image.getexif() is not None


def test_a_claimed_size_alone_takes_no_memory(pool):
    before = pool.stats().outstanding_bytes
    with pytest.raises(MediaError):
        pool.run_sync(decode_image, png_that_claims(8000, 8000), limits=LIMITS)
    assert pool.stats().outstanding_bytes == before


def test_a_large_picture_crosses_intact(pool):
    pixels = noise(1500, 2000)
    result = pool.run_sync(decode_image, encoded(Image.fromarray(pixels), "PNG"), limits=LIMITS)
    np.testing.assert_array_equal(result.arrays[0], pixels)
