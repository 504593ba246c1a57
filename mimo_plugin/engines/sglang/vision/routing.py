# SPDX-License-Identifier: Apache-2.0
"""Which encoder gets which image, video or sound of a request.

SGLang shuffles its encoders for every request, so an item that comes back with the next turn of a
chat finds an encoder that has never seen it. Here an item goes to the encoder that its content
belongs to (``core/item_routing.py``). A request then has one part for each item, in order, and the
list of encoders that SGLang freezes into it has one entry for each part: every place that reads the
two, the scheduler's process included, works as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.encoder.receiver import MMReceiverBase, MMReceiverHTTP

from mimo_plugin.core.item_routing import Routes, item_key, route
from mimo_plugin.engines.wrapping import wrap_once


def install_routing() -> None:
    """Route items in this process; a second call changes nothing."""
    wrap_once(MMReceiverBase, "_send_encode_request", _wrap_send)
    wrap_once(MMReceiverBase, "recv_mm_data", _wrap_receive)


def _wrap_send(stock: Callable[..., Any]) -> Callable[..., Any]:
    def _send_encode_request(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(routed(self, obj), obj, *args, **kwargs)

    return _send_encode_request


def _wrap_receive(stock: Callable[..., Any]) -> Callable[..., Any]:
    async def recv_mm_data(self: Any, request_obj: Any, *args: Any, **kwargs: Any) -> Any:
        return await stock(routed(self, request_obj), request_obj, *args, **kwargs)

    return recv_mm_data


def routed(receiver: Any, request: Any) -> Any:
    """The receiver as one request is to see it: encoders and items as its routes say.

    The receiver itself where there is no choice: fewer than two encoders, or no item.
    """
    encoders = list(receiver.encode_urls)
    if len(encoders) < 2 or not isinstance(receiver, MMReceiverHTTP):
        return receiver
    items = receiver._extract_url_data(request)
    if not items:
        return receiver
    return _view(receiver, route([(item["modality"], _key(item)) for item in items], encoders))


def _view(receiver: Any, routes: Routes) -> Any:
    view = copy.copy(receiver)
    view.encode_urls = list(routes.encoders)
    view._assign_items_by_modality = lambda *args, **kwargs: routes.counts
    return view


def _key(item: dict[str, Any]) -> bytes:
    """By the content that the request names or carries; a link stands for what it leads to."""
    content = item.get("content_hash") or item["url"]
    if isinstance(content, str):
        content = content.encode()
    return item_key(content if isinstance(content, bytes) else repr(content).encode())
