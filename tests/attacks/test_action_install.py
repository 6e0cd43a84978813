"""The installing step, in virtual environments of the test's own and without a network: torch stays as it was."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ROOT / "action" / "install.py"
#: What the package requires, as wheels that hold nothing; torch is the runner's own.
REQUIRED = {
    "pytest": "9.0",
    "openai": "3.0",
    "junitparser": "5.0",
    "ninja": "1.13",
    "gitpython": "3.2.1",
    "rich": "15.0",
}
LIGHT = {"pyyaml": "6.0", "filelock": "4.0", "requests": "2.34"}


def wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = (), files: Mapping[str, str] = {}) -> Path:
    """A wheel of a few files, with the metadata that pip wants."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    held = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        **files,
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {line}\n" for line in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{_digest(text)},{len(text.encode())}\n" for path, text in held.items())
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in {**held, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return made


def _digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All wheels that may be asked for."""
    folder = tmp_path_factory.mktemp("index")
    for name, version in {**REQUIRED, **LIGHT}.items():
        wheel(folder, name, version)
    return folder


def tempting(folder: Path) -> Path:
    """Something that is required has a newer version, which wants a newer torch."""
    wheel(folder, "rich", "15.1", ("torch>=2.9",))
    wheel(folder, "torch", "2.9", ("triton",))
    wheel(folder, "triton", "3.9")
    return folder


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This machine's setuptools, to be seen by who builds the package."""
    return linked(tmp_path_factory.mktemp("builder"), "setuptools")


def linked(folder: Path, name: str) -> Path:
    """A distribution of this machine by reference."""
    found = importlib.metadata.distribution(name)
    for part in {Path(str(file)).parts[0] for file in found.files or ()} - {"__pycache__", ".."}:
        (folder / part).symlink_to(Path(str(found.locate_file(part))).resolve())
    return folder


def environment(folder: Path, *wheels: Path) -> Path:
    """A virtual environment with these wheels, and with this machine's pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    place = linked(next(folder.glob("lib/python*/site-packages")), "pip")
    for one in wheels:
        with zipfile.ZipFile(one) as archive:
            archive.extractall(place)
    return folder / "bin" / "python"


def install(python: Path, index: Path, builder: Path, temp: Path, mode: str = "guard") -> tuple[int, str, str]:
    """Exit status, log, and the Python that is handed on."""
    temp.mkdir(exist_ok=True)
    output = temp / "output"
    output.write_text("")
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(temp),
        "RUNNER_TEMP": str(temp),
        "GITHUB_OUTPUT": str(output),
        "INPUT_MODE": mode,
        "INPUT_PYTHON": str(python),
        "INPUT_DEVICE": "cpu",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it so: none
        "PYTHONPATH": str(builder),
        "PIP_NO_CACHE_DIR": "1",
    }
    done = subprocess.run([sys.executable, str(INSTALL)], env=environ, capture_output=True, text=True)
    lines = output.read_text().splitlines()
    return done.returncode, done.stdout + done.stderr, lines[1] if lines else ""


def versions(python: str) -> dict[str, str]:
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    said = subprocess.run([python, "-c", code], capture_output=True, check=True, cwd="/").stdout
    return {name.lower(): version for name, version in json.loads(said).items()}


def test_torch_is_left_as_it_is_and_a_second_run_has_nothing_to_do(index: Path, builder: Path, tmp_path: Path) -> None:
    torch = wheel(tmp_path, "torch", "2.7.1+local", ("triton", "nvidia-cuda-nvrtc"))
    python = environment(tmp_path / "runner", torch, wheel(tmp_path, "triton", "3.3"))
    offered = tempting(Path(shutil.copytree(index, tmp_path / "index")))
    status, log, handed = install(python, offered, builder, tmp_path / "temp")
    assert status == 0, log
    found = versions(handed)
    assert handed == str(python)
    assert (found["torch"], found["triton"], found["rich"]) == ("2.7.1+local", "3.3", "15.0")
    assert found["pytest-cudaforge"] == "0.1.0"
    entry = subprocess.run([handed, "-c", "import cudaforge_action.inputs"], capture_output=True, cwd="/", text=True)
    assert "No module named 'yaml'" in entry.stderr  # an empty wheel here: everything before it was found
    status, log, again = install(python, Path("/nowhere"), builder, tmp_path / "temp")
    assert status == 0 and again == handed, log


def test_without_torch_the_modes_that_need_it_say_what_to_do(index: Path, builder: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "runner")
    status, log, handed = install(python, index, builder, tmp_path / "temp")
    assert status == 2 and not handed
    assert "has no torch" in log and "input python" in log
    old = environment(tmp_path / "old", wheel(tmp_path, "torch", "2.4.0"))
    status, log, _ = install(old, index, builder, tmp_path / "temp")
    assert status == 2 and "torch 2.6 or newer" in log


def test_the_light_modes_get_an_environment_of_their_own_without_torch(
    index: Path, builder: Path, tmp_path: Path
) -> None:
    python = environment(tmp_path / "runner")
    status, log, handed = install(python, index, builder, tmp_path / "temp", "publish")
    assert status == 0, log
    assert handed == str(tmp_path / "temp" / "cudaforge-light" / "bin" / "python")
    assert {"pytest-cudaforge", *LIGHT, "junitparser", "gitpython", "rich"} == set(versions(handed))
    assert "pytest-cudaforge" not in versions(str(python))


def test_an_environment_that_must_be_left_alone_is_seen_through_another(tmp_path: Path) -> None:
    """Called as a function: who may not write where differs from machine to machine."""
    python = environment(tmp_path / "runner", wheel(tmp_path, "torch", "2.7.1"))
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "project.py").write_text("")
    place = next((tmp_path / "runner").glob("lib/python*/site-packages"))
    (place / "editable.pth").write_text(f"{tmp_path / 'sources'}\n")
    call = f"import sys; sys.path.insert(0, {str(INSTALL.parent)!r}); import install; from pathlib import Path; "
    call += (
        f"found = install.probe({str(python)!r}); place = install.virtual_environment(found, Path('seeing'), False); "
    )
    call += "Path('told').write_text(str(place))"
    subprocess.run([sys.executable, "-c", call], cwd=tmp_path, check=True)
    seeing = tmp_path / (tmp_path / "told").read_text()
    subprocess.run([seeing, "-c", "import torch, project"], check=True)
    assert versions(str(seeing))["torch"] == "2.7.1" and str(tmp_path / "seeing") in str(seeing)
