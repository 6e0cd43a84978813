"""Which targets are worth a job, and how they are spread: pure."""

from __future__ import annotations

import dataclasses
import json

import pytest
from cudaforge_action.inputs import Runner
from cudaforge_action.matrix import MATRIX_CHARS, Known, Work, matrix, select, shards
from cudaforge_action.records import Shard
from history_records import H200, measurement

from pytest_cudaforge.facts import from_json
from pytest_cudaforge.records import Guard, Target
from pytest_cudaforge.runtime.manifest import Entry, EntryWorkload

GPU = Runner(("self-hosted", "h200"), "cuda", "sm_90", 4)
CPU = Runner(("cpu-box",), "cpu", "", 2)
ANY = Runner(("self-hosted",))


def target(name: str, digest: str = "now") -> Target:
    path = "layers.py"
    return Target(f"{path}::{name}", "/r", path, name, "class", 1, "layers", "/r", name.lower(), "source", digest)


def entry(name: str, arch: str = "sm_90", digest: str = "now", gains: tuple[float | None, ...] = (2.0,)) -> Entry:
    of = target(name)
    workloads = tuple(EntryWorkload(f"w{number}", (), gain, None) for number, gain in enumerate(gains))
    language = "cpp" if arch == "cpu" else "cuda"
    return Entry(
        *(of.id, "layers", name, "class", of.path, digest, language, arch, f"{of.slug}/{arch}", (), Guard()),
        *(workloads, "2.10.0", "a device", "fp32", "eval"),
    )


def known(name: str, **rest: object) -> Known:
    of = {key: rest.pop(key) for key in ("arch", "digest", "gains") if key in rest}
    return Known(entry(name, **of), "forged/manifest.json", **rest)  # type: ignore[arg-type]


def reasons(work: tuple[Work, ...]) -> list[tuple[str, str]]:
    return [(one.target.partition("::")[2], one.reason) for one in work]


# -- which ---------------------------------------------------------------------------------------------------------


def test_new_stale_and_thin_are_work_and_nothing_else() -> None:
    targets = [target(name) for name in ("Fine", "New", "Stale", "Thin", "Broken")]
    kernels = [
        known("Fine"),
        known("Stale", digest="before"),
        known("Thin", gains=(1.05,)),
        known("Broken", damage="its files are not those that were verified: kernel.cu is gone"),
    ]
    work = select(targets, kernels, [GPU], min_headroom=1.1)
    assert reasons(work) == [("Broken", "stale"), ("Stale", "stale"), ("New", "new"), ("Thin", "thin")]
    why = {one.target.partition("::")[2]: one.why for one in work}
    assert "source has changed" in why["Stale"] and "kernel.cu is gone" in why["Broken"]
    assert "1.05x" in why["Thin"] and "1.1x" in why["Thin"] and why["New"] == "it has no kernel yet"


def test_a_kernel_counts_for_the_runners_it_serves() -> None:
    targets, kernels = [target("A")], [known("A", arch="sm_80")]
    assert select(targets, kernels, [ANY]) == ()
    assert select(targets, kernels, [Runner(("x",), "cuda")]) == ()
    (here,) = select(targets, kernels, [GPU])
    assert here.reason == "new" and here.why == "it has a kernel for sm_80 only"
    assert [one.runner for one in select(targets, kernels, [GPU, CPU])] == [GPU, CPU]


def test_what_the_open_pull_request_brings_is_no_work() -> None:
    targets = [target(name) for name in ("A", "B", "C", "D")]
    kernels = [
        known("A", proposed=True),  # new here, done there
        known("B", digest="before"),
        known("B", proposed=True),  # stale here, mended there
        known("C", proposed=True, digest="before"),  # what lies there is void by now
        known("D", gains=(1.0,)),
        known("D", proposed=True, gains=(1.04,)),  # thin in both places: it has just been tried
    ]
    assert reasons(select(targets, kernels, [GPU])) == [("C", "stale")]


def test_the_faster_baseline_and_the_mean_over_workloads_count() -> None:
    thin = dataclasses.replace(entry("A"), workloads=(EntryWorkload("w", (), 3.0, 1.02),))
    assert reasons(select([target("A")], [Known(thin)], [GPU])) == [("A", "thin")]
    mean = entry("A", gains=(1.0, 1.44))
    assert select([target("A")], [Known(mean)], [GPU], min_headroom=1.19) == ()
    assert reasons(select([target("A")], [Known(mean)], [GPU], min_headroom=1.21)) == [("A", "thin")]
    untimed = entry("A", gains=(None,))
    assert select([target("A")], [Known(untimed)], [GPU]) == ()


def test_the_thinnest_first() -> None:
    targets = [target(name) for name in ("A", "B", "C")]
    kernels = [known("A", gains=(1.08,)), known("B", gains=(1.01,)), known("C", gains=(1.05,))]
    assert [one.target[-1] for one in select(targets, kernels, [GPU])] == ["B", "C", "A"]


