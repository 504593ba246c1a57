# SPDX-License-Identifier: Apache-2.0
"""Pictures on a loopback web server, and decoders that crash or hang on one of them."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

CRASH, HANG = b"crash the decoder", b"hang the decoder"
"""Bytes in a picture on which the decoders of :func:`bad_decoder` fail."""

_SITE_CUSTOMIZE = f"""
import sys
if any("mimo_plugin.media.worker" in word for word in sys.orig_argv):
    import os, signal, time
    from PIL import Image
    stock = Image.open
    def open(source, *args, **kwargs):
        data = source.getvalue()
        if {CRASH!r} in data:
            os.kill(os.getpid(), signal.SIGSEGV)
        if {HANG!r} in data:
            time.sleep(600)
        return stock(source, *args, **kwargs)
    Image.open = open
"""


def bad_decoder(folder: Path) -> Path:
    """A folder for ``PYTHONPATH`` that gives decoding processes a fault; others are left alone."""
    (folder / "sitecustomize.py").write_text(_SITE_CUSTOMIZE)
    return folder


@contextlib.contextmanager
def site(pictures: Mapping[str, bytes], slow_s: float) -> Iterator[str]:
    """Serve pictures by name; the root of their URLs.

    ``/moved/NAME`` redirects, ``/slow`` sends nothing for ``slow_s`` seconds, ``/big`` 64 MiB.
    """

    gone = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, *folder, name = self.path.split("/")
            if folder == ["moved"]:
                self.send_response(302)
                self.send_header("Location", f"/{name}")
                self.end_headers()
            elif name == "slow":
                gone.wait(slow_s)
            elif name == "big":
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):
                    for _ in range(64):
                        self.wfile.write(bytes(1 << 20))
            elif name in pictures:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(pictures[name])
            else:
                self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        gone.set()
        server.shutdown()
