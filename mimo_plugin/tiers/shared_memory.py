# SPDX-License-Identifier: Apache-2.0
"""Has the machine, or the container, room for host memory of KV?  Nothing is allocated.

vLLM puts host memory into a file in ``/dev/shm``, so that all ranks and the scheduler can map it.
Containers have little of that unless they are given more (Docker: 64 MiB).
"""

from __future__ import annotations

import shutil
from pathlib import Path

SHM = Path("/dev/shm")
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where the kernel says how much memory a container may have; of cgroups v2 and v1."""

_GIB = 1 << 30


def why_no_room(needed_bytes: int, *, shm: Path = SHM) -> str | None:
    """Reason, with its fix, why shared memory can't hold so much; None if it can.

    Args:
        needed_bytes: of host memory, all engines of this machine together.
        shm: where shared memory is mounted.
    """
    try:
        usage = shutil.disk_usage(shm)
    except OSError as error:
        return f"{shm} can't be used ({error.strerror}); mount a tmpfs there"
    if needed_bytes <= usage.free:
        return None
    return (
        f"host memory of {needed_bytes / _GIB:.2f} GiB does not fit into {shm}, which has "
        f"{usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free; lower host_gib, or give "
        "the container more (Docker: --shm-size or --ipc=host; Kubernetes: an emptyDir with "
        "medium: Memory there)"
    )


def memory_limit_bytes(files: tuple[Path, ...] = CGROUP_LIMITS) -> int | None:
    """The memory that this container may use, shared memory included; None: no limit is known."""
    for file in files:
        try:
            text = file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdigit():
            return int(text)
        return None  # "max"
    return None
