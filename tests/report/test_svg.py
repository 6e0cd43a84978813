"""Pictures are well-formed, say what they show, and hold nothing that a model could have put there."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from flow_records import make_round
from report_records import DEVICE, HOSTILE, hostile_trace, rich_trace

from pytest_cudaforge.records import Round, Status
from pytest_cudaforge.report import pictures, svg
from pytest_cudaforge.report.rows import round_row
from pytest_cudaforge.report.standings import Standing, standings

SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture: svg.Picture | None) -> ElementTree.Element:
    assert picture is not None
    return ElementTree.fromstring(picture.standalone())


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_rounds_have_marks_crosses_and_a_star() -> None:
    trace = rich_trace()
    root = drawn(svg.rounds([round_row(entry) for entry in trace.rounds], trace.winner))
    groups = [title.text for title in root.iter(f"{SVG}title")]
    assert "round 1: BUILD_ERROR: BUILD_ERROR for the test" in groups and "round 3: 2.00× vs eager" in groups
    assert {"1", "2", "3★", "4", "failed", "vs eager"} <= set(texts(root))
    assert "vs torch.compile" not in texts(root), "nothing was timed against it"
    assert groups[0] == "Speedup by round: 1 BUILD_ERROR, 2 0.80×, 3 2.00×, 4 NO CANDIDATE"


@pytest.mark.parametrize("count", [1, 7, 60])
def test_marks_stay_inside_the_picture(count: int) -> None:
    lines = [round_row(make_round(n, speedup=0.01 * 3**n if n < 9 else 900.0)) for n in range(1, count + 1)]
    picture = svg.rounds(lines)
    assert picture is not None and picture.width <= 1000
    for circle in drawn(picture).iter(f"{SVG}circle"):
        if circle.get("cx") != "0":
            assert 40 < float(circle.get("cx", "")) < picture.width
            assert 30 <= float(circle.get("cy", "")) <= 220


def test_only_failures_and_nothing_at_all() -> None:
    failed = round_row(make_round(1, status=Status.TIMEOUT))
    assert "vs eager" in texts(drawn(svg.rounds([failed])))
    assert svg.rounds([]) is None and svg.bars("none", []) is None and svg.standing_bars([]) is None


def test_text_from_outside_is_text() -> None:
    entry: Round = replace(make_round(1, status=None), failure=HOSTILE)
    for picture in (
        svg.rounds([round_row(entry)]),
        svg.bars(HOSTILE, [svg.Bar(HOSTILE, 1.0, HOSTILE, group=HOSTILE)], limits=[(1.0, HOSTILE)]),
    ):
        root = drawn(picture)
        assert not [element for element in root.iter() if element.tag in (f"{SVG}script", f"{SVG}image", f"{SVG}a")]
        assert all(not name.startswith("on") for element in root.iter() for name in element.attrib)
        assert "\u202e" not in (picture.standalone() if picture else "") and "\x1b" not in str(picture)


def test_bars_are_in_proportion_and_show_their_limit() -> None:
    root = drawn(svg.standing_bars(standings(rich_trace())))
    widths = {
        group.find(f"{SVG}text").text: float(group.find(f"{SVG}rect").get("width"))  # type: ignore[union-attr, arg-type]
        for group in root.iter(f"{SVG}g")
    }
    assert widths.keys() == {"eager", "round 2", "round 3"}
    assert widths["round 3"] == pytest.approx(2 * widths["eager"], rel=0.01), "40 % and 20 % of the speed of light"
    assert "speed of light" in texts(root)


def test_faster_than_the_roofline_is_said() -> None:
    assert "(over the roofline)" in str(svg.standing_bars([Standing("w", "round 1", 100.0, 150.0)]))


def test_the_roofline_needs_flops_and_a_bandwidth() -> None:
    near = standings(rich_trace())
    root = drawn(svg.rooflines(near, DEVICE.bandwidth_bytes_per_s, DEVICE.peak_flops))
    assert {"eager", "round 3", "fp32 300 GFLOP/s", "FLOPs per byte"} <= set(texts(root))
    assert svg.rooflines(near, None, ()) is None
    assert svg.rooflines([replace(entry, flops=0) for entry in near], 5e10, ()) is None
    assert svg.rooflines(near, 5e10, ()) is not None, "a device whose peaks are unknown"


def test_one_picture_of_a_target_for_a_pull_request() -> None:
    root = drawn(pictures.summary(rich_trace()))
    wanted = {"Speedup by round", "Percent of the speed of light", "Time by kernel", "3★", "scale", "60 %, 3.75 µs"}
    assert wanted <= set(texts(root))
    assert len(pictures.summary(rich_trace()).standalone()) < 12_000  # type: ignore[union-attr]
    nothing = replace(rich_trace(), rounds=(), final=None, baselines=())
    assert pictures.summary(nothing) is None
    attacked = drawn(pictures.summary(hostile_trace()))
    assert {element.tag.removeprefix(SVG) for element in attacked.iter()} == {
        element.tag.removeprefix(SVG) for element in root.iter()
    }
