"""The scan: decorators under any name, KernelBench files, what is left out, what becomes a problem."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from pytest_cudaforge.discovery import Discovery, discover, snake_case

Write = Callable[..., Discovery]

MODULE = "class Norm(nn.Module): ...\n"
KERNELBENCH = "class Model(nn.Module): ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n"


@pytest.fixture
def scan(tmp_path: Path) -> Write:
    """Write files and scan the folder (or ``paths`` in it)."""

    def write_and_scan(files: dict[str, str | bytes], paths: tuple[str, ...] = ("",)) -> Discovery:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
        return discover([tmp_path / path for path in paths], tmp_path)

    return write_and_scan


def ids(found: Discovery) -> list[str]:
    return [target.id for target in found.targets]


@pytest.mark.parametrize(
    ("imports", "decorator"),
    [
        ("from pytest_cudaforge import forge_target", "@forge_target"),
        ("from pytest_cudaforge import forge_target", "@forge_target()"),
        ("from pytest_cudaforge import forge_target as ft", "@ft(inputs=lambda: [1])"),
        ("from pytest_cudaforge.target import forge_target as ft", "@ft"),
        ("import pytest_cudaforge", "@pytest_cudaforge.forge_target"),
        ("import pytest_cudaforge as cf", "@cf.forge_target(inputs=f)"),
        ("import pytest_cudaforge.target", "@pytest_cudaforge.target.forge_target"),
        ("import pytest_cudaforge.target", "@pytest_cudaforge.forge_target"),
        ("import pytest_cudaforge.target as t", "@t.forge_target"),
        ("from pytest_cudaforge import target as t", "@t.forge_target"),
        ("from pytest_cudaforge import *", "@forge_target"),
        ("try:\n    from pytest_cudaforge import forge_target as ft\nexcept ImportError:\n    ft = None", "@ft"),
        ("from pytest_cudaforge import forge_target\nmark = forge_target", "@mark"),
        ("from pytest_cudaforge import forge_target\nhalf = forge_target(precision='fp16')", "@half"),
        ("import functools\nimport pytest_cudaforge as cf\np = functools.partial(cf.forge_target, grad=True)", "@p()"),
        ("def f():\n    from pytest_cudaforge import forge_target", "@forge_target"),
    ],
)
def test_aliases(scan: Write, imports: str, decorator: str) -> None:
    found = scan({"layers.py": f"{imports}\n{decorator}\n{MODULE}"})
    assert ids(found) == ["layers.py::Norm"] and not found.problems


@pytest.mark.parametrize(
    ("imports", "decorator"),
    [
        ("from other import forge_target", "@forge_target"),
        ("forge_target = print", "@forge_target"),
        ("import cudaforge as cf", "@cf.forge_target"),
        ("import pytest_cudaforge as cf", "@cf.apply"),
        ("from pytest_cudaforge import forge_target", "# @forge_target"),
    ],
)
def test_others_are_not_taken(scan: Write, imports: str, decorator: str) -> None:
    assert scan({"layers.py": f"{imports}\n{decorator}\n{MODULE}"}) == Discovery(files=1)


@pytest.mark.parametrize(
    ("imports", "decorator"),
    [
        ("from pkg.marks import ft", "@ft"),
        ("from .marks import ft as mine", "@mine(inputs=f)"),
        ("from . import marks", "@marks.ft"),
        ("from pkg import marks as m", "@m.ft"),
        ("import pkg.marks", "@pkg.marks.ft"),
        ("import pkg.marks as m", "@m.ft"),
        ("from .marks import *", "@ft"),
        ("from . import exported", "@exported"),
        ("from .marks import (\n    other,\n    ft,\n)", "@ft"),
    ],
)
def test_re_exports_through_local_modules(scan: Write, imports: str, decorator: str) -> None:
    files: dict[str, str | bytes] = {
        "src/pkg/__init__.py": "from .marks import ft as exported",
        "src/pkg/marks.py": "from pytest_cudaforge import forge_target as ft",
        "src/pkg/deep/__init__.py": "",
        "src/pkg/layers.py": f"{imports}\n{decorator}\n{MODULE}",
    }
    assert ids(scan(files)) == ["src/pkg/layers.py::Norm"]
    assert ids(scan(files, ("src/pkg/layers.py",))) == ["src/pkg/layers.py::Norm"]  # only the file given


def test_a_circle_of_imports_ends(scan: Write) -> None:
    found = scan({"a.py": "from b import ft  # forge_target\n@ft\nclass A(B): ...", "b.py": "from a import ft"})
    assert found == Discovery(files=2)


def test_nested_classes_functions_and_order(scan: Write) -> None:
    found = scan(
        {
            "b.py": """
                from pytest_cudaforge import forge_target
                class Outer:
                    @forge_target
                    class Inner(nn.Module): ...
                if True:
                    @forge_target
                    def gelu(x): ...
            """,
            "a.py": f"from pytest_cudaforge import forge_target\n@forge_target\n{MODULE}",
        }
    )
    assert [(target.id, target.kind, target.line) for target in found.targets] == [
        ("a.py::Norm", "class", 3),
        ("b.py::Outer.Inner", "class", 5),
        ("b.py::gelu", "function", 8),
    ]


def test_marking_by_a_call(scan: Write) -> None:
    found = scan({"a.py": f"import pytest_cudaforge as cf\n{MODULE}Norm = cf.forge_target(inputs=f)(Norm)\n"})
    assert ids(found) == ["a.py::Norm"]


@pytest.mark.parametrize(
    ("body", "where", "message"),
    [
        ("@ft\nclass A: ...", "a.py::A", "A is not an nn.Module"),
        ("@ft\nclass A(Enum): ...", "a.py::A", "A is not an nn.Module"),
        ("@ft\nasync def f(x): ...", "a.py::f", "async function"),
        ("class A(M):\n    @ft\n    def forward(self): ...", "a.py::A.forward", "is a method"),
        ("def f():\n    @ft\n    class A(M): ...", "a.py::f.A", "inside a function"),
        ("class A(M):\n    def f(self):\n        @ft\n        def g(): ...", "a.py::A.f.g", "inside a function"),
        ("@ft\nclass A(M): ...\n@ft\nclass A(M): ...", "a.py::A", "marked more than once (lines 3, 5)"),
        ("@ft\n@ft\nclass A(M): ...", "a.py::A", "marked more than once"),
        ("@ft(lambda: [1])\nclass A(M): ...", "a.py::A", "by keyword"),
        ("@ft(inputz=f)\nclass A(M): ...", "a.py::A", "did you mean 'inputs'?"),
        ("ft(inputs=f)(torch.nn.GELU)", "a.py::line2", "torch.nn.GELU is marked but not defined in this file"),
        ("ft(B)", "a.py::B", "B is marked but not defined in this file"),
    ],
)
def test_problems(scan: Write, body: str, where: str, message: str) -> None:
    found = scan({"a.py": "from pytest_cudaforge import forge_target as ft\n" + body})
    assert not found.targets
    (problem,) = found.problems
    assert problem.id == where and message in problem.text


def test_a_problem_leaves_the_rest_alone(scan: Write) -> None:
    found = scan(
        {
            "bad.py": "from pytest_cudaforge import forge_target\ndef f(:",
            "good.py": f"from pytest_cudaforge import forge_target\n@forge_target\n{MODULE}",
        }
    )
    assert ids(found) == ["good.py::Norm"]
    (problem,) = found.problems
    assert (problem.id, problem.line) == ("bad.py", 2) and "not valid Python" in problem.text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"# forge_target \xff\n", "not valid Python"),
        (b"# coding: latin-9000\n# forge_target\n", "not valid Python: unknown encoding"),
        (b"x = '\x00'  # forge_target\n", "null bytes"),
        (b"# forge_target\n" + b"(" * 5000, ""),
        (b"# coding: ascii\n# forge_target\nx = '\xc3'\n", "cannot be decoded as ascii"),
    ],
)
def test_unreadable_files(scan: Write, data: bytes, message: str) -> None:
    (problem,) = scan({"a.py": data}).problems
    assert problem.id == "a.py" and message in problem.text


def test_broken_files_without_the_decorator_are_nobodys_business(scan: Write) -> None:
    assert scan({"a.py": b"def (\xff"}) == Discovery(files=1)


def test_left_out_folders(scan: Write) -> None:
    text = f"from pytest_cudaforge import forge_target\n@forge_target\n{MODULE}"
    folders = (".git", "node_modules", "build", "my_env", "lib/site-packages", "venv", "__pycache__", "x.egg")
    files: dict[str, str | bytes] = {f"{folder}/a.py": text for folder in folders}
    assert ids(scan({**files, "my_env/pyvenv.cfg": "", "ok/a.py": text})) == ["ok/a.py::Norm"]


def test_given_folders_are_entered_and_links_are_not_followed(scan: Write, tmp_path: Path) -> None:
    text = f"from pytest_cudaforge import forge_target\n@forge_target\n{MODULE}"
    scan({"build/a.py": text})
    (tmp_path / "link").symlink_to(tmp_path / "build")
    assert ids(scan({}, ("build",))) == ["build/a.py::Norm"]
    assert ids(scan({})) == []


def test_own_no_recurse_patterns(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.py").write_text(f"from pytest_cudaforge import forge_target\n@forge_target\n{MODULE}")
    assert discover([tmp_path], tmp_path, no_recurse=("old*",)).targets == ()
    assert len(discover([tmp_path], tmp_path, no_recurse=()).targets) == 1


def test_a_file_given_twice_is_one(scan: Write) -> None:
    files: dict[str, str | bytes] = {"a.py": f"from pytest_cudaforge import forge_target\n@forge_target\n{MODULE}"}
    assert ids(scan(files, ("", "a.py", "a.py"))) == ["a.py::Norm"]


def test_missing_paths_are_ignored(tmp_path: Path) -> None:
    assert discover([tmp_path / "none"], tmp_path) == Discovery()


# -- KernelBench -----------------------------------------------------------------------------------------------


def test_kernelbench_file_given(scan: Write) -> None:
    (target,) = scan({"swish.py": KERNELBENCH}, ("swish.py",)).targets
    assert (target.id, target.kind, target.name) == ("swish.py::Model", "kernelbench", "swish")


@pytest.mark.parametrize("name", ["36_RMSNorm_.py", "KernelBench/swish.py", "kernel_bench/swish.py"])
def test_kernelbench_file_found_by_its_name(scan: Write, name: str) -> None:
    assert ids(scan({name: KERNELBENCH})) == [f"{name}::Model"]


def test_kernelbench_folder_is_recognised_by_its_majority(scan: Write) -> None:
    assert ids(scan({"few/a.py": KERNELBENCH, "few/b.py": "", "few/c.py": ""})) == []
    assert ids(scan({"many/a.py": KERNELBENCH, "many/b.py": KERNELBENCH, "many/c.py": ""})) == [
        "many/a.py::Model",
        "many/b.py::Model",
    ]


def test_incomplete_or_marked_kernelbench_files(scan: Write) -> None:
    assert ids(scan({"1_a.py": "class Model(nn.Module): ...\ndef get_init_inputs(): ..."})) == []
    marked = "from pytest_cudaforge import forge_target\n@forge_target\n" + KERNELBENCH
    (target,) = scan({"1_a.py": marked}).targets
    assert target.kind == "class"


# -- names, places, source -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RMSNorm", "rms_norm"),
        ("Outer.Inner", "outer_inner"),
        ("36_RMSNorm_", "36_rms_norm"),
        ("SwiGLU", "swi_glu"),
        ("LayerNormGELU2d", "layer_norm_gelu2d"),
        ("Big Fun!", "big_fun"),
        ("__", "target"),
    ],
)
def test_snake_case(name: str, expected: str) -> None:
    assert snake_case(name) == expected


def test_name_option_and_slug(scan: Write) -> None:
    (target,) = scan({"a.py": f"import pytest_cudaforge as c\n@c.forge_target(name='My Norm')\n{MODULE}"}).targets
    assert target.name == "my_norm" and target.slug.startswith("my_norm-") and len(target.slug) == len("my_norm-") + 6


@pytest.mark.parametrize(
    ("files", "module", "root"),
    [
        (("src/pkg/__init__.py", "src/pkg/sub/__init__.py"), "pkg.sub.layers", "src"),
        ((), "layers", "src/pkg/sub"),
        (("src/pkg/sub/__init__.py",), "sub.layers", "src/pkg"),
    ],
)
def test_module_name_and_import_root(
    scan: Write, tmp_path: Path, files: tuple[str, ...], module: str, root: str
) -> None:
    text = f"from pytest_cudaforge import forge_target\n@forge_target\n{MODULE}"
    (target,) = scan({**dict.fromkeys(files, ""), "src/pkg/sub/layers.py": text}).targets
    assert (target.module_name, target.import_root) == (module, str(tmp_path / root))


def test_relative_imports_make_namespace_packages(scan: Write, tmp_path: Path) -> None:
    text = f"from ..ops import x\nfrom pytest_cudaforge import forge_target\n@forge_target\n{MODULE}"
    (target,) = scan({"a/b/layers.py": text}).targets
    assert (target.module_name, target.import_root) == ("a.b.layers", str(tmp_path))


PACKAGE: dict[str, str | bytes] = {
    "pkg/__init__.py": "",
    "pkg/ops.py": """
        import torch
        SCALE = 3
        TABLE = {}
        TABLE["a"] = 1
        def unused(): ...
        def silu(x):
            return torch.silu(x) * SCALE + TABLE["a"]
    """,
    "pkg/layers.py": """
        import torch
        from torch import nn
        from pytest_cudaforge import forge_target
        from .ops import silu
        from pkg import ops

        WIDTH = 4
        OTHER = 5

        @forge_target(inputs=lambda: [torch.randn(WIDTH)])
        class Norm(nn.Module):
            def forward(self, x):
                return silu(x)

        @forge_target
        def gelu(x):
            return ops.unused()
    """,
}


def test_source_holds_what_the_target_needs_and_no_more(scan: Write) -> None:
    norm, gelu = scan(PACKAGE).targets
    for wanted in (
        "WIDTH = 4",
        "class Norm",
        "@forge_target(inputs",
        "# --- pkg/ops.py",
        "SCALE = 3",
        'TABLE["a"] = 1',
    ):
        assert wanted in norm.source
    for other in ("OTHER", "def unused", "def gelu"):
        assert other not in norm.source
    assert "def unused" in gelu.source and "def silu" not in gelu.source and "class Norm" not in gelu.source


@pytest.mark.parametrize(
    ("name", "before", "after", "changes_norm"),
    [
        ("pkg/ops.py", "SCALE = 3", "SCALE = 4", True),
        ("pkg/ops.py", 'TABLE["a"] = 1', 'TABLE["a"] = 2', True),
        ("pkg/ops.py", "def unused(): ...", "def unused(): return 1", False),
        ("pkg/layers.py", "WIDTH = 4", "WIDTH = 8", True),
        ("pkg/layers.py", "OTHER = 5", "OTHER = 6", False),
        ("pkg/layers.py", "ops.unused()", "ops.unused", False),
    ],
)
def test_digest_follows_the_target_alone(scan: Write, name: str, before: str, after: str, changes_norm: bool) -> None:
    first = scan(PACKAGE).targets[0].digest
    text = PACKAGE[name]
    assert isinstance(text, str) and before in text
    assert (scan({name: text.replace(before, after)}).targets[0].digest != first) is changes_norm


def test_source_of_star_imports_methods_modules_and_cycles(scan: Write) -> None:
    found = scan(
        {
            "p/__init__.py": "",
            "p/a.py": """
                from .b import *
                from . import c
                from pytest_cudaforge import forge_target
                @forge_target
                def f(x):
                    return star(x) + g(c)
                def g(x):
                    return f
            """,
            "p/b.py": "def star(x): ...\ndef unneeded(x): ...",
            "p/c.py": "from .a import f\nX = 1\nY = f",
        }
    )
    (target,) = found.targets
    for wanted in ("from .b import *", "def star", "def g(x)", "X = 1", "Y = f"):
        assert wanted in target.source
    assert "unneeded" not in target.source


def test_source_survives_a_broken_neighbour_and_never_enters_installed_packages(scan: Write) -> None:
    text = (
        "from .b import z\nimport torch\nfrom pytest_cudaforge import forge_target\n@forge_target\ndef f(x): return z"
    )
    (target,) = scan({"p/__init__.py": "", "p/a.py": text, "p/b.py": "def ("}).targets
    assert "from .b import z" in target.source and "# ---" not in target.source


def test_without_inputs_the_files_input_functions_belong_to_the_source(scan: Write) -> None:
    text = f"from pytest_cudaforge import forge_target\n@forge_target\n{MODULE}\ndef get_inputs(): return N\nN = 3\n"
    (target,) = scan({"a.py": text}).targets
    assert "def get_inputs" in target.source and "N = 3" in target.source


def test_nothing_is_imported(scan: Write) -> None:
    before = set(sys.modules)
    scan({"boom.py": f"raise SystemExit\nfrom pytest_cudaforge import forge_target\n@forge_target\n{MODULE}"})
    assert "boom" not in sys.modules and "torch" not in set(sys.modules) - before


def test_files_outside_the_root_keep_their_absolute_path(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(f"from pytest_cudaforge import forge_target\n@forge_target\n{MODULE}")
    (target,) = discover([file], tmp_path / "repo").targets
    assert target.id == f"{file.as_posix()}::Norm"
