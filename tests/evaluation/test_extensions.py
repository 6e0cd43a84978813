"""``load_inline`` and ``load`` as a module's worker has them: requests as torch would build them; what is handed on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_cudaforge.errors import WorkerProtocol
from pytest_cudaforge.evaluation import extensions
from pytest_cudaforge.evaluation.contract import CallProfile, label_of_call
from pytest_cudaforge.languages.extension import ExtensionRequest, request_from_text


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(extensions, "_registry", extensions._Registry())
    extensions._registry.folder = tmp_path
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    extensions._registry.libraries = {
        "a key": b"\0_Z12twice_kernelPKfPfl\0_Z21my_sgemm_ampere_tunedPf\0plain_c\0"
        b"_ZN7cutlass6KernelI4GemmEEvNT_6ParamsE\0"
    }
    extensions._registry.triton = {"softmax"}
    yield


def _asked() -> ExtensionRequest:
    text = extensions.missing()
    assert text is not None
    assert extensions.missing() is None
    return request_from_text(text)


def test_a_call_becomes_the_sources_that_torch_would_compile() -> None:
    functions = {"f": "adds", "g": "multiplies"}
    with pytest.raises(extensions.NEVER):
        extensions.load_inline("ext", "int f(int x);", ["__global__ void k() {}"], functions=functions, verbose=True)
    request = _asked()
    assert [name for name, _ in request.sources] == ["main.cpp", "cuda.cu"]
    main, cuda = (text for _, text in request.sources)
    assert main.startswith("#include <torch/extension.h>\nint f(int x);\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {")
    assert 'm.def("g", torch::wrap_pybind_function(g), "multiplies");' in main
    assert cuda.startswith("#include <torch/types.h>\n#include <cuda.h>\n#include <cuda_runtime.h>\n__global__")
    assert request.with_cuda


def test_headers_functions_and_cuda_as_asked() -> None:
    with pytest.raises(extensions.NEVER):
        extensions.load_inline(
            "ext", ["a", "b"], functions="f", no_implicit_headers=True, with_pytorch_error_handling=False
        )
    request = _asked()
    assert request.sources[0][1].startswith("a\nb\nPYBIND11_MODULE")
    assert 'm.def("f", f, "f");' in request.sources[0][1]
    assert not request.with_cuda and request.python_module


def test_load_reads_its_files_in_the_candidates_process(tmp_path: Path) -> None:
    (tmp_path / "k.cpp").write_text("int x;")
    with pytest.raises(extensions.NEVER):
        extensions.load("ext", [str(tmp_path / "k.cpp")], extra_cflags=[" -O3 ", ""], is_python_module=False)
    request = _asked()
    assert request.sources == (("k.cpp", "int x;"),) and request.cflags == ("-O3",)
    assert not request.python_module


def test_no_except_clause_hides_that_an_extension_is_missing() -> None:
    with contextlib.suppress(BaseException):  # what a candidate with a fallback does
        extensions.load_inline("ext", "int x;")
    assert _asked().name == "ext"


def test_a_malformed_request_is_a_broken_protocol() -> None:
    with pytest.raises(WorkerProtocol):
        extensions.decode_request("{}")


def test_what_triton_compiled_goes_from_one_worker_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "triton" / "deep").mkdir(parents=True)
    (tmp_path / "triton" / "deep" / "kernel.cubin").write_bytes(b"\0\xff")
    packed = extensions.packed_cache()
    extensions._registry.folder = tmp_path / "other"
    extensions.unpack_cache(packed)
    assert (tmp_path / "other" / "triton" / "deep" / "kernel.cubin").read_bytes() == b"\0\xff"


def test_operators_of_extensions_are_told_from_torchs() -> None:
    extensions._registry.operators = {"my_ops::norm"}
    assert extensions.is_own_operator("my_ops::norm")
    others = ["aten::mul", "pythons::norm", "profiler::_record", "plain", "Optimizer.step#x"]
    assert not any(map(extensions.is_own_operator, others))


# -- whose kernels run in a call: events as torch's profiler has them, with times that nobody measured


@dataclass(frozen=True)
class _Event:
    key: str
    self_device_time_total: float
    device_type: str = "DeviceType.CUDA"
    is_user_annotation: bool = False
    count: int = 1
    self_cpu_time_total: float = 1.0
    input_shapes: tuple[list[int], ...] = ()


@dataclass(frozen=True)
class _Part:
    name: str
    self_device_time_total: float
    cpu_parent: _Part | None = None


@dataclass(frozen=True)
class _Profile:
    events: tuple[_Event, ...]
    function_events: tuple[_Part, ...] = ()

    def key_averages(self, group_by_input_shape: bool) -> tuple[_Event, ...]:
        assert group_by_input_shape
        return self.events


def _labelled(*events: _Event) -> str:
    """The work of a call in which these kernels ran for so many us, with the operators that launched them."""
    found = extensions._summary(_Profile(events), 0, cuda=True)
    operators = tuple((name, ns) for name, ns in found["operators"])
    return label_of_call(CallProfile(found["own_calls"], found["own_ns"], operators))


OWN = _Event("twice_kernel(float const*, float*, long)", 3.0)
SPAN = _Event("forge_own::ext.twice", 40.0, is_user_annotation=True)
ATEN = _Event("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", 3.0)
FFT = _Event("void vector_fft<2048u, (padding_t)1>(kernel_arguments_t<unsigned int>)", 90.0)
FLASH = _Event("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>, false>(Flash_fwd_params)", 90.0)
CUBLAS = _Event("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", 90.0)


def _operator(name: str, us: float, *shapes: list[int]) -> _Event:
    return _Event(name, us, device_type="DeviceType.CPU", input_shapes=shapes)


@pytest.mark.parametrize(
    ("events", "label"),
    [
        ((OWN, SPAN), "kernel"),
        ((OWN, SPAN, ATEN, _operator("aten::mul", 3.0)), "mixed"),
        ((OWN, SPAN, ATEN, _operator("aten::add_", 3.0, [], [], [])), "kernel"),
        ((OWN, SPAN, ATEN, _operator("aten::add_", 3.0, [64], [], [])), "mixed"),
        ((OWN, SPAN, ATEN, _operator("aten::addmv_", 3.0, [], [64])), "mixed"),
        ((OWN, SPAN, ATEN, _operator("aten::rand", 3.0, [], [])), "mixed"),
        ((SPAN, ATEN, _operator("aten::mul", 3.0)), "rewrite"),
        ((OWN, CUBLAS, _operator("aten::mm", 90.0)), "library"),
        ((OWN, SPAN, CUBLAS), "library"),
        ((_Event("my_sgemm_ampere_tuned(float*)", 90.0), SPAN), "kernel"),
        ((_Event("void cutlass::Kernel<Gemm>(Gemm::Params)", 90.0), SPAN), "kernel"),
        ((OWN, SPAN, FFT), "rewrite"),
        ((OWN, SPAN, FFT, _operator("aten::_fft_r2c", 90.0)), "rewrite"),
        ((OWN, SPAN, FLASH), "library"),
        ((OWN, SPAN, FLASH, _operator("aten::_flash_attention_forward", 90.0)), "library"),
    ],
    ids=[
        "own",
        "torch inside an extension",
        "a counter",
        "in place",
        "a sum into one number",
        "drawn",
        "nothing own",
        "torch's product",
        "cuBLAS by itself",
        "own product",
        "a template's product",
        "cuFFT by itself",
        "torch's transform",
        "torch's attention in a graph",
        "torch's attention",
    ],
)
def test_time_belongs_to_whoever_wrote_the_kernel(events: tuple[_Event, ...], label: str) -> None:
    assert _labelled(*events) == label


@pytest.mark.parametrize(
    "name",
    [
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_tn_align1>(cutlass_80_simt_sgemm_128x64_8x5_tn_align1)",
        "cutlass_80_simt_sgemm_128x64_8x5_tn_align1",
        "ampere_sgemm_128x64_tn",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, true>(float, float)",
        "nvjet_sss_128x128_32x4_1x2_h_bz_TNT",
    ],
)
@pytest.mark.parametrize(("own_us", "label"), [(3.0, "library"), (6.0, "kernel")])
def test_a_product_of_nvidias_is_a_librarys_whoever_launched_it(name: str, own_us: float, label: str) -> None:
    """Also where an extension has a kernel of that name. A share of own work beside it has the label that it has
    beside torch's product: behind that is the same kernel."""
    base = extensions._base_name(name)
    extensions._registry.libraries = {"a key": f"\0_Z12twice_kernelPf\0_Z{len(base)}{base}v\0{base}\0".encode()}
    own = _Event("twice_kernel(float*)", own_us)
    assert _labelled(own, SPAN, _Event(name, 90.0)) == label
    assert _labelled(own, SPAN, _Event(name, 90.0), _operator("aten::mm", 90.0)) == label


