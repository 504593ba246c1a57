# SPDX-License-Identifier: Apache-2.0
"""Who may see and change the workers.

With a key: whoever has it. Without one: this machine alone, which a web page that is open in a
browser here is not. So the address that was asked for must be one of this machine (a name that was
made to point here is not), a request that comes from a page must come from our own, and one that
was passed on for somebody else counts as theirs.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from aiohttp import web

from mimo_plugin.router.problems import Problem
from mimo_plugin.router.settings import is_loopback

_PASSED_ON = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via")


def check(request: web.BaseRequest, key: str | None) -> None:
    """Return if the request may see or change what is for operators.

    Raises:
        Problem: 401 or 403.
    """
    if key is not None:
        given = request.headers.get("Authorization", "")
        scheme, _, token = given.partition(" ")
        if scheme.lower() != "bearer":
            token = request.headers.get("X-Admin-Key", "")
        if not hmac.compare_digest(token.strip().encode(), key.encode()):
            raise Problem(
                401,
                "the admin key is missing or wrong: send it as Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return
    peer = request.transport.get_extra_info("peername") if request.transport else None
    if not isinstance(peer, tuple) or not is_loopback(str(peer[0])):
        raise Problem(403, "only from this machine: the router has no --admin-key")
    if any(name in request.headers for name in _PASSED_ON):
        raise Problem(403, "passed on for another machine: the router has no --admin-key")
    host = request.headers.get("Host", "")
    if not is_loopback(_name(f"//{host}")):
        raise Problem(403, "Host is no address of this machine: the router has no --admin-key")
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        raise Problem(403, "from a page of another site")
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise Problem(403, "from a page of another site")


def check_json(request: web.BaseRequest) -> None:
    """Refuse a body that a plain form of another site could have sent.

    Raises:
        Problem: 415.
    """
    if request.content_type != "application/json":
        raise Problem(415, "Content-Type must be application/json")


def _name(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""
