# SPDX-License-Identifier: Apache-2.0
"""Which requests are turns of one chat, and how media are named."""

from __future__ import annotations

from typing import Any

import pytest

from mimo_plugin.router.prompt_sessions import derived_session, media_key, media_of, session_of

UUID = "0b7c2c3e-8a55-4f6e-9a93-3d2f5a1f7c11"


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        ({}, {}, None),
        ({"user": "ann"}, {}, None),
        ({"session_id": "b"}, {"x-session-id": "h"}, "b"),
        ({}, {"x-session-id": "h"}, "h"),
        ({}, {"x-smg-routing-key": "k"}, "k"),
        ({"session_params": {"id": "s"}}, {}, "s"),
        ({"vllm_xargs": {"session_id": "x"}, "prompt_cache_key": "c"}, {}, "x"),
        ({"prompt_cache_key": "c"}, {"x-session-id": "h"}, "h"),
        ({"prompt_cache_key": "c"}, {}, "c"),
        ({"conversation": "conv_1"}, {}, "conv_1"),
        ({"conversation": {"id": "conv_2"}}, {}, "conv_2"),
        ({"metadata": {"session_id": "m"}}, {}, "m"),
        ({"metadata": {"user_id": f"user_ab_account__session_{UUID}"}}, {}, UUID),
        ({"metadata": {"user_id": '{"session_id": "j"}'}}, {}, "j"),
        ({"metadata": {"user_id": "ann"}}, {}, None),
        ({"metadata": {"user_id": "{" * 100_000}}, {}, None),
        ({"session_id": ""}, {}, None),
        ({"session_id": 5, "metadata": 5, "vllm_xargs": 5, "session_params": 5}, {}, None),
    ],
)
def test_named(body: dict[str, Any], headers: dict[str, str], session: str | None) -> None:
    assert session_of(body, headers) == session


def test_a_long_name_is_shortened() -> None:
    one, two = "a" * 10_000, "a" * 10_000 + "b"
    names = {session_of({"session_id": name}, {}) for name in (one, two)}
    assert len(names) == 2
    assert all(name is not None and len(name) < 100 for name in names)


def turns(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return head + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_turns_of_a_chat_share_a_derived_session() -> None:
    first = derived_session({"model": "m", "messages": turns("a", system="s")})
    assert first is not None
    assert derived_session({"model": "m", "messages": turns("a", "b", "c", system="s")}) == first
    others = [
        {"model": "m", "messages": turns("b", system="s")},
        {"model": "m", "messages": turns("a", system="t")},
        {"model": "n", "messages": turns("a", system="s")},
        {"model": "m", "messages": turns("a", system="s"), "cache_salt": "x"},
        {"model": "m", "messages": turns("a")},
    ]
    names = {derived_session(body) for body in others}
    assert len(names) == len(others)
    assert first not in names


def test_apis_derive_alike_from_their_own_fields() -> None:
    parts = [{"type": "text", "text": "a"}]
    assert derived_session({"messages": [{"role": "user", "content": parts}]}) == derived_session(
        {"messages": turns("a")}
    )
    one = {"system": "s", "messages": turns("a")}
    assert derived_session(one) == derived_session({**one, "messages": turns("a", "b", "c")})
    assert derived_session(one) != derived_session({**one, "system": "t"})
    one = {"instructions": "s", "input": "a"}
    assert derived_session(one) is not None
    assert derived_session(one) != derived_session({"instructions": "s", "input": "b"})
    header = [{"type": "text", "text": "x-anthropic-billing-header: 1"}]
    other = [{"type": "text", "text": "x-anthropic-billing-header: 2"}]
    assert derived_session({"system": header, "messages": turns("a")}) == derived_session(
        {"system": other, "messages": turns("a")}
    )


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a"},
        {"input": "a text to embed"},
        {"messages": []},
        {"messages": turns()},
        {"messages": [{"role": "system", "content": "s"}]},
        {"messages": "x"},
        {"messages": [5, None]},
    ],
)
def test_no_derived_session(body: dict[str, Any]) -> None:
    if body.get("messages") == "x":
        assert derived_session(body) is not None  # one text with a role of its own
    else:
        assert derived_session(body) is None


def test_media_keys() -> None:
    data = "data:image/png;base64,QUJD"
    inline = media_key({"type": "image_url", "image_url": {"url": data}})
    assert inline is not None and inline.startswith("b2:") and "QUJD" not in inline
    same = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"},
    }
    assert media_key(same) == inline
    assert media_key({"type": "input_image", "image_url": data}) == inline
    assert media_key({"image_url": "data:image/jpeg;base64,QUJE"}) != inline
    url = "https://example.com/a.png"
    assert media_key({"type": "video_url", "video_url": {"url": url}}) == url
    assert media_key({"type": "image_url", "image_url": None, "uuid": "u1"}) == "uuid:u1"
    sound = {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}
    assert media_key(sound) == inline
    assert media_key({"type": "text", "text": "a"}) is None
    assert media_key("a") is None


def test_media_of_a_request() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://x/1"}}
    video = {"type": "video_url", "video_url": {"url": "https://x/2"}}
    messages = [
        {"role": "user", "content": [image, {"type": "text", "text": "a"}]},
        {"role": "user", "content": [video, image]},
    ]
    assert media_of({"messages": messages}) == ("https://x/1", "https://x/2")
    assert media_of({"input": messages}) == ("https://x/1", "https://x/2")
    assert media_of({"content_parts": [video]}) == ("https://x/2",)
    nested = {"text": "a", "image_data": [["https://x/1"], [{"url": "https://x/3"}]]}
    assert media_of(nested) == ("https://x/1", "https://x/3")
    assert media_of({"messages": "x", "image_data": None}) == ()
