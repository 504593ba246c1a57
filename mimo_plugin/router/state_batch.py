# SPDX-License-Identifier: Apache-2.0
"""One batch of changes, written as one command: stream, requests in flight, sessions, workers.

As one script it is atomic, so that what is in flight is always complete up to its number; and it
costs the client less than half of a transaction's commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# KEYS: stream, requests in flight, sessions, workers. ARGV: longest stream, process, batch, then
# four lists behind their lengths: fields and values in flight, fields that are over, times and
# members of sessions, URLs and changes of workers.
_SCRIPT = """
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'by', ARGV[2], 'is', ARGV[3])
local at = 4
local function each(step, call)
  local last = at + ARGV[at]
  at = at + 1
  while at <= last do
    call(ARGV[at], ARGV[at + 1])
    at = at + step
  end
end
each(2, function(field, value) redis.call('HSET', KEYS[2], field, value) end)
each(1, function(field) redis.call('HDEL', KEYS[2], field) end)
each(2, function(time, member) redis.call('ZADD', KEYS[3], 'GT', time, member) end)
each(2, function(url, change) redis.call('HSET', KEYS[4], url, change) end)
"""


class BatchWriter:
    """See the module.

    Args:
        client: of the server.
        prefix: of all keys.
        process: this one.
        max_batches: kept in the stream.
    """

    def __init__(self, client: Any, prefix: str, process: str, max_batches: int) -> None:
        self._script = client.register_script(_SCRIPT)
        self._keys = [
            prefix + name for name in ("stream", "open:" + process, "sessions", "workers")
        ]
        self._fixed = (max_batches, process)

    async def write(
        self,
        batch: bytes,
        flying: Mapping[bytes, bytes],
        over: Sequence[bytes],
        sessions: Mapping[str, int],
        workers: Mapping[str, bytes],
    ) -> None:
        """Write one.

        Args:
            batch: for the stream.
            flying: fields of this process's requests in flight that are new or changed.
            over: fields that are not in flight any more.
            sessions: when, by session and target.
            workers: changes by URL.

        Raises:
            RedisError, OSError, TimeoutError: the server fails.
        """
        arguments: list[Any] = [*self._fixed, batch, 2 * len(flying)]
        for field, value in flying.items():
            arguments += field, value
        arguments += len(over), *over, 2 * len(sessions)
        for member, at_us in sessions.items():
            arguments += at_us, member
        arguments.append(2 * len(workers))
        for url, change in workers.items():
            arguments += url, change
        await self._script(keys=self._keys, args=arguments)
