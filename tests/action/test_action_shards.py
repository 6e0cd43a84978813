"""What jobs hand each other is read strictly: one row for each way in which a folder may lie."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shard_records
from cudaforge_action.artifact import ArtifactError, digest_of, files_below, read_json
from cudaforge_action.records import VerifiedKernel, VerifiedShard
from cudaforge_action.shards import (
    FORGED_DIR,
    Forged,
    ShardError,
    Verified,
    candidate_of,
    check_name,
    check_target,
    read_forged,
    read_verified,
    write_forged,
    write_verified,
)
from flow_records import make_facts

from pytest_cudaforge.languages.binary import Binary, CompiledLaunch, KernelInfo
from pytest_cudaforge.languages.cache import BuildCache
from pytest_cudaforge.languages.published import binary_digest, encode_binaries
from pytest_cudaforge.publishing import publish
from pytest_cudaforge.records import Build, Candidate, Isolation, KernelResources, Status, Target
from pytest_cudaforge.runtime.manifest import EntryFile


@pytest.fixture
def targets(tmp_path: Path) -> list[Target]:
    return [shard_records.target(tmp_path, name) for name in ("scale", "shift")]


@pytest.fixture
def forged(tmp_path: Path, targets: list[Target]) -> Path:
    folder = tmp_path / "forged-shards" / "01-cpu"
    shard_records.forged(folder, targets)
    (folder / "junit.xml").write_text("<testsuites/>")
    return folder


@pytest.fixture
def verified(tmp_path: Path, targets: list[Target]) -> Path:
    folder = tmp_path / "verified-shards" / "01-cpu"
    shard_records.verified(folder, targets)
    return folder


def edit(folder: Path, change: Callable[[Any], None], name: str = "shard.json") -> None:
    path = folder / name
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def kernels_of(data: Any) -> Any:
    return data["shard"]["kernels"]


def trace_file(folder: Path) -> Path:
    return sorted((folder / "traces").iterdir())[0]


def place_of(folder: Path) -> Path:
    """The folder of the first kernel's files."""
    entry = read_verified(folder).shard.kernels[0].entry
    assert entry is not None
    return folder / FORGED_DIR / entry.directory


# -- what is right -------------------------------------------------------------------------------------------------


def test_a_forged_shard_comes_back(forged: Path, targets: list[Target]) -> None:
    found = read_forged(forged)
    assert isinstance(found, Forged) and found.shard.usd == 0.06 and found.reports == ("junit.xml",)
    assert [kernel.target for kernel, _ in found.kernels] == [target.id for target in targets]
    kernel, trace = found.kernels[0]
    assert candidate_of(kernel, trace).digest == kernel.digest and trace.rounds[1].feedback is not None


def test_a_verified_shard_comes_back_with_its_files(verified: Path) -> None:
    found = read_verified(verified)
    assert isinstance(found, Verified) and len(found.files) == 2
    for kernel in found.shard.kernels:
        assert kernel.entry is not None
        files = found.files[kernel.entry.directory]
        assert set(files) == {"kernel.cpp", "plan.py", "evaluation.json", "report.md", "report.svg"}
        assert files["kernel.cpp"] == b"// fast\n"


def test_the_trace_of_what_was_verified(forged: Path, verified: Path) -> None:
    found = read_forged(forged)
    for kernel in read_verified(verified).shard.kernels:
        trace = found.trace_of(kernel)
        assert trace is not None and trace.target == kernel.target
        assert found.trace_of(dataclasses.replace(kernel, digest="0" * 64)) is None


def test_what_was_not_verified_has_a_reason_and_no_files(tmp_path: Path, targets: list[Target]) -> None:
    folder = tmp_path / "none" / "01-cpu"
    shard = shard_records.verified(folder, targets[:1])
    lacking = VerifiedKernel(targets[1].id, targets[1].digest, "cpp", "0" * 64, None, None, "there is no GPU here")
    write_verified(folder, dataclasses.replace(shard, kernels=(*shard.kernels, lacking)))
    found = read_verified(folder)
    assert found.shard.kernels[1].reason == "there is no GPU here" and len(found.files) == 1


