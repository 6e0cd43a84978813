"""The manifest: read strictly, merged under a lock, written atomically."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_cudaforge.errors import ConfigError, PublishError
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import Guard
from pytest_cudaforge.runtime.manifest import Entry, EntryFile, EntryWorkload, Manifest, merge

ENTRY = Entry(
    target="layers.py::Scale",
    import_name="layers",
    qualname="Scale",
    kind="class",
    path="layers.py",
    source_digest="ab" * 32,
    language="cpp",
    arch="cpu",
    directory="scale-3f9a1c/cpu",
    files=(EntryFile("kernel.cpp", hashlib.sha256(b"// k\n").hexdigest()),),
    guard=Guard(contiguous_only=True, reasons=("failed on strided input",)),
    workloads=(EntryWorkload("default", (("0", TensorSpec((4, 8), "float32", (8, 1))), ("kw.eps", 1e-5)), 2.0, None),),
    torch="2.13.0",
    device="cpu",
    precision="fp32",
    mode="eval",
)


def test_it_goes_to_disk_and_back(tmp_path: Path) -> None:
    path = tmp_path / "forged" / "manifest.json"
    merge(path, [ENTRY])
    assert Manifest.load(path) == Manifest((ENTRY,))
    assert [item.name for item in path.parent.iterdir()] == ["manifest.json"], "no lock or temporary file is left"


def test_what_is_promised_is_the_low_end_of_what_was_measured(tmp_path: Path) -> None:
    measured = replace(ENTRY.workloads[0], speedup_compile=3.0, least_compile=1.4)
    assert (ENTRY.workloads[0].promised, measured.promised) == ((2.0, None), (2.0, 1.4))
    path = tmp_path / "manifest.json"
    merge(path, [replace(ENTRY, workloads=(measured,))])
    assert Manifest.load(path).entries[0].workloads == (measured,)
    assert "least_eager" not in path.read_text()


def test_merging_replaces_the_same_key_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    other = replace(ENTRY, arch="sm_90", language="cuda")
    merge(path, [ENTRY, other])
    merged = merge(path, [replace(ENTRY, torch="2.14.0")])
    assert [(entry.arch, entry.torch) for entry in merged.entries] == [("cpu", "2.14.0"), ("sm_90", "2.13.0")]
    assert merged.find("layers.py::Scale", arch="sm_90") == (other,)


def test_kernels_for_other_workloads_live_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    half = replace(ENTRY, variant="half-3f9a1c", directory="scale-3f9a1c/cpu-half-3f9a1c")
    merge(path, [ENTRY, half])
    merged = merge(path, [replace(half, torch="2.14.0")])
    assert [(entry.variant, entry.torch) for entry in merged.entries] == [("", "2.13.0"), ("half-3f9a1c", "2.14.0")]
    assert Manifest.load(path) == merged


def test_an_entry_without_variants_reads_as_before(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    merge(path, [ENTRY])
    assert "variant" not in json.loads(path.read_text())["entries"][0]
    assert Manifest.load(path).entries[0].variant == ""


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    script = (
        "import sys, json; from pathlib import Path\n"
        "from pytest_cudaforge.runtime.manifest import *; from pytest_cudaforge.records import from_json\n"
        "path, data = Path(sys.argv[1]), json.loads(sys.argv[2])\n"
        "for n in range(10): merge(path, [from_json(Entry, {**data, 'target': f'{sys.argv[3]}::{n}'})])\n"
    )
    data = json.dumps(json.loads(Manifest((ENTRY,)).render())["entries"][0])
    writers = [subprocess.Popen([sys.executable, "-c", script, str(path), data, f"w{n}.py"]) for n in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len(Manifest.load(path).entries) == 30


def test_sources_are_checked_against_their_digest(tmp_path: Path) -> None:
    folder = tmp_path / ENTRY.directory
    folder.mkdir(parents=True)
    (folder / "kernel.cpp").write_text("// k\n")
    assert ENTRY.sources(tmp_path / "manifest.json") == {"kernel.cpp": "// k\n"}
    (folder / "kernel.cpp").write_text("// edited\n")
    with pytest.raises(ConfigError, match="differs from what was verified"):
        ENTRY.sources(tmp_path / "manifest.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a manifest"),
        ('{"format": 99, "entries": []}', "format 99"),
        ('{"format": 1, "entries": [{"target": 3}]}', "entry 0: Entry.target"),
    ],
)
def test_a_malformed_file_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Manifest.parse(text)


@pytest.mark.parametrize("directory", ["../elsewhere", "/etc", ""])
def test_an_entry_cannot_point_outside(directory: str) -> None:
    with pytest.raises(ConfigError, match="leaves the folder"):
        Manifest.parse(Manifest((replace(ENTRY, directory=directory),)).render())


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pytest --forge"):
        Manifest.load(tmp_path / "manifest.json")


def test_a_folder_that_cannot_be_written_is_a_publish_error(tmp_path: Path) -> None:
    (tmp_path / "forged").write_text("a file where the folder should be")
    with pytest.raises(PublishError, match="cannot be written"):
        merge(tmp_path / "forged" / "manifest.json", [ENTRY])
