# SPDX-License-Identifier: Apache-2.0
"""Find a Chromium for the tests of web pages, or get one where that takes no decision of anybody.

    python -m tools.browser             # print where it is; as root on Debian, install it first

Standard library only. A browser is looked for in the variable ``MIMO_CHROMIUM`` (a path, or
``off``) and on ``PATH``. Where there is none, root on a Debian gets its package
``chromium-headless-shell`` (64 MB and its libraries, about 20 s).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "MIMO_CHROMIUM"
PACKAGE = "chromium-headless-shell"
NAMES = (
    PACKAGE,
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
    "chrome",
)
INSTALL_LIMIT_S = 600.0
_APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=2")


class BrowserError(Exception):
    """There is no browser; the message is one finished line for the user."""


def find() -> str | None:
    """Path of a Chromium that is there, or None.

    Raises BrowserError when the variable names none.
    """
    named = os.environ.get(VARIABLE, "")
    if named == "off":
        return None
    if named:
        path = shutil.which(named)
        if path is None:
            raise BrowserError(
                f"{VARIABLE}: found {named!r}; allowed: the path of a Chromium, or off "
                f"(fix: unset {VARIABLE} to have one looked for)"
            )
        return path
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


def ensure() -> str:
    """Path of a Chromium, which is installed first where root can do so.

    Raises BrowserError saying why there is none, and how to get one.
    """
    path = find()
    if path is not None:
        return path
    if os.environ.get(VARIABLE) == "off":
        raise BrowserError(f"no browser: {VARIABLE} is off")
    fix = f"install {PACKAGE} or chromium, or set {VARIABLE} to the path of one"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BrowserError(f"no browser on PATH (fix: {fix})")
    with (Path(tempfile.gettempdir()) / "mimo-browser.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes run side by side
        path = find()
        if path is not None:
            return path
        print(f"[browser] installing {PACKAGE}", file=sys.stderr, flush=True)
        problem = _install()
        path = find()
    if path is None:
        raise BrowserError(f"no browser: {problem} (fix: {fix})")
    return path


def _install() -> str:
    """Have apt-get install it; the last line that it said."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    for command in (
        (*_APT, "update"),
        (*_APT, "install", "-y", "--no-install-recommends", PACKAGE),
    ):
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=INSTALL_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{' '.join(command)} took longer than {INSTALL_LIMIT_S:.0f} s"
        lines = done.stdout.strip().splitlines() or [""]
        said = f"{command[0]} ended with status {done.returncode}: {lines[-1]}"
    return said


def main() -> int:
    """Print the path; 1 when there is none."""
    try:
        print(ensure())
    except BrowserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
