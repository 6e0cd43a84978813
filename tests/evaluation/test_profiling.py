"""The ladder of profiles where its upper rungs break: real programs stand in for ncu, and none of them is fatal."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import planted_faults
import pytest

from pytest_cudaforge import languages
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation import counter_profiling
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.contract import CallProfile
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.evaluation.profiling import ProfiledCall, Profiler, module_profile
from pytest_cudaforge.languages import units_of
from pytest_cudaforge.records import Candidate, DeviceFacts, Profile
from pytest_cudaforge.runtime.library import MetaShapes
from pytest_cudaforge.runtime.signature import Signature
from pytest_cudaforge.runtime.trace import trace

H200 = DeviceFacts(
    kind="cuda",
    name="NVIDIA H200",
    arch="sm_90",
    sm_count=132,
    l2_bytes=60 << 20,
    bandwidth_bytes_per_s=4.3e12,
    extra=(
        ("max_blocks_per_sm", "32"),
        ("max_threads_per_sm", "2048"),
        ("registers_per_sm", "65536"),
        ("shared_bytes_per_sm", "233472"),
    ),
)
REFUSED = """\
==PROF== Connected to process 4242 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target \
device 0. For instructions on enabling permissions and to get more information see \
https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 4242
"""


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProfiledCall, OracleClient]]:
    """A CUDA candidate as it would be on an H200; its inputs are small."""
    cuda = languages.load("cuda")
    if reason := cuda.availability():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("repo")
    (root / "faults.py").write_text(planted_faults.LAYERS.replace("4096, 4096", "64, 64"))
    target = next(t for t in discover([root / "faults.py"], root).targets if t.id.endswith("::chain"))
    candidate = planted_faults.FAULTS[-1].candidate
    with OracleClient("cpu", cache_dir=root / "cache") as oracle:
        facts = oracle.facts(target)
        workload = facts.workloads[0]
        signature = Signature(workload.inputs, workload.input_tree, facts.module, H200, "cuda")
        traced = trace(candidate.file("plan.py"), signature, MetaShapes())
        source = candidate.file("kernel.cu")
        binaries = tuple(cuda.compile(source, unit, "sm_90") for unit in units_of(traced))
        yield ProfiledCall(candidate, target, facts, Product(workload, traced, binaries), H200), oracle


def _profile(call: tuple[ProfiledCall, OracleClient], folder: Path, script: str | None) -> tuple[Profile, Profiler]:
    """With a shell script as ncu, or without any."""
    path = folder / "bin"
    path.mkdir(exist_ok=True)
    if script is not None:
        (path / "ncu").write_text(f"#!/bin/sh\n{script}\n")
        os.chmod(path / "ncu", stat.S_IRWXU)
    profiler = Profiler("cpu", call[1], folder / "cache", {"PATH": f"{path}:{os.defpath}", "CUDA_HOME": str(folder)})
    return profiler.profile(call[0], "quick"), profiler


def _stands_below(profile: Profile) -> None:
    """What is always there: the plan's kernels with what their binary tells."""
    assert profile.rung == "static"
    assert [kernel.function for kernel in profile.kernels] == ["twice", "increment", "positive"]
    facts = {name: value for name, value, _ in profile.facts}
    # The plan writes and reads two buffers that nobody outside sees.
    assert facts["scratch_bytes"] == 2 * facts["minimal_bytes"] == 4 * 64 * 64 * 4
    metrics = {name: value for name, value, _ in profile.kernels[0].metrics}
    assert metrics["sm__maximum_warps_per_active_cycle_pct"] == 100.0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"cat <<'END'\n{REFUSED}END\nexit 1", "ERR_NVGPUCTRPERM: this user may not read"),
        ("echo '==ERROR== Something that nobody foresaw'; exit 3", "Something that nobody foresaw"),
        ("head -c 20000 /dev/urandom; exit 0", "the replay did not come to its end"),
        # It says that it profiled, and what it prints is none of its pages.
        (
            'for last; do :; done; case "$*" in *"--import "*) head -c 9999 /dev/urandom;; *) '
            'echo \'{"done": true}\' > "$last/outcome.json"; touch "$last/report.ncu-rep";; esac',
            "ncu printed no metrics that can be read",
        ),
    ],
)
def test_a_broken_ncu_leaves_a_lower_rung_and_a_note(
    call: tuple[ProfiledCall, OracleClient], tmp_path: Path, script: str, words: str
) -> None:
    profile, _ = _profile(call, tmp_path, script)
    _stands_below(profile)
    assert profile.notes[0].startswith("no Nsight Compute: ") and words in profile.notes[0]
    assert profile.notes[1].startswith("no kernel times: ")


def test_without_ncu_the_note_says_so_and_a_lasting_refusal_is_asked_for_once(
    call: tuple[ProfiledCall, OracleClient], tmp_path: Path
) -> None:
    profile, _ = _profile(call, tmp_path, None)
    _stands_below(profile)
    assert "ncu was not found" in profile.notes[0]
    asked = tmp_path / "asked"
    refusing = f"echo x >> {asked}\ncat <<'END'\n{REFUSED}END\nexit 1"
    first, profiler = _profile(call, tmp_path, refusing)
    again = profiler.profile(call[0], "full")
    assert asked.read_text() == "x\n"
    assert again.notes[0] == first.notes[0]