def test_history_knows_todays_speedup_and_torch() -> None:
    times = {"candidate": 100.0, "eager": 150.0, "compile": 103.0}
    today = measurement(1, times, target="layers.py::A", kernel="k1")
    kernel = Known(dataclasses.replace(entry("A"), torch=H200.toolchain.torch), digest="k1")
    (work,) = select([target("A")], [kernel], [GPU], measured=[today])
    assert (work.reason, work.speedup) == ("thin", pytest.approx(1.03)) and "measured 2026-09-02" in work.why
    disturbed = measurement(2, times | {"compile": 50.0}, target="layers.py::A", kernel="k1", disturbed="a build")
    assert select([target("A")], [kernel], [GPU], measured=[today, disturbed]) == (work,)
    other = dataclasses.replace(kernel, digest="k2")  # the measurement is of another kernel
    assert select([target("A")], [other], [GPU], measured=[today]) == ()
    newer = dataclasses.replace(H200, toolchain=dataclasses.replace(H200.toolchain, torch="3.0.0"))
    elsewhere = measurement(3, times, target="layers.py::B", machine=newer)
    (work,) = select([target("A")], [other], [GPU], measured=[today, elsewhere])
    assert work.reason == "stale" and H200.toolchain.torch in work.why and "3.0.0 (measured 2026-09-04)" in work.why


# -- how they are spread -------------------------------------------------------------------------------------------


def works(count: int, runner: Runner = GPU, weights: tuple[float, ...] = (1.0,), name: str = "T{}") -> list[Work]:
    return [
        Work(f"layers.py::{name.format(number)}", runner, "new", "why", weights[number % len(weights)])
        for number in range(count)
    ]


def test_the_longest_first_onto_the_least_loaded() -> None:
    made = shards(works(8, weights=(4.0, 3.0, 2.0, 1.0)), [GPU], 16)
    assert [shard.name for shard in made] == ["01-sm_90", "02-sm_90", "03-sm_90", "04-sm_90"]
    assert [shard.weight for shard in made] == [5.0] * 4
    assert sorted(name for shard in made for name in shard.targets) == sorted(one.target for one in works(8))
    assert {shard.runs_on for shard in made} == {GPU.labels} and {shard.device for shard in made} == {"cuda"}


def test_inside_a_shard_the_most_useful_comes_first() -> None:
    (shard,) = shards(works(3, ANY, (1.0, 2.0, 3.0)), [ANY], 16)
    assert shard.targets == ("layers.py::T0", "layers.py::T1", "layers.py::T2") and shard.name == "01-any"


@pytest.mark.parametrize(("most", "expected"), [(16, {"h200": 4, "cpu-box": 2}), (3, {"h200": 2, "cpu-box": 1})])
def test_no_more_jobs_than_allowed_and_every_kind_gets_one(most: int, expected: dict[str, int]) -> None:
    made = shards([*works(40), *works(10, CPU)], [GPU, CPU], most)
    found = {label: sum(label in shard.runs_on for shard in made) for label in expected}
    assert found == expected
    assert sum(len(shard.targets) for shard in made) == 50


def test_fewer_jobs_than_kinds_of_runner() -> None:
    made = shards([*works(4), *works(4, CPU)], [GPU, CPU], 1)
    assert [shard.name for shard in made] == ["01-sm_90"] and len(made[0].targets) == 4


def test_no_job_is_empty_and_no_work_is_no_job() -> None:
    assert len(shards(works(2), [GPU], 16)) == 2
    assert shards([], [GPU, CPU], 16) == ()
    assert json.loads(matrix(())) == {"include": []}


def test_never_more_than_githubs_256_jobs() -> None:
    many = [Runner((f"box-{number}",), "cuda", "", 256) for number in range(3)]
    made = shards([one for runner in many for one in works(300, runner)], many, 256)
    assert len(made) == 256 and len({shard.name for shard in made}) == 256


def test_a_job_output_and_a_variable_have_room_for_it() -> None:
    names = [*works(1500, name="Quite" * 40 + "Long{}"), *works(1500, name='Ünï"\\' * 30 + "{}")]
    made = shards(names, [GPU], 16)
    text = matrix(made)
    assert len(text) <= MATRIX_CHARS and len(text.encode("utf-16-le")) <= 1_000_000
    rows = json.loads(text)["include"]
    assert all(len(row["shard"].encode()) < 128 * 1024 for row in rows)
    left = len(names) - sum(len(shard.targets) for shard in made)
    assert 0 < left < len(names)
    first = {one.target for one in names[:500]}
    assert first <= {name for shard in made for name in shard.targets}


def test_one_shard_fits_into_a_variable() -> None:
    (shard,) = shards(works(2000, ANY, name="Long" * 25 + "{}"), [ANY], 16)
    assert 50_000 < len(json.dumps(shard.targets)) < 128 * 1024


def test_a_row_holds_its_shard() -> None:
    made = shards(works(3), [GPU], 2)
    for row, shard in zip(json.loads(matrix(made))["include"], made, strict=True):
        assert row["name"] == shard.name and row["runs-on"] == ["self-hosted", "h200"]
        assert from_json(Shard, json.loads(row["shard"])) == shard


def test_a_runners_arch_is_no_part_of_a_path() -> None:
    (shard,) = shards(works(1, Runner(("x",), "", "../sm_90")), [Runner(("x",), "", "../sm_90")], 4)
    assert shard.name == "01-_sm_90"
