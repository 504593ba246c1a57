# SPDX-License-Identifier: Apache-2.0
"""Functions that the tests run in workers of the pool."""

import ctypes
import os
import signal
import sys
import time

import numpy as np

from mimo_plugin.media.limits import MediaError


def describe(data, allocate):
    """Who runs this and what it has imported."""
    return {
        "pid": os.getpid(),
        "bytes": len(data),
        "niceness": os.nice(0),
        "modules": sorted(sys.modules),
        "fds": sorted(os.listdir("/proc/self/fd")),
    }


def filled(data, allocate, *, shapes, first=0):
    """One array per shape, filled with consecutive numbers."""
    for number, shape in enumerate(shapes, first):
        allocate(shape)[...] = number % 256
    return [sum(data), len(data)]


def twice(data, allocate):
    """The bytes, doubled."""
    out = allocate((2 * len(data),))
    out[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    out[len(data) :] = out[: len(data)]


def sleep(data, allocate, *, seconds, shape=None):
    if shape is not None:
        allocate(shape)[...] = 1
    time.sleep(seconds)
    return os.getpid()


def spin_without_release(data, allocate):
    """Hang inside C code that keeps the interpreter lock: only a kill helps."""
    ctypes.PyDLL(None).sleep(600)


def crash(data, allocate, *, shape=None):
    if shape is not None:
        allocate(shape)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(data, allocate):
    os._exit(3)


def refuse(data, allocate):
    raise MediaError("image: found\nnothing; allowed: something")


def fail(data, allocate):
    raise KeyError("a bug of the job")


def eat_memory(data, allocate, *, length):
    return int(np.ones(length, dtype=np.uint8)[-1])


def talk_nonsense(data, allocate):
    """What a decoder that was taken over might do: write to the pool's socket."""
    fd = next(int(n) for n in os.listdir("/proc/self/fd") if _is_socket(int(n)))
    os.write(fd, b"\x00\x00\x00\x04nope")
    time.sleep(60)


def _is_socket(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False
