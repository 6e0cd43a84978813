"""Hostile compiles: host files, endless templates, and what a builder may say."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from native_children import compile_act

from pytest_cudaforge.errors import BuildFailure, CandidateError, WorkerTimeout
from pytest_cudaforge.evaluation.sandbox import Defences
from pytest_cudaforge.evaluation.zygote import ForkServers
from pytest_cudaforge.languages import Unit


def _embed(path: Path) -> str:
    return f'asm(".section .rodata\\n .global stolen\\n stolen: .incbin \\"{path}\\"\\n .text");'


def test_incbin_finds_no_file_of_the_host(guarded: ForkServers, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("an expected output")
    with pytest.raises(BuildFailure):
        compile_act(guarded, "out[0] = 1;", _embed(secret))


def test_incbin_finds_it_once_the_files_defence_is_off(
    guarded: ForkServers, servers_with: Callable[[Defences], ForkServers], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("an expected output")
    (binary,) = compile_act(servers_with(Defences(files=False)), "out[0] = 1;", _embed(secret))
    assert b"an expected output" in binary.code


def test_including_a_host_file_shows_nothing_of_it(guarded: ForkServers, tmp_path: Path) -> None:
    secret = tmp_path / "secret.h"
    secret.write_text("this_is_the_expected_output\n")
    with pytest.raises(BuildFailure) as caught:
        compile_act(guarded, "out[0] = 1;", f'#include "{secret}"')
    assert "this_is_the_expected_output" not in caught.value.log


@pytest.mark.parametrize("device", ["zero", "urandom"])
def test_a_device_without_an_end_is_no_file_to_include(guarded: ForkServers, device: str) -> None:
    with pytest.raises(BuildFailure, match=r"No such file|Permission denied"):
        compile_act(guarded, "out[0] = 1;", f'#include "/dev/{device}"')


def test_a_template_bomb_ends_in_time(guarded: ForkServers) -> None:
    bomb = """
    template <int D, int K> struct T { static const long v = T<D - 1, 2 * K>::v + T<D - 1, 2 * K + 1>::v; };
    template <int K> struct T<0, K> { static const long v = K; };
    extern "C" void act(const long long* in, long long* out) { out[0] = T<26, 1>::v; }
    """
    begun = time.monotonic()
    with pytest.raises(CandidateError) as caught:
        guarded.builder().compile("cpp", bomb, Unit((), ("act",)), "cpu", timeout_s=2)
    assert isinstance(caught.value, (WorkerTimeout, BuildFailure))
    assert time.monotonic() - begun < 10


def test_an_honest_compile_passes(guarded: ForkServers) -> None:
    (binary,) = compile_act(guarded, "out[0] = 1;")
    assert binary.kernel("act") is not None
