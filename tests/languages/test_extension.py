"""torch's extensions as data: requests, narrow headers, ninja's file. Real builds are in the module tier's tests."""

from __future__ import annotations

import json

import pytest

from pytest_cudaforge.errors import BuildFailure, ToolchainError
from pytest_cudaforge.languages import extension
from pytest_cudaforge.languages.extension import (
    ExtensionRequest,
    _narrow_headers,
    _ninja_text,
    _words,
    build,
    fingerprint,
    request_from_text,
    request_to_text,
)

_INCLUDE = "#include <torch/extension.h>\n"


def _request(text: str = "", **fields: object) -> ExtensionRequest:
    return ExtensionRequest(**{"name": "ext", "sources": (("main.cpp", _INCLUDE + text),), **fields})  # type: ignore[arg-type]


def test_a_request_survives_its_text_and_its_key_depends_on_everything() -> None:
    request = _request("int x;", cflags=("-O3",), ldflags=("-lm",), python_module=False)
    assert request_from_text(request_to_text(request)) == request
    keys = {request.key, _request("int y;").key, _request("int x;").key, _request("int x;", cflags=("-O2",)).key}
    assert len(keys) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"name": "not a name"},
        {"sources": []},
        {"sources": [["../main.cpp", ""]]},
        {"sources": [["a.cpp", ""], ["a.cpp", ""]]},
        {"sources": [["a.cpp", 3]]},
        {"cflags": "-O3"},
        {"cflags": ["-O3"] * 1000},
        {"more": 1},
    ],
)
def test_malformed_requests_are_refused(change: dict[str, object]) -> None:
    data = json.loads(request_to_text(_request())) | change
    with pytest.raises(ValueError):
        request_from_text(json.dumps(data))


def test_narrow_headers_name_the_operators_that_the_source_uses() -> None:
    types = _narrow_headers(_request("auto y = torch::empty_like(at::relu(x)); auto d = torch::kFloat32;"))[
        "torch/types.h"
    ]
    assert "ATen/ops/empty_like.h" in types and "ATen/ops/relu.h" in types and "ATen/ops/sigmoid.h" not in types
    assert "kFloat32 = at::kFloat" in types
    assert "ATen/Dispatch.h" in _narrow_headers(_request("AT_DISPATCH_ALL_TYPES"))["torch/types.h"]


@pytest.mark.parametrize("text", ["torch::nn::Linear l(3, 3);", "torch::tensor({1.0})", "torch::autograd::Function"])
def test_what_only_the_full_headers_declare_gets_them(text: str) -> None:
    assert not _narrow_headers(_request(text))


def test_ninja_runs_one_edge_per_source_and_quotes_flags() -> None:
    sources = (("main.cpp", _INCLUDE), ("more.cpp", ""), ("own.h", ""))
    text = _ninja_text(_request(sources=sources, cflags=("-DX=$(reboot) -O3",)), "cpu", False)
    assert text.count("build unit") == 2
    assert "'-DX=$$(reboot)' -O3" in text
    assert "-isystem" in text and "c++" in text
    assert _words(("-O3 -march=native", "-DA='b c'")) == ["-O3", "-march=native", "-DA=b c"]


def test_cuda_sources_are_compiled_for_the_device_at_hand() -> None:
    sources = (("main.cpp", _INCLUDE), ("cuda.cu", "#include <torch/types.h>\n__global__ void k() {}"))
    request = _request(sources=sources, with_cuda=True)
    try:
        text = _ninja_text(request, "sm_90", True)
    except ToolchainError:
        pytest.skip("nvcc is not installed here")
    assert "build unit1.o: cu cuda.cu" in text
    assert "code=sm_90a" in text and "-DFORGE_WITHOUT_PYTHON" in text and "-lcudart" in text
    own = _ninja_text(_request(sources=sources, with_cuda=True, cuda_cflags=("-arch=sm_80",)), "sm_90", True)
    assert "sm_90" not in own


def test_cuda_on_the_cpu_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(BuildFailure, match="asks for CUDA"):
        build(_request(with_cuda=True), "cpu")


def test_the_fingerprint_tells_devices_apart() -> None:
    assert fingerprint("cpu", False) != fingerprint("sm_90", False)
    assert len(extension.fingerprint("cpu", False)) == 64
