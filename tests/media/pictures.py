# SPDX-License-Identifier: Apache-2.0
"""Encoded pictures of many kinds, sound and hostile, made by Pillow."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def noise(height, width, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def oriented(orientation, kind="JPEG"):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.fromarray(noise(24, 40)), kind, exif=exif)


def with_image_id(text="0123456789abcdef0123456789abcdef"):
    exif = Image.Exif()
    exif[0x800D] = text
    return encoded(Image.fromarray(noise(16, 16)), "JPEG", exif=exif)


def palette(transparency=None):
    image = Image.fromarray(noise(20, 30)).quantize(16)
    options = {} if transparency is None else {"transparency": transparency}
    return encoded(image, "PNG", **options)


def animated(kind):
    first = Image.fromarray(noise(18, 22))
    rest = [Image.fromarray(noise(18, 22, seed=n)) for n in (1, 2)]
    options = {"lossless": True} if kind == "WEBP" else {}
    return encoded(first, kind, save_all=True, append_images=rest, duration=50, **options)


def broken_exif():
    data = bytearray(oriented(6))
    at = data.index(b"Exif\x00\x00") + 6
    data[at : at + 8] = b"\xff" * 8
    return bytes(data)


SOUND = {
    "jpeg": encoded(Image.fromarray(noise(33, 47)), "JPEG", quality=80),
    "jpeg-progressive": encoded(Image.fromarray(noise(33, 47)), "JPEG", progressive=True),
    "jpeg-grey": encoded(Image.fromarray(noise(33, 47, 1)), "JPEG"),
    "jpeg-cmyk": encoded(Image.fromarray(noise(24, 16, 4), "CMYK"), "JPEG"),
    "jpeg-1x1": encoded(Image.fromarray(noise(1, 1)), "JPEG"),
    "png-rgb": encoded(Image.fromarray(noise(10, 7)), "PNG"),
    "png-rgb-one-colour-clear": encoded(
        Image.fromarray(noise(10, 7)), "PNG", transparency=(1, 2, 3)
    ),
    "png-rgba": encoded(Image.fromarray(noise(10, 7, 4)), "PNG"),
    "png-grey-alpha": encoded(Image.fromarray(noise(10, 7, 2), "LA"), "PNG"),
    "png-grey": encoded(Image.fromarray(noise(10, 7, 1)), "PNG"),
    "png-grey-one-clear": encoded(Image.fromarray(noise(10, 7, 1)), "PNG", transparency=9),
    "png-16bit": encoded(Image.fromarray(noise(10, 7, 1).astype(np.uint16) * 257), "PNG"),
    "png-bilevel": encoded(Image.fromarray(noise(11, 13, 1)).convert("1"), "PNG"),
    "png-palette": palette(),
    "png-palette-one-clear": palette(3),
    "png-palette-alphas": palette(bytes(range(0, 256, 16))),
    "gif": encoded(Image.fromarray(noise(18, 22)).quantize(32), "GIF"),
    "gif-animated": animated("GIF"),
    "webp": encoded(Image.fromarray(noise(18, 22)), "WEBP"),
    "webp-alpha": encoded(Image.fromarray(noise(18, 22, 4)), "WEBP", lossless=True),
    "webp-animated": animated("WEBP"),
    "mpo": animated("MPO"),
    "tiff": encoded(Image.fromarray(noise(18, 22)), "TIFF"),
    "tiff-float": encoded(Image.fromarray(noise(9, 8, 1).astype(np.float32)), "TIFF"),
    "bmp": encoded(Image.fromarray(noise(18, 22)), "BMP"),
    "avif": encoded(Image.fromarray(noise(32, 32)), "AVIF"),
    **{f"exif-{n}": oriented(n) for n in range(1, 9)},
    "exif-6-png": oriented(6, "PNG"),
    "exif-broken": broken_exif(),
    "exif-image-id": with_image_id(),
}


def png_that_claims(width, height, rows=b""):
    """A PNG whose header promises a size that its data do not hold."""

    def chunk(name, body):
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


_JPEG = encoded(Image.fromarray(noise(256, 256)), "JPEG")

HOSTILE = {
    "empty": (b"", "0 bytes"),
    "truncated-jpeg": (_JPEG[: len(_JPEG) // 2], "damaged"),
    "header-only-jpeg": (_JPEG[:200], "damaged|start with"),
    "truncated-png": (SOUND["png-rgb"][:60], "damaged"),
    "truncated-webp": (SOUND["webp"][:100], "damaged|start with"),
    "not-a-picture": (b"%PDF-1.7\n" + bytes(500), "start with 255044462d312e37"),
    "text": ("это не картинка".encode() * 20, "start with"),
    "html": (b"<html><body>404</body></html>", "start with"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "start with"),
    "1xN": (encoded(Image.fromarray(noise(1, 900)), "PNG"), r"900x1, .* = 900; .*200"),
    "Nx1": (encoded(Image.fromarray(noise(900, 1)), "PNG"), "1x900"),
    "100-gigapixel-header": (png_that_claims(400_000, 250_000), "400000x250000 = 100000000000"),
    "claims-more-than-it-holds": (png_that_claims(2000, 2000), "damaged"),
    "zero-width": (png_that_claims(0, 10), "damaged|0x10|start with"),
}