def test_half_a_character_in_a_trace_can_be_handed_on(tmp_path: Path, targets: list[Target]) -> None:
    folder = tmp_path / "half" / "01-cpu"
    shard = shard_records.forged(folder, targets[:1])
    name = shard.kernels[0].trace
    trace = dataclasses.replace(shard_records.trace(targets[0]), notes=("a log with \ud800 in it",))
    write_forged(folder, shard, {name: trace})
    assert read_forged(folder).kernels[0][1].notes == ("a log with ? in it",)


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "..", "a..b", "a/b", "-x", "a b", "x" * 65, "a\n", "é"])
def test_odd_names_of_shards(name: str) -> None:
    with pytest.raises(ShardError):
        check_name(name)


@pytest.mark.parametrize(
    "target",
    [
        *("", "layers.py", "layers.py::", "::A", "../up.py::A", "a/../b.py::A", "/etc/x.py::A", "a//b.py::A"),
        *("a\\b.py::A", "a.txt::A", "a\0.py::A", "a\n.py::A", "a.py::A B", "a.py::A.", "a.py::<b>", "./a.py::A"),
        *("a\u202e.py::A", "x" * 1000 + ".py::A"),
    ],
)
def test_odd_targets(target: str) -> None:
    with pytest.raises(ShardError):
        check_target(target)


def test_honest_targets() -> None:
    for target in ("a.py::A", "pkg/sub-dir/a b.py::Outer.Inner", "naïve/ü.py::Norm", "36_RMSNorm_.py::Model"):
        assert check_target(target) == target


# -- folders -------------------------------------------------------------------------------------------------------


def link(folder: Path) -> None:
    (folder / "junit.xml").unlink()
    (folder / "junit.xml").symlink_to("/etc/hostname")


def link_to_folder(folder: Path) -> None:
    os.rename(folder / "traces", folder.parent / "elsewhere")
    (folder / "traces").symlink_to(folder.parent / "elsewhere")


def pipe(folder: Path) -> None:
    (folder / "junit.xml").unlink()
    os.mkfifo(folder / "junit.xml")


def deep(folder: Path) -> None:
    (folder / "/".join("abcdefgh")).mkdir(parents=True)


def extra(folder: Path) -> None:
    (folder / "action.yml").write_text("runs: {}")


def extra_in_traces(folder: Path) -> None:
    (folder / "traces" / "more.json").write_text("{}")


def hidden(folder: Path) -> None:
    (folder / ".git").mkdir()


def newline(folder: Path) -> None:
    (folder / "a\n::error::b").write_text("")


def crowd(folder: Path) -> None:
    (folder / "many").mkdir()
    for number in range(5_001):
        (folder / "many" / str(number)).touch()


def no_shard(folder: Path) -> None:
    (folder / "shard.json").unlink()


@pytest.mark.parametrize(
    "harm", [link, link_to_folder, pipe, deep, extra, extra_in_traces, hidden, newline, crowd, no_shard]
)
def test_folders_that_no_job_leaves(forged: Path, harm: Callable[[Path], None]) -> None:
    harm(forged)
    with pytest.raises(ShardError) as caught:
        read_forged(forged)
    assert "\n::error" not in str(caught.value) and "nothing of it was used" in str(caught.value)


def test_the_folder_itself_may_be_no_link(forged: Path) -> None:
    other = forged.parent / "02-cpu"
    other.symlink_to(forged)
    with pytest.raises(ShardError, match="no folder"):
        files_below(other)


# -- JSON ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("", "nonsense", "[]", "null", "{}", '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}'),
        *("[" * 100_000, '{"a":' * 100_000, "\ufeff{}", '{"a": ' + "9" * 5000 + "}", '{"a": "\0"}'),
        '{"format": "cudaforge-forged-shard", "version": 2, "shard": {}}',
        '{"format": "cudaforge-verified-shard", "version": 1, "shard": {"shard": "a", "commit": ""}}',
        '{"format": "cudaforge-forged-shard", "version": 1, "shard": {"shard": "a"}}',
        '{"format": "cudaforge-forged-shard", "version": 1, "shard": {"shard": 7, "commit": ""}}',
        '{"format": "cudaforge-forged-shard", "version": 1, "shard": {"shard": "..", "commit": ""}}',
        '{"format": "cudaforge-forged-shard", "version": 1, "shard": {"shard": "a", "commit": "--upload-pack=x"}}',
        '{"format": "cudaforge-forged-shard", "version": 1, "shard": {"shard": "a", "commit": "", "more": 1}}',
        '{"format": "cudaforge-forged-shard", "version": 1, "shard": {"shard": "a", "commit": "", "usd": 1'
        + "0" * 400
        + "}}",
    ],
    ids=range(22),
)
def test_documents_that_no_job_writes(forged: Path, text: str) -> None:
    (forged / "shard.json").write_text(text)
    with pytest.raises(ShardError):
        read_forged(forged)


