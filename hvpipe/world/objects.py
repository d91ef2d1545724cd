"""Objects between ranks as bytes: hvpipe's own as JSON, the user's as pickles where ranks are trusted.

Reading a pickle can run any code. So only what the user sends is one, and only ranks that have proved who
they are send it. Reading JSON makes plain values, arrays, and hvpipe's own dataclasses.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import sys
from array import array
from collections.abc import Callable
from typing import Any

from hvpipe.errors import HvpipeError, PeerError

_BYTES, _JSON = b"B", b"J"
_PLAIN = (type(None), bool, int, float, str)
# What objects of other classes become: a Counter a dict, an IntEnum a number.
_BASES: dict[type, Callable[[Any], Any]] = {
    dict: dict,
    list: list,
    tuple: tuple,
    set: set,
    array: list,
    range: list,
    int: int,
    float: float,
    str: str.__str__,
}
_LISTS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def packed(value: Any) -> bytes:
    """Return a plain value as bytes.

    Args:
        value: None, numbers, texts, bytes, NumPy arrays and numbers, dataclasses and named tuples of hvpipe,
            and lists, tuples, sets and dicts of them.

    Raises:
        HvpipeError: For any other value.
    """
    if type(value) is bytes:
        return _BYTES + value
    return _JSON + json.dumps(_to_json(value), separators=(",", ":")).encode()


def unpacked(data: bytes | bytearray | memoryview) -> Any:
    """Return the value that `packed` has written, on any rank.

    Raises:
        PeerError: If the bytes are something else.
    """
    kind, rest = bytes(data[:1]), bytes(data[1:])
    if kind == _BYTES:
        return rest
    try:
        if kind != _JSON:
            raise ValueError(f"{kind!r} at the start")
        return _from_json(json.loads(rest))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PeerError(
            "Another rank should send what this version of hvpipe can read: install the same version on all "
            f"hosts. Received: {type(error).__name__}: {error}"
        ) from error


def packed_for_user(value: Any, trusted: bool) -> bytes:
    """Return any value of the user's as bytes: pickled if ranks are trusted, else a plain one.

    Raises:
        HvpipeError: For a value that is not plain, if ranks are not trusted.
    """
    if trusted:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        return packed(value)
    except HvpipeError as error:
        raise HvpipeError(
            "The ranks of this job cannot prove who they are, so they exchange no pickles, which can run any "
            "code: set HVPIPE_SECRET before horovodrun, or send numbers, texts, bytes, arrays, and lists, "
            f"tuples, sets and dicts of them. Received: {type(value).__name__}"
        ) from error


def unpacked_for_user(data: bytes | memoryview, trusted: bool) -> Any:
    """Return the value that `packed_for_user` has written."""
    return pickle.loads(data) if trusted else unpacked(data)


def _to_json(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_to_json(one) for one in value]
    if kind is dict:
        return {"dict": [[_to_json(key), _to_json(one)] for key, one in value.items()]}
    if kind.__name__ in _LISTS and kind.__module__ == "builtins":
        return {kind.__name__: [_to_json(one) for one in value]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if _is_own(kind):
        fields = {name: _to_json(getattr(value, name)) for name in _fields(kind)}
        return {"class": [kind.__module__, kind.__qualname__], "fields": fields}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        dtype = value.dtype
        if dtype.kind not in "OV" or (dtype.kind == "V" and dtype.names is None and dtype.name != "void"):
            text = dtype.name if dtype.kind == "V" else dtype.str  # bfloat16 is of kind V
            data = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
            scalar = isinstance(value, numpy.generic)
            return {"array": [text, list(value.shape), scalar, data]}
    for base, plain in _BASES.items():
        if isinstance(value, base):
            return _to_json(plain(value))
    raise HvpipeError(
        "Ranks exchange plain values: numbers, texts, bytes, arrays, and lists, tuples, sets and dicts of "
        f"them. Received: {kind.__module__}.{kind.__qualname__}"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "class" in value:
        module, name = value["class"]
        return _own_object(module, name, value["fields"])
    ((name, content),) = value.items()
    if name == "dict":
        return {_from_json(key): _from_json(one) for key, one in content}
    if name in _LISTS:
        return _LISTS[name](_from_json(one) for one in content)
    if name == "bytes":
        return base64.b64decode(content, validate=True)
    if name == "array":
        return _array(*content)
    raise ValueError(f"an unknown kind, {name!r}")


def _array(dtype: str, shape: list[int], scalar: bool, data: str) -> Any:
    import numpy as np

    array = np.frombuffer(bytearray(base64.b64decode(data, validate=True)), np.dtype(dtype)).reshape(shape)
    return array[()] if scalar else array


def _own_object(module: str, name: str, fields: dict[str, Any]) -> Any:
    """Return an object of one of hvpipe's classes, without running any code of the class."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and _is_own(found) and list(fields) == list(_fields(found))):
        raise ValueError(f"a class that ranks do not exchange, {module}.{name}")
    values = {field: _from_json(one) for field, one in fields.items()}
    if issubclass(found, tuple):
        return tuple.__new__(found, values.values())
    made = object.__new__(found)
    for field, one in values.items():
        object.__setattr__(made, field, one)
    return made


def _is_own(kind: type) -> bool:
    known = dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    return known and kind.__module__.partition(".")[0] == "hvpipe"


def _fields(kind: Any) -> list[str]:
    if issubclass(kind, tuple):
        return list(kind._fields)
    return [field.name for field in dataclasses.fields(kind)]
