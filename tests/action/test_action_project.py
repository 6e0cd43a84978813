"""Where a project begins, held against pytest's own answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from _pytest.config.findpaths import determine_setup
from cudaforge_action.project import project_at

from pytest_cudaforge.errors import UsageError

INI = "[pytest]\npythonpath = src lib\nforge_paths = kernels\nforge_dir = made\nnorecursedirs = old\n"
TOOL = '[tool.pytest.ini_options]\npythonpath = ["src"]\nforge_dir = "made"\n'


def write(top: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "folder", "paths"),
    [
        ({"pytest.ini": INI, "a/b/x.py": ""}, "a/b", ()),
        ({"pytest.ini": INI, "a/pyproject.toml": TOOL, "a/b/x.py": ""}, "a/b", ()),
        ({"pytest.ini": INI, "a/pyproject.toml": "[project]\n", "a/b/x.py": ""}, "a/b", ()),
        ({"a/pyproject.toml": "[project]\n", "pyproject.toml": "[project]\n", "a/b/x.py": ""}, "a/b", ()),
        ({"setup.cfg": "[metadata]\n", "tox.ini": "[pytest]\nforge_dir = made\n", "a/x.py": ""}, "a", ()),
        ({"setup.cfg": "[tool:pytest]\nforge_dir = made\n", "a/x.py": ""}, "a", ()),
        ({"setup.py": "", "a/b/x.py": ""}, "a/b", ()),
        ({".pytest.ini": "", "a/x.py": ""}, "a", ()),
        ({"pytest.ini": "", "pyproject.toml": TOOL, "a/x.py": ""}, "a", ()),
        ({"a/x.py": "", "b/y.py": ""}, ".", ("a", "b/y.py")),
        ({"a/pytest.ini": INI, "b/pytest.ini": INI, "a/x.py": "", "b/y.py": ""}, ".", ("a/x.py", "b")),
        ({"a/pytest.ini": INI, "a/x.py": "", "b/y.py": ""}, ".", ("a/x.py",)),
        ({"pyproject.toml": '[tool.pytest]\npythonpath = ["src"]\n', "a/x.py": ""}, "a", ("x.py",)),
    ],
    ids=range(13),
)
def test_the_root_is_pytests(tmp_path: Path, files: dict[str, str], folder: str, paths: Sequence[str]) -> None:
    # A marked top, so that nothing above it is found.
    write(tmp_path, {"top/setup.py" if "setup.py" not in files else "top/x": ""})
    top = tmp_path / "top"
    write(top, files)
    found = project_at(top / folder, {}, paths)
    start = (top / folder).resolve()
    root, inifile, *_ = determine_setup(
        inifile=None,
        override_ini=None,
        args=[str(start / path) for path in paths] or [str(start)],
        rootdir_cmd_arg=None,
        invocation_dir=start,
    )
    assert (found.root, found.inifile) == (root, inifile)


def test_what_the_ini_file_says(tmp_path: Path) -> None:
    write(tmp_path, {"pytest.ini": INI, "kernels/x.py": "", "cudaforge.yaml": "rounds: 3\n"})
    found = project_at(tmp_path, {"CUDAFORGE_TOKEN": "x", "CUDAFORGE_TRIALS": "7"})
    assert found.manifest == tmp_path / "made" / "manifest.json"
    assert found.paths == (tmp_path / "kernels",) and found.no_recurse == ("old",)
    assert found.python_paths == (tmp_path / "src", tmp_path / "lib")
    assert (found.settings.rounds, found.settings.trials) == (3, 7)


def test_without_any_file(tmp_path: Path) -> None:
    write(tmp_path, {"setup.py": ""})
    found = project_at(tmp_path, {})
    assert found.manifest == tmp_path / "forged" / "manifest.json" and found.paths == (tmp_path,)


@pytest.mark.parametrize(
    "files",
    [
        {"pyproject.toml": "[tool"},
        {"pytest.ini": "nonsense"},
        {"pyproject.toml": "[tool.pytest.ini_options]\n", "cudaforge.yaml": "round: 3\n"},
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, files)
    with pytest.raises(UsageError):
        project_at(tmp_path, {})
