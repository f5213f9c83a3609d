"""Links between the pages lead somewhere: to a file that is there, to a heading that it has."""

import re

import pytest
from pages import ROOT, text_of

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def prose(page):
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """As GitHub makes them of headings: lower case, punctuation dropped, spaces as hyphens."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def links(page):
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(str(target.relative_to(ROOT))), f"{page}: {link}"


def test_pages_link_to_each_other():
    assert sum(len(links(page)) for page in PAGES) > 50
    assert {"docs/" + link.partition("/")[2] for link in links("README.md") if link.endswith(".md")} >= {*PAGES[1:]}
