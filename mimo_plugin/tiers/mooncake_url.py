# SPDX-License-Identifier: Apache-2.0
"""The URL of a Mooncake store: where its master is, and how this machine takes part.

``mooncake://HOST:PORT?protocol=rdma&device=mlx5_0``, or plain ``HOST:PORT``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mimo_plugin.errors import nearest, setting_error

DEFAULT_PORT = 50051
PEER_TO_PEER = "P2PHANDSHAKE"
PROTOCOLS = ("tcp", "rdma")
_METADATA = ("http", "https", "etcd", "redis")
_FORM = "mooncake://HOST:PORT or HOST:PORT of mooncake_master"
_MIN_BUFFER_MIB = 8


@dataclass(frozen=True, kw_only=True)
class MooncakeSettings:
    """What a URL says.

    Attributes:
        host: of the master.
        port: of the master.
        metadata: where machines find each other: the URL of a metadata service, or
            ``PEER_TO_PEER``; the same for all who share the store.
        protocol: of transfers, one of ``PROTOCOLS``.
        device: names of RDMA devices, separated by commas; empty: all that are found.
        local: name or address of this machine for others; empty: the one that it reaches the
            master from.
        segment_gib: memory that each engine process adds to the store, GiB, >= 0.
        buffer_mib: memory that pages go through, MiB, of each engine process; a page may have a
            quarter of it.
    """

    host: str
    port: int
    metadata: str = PEER_TO_PEER
    protocol: str = PROTOCOLS[0]
    device: str = ""
    local: str = ""
    segment_gib: float = 0.0
    buffer_mib: int = 128

    @property
    def master(self) -> str:
        """``HOST:PORT``, as the client library takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def name(self) -> str:
        """What the store is called, by all who share it."""
        return f"mooncake://{self.master}"


def parse_mooncake(setting: str, url: str) -> MooncakeSettings:
    """The settings in a URL.

    Args:
        setting: in messages, where the URL stands.
        url: see the module.

    Raises:
        ConfigError: what is wrong with it.
    """
    try:
        bare = "://" not in url.partition("?")[0]
        parts = urlsplit(f"mooncake://{url}" if bare else url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise setting_error(setting, url, _FORM, f"write it like that ({error})") from error
    if parts.scheme != "mooncake" or not host or parts.username or parts.path.strip("/"):
        raise setting_error(setting, url, _FORM, "write it like that")
    found: dict[str, Any] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        where = f"{setting}: {name} of {host}"
        if name not in _OPTIONS:
            hint = nearest(name, _OPTIONS)
            fix = f"did you mean {hint!r}?" if hint else "remove it"
            raise setting_error(where, value, f"the options {', '.join(_OPTIONS)}", fix)
        if name in found:
            raise setting_error(where, value, "each option once", "drop one")
        found[name] = _OPTIONS[name](where, value)
    settings = MooncakeSettings(host=host, port=port or DEFAULT_PORT, **found)
    if settings.device and settings.protocol != "rdma":
        raise setting_error(
            f"{setting}: device of {host}",
            settings.device,
            "none with protocol=tcp",
            "add protocol=rdma, or drop it",
        )
    return settings


def _metadata(where: str, value: str) -> str:
    scheme, found, rest = value.partition("://")
    if value == PEER_TO_PEER or (found and scheme in _METADATA and rest):
        return value
    allowed = f"{PEER_TO_PEER} or a URL of {', '.join(_METADATA)}"
    raise setting_error(where, value, allowed, "name the service that all machines use")


def _protocol(where: str, value: str) -> str:
    if value not in PROTOCOLS:
        raise setting_error(where, value, " or ".join(PROTOCOLS), "use one of them")
    return value


def _text(where: str, value: str) -> str:
    if not value or any(letter.isspace() for letter in value):
        raise setting_error(where, value, "a name without spaces", "write it, or leave it out")
    return value


def _segment(where: str, value: str) -> float:
    size = _number(value)
    if size is None or size < 0:
        raise setting_error(where, value, "a number >= 0, GiB", "use 0 for none")
    return size


def _buffer(where: str, value: str) -> int:
    size = _number(value)
    if size is None or size != int(size) or size < _MIN_BUFFER_MIB:
        allowed = f"a whole number >= {_MIN_BUFFER_MIB}, MiB"
        raise setting_error(where, value, allowed, "use 4 times the largest page, or leave it out")
    return int(size)


def _number(value: str) -> float | None:
    try:
        size = float(value)
    except ValueError:
        return None
    return size if math.isfinite(size) else None


_OPTIONS: dict[str, Callable[[str, str], object]] = {
    "metadata": _metadata,
    "protocol": _protocol,
    "device": _text,
    "local": _text,
    "segment_gib": _segment,
    "buffer_mib": _buffer,
}