#: It knows one metric of those asked for not, as some versions say it; then it plays back what a real one printed.
PLAYING = """
case "$*" in
*"--import "*) page=$(echo "$*" | sed 's/.*--page \\([a-z]*\\).*/\\1/'); cat PAGES/travelling-$page.csv; exit;;
*sm__inst_executed_pipe_fp32.*) echo "==ERROR== Failed to find metric METRIC"; exit 1;;
esac
echo x >> ASKED
echo '{"done": true}' > outcome.json
echo report > report.ncu-rep
"""


def test_an_unknown_metric_is_left_out_and_the_run_goes_on(
    call: tuple[ProfiledCall, OracleClient], tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    script = PLAYING.replace("PAGES", str(Path(__file__).parent / "data" / "ncu")).replace("ASKED", str(asked))
    script = script.replace("METRIC", "sm__inst_executed_pipe_fp32.avg.pct_of_peak_sustained_active")
    profile, profiler = _profile(call, tmp_path, script)
    assert profile.rung == "ncu" and profile.depth == "quick", profile.notes
    assert {kernel.function for kernel in profile.kernels} == {"twice", "increment", "positive"}
    assert profile.lines and not profile.rules
    assert Path(profile.report).read_text() == "report\n"
    full = profiler.profile(call[0], "full")
    assert full.rung == "ncu" and full.rules and full.report != profile.report
    # Kernels were looked at alone, inside the call, and at full depth alone: what is known is not asked again.
    assert asked.read_text() == 3 * "x\n"
    counted = {name for kernel in full.kernels for name, _, _ in kernel.metrics}
    assert {"in_call__duration", "in_call__dram_bytes", "in_call__dram_share_of_ceiling"} <= counted
    # A look inside the call that takes two passes finds in the caches what the first of them left: it counts nothing.
    told = """echo '==PROF== Profiling "k" - 0: 100% - 2 passes' > inside.log"""
    twice = f'case "$*" in *"--cache-control none"*) {told};; esac'
    alone, profiler = _profile(call, tmp_path, f"{twice}\n{script}")
    again = profiler.profile(call[0], "quick")
    assert alone.rung == "ncu" and alone.notes == again.notes
    assert any("looked at alone only" in note and "in one pass" in note for note in alone.notes)
    assert not [name for kernel in alone.kernels for name, _, _ in kernel.metrics if name.startswith("in_call")]
    assert asked.read_text() == (3 + 2 + 1) * "x\n", "it was not tried again"


def test_where_nvidias_module_does_not_read_a_report_its_pages_are_printed(
    call: tuple[ProfiledCall, OracleClient], tmp_path: Path
) -> None:
    beside = tmp_path / "bin" / "extras" / "python"
    beside.mkdir(parents=True)
    tried = tmp_path / "tried"
    beside.joinpath("ncu_report.py").write_text(
        f"def load_report(path):\n    open({str(tried)!r}, 'w').close()\n    raise RuntimeError('of another version')\n"
    )
    script = PLAYING.replace("PAGES", str(Path(__file__).parent / "data" / "ncu")).replace("ASKED", "/dev/null")
    profile, _ = _profile(call, tmp_path, script.replace("*sm__inst_executed_pipe_fp32.*)", "*nothing*)"))
    assert tried.exists()
    assert profile.rung == "ncu" and profile.lines, profile.notes


def test_a_profiler_that_hangs_is_left_alone(
    call: tuple[ProfiledCall, OracleClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counter_profiling, "_RUN_S", {"quick": 0.4, "full": 0.4})
    first, profiler = _profile(call, tmp_path, "sleep 600")
    _stands_below(first)
    profiler.profile(call[0], "quick")
    # Whatever it would say now, nobody asks it any more.
    (tmp_path / "bin" / "ncu").write_text("#!/bin/sh\necho '==ERROR== awake again'\nexit 1\n")
    assert "ncu was ended after 0.4 s" in profiler.profile(call[0], "full").notes[0]


def test_a_modules_profile_names_its_kernels_where_there_are_any(call: tuple[ProfiledCall, OracleClient]) -> None:
    one = replace(call[0], candidate=Candidate.of("module", {"candidate.py": "@triton.jit\ndef twice(x, y): ..."}))
    kernels = (
        ("twice", 6000, 3),
        ("void at::native::copy<int>(float*)", 3000, 6),
        ("Memcpy DtoD (Device -> Device)", 30, 3),
    )
    seen = CallProfile(1, 6000, (("aten::copy_", 3000),), kernels=kernels)
    profile = module_profile(one, "quick", seen, 3)
    assert profile.rung == "cupti"
    assert [(kernel.function, kernel.own, kernel.launches, kernel.duration_ns) for kernel in profile.kernels] == [
        ("twice", True, 1, 2000.0),
        ("at::native::copy", False, 2, 1000.0),
        ("Memcpy DtoD", False, 1, 10.0),
    ]
    on_a_cpu = module_profile(one, "quick", replace(seen, kernels=()), 3)
    assert on_a_cpu.rung == "static"
    assert [(kernel.function, kernel.own) for kernel in on_a_cpu.kernels] == [
        ("its own functions", True),
        ("aten::copy_", False),
    ]
