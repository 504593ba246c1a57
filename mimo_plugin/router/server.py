# SPDX-License-Identifier: Apache-2.0
"""The HTTP server's connections: how many, and how long they may take to say what they want.

aiohttp limits the size of lines and headers; a client that sends a header byte by byte, or none at
all, it waits for. Here a connection that has sent no whole request header within a time is closed.
Once a header is there, reading the body has a limit of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from mimo_plugin.router.problems import Problem

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Connection(web.RequestHandler):
    """One connection.

    Args:
        server: whose it is.
        header_timeout_s: for a whole header, from the first byte on (for the first one: from the
            connection on).
    """

    def __init__(self, server: Server, *, header_timeout_s: float, **options: Any) -> None:
        super().__init__(server, loop=server.loop, **options)
        self._server, self._header_timeout_s = server, header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._serving = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It begins, unless there are too many."""
        super().connection_made(transport)
        if len(self._server.connections) > self._server.max_connections:
            self._server.refused += 1
            self.force_close()
            return
        self._watch()

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is gone."""
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes came: of a header, unless a request is being served."""
        if not self._serving:
            self._watch()
        super().data_received(data)

    def serve(self) -> None:
        """A header is whole, and its request is being answered."""
        self._serving += 1
        self._unwatch()

    def served(self) -> None:
        """It was answered."""
        self._serving -= 1

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what can't be understood, in the form of all other errors."""
        if request.writer is not None and request.writer.output_size > 0:
            raise ConnectionError("part of the answer was sent already")
        if status >= 500 and exc is not None:
            self.log_exception("error handling request", exc_info=exc)
            message = "the router failed; its log says why"
        return Problem(status, message or "bad request", close=True).response()

    def _watch(self) -> None:
        if self._deadline is None:
            self._deadline = self._server.loop.call_later(self._header_timeout_s, self._late)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        self._server.late += 1
        self.force_close()


class Server(web.Server):
    """Makes connections.

    Attributes:
        refused: connections beyond ``max_connections``.
        late: closed for a header that did not come.
    """

    def __init__(self, handler: Handler, *, max_connections: int, **options: Any) -> None:
        super().__init__(self._serve, handler_cancellation=True)
        self.loop = asyncio.get_running_loop()
        self.max_connections = max_connections
        self.refused = self.late = 0
        self._answer, self._options = handler, options

    def __call__(self) -> Connection:
        """A new connection."""
        return Connection(self, access_log=None, **self._options)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        if isinstance(connection, Connection):
            connection.serve()
            try:
                return await self._answer(request)
            finally:
                connection.served()
        return await self._answer(request)
