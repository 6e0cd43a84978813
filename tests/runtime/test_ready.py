"""Kernels ready to load: what their key covers, and processes that write and read one entry at once."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forged_layers import with_rms

from pytest_cudaforge import hardware
from pytest_cudaforge.languages.binary import Binary
from pytest_cudaforge.languages.stamps import files_stamp, toolchain_stamp
from pytest_cudaforge.plan import LaunchPlan, TracedPlan
from pytest_cudaforge.runtime.kernels import cache_directory
from pytest_cudaforge.runtime.manifest import Entry, EntryFile, Manifest
from pytest_cudaforge.runtime.ready import ReadyCache, ready_key
from pytest_cudaforge.runtime.signature import Signature

KEY = "0" * 64


def _signature(rows: int = 4) -> Signature:
    return Signature.of((torch.randn(rows, 64),), {}, None, hardware.detect("cpu"), "cpp")


def _entry(root: Path) -> Entry:
    (entry,) = Manifest.load(with_rms(root).manifest).entries
    return entry


def test_a_key_covers_files_signature_function_and_arch(tmp_path: Path) -> None:
    entry = _entry(tmp_path)
    other = replace(entry, files=(EntryFile("plan.py", "0" * 64), *entry.files[1:]))
    keys = [
        ready_key(entry, _signature(), "plan"),
        ready_key(entry, _signature(5), "plan"),
        ready_key(entry, _signature(), "plan_backward"),
        ready_key(other, _signature(), "plan"),
        ready_key(replace(entry, arch="sm_90"), _signature(), "plan"),
    ]
    assert None not in keys and len(set(keys)) == len(keys)
    assert ready_key(entry, _signature(), "plan") == keys[0]


def test_a_language_whose_toolchain_cannot_be_told_has_no_key(tmp_path: Path) -> None:
    assert toolchain_stamp("my_package:MyLanguage") is None
    assert ready_key(replace(_entry(tmp_path), language="my_package:MyLanguage"), _signature(), "plan") is None


def test_a_replaced_file_changes_its_stamp(tmp_path: Path) -> None:
    file = tmp_path / "compiler"
    absent = files_stamp([file])
    file.write_text("one")
    first = files_stamp([file])
    file.write_text("other")
    assert len({absent, first, files_stamp([file])}) == 3


def test_processes_that_write_one_entry_at_once_leave_it_whole(tmp_path: Path) -> None:
    traced = TracedPlan(LaunchPlan((), (), None))
    binaries = [Binary("cpp", "cpu", (), bytes([n]) * (n * 4000 + 1), (), "") for n in range(4)]
    children = []
    for binary in binaries[:2]:
        child = os.fork()
        if child == 0:
            for _ in range(100):
                ReadyCache(tmp_path).put(KEY, traced, [binary])
            os._exit(0)
        children.append(child)
    seen = []
    while children:
        found = ReadyCache(tmp_path).get(KEY)
        seen += [found[1]] if found else []
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
    seen.append((ReadyCache(tmp_path).get(KEY) or (None, ()))[1])
    assert all(one in ((binaries[0],), (binaries[1],)) for one in seen)
    assert not list(tmp_path.rglob(".new-*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_cache_of_roots_is_read_by_others_and_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Path("/tmp") / f"forge-cache-{os.getpid()}"  # below a folder that everybody may enter
    cache.mkdir(mode=0o755)
    monkeypatch.setenv("CUDAFORGE_CACHE_DIR", str(cache))
    try:
        assert _as_nobody() == (True, False)
        os.chown(cache, 12345, 12345)
        assert _as_nobody() == (False, False)
    finally:
        cache.rmdir()


def _as_nobody() -> tuple[bool, bool]:
    """Whether another user takes the directory, and would write it."""
    child = os.fork()
    if child == 0:
        os.setegid(65534)
        os.seteuid(65534)
        directory = cache_directory()
        os._exit(
            (directory is not None) + 2 * (directory is not None and os.access(directory, os.W_OK, effective_ids=True))
        )
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return bool(status & 1), bool(status & 2)
