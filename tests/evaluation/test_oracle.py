"""The oracle's process: targets of all kinds, their errors in their author's words, and its own death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judged_targets import find, write_repo

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import OracleError, TargetError
from pytest_cudaforge.evaluation.oracle import FATAL_VARIANT, OracleClient, compiler_caches
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import to_json


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OracleClient]:
    with OracleClient(cache_dir=tmp_path_factory.mktemp("cache")) as client:
        yield client


def test_facts_of_a_module(oracle: OracleClient, repo: Path) -> None:
    facts = oracle.facts(find(repo, "::RMSNorm"))
    (workload,) = facts.workloads
    assert workload.inputs == (("0", TensorSpec((33, 512), "float32", (512, 1))),)
    assert facts.module["attributes"]["eps"] == 1e-6
    assert (facts.mode, facts.precision, workload.state_bytes) == ("eval", "fp32", 2048)


def test_facts_of_keywords_several_workloads_and_outputs(oracle: OracleClient, repo: Path) -> None:
    facts = oracle.facts(find(repo, "::pair"))
    assert [workload.name for workload in facts.workloads] == ["default", "wide"]
    assert [path for path, _ in facts.workloads[1].outputs] == ["out.top", "out.count"]
    assert facts.workloads[1].inputs[0][0] == "kw.x"


def test_kernelbench_file_gets_torchs_defaults_and_its_own_mode(oracle: OracleClient, repo: Path) -> None:
    facts = oracle.facts(find(repo, "relu.py::Model"))
    assert (facts.precision, facts.mode) == ("default", "train")
    assert oracle.structures(find(repo, "relu.py::Model"), "default") == {"0": "generic"}


NETWORK = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(LAYERS)])

    def forward(self, x):
        return self.layers(x)

def get_inputs():
    return [torch.randn(2, 8)]

def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(("layers", "allow"), [(2, ("kernel",)), (4, ("kernel", "mixed", "library"))])
def test_of_a_whole_network_a_part_may_be_fused(
    oracle: OracleClient, tmp_path: Path, layers: int, allow: tuple[str, ...]
) -> None:
    (tmp_path / "net.py").write_text(NETWORK.replace("LAYERS", str(layers)))
    (target,) = discover([tmp_path / "net.py"], tmp_path).targets
    assert oracle.facts(target).allow == allow


def test_relative_imports_work(oracle: OracleClient, repo: Path) -> None:
    assert oracle.facts(find(repo, "::scaled")).workloads[0].output_bytes == 128


def test_two_roots_with_one_package_name_do_not_meet(oracle: OracleClient, repo: Path, tmp_path: Path) -> None:
    write_repo(tmp_path)
    (tmp_path / "mypkg" / "layers.py").write_text(
        (tmp_path / "mypkg" / "layers.py").read_text().replace("torch.randn(4, 8)", "torch.randn(2, 2)")
    )
    assert oracle.facts(find(tmp_path, "::scaled")).workloads[0].output_bytes == 16
    assert oracle.facts(find(repo, "::scaled")).workloads[0].output_bytes == 128


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "::inputs_raise",
            ["drawing inputs of workload 'default' failed", "broken.py:9 in bad_inputs", "no data here"],
        ),
        ("::forward_raises", ["its forward failed", "return x @ torch.ones(4)"]),
        ("::returns_text", ["returns str, no tensor|no tensor"]),
        ("::no_inputs", ["no inputs are declared", "forge_target(inputs="]),
        ("::WrongInit", ["constructing it failed", "TypeError"]),
    ],
)
def test_errors_are_in_the_authors_words(oracle: OracleClient, repo: Path, name: str, words: list[str]) -> None:
    with pytest.raises(TargetError) as caught:
        oracle.facts(find(repo, name))
    text = str(caught.value)
    assert all(any(choice in text for choice in word.split("|")) for word in words), text
    assert "site-packages" not in text
    assert "subject.py" not in text


def test_a_target_that_exits_is_its_own_error_and_the_oracle_starts_anew(oracle: OracleClient, repo: Path) -> None:
    before = oracle.pid
    with pytest.raises(TargetError, match=r"(?s)exits: its own code ended the process \(exit status 7\) at facts"):
        oracle.facts(find(repo, "::exits"))
    assert oracle.facts(find(repo, "::softmax")).workloads[0].output_bytes == 16 * 300 * 4
    assert oracle.pid != before


_DRY = """
import torch
from pytest_cudaforge import forge_target

