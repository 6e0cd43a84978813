"""Source to binary: one language per file behind the :class:`Language` protocol.

Light: importing this loads no compiler, torch or CUDA package. ``load("cpp")``, ``load("cuda")`` or
``load("package.module:attribute")`` gives a language.
"""

from __future__ import annotations

import importlib
from typing import Protocol, runtime_checkable

from pytest_cudaforge.errors import ConfigError
from pytest_cudaforge.languages.binary import (
    Binary,
    KernelInfo,
    Unit,
    binary_from_bytes,
    binary_to_bytes,
    units_of,
)
from pytest_cudaforge.languages.parameters import check_arguments

__all__ = [
    "DEVICE_LANGUAGES",
    "LANGUAGES",
    "Binary",
    "KernelInfo",
    "Language",
    "Unit",
    "binary_from_bytes",
    "binary_to_bytes",
    "check_arguments",
    "load",
    "units_of",
]


@runtime_checkable
class Language(Protocol):
    """Turns one source file into binaries. Instances hold no state, so that any process may make its own."""

    @property
    def name(self) -> str:
        """ "cpp", "cuda", ..."""

    @property
    def source_name(self) -> str:
        """The file the kernels are in: "kernel.cpp"."""

    @property
    def file_names(self) -> tuple[str, ...]:
        """Every file of a candidate: ``source_name`` and "plan.py"."""

    def availability(self) -> str:
        """ "" where this language works here, else the reason with its remedy."""

    def fingerprint(self, arch: str) -> str:
        """Digest of compiler version, flags and headers: part of a build's cache key. Raises ToolchainError."""

    def compile(self, source: str, unit: Unit, arch: str, *, lineinfo: bool = False) -> Binary:
        """Compile ``source`` for ``arch``. Raises BuildFailure (the source is at fault) or ToolchainError."""


#: Built-in languages by name.
LANGUAGES = {
    "cpp": "pytest_cudaforge.languages.cpp:CppLanguage",
    "cuda": "pytest_cudaforge.languages.cuda:CudaLanguage",
    "triton": "pytest_cudaforge.languages.triton:TritonLanguage",
}
#: Those whose candidates are device code alone, launched by the replay on a CUDA device.
DEVICE_LANGUAGES = ("cuda", "triton")


def load(name: str) -> Language:
    """The language called ``name``, or the one at a dotted path "package.module:attribute" (a class or an instance).

    Raises ConfigError for a name or path that leads to no language.
    """
    path = LANGUAGES.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon or not attribute:
        raise ConfigError(
            f"unknown language {name!r}",
            expected=f"one of {', '.join(LANGUAGES)} or a dotted path such as my_package.my_module:MyLanguage",
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"language {name!r} cannot be loaded: {error}", expected="an importable path") from error
    language = found() if isinstance(found, type) else found
    if not isinstance(language, Language):
        raise ConfigError(f"{path} is no language", expected="the protocol pytest_cudaforge.languages.Language")
    return language
