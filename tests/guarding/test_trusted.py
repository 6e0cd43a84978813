"""A pull request may not decide about itself: whatever decides is the merge base's, and what differs is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pytest_cudaforge import trusted
from pytest_cudaforge.config import ForgeConfig, GuardConfig
from pytest_cudaforge.guarded import Change
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import Guard
from pytest_cudaforge.runtime.manifest import Entry, EntryWorkload
from pytest_cudaforge.target import TERMS, TargetOptions, terms_of, with_terms

SPEC = TensorSpec((4, 8), "float32", (8, 1))
ENTRY = Entry(
    target="layers.py::Norm",
    import_name="layers",
    qualname="Norm",
    kind="class",
    path="layers.py",
    source_digest="0" * 64,
    language="cpp",
    arch="cpu",
    directory="norm-000000/cpu",
    files=(),
    guard=Guard(contiguous_only=True, align_bytes=16, drawn_shapes_only=True, reasons=("strided: wrong",)),
    workloads=(EntryWorkload("default", (("0", SPEC),), 3.0, 1.5), EntryWorkload("long", (("0", SPEC),), 2.0)),
    torch="2.13.0",
    device="cpu",
    precision="fp32",
    mode="eval",
)


def texts(changes: tuple[Change, ...]) -> list[str]:
    return [change.text for change in changes]


def test_thresholds_and_allowances_are_the_merge_bases() -> None:
    base = ForgeConfig(file=Path("cudaforge.yaml"), trials=5, history=Path("theirs"))
    head = replace(
        base,
        allow=("rewrite",),
        trials=1,
        isolation="none",
        rounds=3,
        history=Path("ours"),
        guard=GuardConfig(relative=5.0, absolute_us=1e6, promise_margin=0.9, inconclusive="neutral"),
    )
    strict = replace(base, guard=GuardConfig(inconclusive="fail"))
    used, changes = trusted.trusted_settings(head, strict)
    assert (used.allow, used.trials, used.isolation, used.guard) == (None, 5, "auto", strict.guard)
    # Where things lie, and what only forging asks for, is nobody's verdict.
    assert (used.rounds, used.history) == (3, Path("ours"))
    assert texts(changes) == [
        "cudaforge.yaml: allow rewrite, at the merge base none: not obeyed",
        "cudaforge.yaml: trials 1, at the merge base 5: not obeyed",
        "cudaforge.yaml: isolation none, at the merge base auto: not obeyed",
        "cudaforge.yaml: guard.relative 5, at the merge base 0.03: not obeyed",
        "cudaforge.yaml: guard.absolute_us 1e+06, at the merge base 1: not obeyed",
        "cudaforge.yaml: guard.promise_margin 0.9, at the merge base 0.1: not obeyed",
        "cudaforge.yaml: guard.inconclusive neutral, at the merge base fail: not obeyed",
    ]
    assert trusted.trusted_settings(base, base) == (base, ())


def test_a_targets_options_are_the_merge_bases() -> None:
    was = TargetOptions(atol=1e-6, allow=("kernel",), index_outputs=("out.1",))
    loose = replace(was, atol=0.5, allow=("rewrite",), nondeterministic=True, mode="train", index_outputs=(), grad=True)
    base, head = (tuple(terms_of(options).items()) for options in (was, loose))
    terms, changes = trusted.trusted_terms("layers.py::Norm", base, head)
    assert {change.name for change in changes} == {"atol", "allow", "nondeterministic", "mode", "index_outputs", "grad"}
    assert "layers.py::Norm: atol 0.5, at the merge base 1e-06: not obeyed" in texts(changes)
    obeyed = with_terms(loose, terms)
    assert obeyed == replace(was, grad=True), "gradients are verified where either asks for them"
    assert with_terms(was, base) == was and set(terms_of(was)) == set(TERMS)


def test_promises_that_shrink_and_workloads_that_go_are_told() -> None:
    small = TensorSpec((1, 8), "float32", (8, 1))
    head = replace(ENTRY, workloads=(EntryWorkload("default", (("0", small),), 1.01, 1.5),))
    assert texts(trusted.promise_changes(head, ENTRY)) == [
        "layers.py::Norm (cpp, cpu): inputs of default changed, at the merge base others",
        "layers.py::Norm (cpp, cpu): speedup_eager of default 1.01, at the merge base 3: not obeyed",
        "layers.py::Norm (cpp, cpu): workload long gone, at the merge base guarded",
    ]
    assert trusted.promise_changes(ENTRY, ENTRY) == trusted.promise_changes(ENTRY, None) == ()


def test_a_guard_that_allows_more_is_told() -> None:
    for wider in (
        replace(ENTRY.guard, contiguous_only=False),
        replace(ENTRY.guard, align_bytes=4),
        replace(ENTRY.guard, drawn_shapes_only=False),
    ):
        (change,) = trusted.guard_changes(replace(ENTRY, guard=wider), ENTRY)
        assert change.name == "guard" and "16-byte aligned" in change.base and change.head != change.base
    narrower = replace(ENTRY.guard, align_bytes=64, reasons=())
    assert trusted.guard_changes(replace(ENTRY, guard=narrower), ENTRY) == ()
    base = replace(ENTRY, guard=Guard(fixed_sizes=(64,)))
    (change,) = trusted.guard_changes(replace(base, guard=Guard()), base)
    assert (change.base, change.head) == ("64 only", "everything")
    assert trusted.guard_changes(replace(base, guard=Guard(drawn_shapes_only=True)), base) == ()
    base = replace(ENTRY, guard=Guard(equal_sizes_only=True))
    (change,) = trusted.guard_changes(replace(base, guard=Guard()), base)
    assert (change.base, change.head) == ("equal sizes only", "everything")
    assert trusted.guard_changes(replace(base, guard=Guard(drawn_shapes_only=True)), base) == ()
    assert trusted.guard_changes(ENTRY, None) == ()


def test_files_that_run_inside_pytest_are_named() -> None:
    found = trusted.suspicious_files(["layers.py", "tests/conftest.py", ".github/workflows/guard.yml", "docs/x.md"])
    assert [change.place for change in found] == ["tests/conftest.py", ".github/workflows/guard.yml"]
    assert all(change.obeyed for change in found)
    said = trusted.ini_changes("pytest.ini", {"addopts": ["-q"]}, {"addopts": ["-q", "-k", "not slow"], "xfail": True})
    assert texts(said) == ["pytest.ini: addopts -q, -k, not slow, at the merge base -q"]