drawn = 0


def draw():
    global drawn
    drawn += 1
    if drawn > 12:
        raise RuntimeError("no rows are left")
    return [torch.randint(0, 1000, (64,))]


@forge_target(inputs=draw)
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x
"""


def test_what_goes_wrong_while_redraws_are_found_is_told_and_none_is_left_out(
    oracle: OracleClient, tmp_path: Path
) -> None:
    (tmp_path / "dry.py").write_text(_DRY)
    (target,) = discover([tmp_path / "dry.py"], tmp_path).targets
    oracle.facts(target)
    with pytest.raises(TargetError, match="no rows are left"):
        oracle.families(target, "default")


_ENDING = """
import os
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(8, 3000), torch.randint(0, 3000, (8, 64))])
def gathered(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    if int(places.sum()) > 2000 * places.numel():
        ENDS
    return x.gather(1, places)
"""


@pytest.mark.parametrize(
    ("ends", "gone"),
    [
        # As a GPU's assertion does: what says so is the last answer of its process.
        ('raise RuntimeError("CUDA error: device-side assert triggered")', {"highest"}),
        ("os._exit(3)", {"highest", "lowest", "ends"}),
    ],
)
def test_redraws_on_which_a_reference_ends_its_process_are_asked_for_once(
    oracle: OracleClient, tmp_path: Path, ends: str, gone: set[str]
) -> None:
    """A later question in the same verdict must not end the process that holds its benches; the others remain."""
    (tmp_path / "ending.py").write_text(_ENDING.replace("ENDS", ends))
    (target,) = discover([tmp_path / "ending.py"], tmp_path).targets
    found = oracle.families(target, "default")
    generation = oracle.generation
    assert {"large", "faint"} <= set(found) and not gone & set(found)
    assert oracle.families(target, "default") == found and oracle.generation == generation


def test_a_killed_oracle_is_an_oracle_error_and_starts_anew(oracle: OracleClient) -> None:
    oracle.request("hello")
    assert oracle.pid is not None
    os.kill(oracle.pid, signal.SIGKILL)
    with pytest.raises(OracleError, match="the oracle died"):
        oracle.request("hello")
    assert oracle.request("hello")["torch"]


def test_lint_names_targets_that_a_trivial_kernel_would_pass(oracle: OracleClient, repo: Path) -> None:
    assert oracle.lint(find(repo, "::softmax"), "default") == ()
    problems = " ".join(finding.text for finding in oracle.lint(find(repo, "::constant"), "default"))
    assert "a constant would pass" in problems
    assert "zeros would pass" in problems


def test_strides_on_which_the_device_fails_are_left_out_and_the_others_are_not(
    oracle: OracleClient, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of torch's kernels end a GPU's context where rows are not aligned."""
    request, asked = oracle.request, []

    def failing(op: str, **args: Any) -> Any:
        asked.append((args["fatal"].copy(), args.get("sizes", True)))
        for kind in ("strided", "strided in front"):
            if kind not in args["fatal"]:
                raise OracleError(f"{FATAL_VARIANT}{kind}")
        return request(op, **args)

    monkeypatch.setattr(oracle, "request", failing)
    monkeypatch.setattr(oracle, "_variants", {})
    names = [name for name, _ in oracle.variants(find(repo, "::softmax"), "default")]
    assert asked == [([], True), (["strided"], True), (["strided", "strided in front"], True)]
    assert "strided" not in names and any(name.startswith("strided step") for name in names)
    assert any(name.startswith("size") for name in names)


@pytest.mark.parametrize(
    ("fails", "sizes"), [("apart -> at 0[0]", True), ("all but last ->", True), ("size ->", False)]
)
def test_sizes_on_which_the_device_fails_are_left_out_and_the_others_are_not(
    oracle: OracleClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, sizes: bool
) -> None:
    """Places that are told of one input end a GPU's context where another one is shorter."""
    (tmp_path / "pairs.py").write_text(
        "import torch\nfrom pytest_cudaforge import forge_target\n"
        "@forge_target(inputs=lambda: [torch.randn(40, 8), torch.randn(40, 40)], dynamic=True)\n"
        "def pairs(x, y):\n    return x.sum(), y.sum(-1)\n"
    )
    request, asked = oracle.request, []

    def failing(op: str, **args: Any) -> Any:
        asked.append((args["fatal"].copy(), args.get("sizes", True)))
        if not args["fatal"] and args.get("sizes", True):
            raise OracleError(f"{FATAL_VARIANT}{fails}")
        return request(op, **args)

    monkeypatch.setattr(oracle, "request", failing)
    names = [name for name, _ in oracle.variants(find(tmp_path, "::pairs"), "default")]
    word = fails.partition(" ")[0]
    assert asked == [([], True), ([word], True) if sizes else ([], False)]
    assert not any(name.startswith(word) for name in names)
    assert any(name.startswith("size") for name in names) == sizes
    assert {"apart", "all", "tall", "mixed"} - {word} <= {name.partition(" ")[0] for name in names} or not sizes


def test_variants_are_those_the_reference_takes(oracle: OracleClient, repo: Path) -> None:
    names = [name for name, _ in oracle.variants(find(repo, "::RMSNorm"), "default")]
    assert [name for name in names if name.startswith("strided")] == names[:3]
    assert {name.split(" -> ")[0] for name in names[3:]} == {"size 33", "tiny 33"}
    assert {"size 33 -> 32", "size 33 -> 100"} < set(names)
    assert "size 300 -> 299" in [name for name, _ in oracle.variants(find(repo, "::softmax"), "default")]


def test_environment_holds_no_secret(
    oracle: OracleClient, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    (tmp_path / "leak.py").write_text(
        "import os, torch\nfrom pytest_cudaforge import forge_target\n"
        "@forge_target(inputs=lambda: [torch.ones(int('OPENAI_API_KEY' in os.environ) + 1)])\n"
        "def leak(x):\n    return x + 1\n"
    )
    with OracleClient(cache_dir=tmp_path) as fresh:
        assert fresh.facts(find(tmp_path, "::leak")).workloads[0].output_bytes == 4


def test_changed_files_of_a_package_are_imported_again(oracle: OracleClient, tmp_path: Path) -> None:
    write_repo(tmp_path)
    assert oracle.facts(find(tmp_path, "::scaled")).workloads[0].output_bytes == 128
    layers = tmp_path / "mypkg" / "layers.py"
    layers.write_text(layers.read_text().replace("randn(4, 8)", "randn(4, 9)"))
    assert oracle.facts(find(tmp_path, "::scaled")).workloads[0].output_bytes == 144


def test_a_stopped_oracle_ends_with_a_killed_supervisor(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom pytest_cudaforge.evaluation.oracle import OracleClient\n"
        "client = OracleClient(cache_dir=Path(sys.argv[1]))\nclient.start()\n"
        "with client.paused():\n    print(client.pid, flush=True)\n    time.sleep(60)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    supervisor.kill()
    supervisor.wait()
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the oracle outlived its supervisor")


def test_a_reference_that_does_not_compile_has_no_compile_baseline(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    with OracleClient(cache_dir=tmp_path) as fresh:
        target = to_json(find(repo, "::softmax"))
        found = fresh.request("rotation", target=target, workload="default", frames=2, compiled=True)
    assert found["parties"] == ["eager"]
    assert found["compile_note"].startswith("torch.compile failed: ")


def test_timeout_ends_a_hanging_reference(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(
        "import time, torch\nfrom pytest_cudaforge import forge_target\n"
        "@forge_target(inputs=lambda: [torch.ones(2)])\ndef hang(x):\n    time.sleep(600)\n    return x\n"
    )
    with OracleClient(cache_dir=tmp_path) as fresh:
        fresh.request("hello")
        fresh.timeout_s = 0.5
        with pytest.raises(OracleError, match=r"did not answer facts within 0.5 s"):
            fresh.facts(find(tmp_path, "::hang"))
        assert fresh.pid is None


@pytest.mark.parametrize(
    ("said", "folder"), [("", "cache/inductor"), ("own", "own"), ("/somewhere/else", "/somewhere/else")]
)
def test_what_the_compiler_made_lies_where_its_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", said)
    places = dict(compiler_caches(tmp_path / "cache"))
    assert places["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / folder)
    assert places["TRITON_CACHE_DIR"] == str(tmp_path / folder / "triton")
