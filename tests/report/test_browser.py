"""The page and the pictures in a real browser, where Chromium is installed: they are drawn, in both colour schemes."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from report_records import hostile_trace, rich_trace

from pytest_cudaforge.records import Usage
from pytest_cudaforge.report import html, pictures, svg
from pytest_cudaforge.report.rows import totals

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed (Debian: apt-get install chromium)")
WIDTH, HEIGHT = 500, 500


def shot(folder: Path, name: str, text: str, *, dark: bool = False) -> list[bytes]:
    """The rows of pixels (RGB) that a browser shows of ``text``."""
    (folder / name).write_text(text, encoding="utf-8")
    image = folder / f"{name}.png"
    argv = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        "--disable-background-networking", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={image}",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []), f"file://{folder / name}",
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    if not image.exists():
        pytest.skip(f"Chromium makes no picture here: {done.stderr.strip()[-300:]}")
    return pixels(image.read_bytes())


def pixels(png: bytes) -> list[bytes]:
    """The rows of an 8-bit RGB or RGBA picture."""
    at, data = 8, b""
    width = channels = 0
    while at < len(png):
        (size,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        chunk = png[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, _, depth, colour = struct.unpack(">IIBB", chunk[:10])
            assert depth == 8 and colour in (2, 6)
            channels = 3 if colour == 2 else 4
        data += chunk if kind == b"IDAT" else b""
        at += size + 12
    raw, stride, rows = zlib.decompress(data), width * channels, [bytes(width * channels)]
    for start in range(0, len(raw), stride + 1):
        rows.append(unfiltered(raw[start], raw[start + 1 : start + 1 + stride], rows[-1], channels))
    return [bytes(b for i, b in enumerate(row) if i % channels < 3) for row in rows[1:]]


def unfiltered(kind: int, line: bytes, above: bytes, step: int) -> bytes:
    out = bytearray(line)
    for i in range(len(out)):
        left, up, corner = (out[i - step] if i >= step else 0), above[i], (above[i - step] if i >= step else 0)
        if kind == 4:
            guess = left + up - corner
            near = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
        else:
            near = (0, left, up, (left + up) // 2)[kind]
        out[i] = (out[i] + near) & 255
    return bytes(out)


def colours(rows: list[bytes]) -> set[tuple[int, ...]]:
    return {tuple(row[i : i + 3]) for row in rows for i in range(0, len(row), 3)}


def of(scheme: str, name: str) -> tuple[int, ...]:
    """A colour of the palette: ``scheme``: light or dark."""
    light, dark = svg.COLOURS.split("@media")
    value = (dark if scheme == "dark" else light).partition(f"--{name}: #")[2][:6]
    return tuple(bytes.fromhex(value))


def test_the_page_is_drawn_in_the_dark(tmp_path: Path) -> None:
    traces = [hostile_trace(), rich_trace()]
    rows = shot(tmp_path, "page.html", html.document(traces, totals(traces, Usage(), 1.0)), dark=True)
    assert {of("dark", name) for name in ("ground", "ink", "good", "rule")} <= colours(rows)
    assert tuple(rows[0][:3]) == of("dark", "ground"), "the page's own ground, to its edge"


def test_a_picture_is_drawn_on_its_own(tmp_path: Path) -> None:
    picture = pictures.summary(rich_trace())
    assert picture is not None
    rows = shot(tmp_path, "report.svg", picture.standalone())
    assert {of("light", name) for name in ("ground", "one", "bad", "ink")} <= colours(rows)
