"""Numbers that sources name, and the sizes beside them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pytest_cudaforge.evaluation.landmarks import landmarks  # noqa: E402
from pytest_cudaforge.evaluation.variants import landmark_names, multiple_names  # noqa: E402


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("if (n > 18000 && n <= 120'000LL) {}", (18000, 120000)),
        ("constexpr auto cap = 1LL << 25;", (1 << 25,)),
        ("CAP = 2 ** 20", (1 << 20,)),
        ("x[0x7fff] = 1e6f; y = 4096u;", (4096, 32767, 1000000)),
        ("t256 = a1000 * 3.14159f + 12 - 200.5;", ()),
        ("long long all = 99999999999;", ()),
        ("0x' 0x '' 1e999 1 << 31 9999999999 ** 31 " + "9" * 6000, (1 << 31,)),  # whatever stands there
        ("constexpr int lanes = 16, vectors = 21, tile = lanes * vectors;", (336,)),
        (
            "constexpr int kLanes = 16;\nconstexpr int kVectors = 21;\nint a[3], b[5], c[7], d[9];\n"
            "constexpr int kTile = kLanes * kVectors;",
            (336,),
        ),
        ("WARPS = 12  # of a block\nBLOCK = WARPS * 32\nx: int = (BLOCK + 5) / 2", (194, 384)),
        ("constexpr unsigned n = 50u; const long m = n * 3L / 0; const auto k = n * 3L; float f = n * 2.5f;", (150,)),
        ("constexpr int a = 1 << 20; constexpr int b = a * a * a * a, c = a / 64;", (16384, 1 << 20)),
        ("constexpr int a = " + "(" * 100 + "1;", ()),
        ("a[3] + b[5] * c[40] - d[50] / e[60]", ()),  # of so many nobody knows which belong together
    ],
)
def test_numbers_that_may_be_sizes(text: str, found: tuple[int, ...]) -> None:
    assert landmarks([text]) == found


def test_who_names_too_many_names_none() -> None:
    assert landmarks([" ".join(map(str, range(1000, 1100)))]) == ()


def test_sizes_lie_on_either_side_and_elements_beyond() -> None:
    args = (torch.zeros(20, 257),)
    assert set(landmark_names(args, {}, [5000], 1 << 21)) == {
        *(f"size 20 -> {new}" for new in (4999, 5000, 5001)),
        *(f"size 257 -> {new}" for new in (4999, 5000, 5001, 251)),
    }
    assert landmark_names(args, {}, [1 << 25], 1 << 20) == []
    assert len(landmark_names(args, {}, range(300, 400, 5), 1 << 20)) == 18


def test_sizes_are_multiples_of_what_the_target_knows_by_name() -> None:
    args = (torch.zeros(20, 14),)
    found = {name for _ in range(40) for name in multiple_names(args, {}, [0, 1, 7, 1000], 20 * 250)}
    chosen = (50, 60, 90, 100, 120, 150, 180, 200, 240, 250)  # by people
    assert found == {
        *(f"size 20 -> {new}" for new in (*(7 << power for power in (0, 2, 3, 4, 5)), *chosen, 300)),
        *(f"size 14 -> {new}" for new in (*(7 << power for power in (0, 2, 3, 4, 5)), *chosen)),  # 14 is there
    }
    assert len(multiple_names((torch.zeros(9, 10, 11),), {}, [7, 13, 5], 1 << 24)) == 6 + 32
    assert multiple_names(args, {}, [7], 70) == [] == multiple_names(args, {}, [1000], 1 << 14)
