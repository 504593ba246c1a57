# SPDX-License-Identifier: Apache-2.0
"""Errors as clients of the OpenAI API expect them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from mimo_plugin.errors import one_line

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    501: "NotImplementedError",
    502: "WorkerError",
    503: "ServiceUnavailableError",
    504: "WorkerTimeoutError",
}
_MOST_CHARS = 500


class Problem(Exception):
    """A request that is answered by the router itself.

    Attributes:
        status: of HTTP.
        outcome: how it is counted (:data:`mimo_plugin.router.metrics.OUTCOMES`).
        headers: of the answer.
        close: the connection ends with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        outcome: str = "refused",
        *,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.outcome = status, message, outcome
        self.headers, self.close = headers or {}, close

    def response(self) -> web.Response:
        """The answer."""
        response = web.Response(
            body=body(self.status, self.message),
            status=self.status,
            content_type="application/json",
            headers=self.headers,
        )
        if self.close:
            response.force_close()
        return response


def body(status: int, message: str) -> bytes:
    """The error as JSON."""
    text = one_line(message)[:_MOST_CHARS]
    name = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    error = {"message": text, "type": name, "param": None, "code": status}
    return msgspec.json.encode({"error": error})


def event(status: int, message: str) -> bytes:
    """The error as an event of a stream."""
    return b"data: " + body(status, message) + b"\n\n"
