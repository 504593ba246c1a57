# SPDX-License-Identifier: Apache-2.0
"""The router's page for people: its files, as bytes, for any web server.

No part of it needs a build step or anything from elsewhere: plain HTML, CSS and JavaScript modules.
It works under ``CONTENT_SECURITY_POLICY`` and below any path prefix, for all its addresses are
relative.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # Asked for again each time, and answered with 304 when the ETag is the same.
        "Cache-Control": "no-cache",
    }
)
"""To be sent with each file, beside its ``Content-Type`` and ``ETag``."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page.

    Attributes:
        content_type: value of the header ``Content-Type``.
        body: what the file holds.
        etag: value of the header ``ETag``, quotes included.
    """

    content_type: str
    body: bytes
    etag: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """All files by the path that they have to be served at: ``/``, ``/page.css``, …"""
    found = {}
    for entry in resources.files(__name__).iterdir():
        ending = entry.name[entry.name.rfind(".") :]
        if ending in _TYPES:
            body = entry.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            path = "/" if entry.name == "index.html" else f"/{entry.name}"
            found[path] = PageFile(_TYPES[ending], body, etag)
    return MappingProxyType(found)
