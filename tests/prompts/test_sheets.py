import dataclasses

import prompt_records as made
import pytest

from pytest_cudaforge.prompts import sheets


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [(412, "412 ns"), (3_710, "3.71 us"), (999_700, "1000 us"), (1_500_000, "1.5 ms"), (2.5e9, "2.5 s"), (0, "0 ns")],
)
def test_times_read_well(time_ns, text):
    assert sheets.render_ns(time_ns) == text


@pytest.mark.parametrize(
    ("count", "text"), [(17, "17 B"), (1_500_000, "1.5 MB"), (7.5e9, "7.5 GB"), (4.3e12, "4.3 TB")]
)
def test_bytes_read_well(count, text):
    assert sheets.render_bytes(count) == text


def test_workloads_name_arguments_shapes_strides_and_traffic():
    text = sheets.render_workloads(made.facts().workloads)
    assert "argument 1: float32[64, 4096]," in text
    assert "mask=: float32[64, 64] strides [1, 64]" in text
    assert "argument 2 .0: 3" in text
    assert "-> out: float32[64, 4096]; moves at least 2.13 MB, 524 kFLOP" in text


def test_what_the_original_changes_is_said():
    (facts,) = made.facts().workloads
    text = sheets.render_workloads([dataclasses.replace(facts, writes=("input/0", "state/bn.running_mean"))])
    assert "also changes argument 1, `module.bn.running_mean`: your launches leave there what it leaves" in text


def test_module_attributes_are_listed_as_plan_would_write_them():
    text = sheets.render_module(made.facts().module)
    assert "- `module.eps` = 1e-06" in text
    assert "- `module.weight`: float32[4096]" in text
    assert "- `module.layers[0].in_features` = 8" in text
    assert "- `module.limits[1]` = inf" in text
    assert "hook" not in text


def test_many_attributes_are_cut_short_and_said_so():
    module = {"class": "M", "attributes": {f"a{i}": i for i in range(100)}}
    text = sheets.render_module(module)
    assert "and 40 more" in text
    assert "a99" not in text


def test_a_function_has_no_module():
    assert "plain function" in sheets.render_module(None)


def test_the_real_description_of_a_module_is_understood():
    torch = pytest.importorskip("torch")
    from pytest_cudaforge.runtime.signature import describe_module

    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    text = sheets.render_module(describe_module(module))
    assert "`module[0].weight`: float32[5, 3]" in text
    assert "`module[1].eps` = 1e-05" in text


def test_contract_says_precision_allowance_and_promises():
    facts = made.facts(precision="fp16", dynamic=True, strides="any", atol=1e-3, mode="train", index_outputs=("out.1",))
    text = sheets.render_contract(facts, ("kernel", "library"))
    for part in ("half-precision data", "any sizes", "any strides", "atol 0.001", "training mode", "out.1", "products"):
        assert part in text
    assert "at least 5 % of the time" in sheets.render_contract(made.facts(), ("kernel",))


def test_contract_says_where_inputs_are_never_redrawn():
    assert "own function" in sheets.render_contract(made.facts(distributions="drawn"), ("kernel",))
    assert "own function" not in sheets.render_contract(made.facts(), ("kernel",))


def test_device_and_baselines():
    assert sheets.render_device(made.device()) == "Some CPU @ 2.0 GHz, 2 cores, memory 12.5 GB/s, fp32 120 GFLOP/s"
    text = sheets.render_baselines([made.baseline()])
    assert text == "- default: eager 400 us, torch.compile 300 us, bound 100 us (up to 3x faster is possible)"
    uncompiled = dataclasses.replace(made.baseline(), compile=None, roofline_ns=None)
    cached = dataclasses.replace(made.baseline(), roofline_ns=900_000.0)
    assert "bound 900 us (already below it: it says nothing here)" in sheets.render_baselines([cached])
    assert "no torch.compile time" in sheets.render_baselines([uncompiled])
    assert sheets.render_baselines([]) == "- not timed"


def test_a_build_failure_shows_its_log_fenced_and_cut():
    log = "kernel.cpp:1: error: first\n" + "x" * 20_000 + "\nlast line"
    text = sheets.render_verdict(made.failed_build(1, log).evaluation)
    assert text.startswith("Status BUILD_ERROR.\n\n```text\nkernel.cpp did not compile\n```")
    assert "error: first" in text
    assert "characters left out" in text
    assert "last line" in text
    assert len(text) < 4500


def test_a_reason_that_the_log_holds_is_said_once():
    turn = made.failed_build(1)
    verdict = dataclasses.replace(turn.evaluation, reason=f"g++ refused the source: {turn.evaluation.build.log}")
    assert sheets.render_verdict(verdict).count("was not declared") == 1


def test_a_cpu_says_its_caches_and_instructions_and_no_trivia():
    extra = (("isa", "avx2,fma"), ("l1d_bytes", "49152"), ("l3_bytes", "33554432"), ("machine", "x86_64"), ("x", "1"))
    text = sheets.render_device(dataclasses.replace(made.device(), extra=extra, l2_bytes=2_097_152))
    assert text.endswith("fp32 120 GFLOP/s, instructions avx2 fma, L1D 49.2 kB, L3 33.6 MB")
    assert "L2 2.1 MB" in text


def test_wrong_numbers_show_where_and_how_and_what_did_work():
    text = sheets.render_verdict(made.wrong_numbers(1).evaluation)
    assert "failed: workload default, inputs shifted, error ratio 120.5 (bound 16)" in text
    assert "worst at [3, 17]: got 1.25, expected 1.5; pattern: every 64th column" in text
    assert "passed: default/drawn" in text
    assert "strided" not in text  # a probe: not contract, so not the Coder's business


def test_many_mismatches_do_not_flood_the_prompt():
    verdict = made.wrong_numbers(1).evaluation
    case = verdict.verification.cases[1]
    crowded = dataclasses.replace(case, mismatches=case.mismatches * 500)
    many = dataclasses.replace(verdict.verification, cases=(crowded,) * 40)
    text = sheets.render_verdict(dataclasses.replace(verdict, verification=many))
    assert len(text) < 5000


def test_timing_and_resources():
    turn = made.passed(1, 200_000)
    text = sheets.render_timing(turn.evaluation.timing)
    assert "Speedup 2x vs eager, 1.5x vs torch.compile (faster)." in text
    assert "now 200 us (196 us to 206 us)" in text
    assert "(reached to 50%); 1 launch" in text
    assert "- `peak_norm<float>`: registers 40, spills 16 B" in sheets.render_resources(turn.evaluation.build)
    assert sheets.render_resources(None) == ""
