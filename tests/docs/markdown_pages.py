"""The pages of this repository, taken apart: fenced blocks, tables, headings and links.

It knows Markdown as these pages write it; it must not know what any block or table says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^(`{3,})(.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block: the words behind its fence (the first is the language), and the page's line it starts on."""

    page: str
    line: int
    words: tuple[str, ...]
    text: str

    @property
    def language(self) -> str:
        return self.words[0] if self.words else ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Table:
    """A table: the titles of its columns, and its rows by title."""

    titles: tuple[str, ...]
    rows: tuple[dict[str, str], ...]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """Every fenced block, in order; raises ValueError for one that does not end."""
    return list(_split(page)[0])


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _split(page)[1]


def _split(page: Path) -> tuple[list[Block], str]:
    found: list[Block] = []
    outside: list[str] = []
    inside: list[str] | None = None
    fence, words, start = "", (), 0
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        match = _FENCE.match(line)
        if inside is None and match:
            fence, words, start, inside = match[1], tuple(match[2].split()), number + 1, []
        elif inside is not None and line == fence:
            found.append(Block(name_of(page), start, words, "\n".join(inside) + "\n"))
            inside = None
        elif inside is not None:
            inside.append(line)
        else:
            outside.append(line)
    if inside is not None:
        raise ValueError(f"{name_of(page)}:{start}: a block that does not end")
    return found, "\n".join(outside) + "\n"


def tables(page: Path) -> Iterator[Table]:
    """Every table of the page; raises ValueError for a row with another number of cells than the titles."""
    for paragraph in re.split(r"\n(?!\|)", prose(page)):
        lines = [line for line in paragraph.splitlines() if line.startswith("|")]
        if len(lines) < 3:
            continue
        titles, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
        if not all(re.fullmatch(r":?-+:?", cell) for cell in rule):
            raise ValueError(f"{name_of(page)}: a table without a rule under its titles: {titles}")
        for row in rows:
            if len(row) != len(titles):
                raise ValueError(f"{name_of(page)}: a row with {len(row)} of {len(titles)} cells: {row}")
        yield Table(tuple(titles), tuple(dict(zip(titles, row, strict=True)) for row in rows))


def table(page: Path, *titles: str) -> Table:
    """The one table of the page that has all these columns."""
    found = [one for one in tables(page) if set(titles) <= set(one.titles)]
    assert len(found) == 1, f"{name_of(page)} has {len(found)} tables with the columns {titles}"
    return found[0]


def anchors(page: Path) -> set[str]:
    """What a link to a place of this page may say behind ``#``, as code hosts make it from the headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    """The targets of all links."""
    return re.findall(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)", prose(page))


def unquoted(cell: str) -> str:
    """A cell's text without the backquotes around it."""
    return cell.strip("`")