def test_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('"' + "x" * 100 + '"')
    assert len(read_json(path, 102)) == 100
    with pytest.raises(ShardError, match="larger than 101 bytes"):
        read_json(path, 101)


def test_traces_that_are_too_large_together_are_not_read(forged: Path) -> None:
    for number in range(5):
        with (forged / f"traces/{number}.json").open("wb") as stream:
            stream.truncate(60 << 20)
    with pytest.raises(ShardError, match="traces: is larger than 268435456 bytes"):
        read_forged(forged)


# -- a forged kernel -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", "../../x.py::A"),
        ("target", "layers.py::shift"),
        ("language", "module"),
        ("language", "my.repo:Language"),
        ("language", "cuda"),
        ("digest", "0" * 64),
        ("digest", "x"),
        ("source_digest", ""),
        ("trace", "../shard.json"),
        ("trace", "/etc/passwd"),
        ("trace", "gone.json"),
        ("variant", "../x"),
    ],
)
def test_kernels_that_lie(forged: Path, name: str, value: str) -> None:
    edit(forged, lambda data: kernels_of(data)[0].update({name: value}))
    with pytest.raises(ShardError):
        read_forged(forged)


def test_a_target_twice(forged: Path) -> None:
    edit(forged, lambda data: kernels_of(data).append(kernels_of(data)[0]))
    with pytest.raises(ShardError, match="twice"):
        read_forged(forged)


@pytest.mark.parametrize(
    "files",
    [
        [["kernel.cpp", "// other\n"], ["plan.py", "def plan(x):\n    return x\n"]],
        [["kernel.cpp", "// fast\n"]],
        [["kernel.cpp", "// fast\n"], ["plan.py", "def plan(x):\n    return x\n"], ["conftest.py", "boom"]],
        [["../kernel.cpp", "// fast\n"], ["plan.py", "def plan(x):\n    return x\n"]],
        [["kernel.cpp", "// fast\0"], ["plan.py", "def plan(x):\n    return x\n"]],
    ],
    ids=["other text", "one gone", "one more", "elsewhere", "NUL"],
)
def test_a_winner_that_is_not_what_the_shard_names(forged: Path, files: Any) -> None:
    path = trace_file(forged)
    edit(path.parent, lambda data: data["rounds"][1]["candidate"].update(files=files), path.name)
    with pytest.raises(ShardError):
        read_forged(forged)


def test_a_trace_without_a_winner(forged: Path) -> None:
    path = trace_file(forged)
    edit(path.parent, lambda data: data.update(winner=7), path.name)
    with pytest.raises(ShardError, match="no winner"):
        read_forged(forged)


# -- a verified kernel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kernel.cpp", "plan.py", "evaluation.json", "report.svg"])
def test_a_file_that_was_changed_afterwards(verified: Path, name: str) -> None:
    path = place_of(verified) / name
    path.write_text(path.read_text() + " ")
    if name == "evaluation.json":  # the same verdict, written otherwise
        read_verified(verified)
        path.write_text(path.read_text().replace('"B"', '"A"'))
    elif name == "report.svg":
        read_verified(verified)
        path.write_text(path.read_text().replace("</svg>", "<script>fetch('//x')</script></svg>"))
    with pytest.raises(ShardError):
        read_verified(verified)


@pytest.mark.parametrize("name", ["conftest.py", "manifest.json", "sub/kernel.cpp", "../more.py", "../../../more.py"])
def test_a_file_more(verified: Path, name: str) -> None:
    path = Path(os.path.normpath(place_of(verified) / name))
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    if path.is_relative_to(verified):
        with pytest.raises(ShardError, match="no kernel of it has"):
            read_verified(verified)


