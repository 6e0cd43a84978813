"""The pages that users read: every link leads somewhere, and the first one is short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "action/README.md")),
    *(ROOT / "examples").glob("*.md"),
    *(ROOT / "examples" / "workflows").glob("*.md"),
    *(ROOT / "tests" / "benchmarks").glob("*.md"),
    *(ROOT / "pytest_cudaforge" / "docs").glob("*.md"),
]


def links(page: Path) -> Iterator[str]:
    """What the page links to, code blocks left out; addresses on the web as well."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_of_the_docs_is_reached_from_the_readme() -> None:
    reached = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    assert set((ROOT / "pytest_cudaforge" / "docs").glob("*.md")) <= reached


def test_the_readme_is_read_in_five_minutes() -> None:
    """At 300 words a minute: tables and code count as words, and are looked at rather than read."""
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 1500
