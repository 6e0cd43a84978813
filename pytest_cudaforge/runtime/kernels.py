"""One manifest entry in production: verified sources in, programs for a signature out.

Tracing and compiling happen once per signature and process; compiled binaries are kept on disk as well, so that a
later process only loads them. A build cache is native code that this process will run: it lives in a directory that
only its owner can write.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_cudaforge import languages
from pytest_cudaforge.errors import BuildFailure, LaunchFailure, ToolchainError
from pytest_cudaforge.languages.binary import Binary, Unit, units_of
from pytest_cudaforge.languages.cache import BuildCache, build_key
from pytest_cudaforge.languages.published import FILE_NAME, PUBLISHED_LANGUAGES, decode_binaries, find_binary
from pytest_cudaforge.plan import TracedPlan
from pytest_cudaforge.runtime.calls import LoadedPlan, written_buffers
from pytest_cudaforge.runtime.gradients import FUNCTION
from pytest_cudaforge.runtime.manifest import Entry
from pytest_cudaforge.runtime.ready import ReadyCache, ready_key
from pytest_cudaforge.runtime.replay import load_program
from pytest_cudaforge.runtime.signature import Signature

__all__ = ["CACHE_VARIABLE", "Kernel", "LoadedKernel", "cache_directory"]

#: Environment variable that moves the cache of compiled kernels.
CACHE_VARIABLE = "CUDAFORGE_CACHE_DIR"


@dataclass(frozen=True)
class LoadedKernel:
    """A traced, compiled and loaded kernel for one signature."""

    main: LoadedPlan
    prepare: LoadedPlan | None


def cache_directory() -> Path | None:
    """Where binaries are kept: $CUDAFORGE_CACHE_DIR, else below $XDG_CACHE_HOME or ~/.cache; None where unusable.

    Made with mode 0700. A directory that belongs to, or can be written by, somebody else is not used; root's is, and
    one that cannot be written (a container's image that was warmed up) is read.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        directory = Path(named)
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        directory = (Path(base) if base else Path.home() / ".cache") / "cudaforge" / "production"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = directory.stat()
    except OSError:
        return None
    owned = facts.st_uid in (os.geteuid(), 0) and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return directory if owned and os.access(directory, os.R_OK | os.X_OK) else None


def _writable(directory: Path) -> bool:
    return os.access(directory, os.W_OK)


class Kernel:
    """The kernel of one entry, whose sources were checked against the manifest's digests by the caller."""

    def __init__(self, entry: Entry, directory: Path, sources: dict[str, str]) -> None:
        self.entry = entry
        self.directory = directory
        self._sources = sources
        self._loaded: dict[tuple[str, str, str], LoadedKernel] = {}
        self._lock = threading.Lock()

    def load(self, signature: Signature, device: str) -> LoadedKernel:
        """Programs for this signature on "cpu" or "cuda:N".

        Raises CandidateError (Unsupported, PlanError, BuildFailure, LaunchFailure), ToolchainError, DeviceError.
        """
        return self._found("plan", signature, device)

    def load_backward(self, signature: Signature, device: str) -> LoadedPlan:
        """As :meth:`load`, of ``plan_backward``: ``signature`` has ``out`` and ``grad_out``, too."""
        return self._found(FUNCTION, signature, device).main

    def _found(self, function: str, signature: Signature, device: str) -> LoadedKernel:
        key = (function, signature.key(), device)
        with self._lock:
            found = self._loaded.get(key)
            if found is None:
                try:
                    found = self._loaded[key] = self._load(signature, device, function)
                except OSError as error:  # no room or no right for the compiler's files
                    raise ToolchainError(
                        f"the kernel could not be built or loaded: {error}",
                        expected="a temporary directory that can be written and executed from",
                        remedy="free some space, or set TMPDIR",
                    ) from error
        return found

    def begin_anew(self) -> None:
        """As after a fork: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def _load(self, signature: Signature, device: str, function: str) -> LoadedKernel:
        directory = cache_directory()
        key = ready_key(self.entry, signature, function) if directory is not None else None
        cache = ReadyCache(directory) if directory is not None else None
        found = cache.get(key) if cache is not None and key is not None else None
        if found is not None:
            # What cannot be loaded here after all is made anew.
            with contextlib.suppress(BuildFailure, LaunchFailure):
                return _loaded(*found, device)
        traced = self._trace(signature, function)
        binaries = [self._build(unit, self.entry.arch) for unit in units_of(traced)]
        loaded = _loaded(traced, binaries, device)
        if cache is not None and key is not None and directory is not None and _writable(directory):
            cache.put(key, traced, binaries)
        return loaded

    def _trace(self, signature: Signature, function: str) -> TracedPlan:
        from pytest_cudaforge.runtime.trace import trace

        return trace(self._sources["plan.py"], signature, function=function)

    def _published(self, unit: Unit, arch: str) -> Binary:
        """What was compiled when the kernel was forged. Raises BuildFailure, ConfigError."""
        found = find_binary(decode_binaries(self._sources.get(FILE_NAME, "")), unit, arch)
        if found is None:
            raise BuildFailure(
                f"no kernel was compiled for this call: {', '.join(unit.kernels)} with {dict(unit.constants)}",
                expected=f"one of those in {FILE_NAME}; production compiles no {self.entry.language}",
                remedy="add a workload like this call to the target, and forge again",
            )
        return found

    def _build(self, unit: Unit, arch: str) -> Binary:
        if self.entry.language in PUBLISHED_LANGUAGES:
            return self._published(unit, arch)
        language = languages.load(self.entry.language)
        source = self._sources[language.source_name]
        directory = cache_directory()
        if directory is None:
            return language.compile(source, unit, arch)
        cache, key = BuildCache(directory), build_key(source, unit, language.fingerprint(arch), arch)
        found = cache.get(key)
        if isinstance(found, Binary):
            return found
        if isinstance(found, BuildFailure):
            raise found
        binary = language.compile(source, unit, arch)
        if _writable(directory):
            cache.put(key, binary)
        return binary


def _loaded(traced: TracedPlan, binaries: Sequence[Binary], device: str) -> LoadedKernel:
    """Raises BuildFailure, LaunchFailure."""
    languages.check_arguments(traced, binaries)
    main = load_program(traced.main, binaries, device)
    prepare = None
    if traced.prepare is not None:
        program = load_program(traced.prepare, binaries, device)
        prepare = LoadedPlan(traced.prepare, program, frozenset())
    return LoadedKernel(LoadedPlan(traced.main, main, written_buffers(traced.main, binaries)), prepare)
