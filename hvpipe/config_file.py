"""Reads and writes JSON and TOML files: errors name file, line and field; writes are atomic."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvpipe.atomic_file import atomic_file
from hvpipe.errors import HvpipeError
from hvpipe.own_folder import read_plain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from typing_extensions import Self


MOST = 1e18
"""The largest number in a file. Sums and quotients of such numbers stay finite."""

MOST_BYTES = 1 << 28
"""The most bytes of a file. A larger one would fill the memory before anything in it is checked."""

_KINDS = {
    "hvpipe-profile": "a profile of a model",
    "hvpipe-cluster": "a cluster",
    "hvpipe-plan": "a plan",
    "hvpipe-plan-report": "a report of `hvpipe plan --json`",
    "hvpipe-schedule": "a schedule",
    "hvpipe-tuning": "a file of `hvpipe tune`",
    "hvpipe-checkpoint": "the manifest of a checkpoint",
}
"""What files of each format are."""

NAME = "a printable text of 1 to 300 characters"


def is_name(text: str) -> bool:
    """Tell whether a text is what NAME says."""
    return 0 < len(text) <= 300 and text.isprintable()


class Table:
    """An object of a document; its methods check the type of each field they return.

    `place` names the object in errors: "plan.json" or "plan.json: layers[3]".
    """

    def __init__(self, fields: object, place: str) -> None:
        if not isinstance(fields, Mapping):
            raise HvpipeError(f"{place} should be an object. Received: {short(fields)}")
        self.place = place
        self._fields: Mapping[str, Any] = fields

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as they are in the document."""
        return dict(self._fields)

    def has(self, field: str) -> bool:
        """Tell whether the field is present and not null."""
        return self._fields.get(field) is not None

    def text(self, field: str) -> str:
        """Return a text."""
        value = self._get(field, "text")
        return value if isinstance(value, str) else self._refuse(field, "text", value)

    def name(self, field: str) -> str:
        """Return a text that can be printed in a table: not empty, without line breaks and escapes."""
        value = self.text(field)
        return value if is_name(value) else str(self._refuse(field, NAME, value))

    def file_name(self, field: str) -> str:
        """Return the name of a file beside the document: no path, which could lead anywhere."""
        value = self.text(field)
        if Path(value).name != value or value == ".." or not is_name(value):
            self._refuse(field, "the name of a file beside it", value)
        return value

    def name_or_empty(self, field: str) -> str:
        """Return a text as `name` does, or an empty one."""
        return self.name(field) if self.text(field) else ""

    def number(self, field: str, *, above: float | None = None) -> float:
        """Return a number from 0 to MOST, or > `above` (at least 1 / MOST) if that is given."""
        want = "a number of at least 0" if above is None else f"a number above {above:g}"
        value = self._get(field, want)
        if not _is_finite(value) or (value < 0 if above is None else value <= above):
            self._refuse(field, want, value)
        if value > MOST or (above is not None and value < 1 / MOST):
            self._refuse(field, f"{want}, between {1 / MOST:g} and {MOST:g} in size", value)
        return float(value)

    def seconds(self, field: str) -> float:
        """Return a time: 0, or a number from 1 / MOST to MOST, so that rates stay finite, too."""
        value = self.number(field)
        if 0 < value < 1 / MOST:
            self._refuse(field, f"0, or a number between {1 / MOST:g} and {MOST:g} in size", value)
        return value

    def integer(self, field: str, *, minimum: int = 0) -> int:
        """Return a whole number of at least `minimum`; TOML's 16e9 is one."""
        value = self.number(field)
        if value != int(value) or value < minimum:
            self._refuse(field, f"a whole number of at least {minimum}", self._fields[field])
        return int(value)

    def flag(self, field: str) -> bool:
        """Return true or false."""
        value = self._get(field, "true or false")
        return value if isinstance(value, bool) else bool(self._refuse(field, "true or false", value))

    def flag_or_integers(self, field: str) -> bool | tuple[int, ...]:
        """Return true, false or whole numbers."""
        want = "true, false or a list of whole numbers"
        value = self._get(field, want)
        if isinstance(value, bool):
            return value
        if not isinstance(value, (list, tuple)) or not all(type(number) is int for number in value):
            self._refuse(field, want, value)
        return tuple(value)

    def tables(self, field: str) -> list[Table]:
        """Return a list of objects."""
        value = self._get(field, "a list of objects")
        if not isinstance(value, (list, tuple)):
            self._refuse(field, "a list of objects", value)
        return [Table(row, f"{self._prefix()}{field}[{i}]") for i, row in enumerate(value)]

    def table(self, field: str) -> Table:
        """Return an object."""
        return Table(self._get(field, "an object"), f"{self._prefix()}{field}")

    def texts(self, field: str) -> list[str]:
        """Return a list of texts."""
        value = self._get(field, "a list of texts")
        if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
            self._refuse(field, "a list of texts", value)
        return list(value)

    def numbers(self, field: str, *, above: float | None = None) -> list[float]:
        """Return finite numbers >= 0, or > `above` if that is given."""
        return [one.number(name, above=above) for one, name in self._each(field)]

    def all_seconds(self, field: str) -> list[float]:
        """Return a list of times, each as `seconds` returns it."""
        return [one.seconds(name) for one, name in self._each(field)]

    def _each(self, field: str) -> Iterator[tuple[Table, str]]:
        """Yield each number of a list as the only field of a table, and the field's name."""
        value = self._get(field, "a list of numbers")
        if not isinstance(value, (list, tuple)):
            self._refuse(field, "a list of numbers", value)
        for i, number in enumerate(value):
            yield Table({f"{field}[{i}]": number}, self.place), f"{field}[{i}]"

    def allow(self, fields: Iterable[str]) -> None:
        """Refuse unknown fields: a misspelt field must not count as absent."""
        known = sorted(fields)
        if unknown := sorted(set(self._fields) - set(known)):
            raise HvpipeError(
                f"{self.place} should have only {', '.join(known)}. Received: {short(unknown[0])}"
            )

    def check_format(self, name: str, version: int) -> None:
        """Refuse all but `{"format": name, "version": version, ...}`. Call this before `allow`."""
        received = (self._fields.get("format"), self._fields.get("version"))
        wanted, kind = _KINDS.get(name), self._kind()
        if wanted is not None and kind is not None and kind != wanted:
            named = "" if received[0] is None else f", with format={short(received[0])}"
            raise HvpipeError(
                f'{self.place} should be {wanted}, with "format": "{name}". Received: {kind}{named}'
            )
        if received != (name, version):
            raise HvpipeError(
                f'{self.place} should have "format": "{name}" and "version": {version}. '
                f"Received: format={short(received[0])}, version={short(received[1])}"
            )

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Prefix an HvpipeError raised inside with the place, unless it names the place already."""
        try:
            yield
        except HvpipeError as error:
            raise error if self.place in str(error) else HvpipeError(f"{self.place}: {error}") from error

    def _kind(self) -> str | None:
        """Return the kind of file that this document is, if it says so; clusters in TOML have no format."""
        named = self._fields.get("format")
        if isinstance(named, str):
            return _KINDS.get(named)
        return _KINDS["hvpipe-cluster"] if named is None and "host" in self._fields else None

    def _prefix(self) -> str:
        return f"{self.place}." if ": " in self.place else f"{self.place}: "

    def _get(self, field: str, want: str) -> Any:
        if field not in self._fields:
            raise HvpipeError(f"{self._prefix()}{field} is missing, and should be {want}")
        return self._fields[field]

    def _refuse(self, field: str, want: str, value: object) -> Any:
        raise HvpipeError(f"{self._prefix()}{field} should be {want}. Received: {field}={short(value)}")


class Document(ABC):
    """What a file holds, which its class writes and reads."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""

    @staticmethod
    @abstractmethod
    def from_json(document: Mapping[str, Any] | Table) -> Any:
        """Return what a JSON object of `to_json` describes."""

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file."""
        write_document(path, self.to_json())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a JSON file, or a TOML file if the name ends in .toml.

        Args:
            path: The file.

        Returns:
            What it holds.

        Raises:
            HvpipeError: If the file cannot be read or holds something else; the message names file and field.
        """
        found: Self = cls.from_json(read_document(path))
        return found


