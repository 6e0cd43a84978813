"""What kernel.py may be made of, by its text."""

from __future__ import annotations

from pathlib import Path

import pytest
from honest_cases import honest_cases

from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.languages import triton_text

KERNEL = """
import triton
import triton.language as tl
{imports}

{before}

@triton.jit
def double(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, 2 * tl.load(x + i))
"""


def text(imports: str = "", before: str = "") -> str:
    return KERNEL.format(imports=imports, before=before)


@pytest.mark.parametrize(
    "source",
    [
        text(),
        text("from triton.language.extra import libdevice", "LOG2E = tl.constexpr(1.4426950408889634)"),
        text("from triton.language.extra.cuda.libdevice import tanh as fast_tanh"),
        text("from __future__ import annotations\nimport math", "HALF = tl.constexpr(math.sqrt(0.25))"),
        text("import torch", "KINDS = {torch.float32: 4, torch.bfloat16: 2, torch.float8_e4m3fn: 1}"),
        text("from typing import Any\nimport functools", "@functools.cache\ndef known(x: Any):\n    return 2"),
        text("", "CONFIGS = [triton.Config({'BLOCK': 2**i}, num_warps=4) for i in range(4, 8)]"),
        text("try:\n    from triton.language.extra import libdevice\nexcept ImportError:\n    libdevice = tl.math"),
        text("", "def seeds(x):\n    return tl.random.rand(x, 0)"),
        "def broken(:",
    ],
)
def test_device_code(source: str) -> None:
    triton_text.check(source)


def test_honest_cases_and_the_prompts_example() -> None:
    texts = [dict(case.candidate.files)["kernel.py"] for case in honest_cases("triton")]
    example = (Path(triton_text.__file__).parents[1] / "prompts" / "example_triton.md").read_text(encoding="utf-8")
    texts.append(example.partition("```python kernel.py\n")[2].partition("```")[0])
    assert len(texts) > 1
    for source in texts:
        triton_text.check(source)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (text("import time"), "imports time"),
        (text("from email.utils import localtime"), "imports localtime from email.utils"),
        (text("from typing import get_type_hints"), "imports get_type_hints from typing"),
        (text("from triton import knobs"), "imports knobs from triton"),
        (text("import triton.runtime.driver"), "imports triton.runtime.driver"),
        (text("from triton.language.core import builtins"), "imports builtins"),
        (text("from . import other"), "imports other from ."),
        (text("", "NOW = triton.testing.time.time()"), "reads .testing"),
        (text("", "NOW = tl.core.os.environ"), "reads .os"),
        (text("import torch", "SEED = torch.initial_seed()"), "reads .initial_seed"),
        (text("import functools", "OS = functools.GenericAlias"), "reads .GenericAlias"),
        (text("", "OLD = triton.__version__ < '3'"), "reads .__version__"),
        (text("", "MAIN = __builtins__"), "uses __builtins__"),
        (text("", "FOUND = open('/etc/hostname').read()"), "uses open"),
        (text("", "PLACE = id(tl) % 2"), "uses id"),
        (text("", "def f():\n    yield\nFRAME = f().gi_frame"), "reads .gi_frame"),
    ],
)
def test_anything_else_is_refused(source: str, told: str) -> None:
    with pytest.raises(BuildFailure) as caught:
        triton_text.check(source)
    assert told in caught.value.what and "kernel.py:" in caught.value.what
