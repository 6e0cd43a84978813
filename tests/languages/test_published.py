"""Compiled kernels beside their source: written from a verdict's builds, read by production and by checks of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from flow_records import make_facts, make_round, make_target

from pytest_cudaforge.errors import BuildFailure, ConfigError, PublishError
from pytest_cudaforge.evaluation.builder import Builder
from pytest_cudaforge.evaluation.building import Kitchen
from pytest_cudaforge.languages.binary import Binary, CompiledLaunch, KernelInfo, Unit
from pytest_cudaforge.languages.cache import BuildCache
from pytest_cudaforge.languages.published import FILE_NAME, binary_digest, decode_binaries, encode_binaries, find_binary
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.publishing import Published, publish
from pytest_cudaforge.records import Build, Candidate, DeviceFacts, Isolation, KernelResources, Trace
from pytest_cudaforge.runtime.kernels import Kernel
from pytest_cudaforge.runtime.manifest import Manifest
from pytest_cudaforge.runtime.signature import Signature
from pytest_cudaforge.runtime.trace import trace

H200 = DeviceFacts("cuda", "NVIDIA H200", "sm_90", sm_count=132)
SPEC = TensorSpec((4, 8), "float32", (8, 1))
PLAN = (
    "from pytest_cudaforge.plan import empty, launch\n\ndef plan(x):\n    y = empty(x.shape, x.dtype)\n"
    "    launch('relu', args=(x, y, x.numel()), constants={'BLOCK': 32})\n    return y\n"
)
NAME = "relu<*fp32:16, *fp32:16, i32:16, num_warps=4, num_stages=3>"
UNIT = Unit((("BLOCK", 32),), (NAME,))
KEY = "ab" * 32


def binary(name: str = NAME, code: bytes = b"\x7fELF code", block: int = 32) -> Binary:
    part = CompiledLaunch(128, 0, 1, 2, 0, len(code))
    info = KernelInfo(name, "relu", ("float*", "float*", "int"), KernelResources(name, 16), part)
    return Binary("triton", "sm_90", (("BLOCK", block),), code, (info,))


def winning_trace(binaries: tuple[tuple[str, str], ...] | None = None) -> Trace:
    entry = make_round(1)
    candidate = Candidate.of("triton", {"kernel.py": "# a kernel\n", "plan.py": PLAN})
    assert entry.evaluation is not None
    final = replace(
        entry.evaluation,
        candidate=candidate.digest,
        language="triton",
        isolation=Isolation("A"),
        build=Build("sm_90", 0.2, False, binaries=((KEY, binary_digest(binary())),) if binaries is None else binaries),
    )
    entry = replace(entry, candidate=candidate, evaluation=final)
    return Trace("layers.py::scale", "triton", "forged", "2x", (entry,), 1, final)


def published(root: Path) -> Published:
    builds, target = BuildCache(root / "builds"), make_target(root)
    builds.put(KEY, binary())
    return publish(winning_trace(), target, make_facts(target), root / "forged", builds=builds)


def test_binaries_come_back_as_they_were() -> None:
    both = (binary(code=bytes(range(256)) * 9), binary(block=64))
    assert decode_binaries(encode_binaries(both)) == both
    text = encode_binaries(both)
    assert encode_binaries(both[::-1]) == text and NAME in text and max(map(len, text.splitlines())) < 120


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": 1, "binaries": [{"data": ["?"]}]}', '{"format": 2}', "[[" * 9999]
)
def test_other_texts_are_a_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"binaries\.json"):
        decode_binaries(text)


def test_a_unit_is_found_by_constants_kernels_and_architecture() -> None:
    known = [binary(block=64), binary()]
    assert find_binary(known, UNIT, "sm_90") == binary()
    assert find_binary(known, UNIT, "sm_80") is None
    assert find_binary(known, Unit(UNIT.constants, (NAME, "other<1>")), "sm_90") is None
    assert find_binary(known, Unit((("BLOCK", 16),), (NAME,)), "sm_90") is None


def test_a_winner_is_published_with_the_binaries_of_its_verdict(tmp_path: Path) -> None:
    entry = published(tmp_path).entry
    manifest = tmp_path / "forged" / "manifest.json"
    assert Manifest.load(manifest).entries == (entry,)
    assert [file.name for file in entry.files] == [FILE_NAME, "kernel.py", "plan.py"]
    assert decode_binaries(entry.sources(manifest)[FILE_NAME]) == (binary(),)


def test_an_edited_binary_is_refused_by_its_digest(tmp_path: Path) -> None:
    entry = published(tmp_path).entry
    path = tmp_path / "forged" / entry.directory / FILE_NAME
    path.write_text(encode_binaries([binary(code=b"\x7fELF evil")]))
    with pytest.raises(ConfigError, match="differs from what was verified"):
        entry.sources(tmp_path / "forged" / "manifest.json")


@pytest.mark.parametrize("binaries", [(), (("cd" * 32, binary_digest(binary())),), ((KEY, "ef" * 32),)])
def test_a_verdict_whose_binaries_are_gone_is_not_published(
    tmp_path: Path, binaries: tuple[tuple[str, str], ...]
) -> None:
    """Gone, or built anew since then with another outcome."""
    target, builds = make_target(tmp_path), BuildCache(tmp_path / "builds")
    builds.put(KEY, binary())
    for cache in (builds, None):
        with pytest.raises(PublishError, match="gone from the build cache"):
            publish(winning_trace(binaries), target, make_facts(target), tmp_path / "forged", builds=cache)
    assert not (tmp_path / "forged").exists()


def test_production_takes_what_was_published_and_compiles_nothing(tmp_path: Path) -> None:
    entry = published(tmp_path).entry
    sources = entry.sources(tmp_path / "forged" / "manifest.json")
    # Would end this process, were it ever imported.
    kernel = Kernel(entry, tmp_path, {**sources, "kernel.py": "import os\nos._exit(1)\n"})
    assert kernel._build(UNIT, "sm_90") == binary()
    with pytest.raises(BuildFailure, match="no kernel was compiled for this call"):
        kernel._build(Unit((("BLOCK", 64),), (NAME,)), "sm_90")


def test_a_check_of_a_published_kernel_is_about_what_production_runs(tmp_path: Path) -> None:
    def refuse(kind: str) -> None:
        raise AssertionError("nothing is to be built")

    files = {"kernel.py": "# a kernel\n", "plan.py": PLAN, FILE_NAME: encode_binaries([binary()])}
    facts = make_facts(make_target(tmp_path))
    builder = Builder(refuse)  # type: ignore[arg-type]
    kitchen = Kitchen(Candidate.of("triton", files), facts, H200, arch="sm_90", builder=builder, cache=None)
    traced = trace(PLAN, Signature.of((SPEC,), {}, None, H200, "triton"))
    assert kitchen.compile(traced) == (binary(),) and kitchen.build.binaries == ()


def test_what_is_published_is_readable(tmp_path: Path) -> None:
    entry = published(tmp_path).entry
    data = json.loads((tmp_path / "forged" / entry.directory / FILE_NAME).read_text())
    assert data["binaries"][0]["kernels"] == [NAME] and data["binaries"][0]["constants"] == {"BLOCK": 32}
