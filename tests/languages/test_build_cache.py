"""The build cache: content-addressed, remembers failures, survives damage and company."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.languages import Binary, KernelInfo, Unit, binary_from_bytes, binary_to_bytes
from pytest_cudaforge.languages.cache import BuildCache, build_key
from pytest_cudaforge.records import KernelResources

UNIT = Unit((("COLS", 4),), ("f",))
KEY = build_key("source", UNIT, "fingerprint", "cpu")
BINARY = Binary(
    "cpp",
    "cpu",
    (("COLS", 4), ("EPS", 0.5)),
    b"\x7fELF\x00code",
    (KernelInfo("f", "f0", ("int",), KernelResources("f")),),
)


def test_a_binary_comes_back(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "cache")
    assert cache.get(KEY) is None
    cache.put(KEY, BINARY)
    assert BuildCache(tmp_path / "cache").get(KEY) == BINARY
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [KEY[2:]]


def test_a_failure_comes_back_as_it_was(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path)
    cache.put(KEY, BuildFailure("what", log="the log", expected="better", remedy="mend it"))
    found = cache.get(KEY)
    assert isinstance(found, BuildFailure)
    assert (found.what, found.log, found.expected, found.remedy) == ("what", "the log", "better", "mend it")


def test_the_key_depends_on_everything_a_build_depends_on() -> None:
    keys = {
        KEY,
        build_key("Source", UNIT, "fingerprint", "cpu"),
        build_key("source", Unit((("COLS", 5),), ("f",)), "fingerprint", "cpu"),
        build_key("source", Unit((("COLS", 4.0),), ("f",)), "fingerprint", "cpu"),
        build_key("source", Unit((("COLS", 4),), ("g",)), "fingerprint", "cpu"),
        build_key("source", UNIT, "other", "cpu"),
        build_key("source", UNIT, "fingerprint", "sm_90"),
        build_key("source", UNIT, "fingerprint", "cpu", lineinfo=True),
    }
    assert len(keys) == 8


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    changed = {
        "empty": b"",
        "cut": data[:-3],
        "longer": data + b"x",
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
        "foreign": b"hello" * 100,
        "kind": data.replace(b"CFCACHE1B", b"CFCACHE1F", 1),
    }
    path.write_bytes(changed[how])


@pytest.mark.parametrize("how", ["empty", "cut", "longer", "flipped", "foreign", "kind"])
def test_a_damaged_entry_is_a_miss_and_can_be_replaced(tmp_path: Path, how: str) -> None:
    cache = BuildCache(tmp_path)
    cache.put(KEY, BINARY)
    damage(tmp_path / KEY[:2] / KEY[2:], how)
    assert cache.get(KEY) is None
    cache.put(KEY, BINARY)
    assert cache.get(KEY) == BINARY


def test_an_entry_moved_to_another_key_is_a_miss(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path)
    cache.put(KEY, BINARY)
    other = build_key("other", UNIT, "fingerprint", "cpu")
    (tmp_path / other[:2]).mkdir(exist_ok=True)
    (tmp_path / KEY[:2] / KEY[2:]).rename(tmp_path / other[:2] / other[2:])
    assert cache.get(other) is None


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.warns(UserWarning, match="cannot be written"):
        BuildCache(blocked).put(KEY, BINARY)
    assert BuildCache(blocked).get(KEY) is None


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "g" * 64, KEY.upper(), KEY + "0"])
def test_a_key_that_is_none_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="no key"):
        BuildCache(tmp_path).get(key)


def test_processes_that_write_one_entry_at_once_agree(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from pytest_cudaforge.languages import Binary\n"
        "from pytest_cudaforge.languages.cache import BuildCache\n"
        "cache, key = BuildCache(Path(sys.argv[1])), sys.argv[2]\n"
        "binary = Binary('cpp', 'cpu', (), b'x' * 1_000_000, ())\n"
        "for _ in range(30):\n"
        "    cache.put(key, binary)\n"
        "    assert cache.get(key) == binary\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), KEY]) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def header_changed(**changes: object) -> bytes:
    data = binary_to_bytes(BINARY)
    size = int.from_bytes(data[8:12], "little")
    header = json.loads(data[20 : 20 + size])
    header.update(changes)
    text = json.dumps(header).encode()
    return data[:8] + len(text).to_bytes(4, "little") + data[12:20] + text + data[20 + size :]


def test_bytes_of_a_binary_come_back() -> None:
    assert binary_from_bytes(binary_to_bytes(BINARY)) == BINARY
    assert type(binary_from_bytes(binary_to_bytes(BINARY)).constants[1][1]) is float


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"CFBIN",
        b"\0" * 40,
        binary_to_bytes(BINARY)[:-1],
        binary_to_bytes(BINARY) + b"x",
        binary_to_bytes(BINARY)[:12] + (1 << 60).to_bytes(8, "little") + binary_to_bytes(BINARY)[20:],
        header_changed(language=3),
        header_changed(extra=1),
        header_changed(constants=[["A", True]]),
        header_changed(constants=[["A"]]),
        header_changed(constants={"A": 1}),
        header_changed(kernels="f"),
        header_changed(kernels=[{"expression": "f"}]),
        header_changed(kernels=[{"expression": "f", "symbol": "f", "params": [1], "resources": {"kernel": "f"}}]),
        header_changed(kernels=[{"expression": "f" * 9999, "symbol": "f", "params": [], "resources": {"kernel": "f"}}]),
    ],
)
def test_bytes_that_are_no_binary_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        binary_from_bytes(data)


def test_bytes_changed_at_random_are_refused_or_still_a_binary() -> None:
    original, random = binary_to_bytes(BINARY), Random(1)
    for _ in range(2000):
        data = bytearray(original)
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        try:
            assert isinstance(binary_from_bytes(bytes(data)), Binary)
        except ValueError:
            continue
