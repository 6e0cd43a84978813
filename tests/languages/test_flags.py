"""Which compiler flags an extension may ask for."""

from __future__ import annotations

import pytest

from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.languages import flags


@pytest.mark.parametrize(
    "text",
    [
        "-O3",
        "-Ofast -march=native -mtune=native -mavx2 -mfma -mprefer-vector-width=512 -fopenmp -pthread",
        "-std=c++17 --std=c++20",
        "-DNDEBUG -D COLS=4 -UX -U X '-DNAME=\"a b\"'",
        "-I/usr/include/eigen3 -I /opt/x -isystem /opt/y -include cstdint",
        "-Wall -Wextra -Wno-unused-variable -Werror=return-type -w -pedantic",
        "-ffast-math -fno-math-errno -funroll-loops -fvisibility=hidden -flto=auto -fno-plt -ftree-vectorize",
        "-fvect-cost-model=unlimited -fprefetch-loop-arrays --param max-unroll-times=4 --param=l1-cache-size=32",
        "-fsanitize=address -g -ggdb3 -g0 -s -pipe -fPIC -fdiagnostics-color=always",
        "-fopenmp-simd -foffload=disable -Xpreprocessor -fopenmp",
    ],
)
def test_what_tunes_host_code_is_allowed(text: str) -> None:
    flags.check("ext", [text], [], [])
    flags.check("ext", text.split() if "'" not in text else [text], [], [])


@pytest.mark.parametrize(
    "text",
    [
        "-lcublas -lcudnn -lcuda -lgomp -lm -l cufft -l:libcublas.so.12 -lstdc++",
        "-L/usr/local/cuda/lib64 -L /opt/lib -lcublasLt",
        "-fopenmp -O3 -flto -shared -s -static-libstdc++ -pthread",
        "-Wl,-rpath,/usr/local/cuda/lib64 -Wl,-rpath=/opt/lib -Wl,-rpath -Wl,/x -Wl,-z,now -Wl,-O1,--as-needed",
        "-Wl,-Bsymbolic -Wl,--gc-sections,--strip-all -Wl,--start-group -Wl,--end-group -Wl,--exclude-libs,ALL",
        "-Xlinker -rpath -Xlinker /opt/lib -Xlinker --as-needed",
        "-Wl,--no-as-needed -Wl,--build-id=sha1",
        "/usr/local/cuda/lib64/libcublas.so /opt/lib/libown.a libcudart.so.12.4",
    ],
)
def test_what_links_ordinary_libraries_is_allowed(text: str) -> None:
    flags.check("ext", [], [], [text])


@pytest.mark.parametrize(
    "text",
    [
        "-O3 --use_fast_math -use_fast_math -lineinfo --generate-line-info",
        "-gencode=arch=compute_90,code=sm_90 -gencode arch=compute_80,code=sm_80 -arch=sm_90a -arch sm_80 -code=sm_80",
        "--generate-code=arch=compute_90a,code=[sm_90a,compute_90a] --gpu-architecture=sm_90",
        "--expt-relaxed-constexpr -expt-relaxed-constexpr --expt-extended-lambda --extended-lambda",
        "-Xcompiler -fopenmp -Xcompiler=-O3,-march=native --compiler-options -fPIC --compiler-options='-Wall -g'",
        "-Xptxas -v -Xptxas=-O3 -Xptxas -dlcm=ca --ptxas-options=-v,--warn-on-spills -Xptxas -warn-spills,-O3",
        "--ptxas-options=--register-usage-level=10,--maxrregcount=64",
        "--maxrregcount=64 -maxrregcount 128 -rdc=true --threads 4 --threads=8 -t 4 -t=2",
        "-std=c++17 --std=c++20 -std c++17 -DX=1 -D X -I/opt/cutlass/include -UNDEF --ftz=true --fmad=false",
        "-diag-suppress 177 --diag-suppress=20012,20013 -Xcudafe --diag_suppress=177 -Xfatbin -compress-all",
        "-G -g -w --restrict -res-usage --resource-usage -dlto --default-stream per-thread -Wno-deprecated-gpu-targets",
        "-U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ --split-compile=0 -m64 -cudart shared -Xnvlink -v",
        "-forward-unknown-to-host-compiler -fopenmp -march=native -Werror all-warnings --extra-device-vectorization",
    ],
)
def test_what_tunes_device_code_is_allowed(text: str) -> None:
    flags.check("ext", [], [text], [])