def read_document(path: str | os.PathLike[str]) -> Table:
    """Read the object in a JSON file, or in a TOML file if the name ends in .toml."""
    source = Path(path)
    kind = "TOML" if source.suffix == ".toml" else "JSON"
    try:
        text = read_plain(source, MOST_BYTES).decode()
        document = tomllib.loads(text) if kind == "TOML" else json.loads(text, object_pairs_hook=_once)
    except OSError as error:
        raise HvpipeError(f"{source} should be a {kind} file. Received: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise HvpipeError(
            f"{source}, line {error.lineno}, column {error.colno}: should be JSON. Received: {error.msg}"
        ) from error
    except RecursionError as error:
        raise HvpipeError(f"{source} should be {kind}. Received: brackets nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, which names the line, and UnicodeDecodeError
        raise HvpipeError(f"{source} should be {kind}. Received: {error}") from error
    return Table(document, str(source))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse a key that occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {short(twice)} twice in an object")
    return found


def write_document(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all. On return, the file and its name are on the disk."""
    text = json.dumps(document, indent=1) + "\n"
    try:
        with atomic_file(path, sync=True) as file:
            file.write(text.encode())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error  # without the name of the partial file
        raise HvpipeError(f"{Path(path)} should be a file that can be written. Received: {why}") from error


def fingerprint(content: object) -> str:
    """Return 16 hex digits of a JSON value, equal for equal content on every machine."""
    import hashlib

    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _is_finite(value: object) -> bool:
    """Tell whether a value is a number that a float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def short(value: object) -> str:
    """Return the value as Python writes it, in at most 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # TOML's hexadecimal numbers may have more digits than Python writes
        text = "a number of too many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
