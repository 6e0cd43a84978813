"""The examples in the system prompts are real: they trace, build and give right numbers."""

from __future__ import annotations

import pytest

from pytest_cudaforge import coder, languages, prompts
from pytest_cudaforge.records import DeviceFacts
from pytest_cudaforge.runtime import replay
from pytest_cudaforge.runtime.signature import Signature, describe_module, module_tensors
from pytest_cudaforge.runtime.trace import trace

torch = pytest.importorskip("torch")


def example(language):
    """The reference module class and the files of a prompt's example, read as a reply would be."""
    intro, _, answer = prompts.render(f"example_{language}").partition("A complete reply:")
    (reference,) = coder._blocks(intro)
    names = {"torch": torch, "nn": torch.nn}
    exec(reference.text, names)
    return names["PeakNorm"], coder.parse(answer, language)


def module_and_input(kind, device, rows, cols):
    torch.manual_seed(0)
    module = kind(cols).to(device)
    torch.nn.init.normal_(module.weight)
    return module, torch.randn(3, rows, cols, device=device) * 4


def built(language, files, module, x, facts):
    """The traced plan and its binaries; arguments checked against the compiled kernels."""
    source = files[coder.dialect(language).source_name]
    traced = trace(files["plan.py"], Signature.of((x,), {}, describe_module(module), facts, language))
    chosen = languages.load(language)
    binaries = [chosen.compile(source, unit, facts.arch) for unit in languages.units_of(traced)]
    languages.check_arguments(traced, binaries)
    return traced, binaries


def replayed(traced, binaries, module, x, device):
    """The output of one replay."""
    plan, bound = traced.main, {"input": {"0": x}, "state": module_tensors(module)}
    fresh = {}
    for index, buffer in enumerate(plan.buffers):
        if buffer.role == "scratch":
            fresh[index] = torch.full(buffer.spec.shape, float("nan"), device=x.device)
    tensors = [fresh.get(i, bound.get(b.role, {}).get(b.source)) for i, b in enumerate(plan.buffers)]
    with replay.load_program(plan, binaries, device) as program:
        program.bind([tensor.data_ptr() for tensor in tensors]).run()
        if device != "cpu":
            torch.cuda.synchronize()
    return tensors[plan.outputs.buffer]


def check(kind, files, language, facts, device):
    for rows, cols in ((17, 4096), (5, 132), (64, 1024)):
        module, x = module_and_input(kind, device, rows, cols)
        traced, binaries = built(language, files, module, x, facts)
        found = replayed(traced, binaries, module, x, device)
        wanted = module.double()(x.double())
        torch.testing.assert_close(found.double(), wanted, rtol=3e-7, atol=1e-7)


def test_the_cpp_example_is_right():
    chosen = languages.load("cpp")
    if chosen.availability():
        pytest.skip(chosen.availability())
    kind, files = example("cpp")
    check(kind, files, "cpp", DeviceFacts("cpu", "this CPU", "cpu"), "cpu")


def test_the_cuda_example_builds_without_spills():
    chosen = languages.load("cuda")
    if chosen.availability() and "torch was built" not in chosen.availability():
        pytest.skip(chosen.availability())
    kind, files = example("cuda")
    module, x = module_and_input(kind, "cpu", 5, 4096)
    facts = DeviceFacts("cuda", "some GPU", "sm_90", sm_count=132, max_shared_bytes=232_448)
    traced, binaries = built("cuda", files, module, x, facts)
    (launch,) = traced.main.launches
    assert (launch.grid, launch.block) == ((15, 1, 1), (256, 1, 1))
    (kernel,) = binaries[0].kernels
    assert kernel.params == ("const float*", "const float*", "float*", "float")
    assert kernel.resources.spill_bytes in (0, None)


def test_the_triton_example_builds_without_spills():
    chosen = languages.load("triton")
    if chosen.availability():
        pytest.skip(chosen.availability())
    kind, files = example("triton")
    facts = DeviceFacts("cuda", "some GPU", "sm_90", sm_count=132, max_shared_bytes=232_448)
    for cols, warps in ((4096, 8), (132, 4)):
        module, x = module_and_input(kind, "cpu", 5, cols)
        traced, binaries = built("triton", files, module, x, facts)
        (launch,), (kernel,) = traced.main.launches, binaries[0].kernels
        assert launch.grid == (15, 1, 1) and kernel.compiled.threads == 32 * warps
        assert kernel.params == ("float*", "float*", "float*", "int", "float")
        assert kernel.resources.spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("language", ["cuda", "triton"])
def test_the_example_is_right_on_a_gpu(language):
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    if languages.load(language).availability():
        pytest.skip(languages.load(language).availability())
    major, minor = torch.cuda.get_device_capability(0)
    facts = DeviceFacts("cuda", "this GPU", f"sm_{major}{minor}", max_shared_bytes=49_152)
    kind, files = example(language)
    check(kind, files, language, facts, "cuda:0")
