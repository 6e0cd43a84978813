from pytest_cudaforge.evaluation.generated import kernels_of

CXX = """
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r\'\'\'
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0)
{
    inductor_cpu_integer_div_error_flag = nullptr;
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(512L); x0+=static_cast<int64_t>(16L)) {}
}
\'\'\')
async_compile.wait(globals())
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        assert_size_stride(arg0_1, (512, ), (1, ), 'input')
        buf0 = empty_strided_cpu((512, ), (1, ), torch.float32)
        cpp_fused_add_0(arg0_1, buf0)
        buf1 = buf0; del buf0
        extern_kernels.mm(buf1, arg1_1, out=buf1)
        return (buf1, )
"""
TRITON = """
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
import triton
import triton.language as tl
@triton_heuristics.pointwise(size_hints={'x': 512}, inductor_meta={'kernel_name': 'triton_poi_fused_0'})
@triton.jit
def triton_poi_fused_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
''', device_str='cuda')
def call(args):
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((512, ), (1, ), torch.float32)
        stream0 = get_raw_stream(0)
        triton_poi_fused_0.run(arg0_1, buf0, 512, stream=stream0)
    return (buf0, )
"""


def test_cxx_is_reduced_to_kernels_and_the_calls_that_run_them():
    text = kernels_of([CXX, CXX])
    assert text.startswith('extern "C"  void  cpp_fused_add_0(const float* in_ptr0, float* out_ptr0)')
    assert "for(int64_t x0=0; x0<512; x0+=16) {}" in text
    assert text.count("cpp_fused_add_0(arg0_1, buf0)") == 1
    assert "# extern_kernels.mm(buf1, arg1_1, out=buf1)" in text
    for left_out in ("#include", "div_error", "assert_size_stride", "AsyncCompile", "buf1 = buf0"):
        assert left_out not in text


def test_triton_is_reduced_to_its_jitted_functions():
    text = kernels_of([TRITON])
    assert text.startswith("@triton.jit\ndef triton_poi_fused_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):\n")
    assert "xoffset = tl.program_id(0) * XBLOCK" in text
    assert "# triton_poi_fused_0.run(arg0_1, buf0, 512, stream=stream0)" in text
    for left_out in ("import", "heuristics", "get_raw_stream", "set_device"):
        assert left_out not in text


def test_a_long_text_is_cut_by_whole_kernels_and_says_so():
    both = kernels_of([CXX, TRITON], most=300)
    assert len(both) <= 350
    assert "cpp_fused_add_0(const float*" in both
    assert "# ... and 1 more kernel" in both
    one = kernels_of([CXX], most=120)
    assert "... (cut)" in one
    assert len(one) < 180


def test_what_is_no_kernel_gives_nothing():
    assert kernels_of([]) == ""
    assert kernels_of(["def call(args):\n    extern_kernels.mm(a, b)", "not python ("]) == ""
