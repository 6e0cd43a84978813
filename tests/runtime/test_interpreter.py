"""The Python subset of plan.py: what works as in Python, what is refused and how, and hostile text."""

from __future__ import annotations

import textwrap
import time

import pytest

from pytest_cudaforge.errors import PlanError, PlanLimitError, PlanSyntaxError, Unsupported
from pytest_cudaforge.runtime.interpreter import parse
from pytest_cudaforge.runtime.values import Meter, StandIn

HEADER = "import math\nfrom math import ceil\nfrom pytest_cudaforge.plan import Unsupported\n"


def source_of(body: str) -> str:
    """``body`` as the body of plan(), which starts at line 5."""
    return HEADER + "def plan(a=None, b=None):\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n"


def run(body: str, *args: object, **kwargs: object) -> object:
    return parse(source_of(body)).call("plan", args, kwargs, {"Unsupported": None})


class Opaque(StandIn):
    kind = "the thing"


# -- what works, compared with Python itself ---------------------------------------------------------------------

EXPRESSIONS = [
    "(7 + 255) // 256",
    "-(-1000 // 256)",
    "1 << (1000 - 1).bit_length()",
    "min(1024, 1 << 9), max([3, 9, 2]), max(3, 4.5), min((), default=7)",
    "[x * x for x in range(10) if x % 3 if x > 1]",
    "[(i, j) for i in range(3) for j in range(i)]",
    "{k: v for k, v in zip(('a', 'b'), (1, 2))}",
    "sum(x for x in [1, 2, 3]), any(x > 2 for x in (1, 2, 3)), all([True, 0])",
    "list(enumerate('ab', 1))",
    "1 < 2 <= 2 != 3, 1 < 0 < 5, 'a' < 'b'",
    "None is None, True and 'x' or 'y', not [], 0 or 5",
    "2 in (1, 2), 'ell' in 'hello', 5 not in {1, 2}, 3 in range(10), 'k' in {'k': 1}",
    "[1, 2, 3, 4][1:3], (1, 2, 3)[::-1], 'abc'[-1], range(10)[2:8:3]",
    "f'norm<{4}, {1.5:.2f}, {255:#06x}, {\"s\"!r:>6}, {(1, 2)}, {True}>{{}}'",
    "[*range(3), *(7, 8)], (*'ab', 1), {**{'a': 1}, 'b': 2}",
    "(lambda n, k=2: n * k)(4), (lambda *a, **k: (a, k))(1, 2, z=3)",
    "math.ceil(7 / 2), math.sqrt(16), math.log2(8), math.prod([2, 3, 4]), math.gcd(12, 18), ceil(0.2), math.inf",
    "int('12'), int(3.9), float('-inf'), bool(''), abs(-3), round(2.567, 1), str(4), divmod(7, 2), pow(2, 5)",
    "2 ** 10, 2 ** -1, 7 % 3, 7.5 // 2, ~5, 6 & 3, 6 | 3, 6 ^ 3, 256 >> 4, 1 / 4",
    "[0] * 3 + [1], 'ab' * 2, (1,) * 2 + (3,), 3 * [1]",
    "sorted([3, 1, 2], reverse=True), list(reversed((1, 2))), tuple([1]), dict(a=1), len({'a': 1}), len('abc')",
    "isinstance(3, int), isinstance(True, int), isinstance(3.0, (int, float)), isinstance('a', str)",
    "{'a': 1}.get('a'), {'a': 1}.get('b', 2), list({'a': 1}.items()), (1, 2, 1).count(1), [4, 5].index(5)",
    "', '.join(['a', 'b']), 'float32'.startswith('float'), 'x_y'.replace('_', '-').upper()",
    "'torch.float32'.split('.')[-1], ' a b '.strip().split(), 'ab'.removeprefix('a'), 'ab'.removesuffix('b')",
    "[1, 2].copy(), {'a': 1}.copy(), {1: 2}.update({3: 4})",
    "(1, (2, 3)) == (1, (2, 3)), [1] == (1,), 1 == 1.0, None == 0, 'a' != 'b'",
    "5 if 3 > 2 else 6, (3.0).is_integer(), 10 .bit_length()",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expression_gives_what_python_gives(expression: str) -> None:
    import math

    expected = eval(expression, {"math": math, "ceil": math.ceil})
    assert run(f"return {expression}") == expected


BODIES = [
    "x = 0\nfor i in range(10):\n    if i == 3:\n        continue\n    if i == 6:\n        break\n    x += i\nreturn x",
    "for i in (1, 2):\n    pass\nelse:\n    return 'done', i",
    "*lead, last = (1, 2, 3)\nfirst, *rest = lead\n(a, b), c = (1, 2), 3\nreturn lead, last, first, rest, a, b, c",
    "d = {}\nd['k'] = [1]\nd['k'][0] += 5\nd['k'].append(2)\nd['k'].extend((3, 4))\nd['k'].insert(0, 9)\n"
    "d['k'].pop()\nreturn d",
    "def up(n, step=1, *, times=1):\n    return n + step * times\nreturn up(1), up(1, 2), up(n=1, times=5)",
    "def outer(k):\n    def inner(n):\n        return n * k\n    return inner\nreturn outer(3)(4)",
    "def fact(n):\n    return 1 if n <= 1 else n * fact(n - 1)\nreturn fact(10)",
    "x: int = 4\na = b = x\nif a > 3:\n    y = 1\nelif a > 2:\n    y = 2\nelse:\n    y = 3\nreturn a, b, y",
    "block = 32\nfor _ in range(10):\n    if block >= 300:\n        break\n    block *= 2\nreturn block",
    "x = [i for i in range(3)]\nx = x + [len(x)]\nx += [9]\nreturn x",
    "i = 7\ny = [i for i in range(3)]\nreturn i",
    "'a docstring'\nreturn",
    "items = []\nfor i, (p, q) in enumerate([(1, 2), (3, 4)]):\n    items.append(i * p + q)\nreturn items",
    "assert True, 'never'\nreturn 1",
]


@pytest.mark.parametrize("body", BODIES)
def test_statements_give_what_python_gives(body: str) -> None:
    names: dict[str, object] = {}
    exec(source_of(body).replace("from pytest_cudaforge.plan import Unsupported\n", ""), names)
    expected = names["plan"]()  # type: ignore[operator]  # it is the function just defined
    assert run(body) == expected


def test_annotations_are_never_evaluated() -> None:
    text = "def plan(x: torch.Tensor, n: 'int' = 3) -> torch.Tensor:\n    return n\n"
    assert parse(text).call("plan", (1,), {}, {}) == 3


def test_top_level_constants_and_helpers() -> None:
    text = (
        "from __future__ import annotations\nBLOCK = 256\n\ndef blocks(n):\n    return -(-n // BLOCK)\n\ndef plan(n):\n"
    )
    assert parse(text + "    return blocks(n)\n").call("plan", (1000,), {}, {}) == 4


def test_each_run_starts_anew() -> None:
    program = parse("SEEN = []\ndef plan():\n    SEEN.append(1)\n    return len(SEEN)\n")
    assert [program.call("plan", (), {}, {}) for _ in range(2)] == [1, 1]


def test_parse_is_cached() -> None:
    text = source_of("return 1")
    assert parse(text) is parse(text)


# -- what is refused ---------------------------------------------------------------------------------------------

REFUSED = [
    ("while True:\n    pass", "while loop", "for i in range"),
    ("try:\n    pass\nexcept ValueError:\n    pass", "try/except", "raise Unsupported"),
    ("with open('x') as f:\n    pass", "with statement", "leave it out"),
    ("class A:\n    pass", "a class", "plain functions"),
    ("async def f():\n    pass", "async function", "use `def`"),
    ("global x", "global", "argument"),
    ("del a", "del statement", "freed"),
    ("if (n := 3):\n    pass", ":=", "line of its own"),
    ("return {x for x in (1, 2)}", "set comprehension", "list comprehension"),
    ("return {1, 2}", "a set", "tuple"),
    ("return a @ b", "operator @", "aten.mm"),
    ("yield 1", "yield", "return a list"),
    ("import math", "import inside a function", "top"),
    ("return a.__class__", "attribute .__class__", "leading underscore"),
    ("return a._private", "attribute ._private", "leading underscore"),
    ("return __import__('os')", "'__import__'", "underscores"),
    ("a.x = 3", "assignment to .x", "name"),
    ("return 1j", "complex literal", "numbers"),
    ("return b'x'", "bytes literal", "numbers"),
    ("raise OSError('x')", "raise of anything but Unsupported", "Unsupported"),
    ("raise", "raise of anything but Unsupported", "Unsupported"),
    ("return eval('1')", "'eval' is not defined", "no text"),
    ("return getattr", None, None),
    ("return torch.float32", "'torch' is not defined", "x.dtype"),
    ("print(a)", "'print' is not defined", "leave it out"),
    ("return empty((2,), 'float32')", "'empty' is not imported", "from pytest_cudaforge.plan import empty"),
    ("return rowz", "'rowz' is not defined", None),
    ("@a\ndef f():\n    pass", "decorator", "directly"),
    ("return f'{3:{4}}'", "format spec", "number"),
    ("match a:\n    case 1:\n        pass", "Match", "if"),
    ("return [x async for x in a]", None, None),
]


@pytest.mark.parametrize(("body", "names", "advice"), [case for case in REFUSED if case[1]])
def test_outside_the_subset_is_refused_with_line_name_and_advice(body: str, names: str, advice: str | None) -> None:
    with pytest.raises(PlanSyntaxError) as caught:
        parse(source_of(body))
    text = str(caught.value)
    assert names in text
    assert advice is None or advice in text
    assert caught.value.line in (5, 6) and f"plan.py:{caught.value.line}:" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\ndef plan(x):\n    return x\n", "import of 'torch'"),
        ("import os\ndef plan(x):\n    return x\n", "only `from pytest_cudaforge.plan import ...` and `math`"),
        ("from os import path\ndef plan(x):\n    return x\n", "import of 'os'"),
        ("from . import y\ndef plan(x):\n    return x\n", "import of '.'"),
        ("from pytest_cudaforge.plan import empty_like\ndef plan(x):\n    return x\n", "write empty(x.shape, x.dtype)"),
        ("from pytest_cudaforge.plan import lunch\ndef plan(x):\n    return x\n", "did you mean 'launch'?"),
        ("from pytest_cudaforge.plan import *\ndef plan(x):\n    return x\n", "import the names you use"),
        (
            "from pytest_cudaforge.plan import annotations, MAX_BYTES\ndef plan(x):\n    return x\n",
            "has no 'annotations'",
        ),
        ("import math as os\nimport math.os\ndef plan(x):\n    return x\n", "import of 'math.os'"),
        ("def plna(x):\n    return x\n", "did you mean 'plna'?"),
        ("x = 3\n", "defines no function `plan`"),
        ("", "defines no function `plan`"),
        ("for i in range(3):\n    pass\ndef plan(x):\n    return x\n", "`for` outside a function"),
        ("def plan(x):\nreturn x\n", "not Python"),
        ("def plan(x:\n", "not Python"),
        ("\0", "null bytes"),
        ("def plan(x):\n    return " + "(" * 500 + "x" + ")" * 500, "plan.py"),
        ("def plan(x):\n    return " + "-" * 500 + "1", "nested"),
        ("def plan(x):\n    return " + "+".join(["x"] * 200), "nested"),
        ("def plan(x):\n    return " + "+".join(["x"] * 30000), "nested too deeply"),
        ("def plan(x):\n    return " + "-" * 100_000 + "1", "nested too deeply"),
        ("def plan(x):\n    return " + "lambda:" * 15_000 + "1", "nested too deeply"),
        ("def plan(x):\n    return " + "9" * 5000, "plan.py"),
        ("def plan(x):\n    return " + "9" * 100, "integer of"),
        ("#" * 200_000, "characters"),
        ("def plan(x):\n" + " x=1\n" * 20_000, "syntax nodes"),
    ],
)
def test_whole_file_mistakes(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse(text)
    assert message in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    text = """import torch
from pytest_cudaforge.plan import empty
def plan(x):
    y = empty(x.shape, torch.float32)
    i = 0
    while i < 3:
        i += 1
    lunch("k", args=(x,))
    print(y)
    return launch
"""
    with pytest.raises(PlanSyntaxError) as caught:
        parse(text)
    assert caught.value.line == 1
    lines = str(caught.value).splitlines()
    assert lines[0] == "plan.py:1: import of 'torch'"
    assert lines[3].startswith("  also plan.py:6: a while loop is outside the plan's Python (use `for")
    assert lines[4].startswith("  also plan.py:8: the name 'lunch' is not defined")
    assert lines[5].startswith("  also plan.py:9: the name 'print' is not defined (leave it out")
    assert lines[6].startswith("  also plan.py:10: the name 'launch' is not imported (add `from")
    assert len(lines) == 7


def test_many_mistakes_are_not_all_listed() -> None:
    with pytest.raises(PlanSyntaxError, match="and 31 more"):
        parse("def plan(x):\n" + "".join(f"    name{i} + 1\n" for i in range(40)))


RUNTIME = [
    ("return a + 1", "cannot compute the thing + 1 (int)"),
    ("return a < 1", "cannot compute the thing < 1 (int)"),
    ("return a == 1", "cannot compare the thing with 1 (int)"),
    ("if a:\n    pass", "the truth of the thing"),
    ("return a()", "the thing cannot be called"),
    ("return a[0]", "the thing cannot be indexed"),
    ("return a.shape", "has no attribute 'shape'"),
    ("return a is a", "`is None`"),
    ("return 3 / 0", "division by zero"),
    ("return 1.5 << 2", "bit operations need integers"),
    ("return (-1) ** 0.5", "complex number"),
    ("return [1, 2][5]", "index 5"),
    ("return {'a': 1}['b']", "no key 'b'"),
    ("return (1, 2).append(3)", "no attribute 'append'"),
    ("return 'x'.format(1)", "use an f-string"),
    ("return {}.update(3)", "update() with 3"),
    ("return 'a'.split('')", "empty separator"),
    ("x, y = (1, 2, 3)", "cannot unpack a tuple of 3 into 2 names"),
    ("x, y = 3", "3 (int) cannot be iterated"),
    ("return len(3)", "len() of 3"),
    ("return range(2.5)", "use // instead of /"),
    ("return min('ab', 3)", "min() of 'ab'"),
    ("return int('x' * 10)", "int() of"),
    ("return int(float('inf'))", "int() of inf"),
    ("return math.sqrt(-1)", "math.sqrt(-1)"),
    ("return math.sqrt('a')", "expected: a number"),
    ("return math.factorial(3)", "math has no 'factorial'"),
    ("return math.sqt(3)", "did you mean 'sqrt'?"),
    ("x = 1 if b else y\ny = 2", "'y' has no value yet"),
    ("def f(n):\n    return n\nreturn f()", "f() misses the argument 'n'"),
    ("def f(n):\n    return n\nreturn f(1, 2)", "called with 2 positional arguments"),
    ("def f(rows):\n    return rows\nreturn f(row=2)", "did you mean 'rows'?"),
    ("def f(n):\n    return n\nreturn f(1, n=2)", "gets the argument 'n' twice"),
    ("n = 1\ndef f():\n    n += 1\n    return n\nreturn f()", "outer function"),
    ("return {[1]: 2}", "cannot be a dict key"),
    ("return f'{3:q}'", "format 'q'"),
    ("return f'{[1, [2]]:>4}'", "cannot be formatted"),
    ("return sorted([1, 'a'])", "sorted() of"),
    ("return isinstance(3, len)", "isinstance() with"),
    ("return len(3, 4)", "len() got 2 positional arguments"),
    ("return sum([1], strat=2)", "did you mean 'start'?"),
    ("(1, 2)[0] = 3", "cannot assign into a tuple of 2"),
    ("return getattr(a, '__class__')", "leading underscore"),
    ("return getattr(3, 'real')", "getattr() on 3"),
    ("return zip((1,), (1, 2), strict=True)", "lengths 1, 2"),
    ("return 'a' + 1", "'a' (str) + 1 (int)"),
    ("return '%d' % 3", "cannot compute '%d' (str) % 3 (int)\n  to do: use an f-string"),
]


@pytest.mark.parametrize(("body", "message"), RUNTIME)
def test_mistakes_at_run_time_name_the_values_and_the_line(body: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        run(body, Opaque())
    assert message in str(caught.value)
    assert caught.value.line is not None and caught.value.line >= 5


def test_the_line_is_that_of_the_innermost_expression() -> None:
    with pytest.raises(PlanError) as caught:
        run("x = 1\ny = max(\n    x,\n    3 / 0,\n)\nreturn y")
    assert caught.value.line == 8


def test_unsupported_carries_the_reason_and_line() -> None:
    with pytest.raises(Unsupported, match=r"plan.py:5: needs contiguous x"):
        run("raise Unsupported('needs contiguous x')")
    with pytest.raises(Unsupported, match=r"plan.py:5: ValueError: cols is 3"):
        run("raise ValueError(f'cols is {3}')")
    with pytest.raises(Unsupported, match=r"assertion failed: a == 4"):
        run("assert a == 4", 5)
    with pytest.raises(Unsupported, match=r"assertion failed: odd rows: 5"):
        run("assert a % 2 == 0, f'odd rows: {a}'", 5)


# -- hostile text ------------------------------------------------------------------------------------------------

HOSTILE = [
    "return 10 ** 10 ** 9",
    "return 2 ** 100000",
    "return 1 << 10 ** 9",
    "return 10 ** 10 ** 10 ** 10",
    "x = 3\nfor i in range(100):\n    x = x * x\nreturn x",
    "for i in range(10 ** 12):\n    pass",
    "return [i for i in range(10 ** 12)]",
    "return sum(i for i in range(10 ** 12))",
    "return list(range(10 ** 30))",
    "return len(range(10 ** 30))",
    "return sum(range(10 ** 9))",
    "return max(range(10 ** 9))",
    "return tuple(range(10 ** 9))",
    "return zip(range(10 ** 9), range(10 ** 9))",
    "return enumerate(range(10 ** 9))",
    "return 1.5 in list(range(10 ** 9))",
    "return 'a' * 10 ** 10",
    "return [0] * 10 ** 10",
    "return (0,) * 60000 * 60000",
    "x = 'a'\nfor i in range(100):\n    x = x + x\nreturn x",
    "x = 'a'\nfor i in range(100):\n    x += x\nreturn x",
    "x = [1]\nfor i in range(100):\n    x = x + x\nreturn x",
    "x = [1]\nfor i in range(100):\n    x.extend(x)\nreturn x",
    "x = []\nfor i in range(10 ** 9):\n    x.append('a' * 16000 + str(i))",
    "x = 'ab'\nfor i in range(100):\n    x = x.replace('a', x)\nreturn x",
    "x = 'ab'\nfor i in range(100):\n    x = x.join([x, x])\nreturn x",
    "x = 'ab'\nfor i in range(100):\n    x = f'{x}{x}'\nreturn x",
    "x = [0]\ny = [0]\nfor i in range(200):\n    x = [x, x]\n    y = [y, y]\nreturn x == y",
    "x = [0]\nfor i in range(200):\n    x = [x, x]\nreturn str(x)",
    "x = []\nx.append(x)\nreturn x == [x]",
    "x = []\nx.append(x)\nreturn f'{x}'",
    "x = {}\nfor i in range(10 ** 9):\n    x[i] = i",
    "def f(n):\n    return f(n + 1)\nreturn f(0)",
    "def f(n):\n    return [f(n), f(n)]\nreturn f(0)",
    "f = lambda g: g(g)\nreturn f(f)",
    "def f(*a):\n    return f(*a, *a)\nreturn f(1)",
    "return f'{3:999999999d}'",
    "return math.prod(range(1, 10 ** 6))",
    "return math.prod([10 ** 9] * 1000)",
    "return math.lcm(10 ** 30, 10 ** 30 + 1, 10 ** 29 + 7)",
    "return round(10 ** 30, -10 ** 9)",
    "return math.exp(10 ** 9)",
    "return sum([[0] * 1000] * 60000, [])",
    "return sorted(list(range(60000)) * 2)",
    "x = tuple(range(60000))\nfor i in range(1000):\n    y = x[1:]",
    "x = list(range(60000))\nfor i in range(10 ** 6):\n    x.pop(0)",
    "x = 3\nfor i in range(9):\n    x = {x: x, 'y': x}.get(x) * 10 ** 30",
    "return " + "[" * 40 + "0" + "]" * 40 + " * 10 ** 10",
    "return [x for x in range(10 ** 4) for y in range(10 ** 4)]",
]


@pytest.mark.parametrize("body", HOSTILE)
def test_hostile_text_ends_soon_with_a_plan_error(body: str) -> None:
    begin = time.process_time()
    with pytest.raises(PlanError) as caught:
        run(body)
    assert time.process_time() - begin < 8  # a second or less on an idle core; this one is shared
    assert caught.value.line is not None
    assert len(str(caught.value)) < 2000


def test_the_step_cap_says_what_to_do() -> None:
    with pytest.raises(PlanLimitError, match=r"more than 500000 steps[\s\S]*loop over tiles inside the kernel"):
        run("for i in range(10 ** 9):\n    pass")


def test_meter_counts() -> None:
    meter = Meter(3)
    meter.charge(3)
    with pytest.raises(PlanLimitError):
        meter.charge(1)