@pytest.mark.parametrize(
    ("parent", "label"), [("aten::_convolution", "kernel"), ("aten::relu", "mixed"), (None, "mixed")]
)
def test_a_bias_is_part_of_its_convolution(parent: str | None, label: str) -> None:
    part = _Part("aten::add_", 3.0, _Part(parent, 0.0) if parent else None)
    events = (OWN, SPAN, ATEN, _operator("aten::add_", 3.0, [8, 4], [8, 1]))
    found = extensions._summary(_Profile(events, (part,)), 0, cuda=True)
    operators = tuple((name, ns) for name, ns in found["operators"])
    assert label_of_call(CallProfile(found["own_calls"], found["own_ns"], operators)) == label


def test_a_products_bias_in_a_real_profile() -> None:
    x, weight, bias = torch.randn(32, 8, 64).transpose(0, 1), torch.randn(64, 64), torch.randn(64)
    found = extensions.profiled(lambda: torch.nn.functional.linear(x, weight, bias) + 1, 2, cuda=False)
    operators = dict(found["operators"])
    assert not operators.get("aten::add_") and operators["aten::add"] > 0 and operators["aten::linear"] > 0


def test_what_another_thread_does_for_an_own_function_is_torchs_work() -> None:
    x = torch.randn(1 << 23)  # on busy cores a thread may begin late

    def threaded() -> None:
        with torch.autograd.profiler.record_function(extensions._OWN + "f"):
            thread = threading.Thread(target=lambda: torch.sin(x))
            thread.start()
            thread.join()

    found = extensions.profiled(threaded, 3, cuda=False)
    operators = tuple((name, ns) for name, ns in found["operators"])
    seen = CallProfile(1, found["own_ns"], operators)
    assert dict(operators)["aten::sin"] > 0 and seen.own_share < 0.5, seen


