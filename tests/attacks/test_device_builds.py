"""The attacks of ``device_rows`` as far as a machine without a GPU goes: plans are traced, kernels compiled to cubins.

What is refused by the builder is refused here already; all others must build, or they would attack nothing.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from device_attacked import device_kernel, find, write_repo
from device_modules import CLOCKS, MODULE_ENDLESS, MODULE_REFUSED, MODULE_ROWS
from device_rows import BOMBS, KEPT_SUMS, LAZY, PLAIN_SUMS, REFUSED, ROWS
from switches import SWITCHES

from pytest_cudaforge import languages
from pytest_cudaforge.evaluation.builder import Builder
from pytest_cudaforge.evaluation.building import Kitchen, Product
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.sandbox import Defences
from pytest_cudaforge.evaluation.zygote import ForkServers
from pytest_cudaforge.languages import clocks
from pytest_cudaforge.records import Candidate, DeviceFacts, Status

_WHY_NOT = languages.load("cuda").availability()
pytestmark = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "NVRTC is here")


@pytest.fixture(scope="module", autouse=True)
def clocks_are_let_in() -> Iterator[None]:
    """Many of the attacks tell the time, which by itself is no build: ``test_device_attacks`` has one for that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks, "check", lambda _: None)
        yield


H200 = DeviceFacts(
    "cuda",
    "NVIDIA H200",
    "sm_90",
    sm_count=132,
    l2_bytes=50 << 20,
    max_shared_bytes=227 << 10,
    memory_bytes=139 << 30,
)
_BUILT = [
    *((row.name, row.attack, row.target) for row in ROWS),
    *((f"{row.name}, twin", row.twin, row.target) for row in ROWS),
    ("save a third of a call after the first", LAZY, "waves"),
    ("read plainly", PLAIN_SUMS, "row_sums"),
    ("ask the cache to keep inputs", KEPT_SUMS, "row_sums"),
    *((name, candidate, "waves") for name, candidate, statuses in REFUSED if Status.BUILD_ERROR not in statuses),
]
_UNLIKE = [(n, c, s) for n, c, s in REFUSED if Status.BUILD_ERROR in s]


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    write_repo(root)
    (root / "secret.h").write_text("// an expected output\n")
    return root


@pytest.fixture(scope="module")
def build(
    tmp_path_factory: pytest.TempPathFactory, repo: Path, guarded: ForkServers
) -> Iterator[Callable[..., Product]]:
    """Trace and compile as a verdict on an H200 does, through the sandboxed builder; facts come from the CPU."""
    cache = tmp_path_factory.mktemp("cache")
    known: dict[str, Product] = {}
    with Evaluator(EvaluatorSettings(cache_dir=cache, lock_dir=cache)) as opened:

        def made(candidate: Candidate, name: str = "waves", servers: ForkServers = guarded) -> Product:
            key = f"{name}\0{candidate.digest}\0{id(servers)}"
            if key not in known:
                facts = opened.facts(find(repo, name))
                kitchen = Kitchen(candidate, facts, H200, arch="sm_90", builder=servers.builder(), cache=None)
                known[key] = kitchen.produce(facts.workloads[0])
            return known[key]

        yield made


@pytest.mark.parametrize(("name", "candidate", "target"), _BUILT, ids=[name for name, _, _ in _BUILT])
def test_it_builds(build: Callable[..., Product], name: str, candidate: Candidate, target: str) -> None:
    product = build(candidate, target)
    assert product.binaries or name == "launch nothing"


@pytest.mark.parametrize(("name", "candidate", "statuses"), _UNLIKE, ids=[name for name, _, _ in _UNLIKE])
def test_the_builder_refuses_it_or_it_is_for_the_device_to_refuse(
    build: Callable[..., Product], name: str, candidate: Candidate, statuses: tuple[Status, ...]
) -> None:
    try:
        build(candidate)
    except Refusal as refusal:
        assert refusal.status in statuses, refusal.reason
        assert "root:" not in refusal.reason
        assert refusal.build is None or "root:" not in refusal.build.log
    else:
        assert any(status not in (Status.BUILD_ERROR, Status.TIMEOUT) for status in statuses)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("name", "candidate", "statuses"), BOMBS, ids=[name for name, _, _ in BOMBS])
def test_a_bomb_ends_in_time(
    build: Callable[..., Product],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    candidate: Candidate,
    statuses: tuple[Status, ...],
) -> None:
    assert Builder.compile.__kwdefaults__ is not None
    monkeypatch.setitem(Builder.compile.__kwdefaults__, "timeout_s", 6)
    began = time.monotonic()
    try:
        build(candidate)
    except Refusal as refusal:
        assert refusal.status in statuses, refusal.reason
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("hidden", [True, False])
def test_a_build_sees_no_file_of_the_repository(
    build: Callable[..., Product],
    repo: Path,
    guarded: ForkServers,
    servers_with: Callable[[Defences], ForkServers],
    hidden: bool,
) -> None:
    secret = repo / "secret.h"
    seen = device_kernel(body=f'\n#include "{secret}"\n HONEST')
    servers = guarded if hidden else servers_with(Defences(files=False))
    if not hidden:
        build(seen, servers=servers)
        return
    with pytest.raises(Refusal, match=r"secret\.h"):
        build(seen, servers=servers)


_MODULES = [
    *((row.name, row.attack) for row in MODULE_ROWS),
    *((f"{row.name}, twin", row.twin) for row in MODULE_ROWS),
    *((name, candidate) for name, candidate, _ in (*MODULE_REFUSED, *MODULE_ENDLESS)),
    *CLOCKS,
]


@pytest.mark.parametrize(("name", "candidate"), _MODULES, ids=[name for name, _ in _MODULES])
def test_a_module_that_attacks_is_python(name: str, candidate: Candidate) -> None:
    ((_, text),) = candidate.files
    assert any(isinstance(node, ast.ClassDef) and node.name == "ModelNew" for node in ast.parse(text).body)


def test_every_row_has_its_switch_or_says_why_not() -> None:
    rows = (*ROWS, *MODULE_ROWS)
    assert len({row.name for row in ROWS}) == len(ROWS) and len({row.name for row in MODULE_ROWS}) == len(MODULE_ROWS)
    assert all((row.off in SWITCHES) != bool(row.why) for row in rows)
    assert {row.promise[0] for row in rows} == {"1", "2", "3", "4"}
