# SPDX-License-Identifier: Apache-2.0
"""Content keys: different content never shares one (cases B37, B39), equal content always does."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_plugin.media.keys import content_key, length_agrees

SETTINGS = {"max_pixels": 1000, "mean": [0.5, 0.5, 0.5], "patch": {"size": 16, "merge": 2}}


def key(kind="image", data=b"x" * 24, mode="RGB", size=(4, 6), **changed):
    return content_key(kind, data, mode=mode, size=size, settings={**SETTINGS, **changed})


def test_a_key_is_a_full_256_bit_identifier():
    assert re.fullmatch("[0-9a-f]{64}", key())
    assert key() == key()


@pytest.mark.parametrize(
    "other",
    [
        {"size": (6, 4)},
        {"size": (24,)},
        {"data": b"x" * 23 + b"y"},
        {"data": b"x" * 25},
        {"kind": "video"},
        {"mode": "L"},
        {"max_pixels": 1001},
        {"max_pixels": None},
        {"max_pixels": 1000.0},
        {"max_pixels": "1000"},
        {"mean": [0.5, 0.5, 0.25]},
        {"mean": [0.5, 0.5]},
        {"patch": {"size": 2, "merge": 16}},
        {"background": [0, 0, 0]},
    ],
    ids=str,
)
def test_b37_everything_that_changes_the_result_changes_the_key(other):
    assert key(**other) != key()


def test_b37_borders_of_a_list_count():
    data = bytes(range(24))
    splits = [
        [data[:10], data[10:]],
        [data[:12], data[12:]],
        [data],
        [data, b""],
        [b"", data],
        data,
    ]
    assert len({key(data=split) for split in splits}) == len(splits)


def test_b37_the_same_bytes_as_other_shapes_and_types():
    pixels = np.arange(24, dtype=np.uint8)
    forms = {
        content_key("image", pixels.tobytes(), mode=mode, size=size, settings={})
        for mode in ("uint8", "int8")
        for size in ((4, 6), (6, 4), (2, 12), (24,), (1, 24), (24, 1))
    }
    assert len(forms) == 12


def test_b39_keys_that_agree_in_their_last_digits_are_different():
    keys = {}
    for number in range(4000):
        found = key(data=b"%d" % number)
        clash = keys.setdefault(found[-4:], found)
        assert clash == found or clash[:-4] != found[:-4]
    assert len(set(keys)) < 4000  # 16 bits did clash; whole keys did not


def test_the_order_of_settings_does_not_matter_but_of_lists_does():
    swapped = dict(reversed(SETTINGS.items()))
    assert content_key("image", b"", mode="", size=(), settings=swapped) == content_key(
        "image", b"", mode="", size=(), settings=SETTINGS
    )
    assert key(mean=[1, 2]) != key(mean=[2, 1])
    assert key(kinds={"a", "b"}) == key(kinds={"b", "a"}) != key(kinds=["a", "b"])


def test_views_and_copies_of_bytes_are_the_same():
    data = bytes(range(24))
    strided = memoryview(bytes(range(48)))[::2]
    assert key(data=data) == key(data=bytearray(data)) == key(data=memoryview(data))
    assert key(data=strided) == key(data=strided.tobytes())


def test_a_value_without_an_unambiguous_form_is_refused():
    with pytest.raises(TypeError, match="found a value of type object; allowed: text, bytes"):
        key(thing=object())


def test_an_expected_length_decides():
    assert length_agrees(275, 275) and length_agrees(275, None)
    assert not length_agrees(256, 275)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def exact(value):
    """A form in which 1, 1.0, True, "1" and b"1" differ, as they do in a key."""
    if isinstance(value, list):
        return ("list", tuple(exact(item) for item in value))
    if isinstance(value, dict):
        return ("dict", frozenset((name, exact(item)) for name, item in value.items()))
    return (type(value).__name__, repr(value))


@settings(deadline=None, max_examples=300)
@given(VALUES, VALUES)
def test_keys_are_equal_only_for_equal_settings(first, second):
    same = key(setting=first) == key(setting=second)
    assert same == (exact(first) == exact(second))
