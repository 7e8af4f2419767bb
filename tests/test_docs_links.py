"""Links between the pages of the documentation lead to files and headings that exist."""

import re
from pathlib import Path

import pytest

from tests.support.pages import PAGES, ROOT

LINK = re.compile(r"\]\(([^()\s]+)\)")


def _anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        assert not anchor or anchor in _anchors(path), link


def test_links_are_found() -> None:
    assert sum(len(LINK.findall(page.read_text())) for page in PAGES) > 100
