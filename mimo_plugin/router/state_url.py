# SPDX-License-Identifier: Apache-2.0
"""The address of a shared state, and clients for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from mimo_plugin.errors import FeatureUnavailable, MimoError, one_line, setting_error

_SCHEMES = ("redis", "rediss", "unix")
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MIN_VERSION = (6, 2)


class StateUnavailable(MimoError):
    """The server can't be reached, refuses the password, or is too old; one line."""


@dataclass(frozen=True, slots=True)
class StateUrl:
    """A parsed address.

    Attributes:
        url: for redis-py, without our own options.
        shown: without user, password and options.
        namespace: routers with the same one share.
    """

    url: str
    shown: str
    namespace: str

    @classmethod
    def parse(cls, text: str) -> StateUrl:
        """Take one apart.

        Raises:
            ConfigError: it is no address of a Redis server.
        """
        fix = "write redis://host:6379/0?namespace=NAME"
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            shown = text.rsplit("@", 1)[-1] if "@" in text else text
            raise setting_error("--state", shown, "the URL of a Redis server", fix) from None
        place = parts.path if parts.scheme == "unix" else host
        shown = f"{parts.scheme}://{place or ''}"
        if parts.scheme != "unix":
            shown += f":{port or 6379}{parts.path}"
        database = parts.path.strip("/")
        if (
            parts.scheme not in _SCHEMES
            or not place
            or (parts.scheme != "unix" and database and not database.isdecimal())
        ):
            raise setting_error("--state", shown, "the URL of a Redis server", fix)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        namespace = options.pop("namespace", "default")
        if not _NAMESPACE.fullmatch(namespace):
            raise setting_error(
                "--state namespace", namespace, "1 to 64 letters, digits, '.', '_', '-'", fix
            )
        url = urlunsplit(parts._replace(query=urlencode(options)))
        return cls(url, shown, namespace)


def library() -> Any:
    """redis-py.

    Raises:
        FeatureUnavailable: it is not installed.
    """
    try:
        import redis.asyncio
    except ImportError as error:
        raise FeatureUnavailable(
            f"--state: found no Redis client ({error}); "
            "allowed: redis 5.2.1 or later; fix: pip install 'mimo-plugin[router]' redis"
        ) from error
    return redis


def client(where: StateUrl, timeout_s: float) -> Any:
    """A client that tries nothing twice.

    Raises:
        ConfigError: redis-py does not take an option of the URL.
    """
    redis = library()
    try:
        made = redis.asyncio.Redis.from_url(
            where.url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0),
            decode_responses=False,
        )
        made.connection_pool.make_connection()  # it looks at the options only now
        return made
    except (TypeError, ValueError) as error:
        raise setting_error(
            "--state", where.shown, "options that redis-py takes", f"drop it: {error}"
        ) from error


def failure(error: BaseException) -> str:
    """One line about what went wrong; time-outs say nothing themselves."""
    return one_line(error) or type(error).__name__


def require_version(found: str, where: StateUrl) -> None:
    """Refuse a server without what is used.

    Raises:
        StateUnavailable: it is too old.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers < _MIN_VERSION:
        raise StateUnavailable(
            f"--state: found {where.shown} with version {found}; allowed: Redis 6.2 or later; "
            "fix: update it"
        )
