"""Whatever text is put into an element comes out as that text, in XML and in HTML; nothing of it becomes markup."""

from __future__ import annotations

import html
import unicodedata
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_records import HOSTILE

from pytest_cudaforge.report.escaping import marked, one_line, plain
from pytest_cudaforge.report.markup import Markup, joined, tag


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(), max_size=60))
def test_any_text_is_itself_between_tags_and_in_attributes(text: str) -> None:
    element = ElementTree.fromstring(tag("g", text, title=text))
    assert not list(element) and set(element.attrib) == {"title"}
    assert (element.text or "") == marked(text)
    assert html.unescape(joined(text)) == marked(text)


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(), max_size=60))
def test_what_is_shown_holds_nothing_that_acts(text: str) -> None:
    for shown in (plain(text), marked(text)):
        assert all(char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs") for char in shown)
        shown.encode("utf-8")


def test_a_terminals_sequences_go_as_a_whole_and_hidden_characters_leave_their_number() -> None:
    assert marked("\x1b[1;31mred\x1b[0m \x1b]0;title\x07x") == "red x"
    assert marked("a\u202eb\r\nc\x00") == "a⟨U+202E⟩b\nc⟨U+0000⟩"
    assert "\n" not in one_line(HOSTILE, 40) and len(one_line(HOSTILE, 40)) == 40


@pytest.mark.parametrize(
    ("element", "wanted"),
    [
        (tag("p", "a < b & c"), "<p>a &lt; b &amp; c</p>"),
        (tag("p", tag("b", "x"), None, [1, 2.04, "y"]), "<p><b>x</b>12y</p>"),
        (
            tag("td", class_="n", data_x='"', hidden=True, open=False, id=None),
            '<td class="n" data-x="&quot;" hidden></td>',
        ),
        (tag("rect", x=1.26, width=10.0), '<rect x="1.3" width="10"/>'),
        (tag("line", tag("title", "t")), "<line><title>t</title></line>"),
        (tag("style", Markup("a > b {}")), "<style>a > b {}</style>"),
    ],
)
def test_elements(element: Markup, wanted: str) -> None:
    assert element == wanted