@pytest.mark.parametrize("name", ["kernel.cpp", "plan.py", "evaluation.json", "report.md"])
def test_a_file_less_or_a_link(verified: Path, name: str) -> None:
    path = place_of(verified) / name
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(ShardError):
        read_verified(verified)
    (verified.parent / "outside").write_bytes(data)
    path.symlink_to(verified.parent / "outside")
    with pytest.raises(ShardError):
        read_verified(verified)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("directory", "../../.github/workflows"),
        ("directory", "/tmp/x"),
        ("directory", "scale-000000/cpu"),
        ("directory", "a/b/c"),
        ("target", "layers.py::shift"),
        ("path", "other.py"),
        ("qualname", "other"),
        ("language", "cuda"),
        ("source_digest", "1" * 64),
        ("arch", "sm_90/../.."),
        ("isolation", "A"),
        ("work", "library"),
        ("variant", "0a1b2c"),
        ("files", []),
        ("files", [{"name": "../kernel.cpp", "sha256": "0"}]),
    ],
)
def test_entries_that_lie(verified: Path, name: str, value: object) -> None:
    edit(verified, lambda data: kernels_of(data)[0]["entry"].update({name: value}))
    with pytest.raises(ShardError):
        read_verified(verified)


@pytest.mark.parametrize("speedup", [-1.0, 0.0, "nan", "inf"])
def test_promises_that_are_no_numbers(verified: Path, speedup: object) -> None:
    edit(verified, lambda data: kernels_of(data)[0]["entry"]["workloads"][0].update(speedup_eager=speedup))
    with pytest.raises(ShardError):
        read_verified(verified)


def wrong_status(verdict: Any) -> None:
    verdict["status"] = Status.INCORRECT_NUMERICAL.value


def not_faster(verdict: Any) -> None:
    verdict["timing"]["decision"] = "same"


def untimed(verdict: Any) -> None:
    verdict["timing"] = None


def unisolated(verdict: Any) -> None:
    verdict["isolation"]["grade"] = "C"


def another(verdict: Any) -> None:
    verdict["candidate"] = "0" * 64


@pytest.mark.parametrize("change", [wrong_status, not_faster, untimed, unisolated, another])
def test_an_entry_needs_its_verdict(verified: Path, change: Callable[[Any], None]) -> None:
    edit(verified, lambda data: change(kernels_of(data)[0]["evaluation"]))
    edit(verified, lambda data: kernels_of(data)[0]["entry"].update(isolation="C") if change is unisolated else None)
    with pytest.raises(ShardError):
        read_verified(verified)


def test_two_entries_with_one_place(verified: Path) -> None:
    edit(verified, lambda data: kernels_of(data).append(kernels_of(data)[0]))
    with pytest.raises(ShardError, match="twice"):
        read_verified(verified)


def test_an_entry_names_the_files_that_are_there(verified: Path, targets: list[Target]) -> None:
    shard = read_verified(verified).shard
    entry = shard.kernels[0].entry
    assert entry is not None
    doubled = dataclasses.replace(entry, files=(*entry.files, EntryFile("kernel.cpp", entry.files[0].sha256)))
    kernel = dataclasses.replace(shard.kernels[0], entry=doubled)
    write_verified(verified, dataclasses.replace(shard, kernels=(kernel, *shard.kernels[1:])))
    with pytest.raises(ShardError, match="not those of its entry"):
        read_verified(verified)


# -- kernels that are published compiled ---------------------------------------------------------------------------


def compiled(code: bytes) -> Binary:
    part = CompiledLaunch(128, 0, 1, 2, 0, len(code))
    info = KernelInfo("k<*fp32>", "k", ("float*",), KernelResources("k", 16), part)
    return Binary("triton", "sm_90", (), code, (info,))


