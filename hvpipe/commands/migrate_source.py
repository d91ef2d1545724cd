"""A Python file as bytes, text and syntax tree, for edits that leave the rest of the file as it is."""

from __future__ import annotations

import ast
import codecs
import io
import re
import tokenize
import warnings
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from hvpipe.errors import HvpipeError

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")  # as in Python's tokenizer, for which \f ends no line


@dataclass(frozen=True)
class PythonSource:
    """A Python file.

    Args:
        raw: The whole file.
        text: The decoded file without its byte order mark. Line ends are as in the file.
        encoding: The encoding of `text`: that of the cookie, or UTF-8.
        tree: The syntax tree of the file.
    """

    raw: bytes
    text: str
    encoding: str
    tree: ast.Module

    @staticmethod
    def parse(raw: bytes, name: str) -> PythonSource:
        """Parse a file.

        Args:
            raw: The whole file.
            name: Its name, for messages.

        Returns:
            The file.

        Raises:
            HvpipeError: If this Python cannot parse it, or if its encoding loses something.
        """
        body = raw.removeprefix(codecs.BOM_UTF8)
        try:
            tree = parse_quietly(raw)
            encoding = _encoding(raw)
            text = body.decode(encoding)
            lossless = text.encode(encoding) == body
        except SyntaxError as error:
            where = name if error.lineno is None else f"{name}:{error.lineno}"
            raise _refusal(f"{where}: {error.msg}") from error
        except (ValueError, RecursionError, MemoryError) as error:  # a NUL; brackets nested too deeply
            raise _refusal(f"{name}: {str(error) or 'nested too deeply'}") from error
        if not lossless:
            raise _refusal(f"{name}: {encoding} text that would change when it is written again")
        return PythonSource(raw, text, encoding, tree)

    @cached_property
    def _lines(self) -> list[tuple[int, str]]:
        """The offset and the text of each line."""
        return [(found.start(), found[0]) for found in _LINE.finditer(self.text)]

    def offset(self, node: ast.alias | ast.expr | ast.stmt) -> int:
        """Return the offset in `text` at which a node starts. Nodes count columns in bytes of UTF-8."""
        start, line = self._lines[node.lineno - 1]
        return start + len(line.encode()[: node.col_offset].decode(errors="ignore"))

    def line_at(self, offset: int) -> int:
        """Return the number of the line that holds an offset of `text`."""
        return bisect_right(self._lines, offset, key=lambda line: line[0])

    def with_insertions(self, word: str, offsets: Iterable[int]) -> bytes:
        """Return the file with a word inserted at these offsets of `text`.

        Args:
            word: Characters of ASCII.
            offsets: Where to insert, in any order.

        Returns:
            The new file, in the same encoding.
        """
        cuts = [0, *sorted(offsets), len(self.text)]
        pieces = [self.text[start:end] for start, end in pairwise(cuts)]
        mark = codecs.BOM_UTF8 if self.raw.startswith(codecs.BOM_UTF8) else b""
        return mark + word.join(pieces).encode(self.encoding)


def parse_quietly(raw: bytes) -> ast.Module:
    r"""Return the syntax tree of a file, without a warning about escapes such as "\d" in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(raw)


def _encoding(raw: bytes) -> str:
    # The cookie is on one of the first two lines, and `readline` knows one kind of line end.
    lines = raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    encoding, _ = tokenize.detect_encoding(io.BytesIO(lines).readline)
    return "utf-8" if encoding == "utf-8-sig" else encoding


def _refusal(received: str) -> HvpipeError:
    return HvpipeError(f"The files should be Python that this Python can parse. Received: {received}")