@pytest.mark.parametrize(
    ("kernel", "brought"),
    [
        ("twice_kernel(float const*, float*, long)", True),
        ("void space::twice_kernel<float, (int)4, other<int>>(float const*, float*)", True),
        ("void (anonymous namespace)::twice_kernel<(bool)1>(float*)", True),
        ("plain_c", True),
        ("softmax", True),
        ("wice_kernel(float*)", False),
        ("plain", False),
        ("void other::kernel<twice_kernel>(float*)", False),
        ("void k<&S::operator-> >(float*)", True),
        ("", True),
    ],
)
def test_whose_kernel_it_is(kernel: str, brought: bool) -> None:
    assert extensions._is_brought(kernel) is brought


def _one(own_ns: int, **operators: int) -> dict[str, Any]:
    told = [[f"aten::{name}", ns] for name, ns in operators.items()]
    return {"own_calls": 1, "own_ns": own_ns, "operators": told, "kernels": [], "thread_ns": 100, "compiled": False}


def test_a_call_that_waited_for_a_core_does_not_decide_whose_work_it_is() -> None:
    parts = [_one(2, mul=90), _one(9_000, mul=91), _one(3, mul=92), _one(2, mul=9_000), _one(2, mul=90, mm=50)]
    found = extensions._typical(parts, 5)
    assert found["own_ns"] == 10 and dict(found["operators"]) == {"aten::mul": 455, "aten::mm": 50}
    assert found["own_calls"] == 5 and found["thread_ns"] == 500


def test_what_is_put_in_the_place_of_a_sealed_function_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = extensions.sealed(extensions.profiled)
    for name in ("_profiled_together", "_summary", "_typical"):
        monkeypatch.setattr(extensions, name, lambda *_: {"own_ns": -1})
    told = kept(lambda: torch.ones(8) * 2, 3, False)
    assert told["own_ns"] == 0 and dict(told["operators"])["aten::mul"] > 0
    assert extensions.profiled(lambda: None, 3, False) == {"own_ns": -1}