def test_binaries_are_those_that_were_verified(tmp_path: Path, targets: list[Target]) -> None:
    good, key, target = compiled(b"good"), "ab" * 32, targets[0]
    builds = BuildCache(tmp_path / "builds")
    builds.put(key, good)
    build = Build("sm_90", 0.1, False, binaries=((key, binary_digest(good)),))
    candidate = Candidate.of("triton", {"kernel.py": "# fast\n", "plan.py": "def plan(x):\n    return x\n"})
    said = {"candidate": candidate.digest, "language": "triton", "device": "NVIDIA H200", "build": build}
    made = shard_records.trace(target, **said)
    rounds = (dataclasses.replace(made.rounds[1], candidate=candidate),)
    made = dataclasses.replace(made, language="triton", rounds=rounds)
    folder = tmp_path / "triton" / "01-sm_90"
    entry = publish(made, target, make_facts(target), folder / FORGED_DIR, builds=builds).entry
    (folder / FORGED_DIR / "manifest.json").unlink()
    kernel = VerifiedKernel(target.id, target.digest, "triton", candidate.digest, made.final, entry)
    write_verified(folder, VerifiedShard("01-sm_90", shard_records.COMMIT, kernels=(kernel,)))
    assert set(read_verified(folder).files[entry.directory]) >= {"kernel.py", "plan.py", "binaries.json"}
    other = encode_binaries([compiled(b"evil")])
    (folder / FORGED_DIR / entry.directory / "binaries.json").write_text(other)
    files = [file for file in entry.files if file.name != "binaries.json"]
    files.append(EntryFile("binaries.json", hashlib.sha256(other.encode()).hexdigest()))
    swapped = dataclasses.replace(kernel, entry=dataclasses.replace(entry, files=tuple(files)))
    write_verified(folder, VerifiedShard("01-sm_90", shard_records.COMMIT, kernels=(swapped,)))
    with pytest.raises(ShardError, match="other binaries"):
        read_verified(folder)


def test_a_compiler_configuration_is_a_kernel_too(tmp_path: Path, targets: list[Target]) -> None:
    target = targets[0]
    candidate = Candidate.of("compiler", {"options.json": "{}\n"})
    verdict = {"candidate": candidate.digest, "language": "compiler", "work": "compiler", "isolation": Isolation("C")}
    made = shard_records.trace(target, **verdict)
    rounds = (dataclasses.replace(made.rounds[1], candidate=candidate),)
    made = dataclasses.replace(made, language="compiler", rounds=rounds)
    folder = tmp_path / "compiler" / "01-cpu"
    chosen = dataclasses.replace(make_facts(target), chosen=True)
    entry = publish(made, target, chosen, folder / FORGED_DIR).entry
    (folder / FORGED_DIR / "manifest.json").unlink()
    digests = (target.digest, "compiler", candidate.digest)
    kernel = VerifiedKernel(target.id, *digests, made.final, entry, variant=entry.variant)
    write_verified(folder, VerifiedShard("01-cpu", shard_records.COMMIT, kernels=(kernel,)))
    (files,) = read_verified(folder).files.values()
    assert entry.directory.endswith(f"/cpu-compiler-{entry.variant}") and files["options.json"] == b"{}\n"


# -- what a job says of what it left -------------------------------------------------------------------------------


def add_file(folder: Path) -> None:
    (folder / "more").write_text("")


def change_file(folder: Path) -> None:
    (folder / "a").write_text("1\n2")


def rename_file(folder: Path) -> None:
    (folder / "a").rename(folder / "c")


def swap_files(folder: Path) -> None:
    (folder / "a").write_text("2")
    (folder / "sub/b").write_text("1")


@pytest.mark.parametrize("change", [add_file, change_file, rename_file, swap_files])
def test_a_digest_is_of_names_and_bytes(tmp_path: Path, change: Callable[[Path], None]) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "a").write_text("1")
        (tmp_path / name / "sub/b").write_text("2")
    # What an artifact does not keep is no part of it.
    (tmp_path / "two/empty").mkdir()
    (tmp_path / "two/a").chmod(0o755)
    before = digest_of(tmp_path / "one")
    assert before == digest_of(tmp_path / "two") != digest_of(tmp_path / "one", ["a"])
    change(tmp_path / "two")
    assert digest_of(tmp_path / "two") != before


def test_there_is_no_digest_of_what_lies_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a").symlink_to("/etc/hostname")
    for names in (None, ["a"], ["gone"]):
        with pytest.raises(ArtifactError):
            digest_of(tmp_path / "folder", names)
