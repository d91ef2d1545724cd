"""Pieces of an HTML page; every text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def element(tag: str, text: str, kind: str = "") -> str:
    """Return a tag around a text."""
    attribute = f' class="{escape(kind)}"' if kind else ""
    return f"<{tag}{attribute}>{escape(text)}</{tag}>"


def around(tag: str, pieces: Iterable[str], kind: str = "") -> str:
    """Return a tag around pieces of HTML."""
    attribute = f' class="{escape(kind)}"' if kind else ""
    return f"<{tag}{attribute}>{''.join(pieces)}</{tag}>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], fastest: int | None = None) -> str:
    """Return a table that scrolls sideways if it is too wide. Long texts wrap; one row can stand out."""
    head = around("tr", (element("th", each) for each in header))
    body = (
        around("tr", (_cell(each) for each in row), "fastest" if number == fastest else "")
        for number, row in enumerate(rows)
    )
    return around("div", [around("table", [around("thead", [head]), around("tbody", body)])], "wide")


def figure(caption: str, svg: str) -> str:
    """Return a plot under its caption."""
    return around("figure", [element("figcaption", caption), svg])


def folded(summary: str, output: str) -> str:
    """Return an output that opens on a click."""
    return around("details", [element("summary", summary), element("pre", output)])


def _cell(text: str) -> str:
    return element("td", text, "words" if len(text) > 24 else "")
