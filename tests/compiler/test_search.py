"""The search among torch.compile's options: pure, from baselines and rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import prompt_records as made
import pytest
from flow_records import make_evaluation

from pytest_cudaforge import config as configs
from pytest_cudaforge.compiler import NoModel, Search, bound_of, load, obstacle
from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.errors import BuildFailure, ConfigError
from pytest_cudaforge.planning import PlannedTarget, WorkPlan, render_plan
from pytest_cudaforge.records import Baseline, DeviceFacts, Proposal, Round, Status, Stop
from pytest_cudaforge.runtime.configuration import FILE_NAME, OPTIONS, Configuration, parse
from pytest_cudaforge.session import languages_for, load_models
from pytest_cudaforge.strategies import Limits

CPU = made.device()
GPU = replace(CPU, kind="cuda", arch="sm_90", bandwidth_bytes_per_s=4e12)


def baseline(fastest_ns: float, roofline_ns: float | None, flops: int = 0, device: DeviceFacts = CPU) -> Baseline:
    nbytes = int((roofline_ns or 1e4) * (device.bandwidth_bytes_per_s or 0) / 1e9)
    return Baseline("default", made.sample(2 * fastest_ns), made.sample(fastest_ns), "", roofline_ns, nbytes, flops)


def played(search: Search, *speedups: float | None) -> list[Round]:
    """Rounds as the loop plays them; None: the configuration failed."""
    rounds: list[Round] = []
    for number, speedup in enumerate(speedups, 1):
        proposal = search.propose(rounds, Limits(patience=0))
        assert isinstance(proposal, Proposal)
        candidate = search.candidate(rounds)
        status = Status.PASSED if speedup else Status.RUNTIME_ERROR
        verdict = make_evaluation(candidate, status, speedup or 1.0, compiled=speedup)
        rounds.append(Round(number, proposal.kind, proposal.parent, candidate, verdict))
    return rounds


def options(candidate) -> dict[str, object]:
    return dict(parse(candidate.file(FILE_NAME)).options)


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "cuda"])
def test_the_bound_is_told_from_baselines_and_roofline(device: DeviceFacts) -> None:
    assert bound_of(device, [baseline(20_000, 1_000, device=device)]) == "launches"
    assert bound_of(device, [baseline(2e6, 1e6, device=device)]) == "memory"
    assert bound_of(device, [baseline(400_000, 1_000, device=device)]) == "launches", "many of them"
    assert bound_of(device, [baseline(2e7, 1e5, device=device)]) == "memory", "a slow kernel, not many"
    products = replace(baseline(2e6, 1e6, 10**9, device), min_bytes=1000)
    assert bound_of(device, [baseline(1e3, 900, device=device), products]) == "products"
    assert bound_of(device, [baseline(2e6, None, 10**9, device)]) == "products"
    assert bound_of(device, [baseline(2e6, None, 0, device)]) == "memory"


def test_what_helps_first_is_tried_first() -> None:
    first = {
        (kind, ns): next(iter(options(Search(device, [baseline(ns, ns / 10, device=device)]).candidate([]))))
        for kind, device in (("cpu", CPU), ("cuda", GPU))
        for ns in (20_000, 2e6)
    }
    assert first["cpu", 20_000] == "cpp.threads"
    assert first["cuda", 20_000] == "triton.cudagraphs"
    assert first["cuda", 2e6] == "coordinate_descent_tuning"
    gemm = Search(GPU, [replace(baseline(2e6, 1e6, 10**9, GPU), min_bytes=1000)])
    assert options(gemm.candidate([])) == {"max_autotune_gemm": True}


def test_what_gained_is_kept_and_what_did_not_is_dropped() -> None:
    search = Search(GPU, [baseline(20_000, 1_000, device=GPU)])
    rounds = played(search, 1.5, 1.2, None)
    assert options(rounds[0].candidate) == {"triton.cudagraphs": True}
    assert options(rounds[1].candidate) == {**options(rounds[0].candidate), "combo_kernels": True,
                                            "benchmark_combo_kernel": True}  # fmt: skip
    assert "combo_kernels" not in options(rounds[2].candidate)
    assert [entry.parent for entry in rounds] == [None, 1, 1]
    assert rounds[1].candidate is not None and rounds[0].candidate is not None
    assert rounds[1].candidate.parent == rounds[0].candidate.digest
    assert "short calls" in search.reason(rounds)


def test_a_configuration_no_faster_than_the_default_is_no_ground_to_build_on() -> None:
    search = Search(CPU, [baseline(2e6, 1e6)])
    rounds = played(search, 1.01)
    assert search.propose(rounds, Limits()) == Proposal("first", None)
    assert not set(options(rounds[0].candidate)) & set(options(search.candidate(rounds)))


def test_it_stops_when_nothing_helps_and_when_nothing_is_left() -> None:
    search = Search(CPU, [baseline(2e6, 1e6)])
    assert search.propose(played(search, 0.9, None), Limits(patience=2)) == Stop(
        "2 configurations in a row brought nothing"
    )
    assert search.propose(played(search, 0.9), Limits(rounds=1)) == Stop("all 1 rounds are played")
    rounds = played(search, *[0.9] * 6)
    end = search.propose(rounds, Limits(patience=0))
    assert isinstance(end, Stop) and "no configuration is left to try (6 were" in end.reason


def test_what_torch_cannot_compile_is_not_searched() -> None:
    line = replace(baseline(2e6, 1e6), compile=None, compile_note="torch.compile failed: Unsupported")
    assert obstacle([baseline(2e6, 1e6), line]) == "workload default: torch.compile failed: Unsupported"
    assert obstacle([baseline(2e6, 1e6)]) == ""


def test_every_move_is_of_options_that_may_be_chosen() -> None:
    for device in (CPU, GPU):
        for line in (baseline(20_000, 1_000), baseline(2e6, 1e6), baseline(2e6, None, 10**9)):
            search = Search(device, [line])
            rounds: list[Round] = []
            while isinstance(search.propose(rounds, Limits(patience=0)), Proposal):
                rounds += played(search, *[2.0] * (len(rounds) + 1))[len(rounds) :]
            assert 4 <= len(rounds) <= 6
            assert set(options(rounds[-1].candidate)) <= set(OPTIONS)


def test_options_go_to_their_file_and_back() -> None:
    given = Configuration.of({"cpp.threads": 1, "cpp_wrapper": True})
    assert parse(given.render()) == given
    assert str(given) == "cpp.threads=1, cpp_wrapper=True"
    for text, why in (
        ("[]", "no object"),
        ("{", "not JSON"),
        ('{"freezing": true}', "'freezing' is no option"),
        ('{"emulate_precision_casts": true}', "is no option"),
        ('{"cpp.threads": true}', "cpp.threads = True"),
    ):
        with pytest.raises(BuildFailure, match=why):
            parse(text)


def test_it_reads_for_nobody() -> None:
    assert load(ForgeConfig(), "coder").name == "torch.compile's options"
    with pytest.raises(ConfigError, match=r"chat\.judge\.provider: compiler"):
        load(ForgeConfig(), "judge")


def test_a_session_with_the_compiler_asks_nobody_and_has_one_language(tmp_path: Path) -> None:
    (tmp_path / "cudaforge.yaml").write_text("languages: [cuda]\nchat: {judge: {provider: openai, model: m}}\n")
    config = configs.load({"chat.coder.provider": "compiler"}, root=tmp_path)
    assert languages_for(config, CPU) == languages_for(config, GPU) == ("compiler",)
    models = load_models(config, object())
    assert models.coder is models.judge and isinstance(models.coder, NoModel)


def test_the_plan_of_a_run_promises_no_tokens() -> None:
    planned = PlannedTarget("layers.py::Norm", "compiler", 2, 4, 0, 0, 0, 0.0)
    lines = render_plan(WorkPlan((planned,), "compiler", "compiler"))
    assert "layers.py::Norm: at most 4 configurations of torch.compile, 2 already played, no model" in lines