@pytest.mark.parametrize(
    "text",
    [
        "-wrapper 'python3,-c,print(1)'",
        "-fplugin=/tmp/x.so",
        "-fplugin-arg-x-y",
        "-B/tmp",
        "-B /tmp",
        "--prefix=/tmp",
        "-specs=/tmp/x",
        "--specs /tmp/x",
        "@/tmp/flags",
        "-x c",
        "-I @/tmp/flags",
        "-I -wrapper x",
        "-fmodule-mapper=|sh",
        "-fcompare-debug=-wrapper",
        "-foffload=-wrapper",
        "-fdump-tree-all=/tmp/x",
        "-fprofile-use=/tmp/x",
        "-Wp,-MD,/tmp/x",
        "-Wa,@/tmp/x",
        "-Xassembler @/tmp/x",
        "-Xpreprocessor @/tmp/x",
        "--sysroot=/tmp",
        "-imacros /tmp/x",
        "-o /tmp/x",
        "-E",
        "more.cpp",
        "-O3\n-B/tmp",
        "-Wl,--plugin,/tmp/x.so",
        "-Wl,-plugin=/tmp/x.so",
        "-Wl,--dynamic-linker=/tmp/x",
        "-Wl,-dynamic-linker,/tmp/x",
        "-Wl,--wrap=malloc",
        "-Wl,-T,/tmp/x",
        "-Wl,-rpath,@/tmp/x",
        "-Wl,@/tmp/x",
        "-Xlinker --wrap -Xlinker malloc",
        "-Xlinker -rpath -wrapper x",
        "-T /tmp/x",
        "-l x.so -wrapper x.so",
    ],
)
def test_what_starts_a_program_or_reads_a_file_is_refused(text: str) -> None:
    for given in ((text,), (), ()), ((), (), (text,)), ((), (text,), ()):
        with pytest.raises(BuildFailure, match="extension ext: the compiler flag") as caught:
            flags.check("ext", *given)
        assert "-march=native" in caught.value.expected


@pytest.mark.parametrize(
    "text",
    [
        "-ccbin /tmp/x",
        "-ccbin=/tmp/x",
        "--compiler-bindir=/tmp",
        "--options-file /tmp/x",
        "-optf=/tmp/x",
        "-dryrun",
        "--run",
        "-run",
        "-lib",
        "-ldir /tmp",
        "-Xcompiler -wrapper,sh",
        "-Xcompiler=-fplugin=/tmp/x.so",
        "-Xcompiler '-O3 -B/tmp'",
        "--compiler-options @/tmp/x",
        "-Xptxas --options-file=/tmp/x",
        "-Xptxas @/tmp/x",
        "-Xptxas -o,/tmp/x",
        "-Xlinker --wrap=malloc",
        "-Xarchive x",
        "-Werror -ccbin=/tmp/x",
        "--dryrun",
        "-odir=/tmp",
        "--input-drive-prefix=x",
        "--libdevice-directory=/tmp",
    ],
)
def test_the_same_of_nvcc(text: str) -> None:
    with pytest.raises(BuildFailure, match="extension ext: the compiler flag"):
        flags.check("ext", [], [text], [])


def test_the_flag_is_named() -> None:
    with pytest.raises(BuildFailure, match=r"'-Xcompiler -fplugin=x' is none"):
        flags.check("ext", ["-O3"], ["-O3 -Xcompiler -fopenmp,-fplugin=x"], [])
    with pytest.raises(BuildFailure, match="cannot be read"):
        flags.check("ext", ["-DX='"], [], [])
