# SPDX-License-Identifier: Apache-2.0
"""The process in which Mooncake's client library runs, beside an engine's.

It is started by ``tiers/mooncake_client.py``. Its arguments are whether what the library says
after the start is wanted, and the numbers of open files: the memory that pages go through, a
connection for control, and one for each lane. It ends when its control connection does.
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

READY = "ready"
LIBRARY = "library"
FAILED = "failed"
_WRONG_SIZE = -600
_LOOK_S = 1.0


def main(arguments: list[str]) -> None:
    """Serve until the engine's process is gone.

    Args:
        arguments: see the module.
    """
    engine = os.getppid()
    loud, memory_file, control_file, *lane_files = map(int, arguments)
    control: Connection[Any, Any] = Connection(control_file)
    wanted = control.recv()
    memory = mmap.mmap(memory_file, 0)
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
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code = store.register_buffer(start, len(memory))
    if code:
        control.send((FAILED, f"register_buffer of {len(memory)} bytes ended with {code}"))
        return
    for file in lane_files:
        lane: Connection[Any, Any] = Connection(file)
        threading.Thread(target=_serve, args=(store, lane, start), daemon=True).start()
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


def _serve(store: Any, lane: Connection[Any, Any], start: int) -> None:
    """Answer the questions of a lane: (what, keys, offsets in memory, sizes in bytes)."""
    while True:
        try:
            question = lane.recv()
        except (EOFError, OSError):
            return
        try:
            answer: object = _answer(store, start, *question)
        except Exception as error:
            answer = repr(error)
        try:
            lane.send(answer)
        except OSError:
            return


def _answer(
    store: Any, start: int, what: str, keys: list[str], offsets: list[int], sizes: list[int]
) -> list[int]:
    """Mooncake's own codes, one for each key."""
    if what == "exist":
        return list(store.batch_is_exist(keys))
    if what == "remove":
        return [store.remove(key, True) for key in keys]
    places = [start + offset for offset in offsets]
    if what == "put":
        return list(store.batch_put_from(keys, places, sizes))
    codes = list(store.batch_get_into(keys, places, sizes))
    for index, code in enumerate(codes):
        # It is said of a value that is longer than its place, and of other things.
        if code == _WRONG_SIZE:
            size = store.get_size(keys[index])
            codes[index] = size if size > sizes[index] else code
    return codes


if __name__ == "__main__":
    main(sys.argv[1:])
