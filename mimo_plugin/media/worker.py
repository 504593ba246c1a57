# SPDX-License-Identifier: Apache-2.0
"""The process that decodes: takes jobs from a socket, writes pixels into shared memory.

It is started with ``python -c`` and a socket, never forked and never by ``multiprocessing``: so it
holds nothing of the server's state and does not import the server's main module (and torch with
it). What it says to the pool is JSON: decoders that were taken over by hostile input can't make
the server unpickle anything.

One job: the pool sends a pickle of (function, keyword arguments, data or None), and for long data
a segment; the worker asks for a segment per array; then it sends the result or the error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import mmap
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from mimo_plugin.errors import one_line
from mimo_plugin.media import segments
from mimo_plugin.media.limits import MediaError

GRANTED, REFUSED = b"g", b"r"

ORPHAN_GRACE_S = 5.0
"""A worker ends itself when a job runs this much longer than allowed: its pool is gone."""

ERROR_MAX_CHARS = 2_000


class Refused(Exception):
    """The pool gives no memory for this array; it knows why."""


def main(options_json: str) -> None:
    """Serve jobs until the other end of the socket closes.

    Args:
        options_json: ``fd`` of the socket, ``path`` (the server's ``sys.path``), ``preload``
            (modules to import before saying ready), ``memory_bytes`` (private memory that
            this process may take, or null) and ``niceness``.
    """
    options = json.loads(options_json)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes us
    sys.path[:] = options["path"]
    os.nice(options["niceness"])
    for name in options["preload"]:
        importlib.import_module(name)
    if options["memory_bytes"] is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (options["memory_bytes"], hard))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("500")  # when memory runs out, a decoder shall end, not the server
    channel = socket.socket(fileno=options["fd"])
    connection = Connection(os.dup(options["fd"]))
    with open(os.devnull, "w") as nowhere, contextlib.suppress(EOFError, OSError):
        _send(connection, ready=os.getpid())
        while True:
            spec = connection.recv_bytes()
            _serve(channel, connection, spec, nowhere)


def _serve(channel: socket.socket, connection: Connection, spec: bytes, nowhere: Any) -> None:
    job = pickle.loads(spec)
    faulthandler.dump_traceback_later(job["timeout_s"] + ORPHAN_GRACE_S, exit=True, file=nowhere)
    mapped: mmap.mmap | None = None
    try:
        data = job["data"]
        if data is None:
            mapped = _receive(channel)
            data = memoryview(mapped)[: job["data_bytes"]]

        def allocate(shape: Sequence[int]) -> np.ndarray:
            sides = [int(side) for side in shape]
            _send(connection, need=sides)
            return segments.view(_receive(channel, mmap.MAP_POPULATE), sides)

        module, name = job["function"]
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        result = function(data, allocate, **job["options"])  # type: ignore[operator]
        text = json.dumps({"done": result})
    except MediaError as error:
        text = json.dumps({"error": "media", "text": one_line(error)[:ERROR_MAX_CHARS]})
    except Refused:
        text = json.dumps({"error": "refused", "text": ""})
    except Exception as error:
        text = json.dumps({"error": "job", "text": _told(error)})
    finally:
        faulthandler.cancel_dump_traceback_later()
    connection.send_bytes(text.encode())


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"[:ERROR_MAX_CHARS]


def _send(connection: Connection, **message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _receive(channel: socket.socket, populate: int = 0) -> mmap.mmap:
    answer, fds, _, _ = socket.recv_fds(channel, 1, 1)
    if answer != GRANTED or not fds:
        raise Refused
    try:
        return mmap.mmap(fds[0], 0, flags=mmap.MAP_SHARED | populate)
    finally:
        os.close(fds[0])
