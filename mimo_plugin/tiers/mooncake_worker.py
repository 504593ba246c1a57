# SPDX-License-Identifier: Apache-2.0
"""The process in which Mooncake's client library runs, beside an engine's.

It is started by ``tiers/mooncake_client.py``. Its arguments are whether what the library says
after the start is wanted, and the number of an open connection. There it is told what to set the
library up with, the files of memory that it shares, and those of a connection for each lane. It
ends when that connection does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

Piece = tuple[int, int, int]
"""Index of a file of memory, offset there and size, bytes."""
READY = "ready"
LIBRARY = "library"
FAILED = "failed"
_WRONG_SIZE = (-600, -800)
_LOOK_S = 1.0


def main(arguments: list[str]) -> None:
    """Serve until the engine's process is gone.

    Args:
        arguments: see the module.
    """
    engine = os.getppid()
    loud, file = map(int, arguments)
    control: Connection[Any, Any] = Connection(file)
    wanted, memory_files, lane_files = control.recv()
    try:
        from mooncake.store import MooncakeDistributedStore
    except (ImportError, OSError) as error:
        control.send((LIBRARY, str(error)))
        return
    if not wanted:
        control.send((READY, ""))
        return
    store = MooncakeDistributedStore()
    code = store.setup(*wanted)
    if code:
        control.send((FAILED, f"setup ended with {code}"))
        return
    memories = [mmap.mmap(file, 0) for file in memory_files]
    starts = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
    for start, memory in zip(starts, memories, strict=True):
        code = store.register_buffer(start, len(memory))
        if code:
            control.send((FAILED, f"register_buffer of {len(memory)} bytes ended with {code}"))
            return
    for file in lane_files:
        lane: Connection[Any, Any] = Connection(file)
        threading.Thread(target=_serve, args=(store, lane, starts), daemon=True).start()
    threading.Thread(target=_watch, args=(engine,), daemon=True).start()
    control.send((READY, ""))
    if not loud:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    try:
        control.recv()
    except (EOFError, OSError):
        pass
    finally:
        # Closing the client would wait for its master.
        os._exit(0)


def _watch(engine: int) -> None:
    """End with the engine's process, even where one that it forked keeps the connections."""
    while os.getppid() == engine:
        time.sleep(_LOOK_S)
    os._exit(0)


def _serve(store: Any, lane: Connection[Any, Any], starts: list[int]) -> None:
    """Answer the questions of a lane: what, keys, and the pieces of each value."""
    while True:
        try:
            question = lane.recv()
        except (EOFError, OSError):
            return
        try:
            answer: object = _answer(store, starts, *question)
        except Exception as error:
            answer = repr(error)
        try:
            lane.send(answer)
        except OSError:
            return


def _answer(
    store: Any, starts: list[int], what: str, keys: list[str], values: list[list[Piece]]
) -> list[int]:
    """Mooncake's own codes, one for each key."""
    if what == "exist":
        return list(store.batch_is_exist(keys))
    if what == "remove":
        return [store.remove(key, True) for key in keys]
    places = [[starts[file] + offset for file, offset, _ in value] for value in values]
    sizes = [[size for _, _, size in value] for value in values]
    if all(len(value) == 1 for value in values):
        whole = [place for [place] in places], [size for [size] in sizes]
        call = store.batch_put_from if what == "put" else store.batch_get_into
        codes = list(call(keys, *whole))
    elif what == "put":
        codes = list(store.batch_put_from_multi_buffers(keys, places, sizes))
    else:
        codes = list(store.batch_get_into_multi_buffers(keys, places, sizes))
    if what == "get":
        for index, code in enumerate(codes):
            # It is said of a value of another size than its place, and of other things.
            if code in _WRONG_SIZE:
                size = store.get_size(keys[index])
                codes[index] = size if size >= 0 and size != sum(sizes[index]) else code
    return codes


if __name__ == "__main__":
    main(sys.argv[1:])
