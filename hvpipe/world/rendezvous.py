"""The key-value store in which ranks that horovodrun has started find each other."""

from __future__ import annotations

import hmac
import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any

from hvpipe.errors import InitError

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_REQUEST_S = 10.0
"""The longest that the store may take to answer one request."""
_TRIES = 3


@dataclass(frozen=True)
class Rendezvous:
    """The store that runs beside horovodrun. A value is one line of JSON, whose key has a name of its own.

    Anybody can read and write there. With a secret, a value has a seal, and one without it counts as none.

    Args:
        host: Where horovodrun runs.
        port: The port there.
        scope: What precedes the keys.
        limit_s: The longest wait for another rank's value, in seconds.
        secret: What only ranks know; b"": values have no seal.
    """

    host: str
    port: int
    scope: str
    limit_s: float
    secret: bytes = field(default=b"", repr=False)

    def put(self, key: str, value: Any) -> None:
        """Store a value, which must be JSON.

        Raises:
            InitError: If the store does not take it.
        """
        text = json.dumps(value)
        self._request("PUT", key, f"{self._seal(key, text)}{text}".encode())

    def get(self, key: str, whose: str) -> Any:
        """Return a value, once it is there. `whose` says who stores it.

        Raises:
            InitError: If the store does not answer, or nobody stores the value in time.
        """
        deadline_s, pause_s = time.monotonic() + self.limit_s, _SHORTEST_PAUSE_S
        while True:
            found = self._request("GET", key)
            if found is not None and (text := self._opened(key, found)) is not None:
                return json.loads(text)
            if time.monotonic() > deadline_s:
                received = (
                    "nothing from it"
                    if found is None
                    else (
                        f"a value without the seal of this job's secret, at /{self.scope}/{key}: "
                        "HVPIPE_SECRET must be the same on all ranks"
                    )
                )
                raise InitError(
                    f"{whose} should call hvpipe.init() within {self.limit_s:g} s (HVPIPE_TIMEOUT). "
                    f"Received: {received}"
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    def _seal(self, key: str, text: str) -> str:
        if not self.secret:
            return ""
        content = f"hvpipe store /{self.scope}/{key}\0{text}"
        return hmac.digest(self.secret, content.encode(), "sha256").hex() + " "

    def _opened(self, key: str, found: bytes) -> str | None:
        """Return the JSON of a value; None if it is not one of this job's."""
        text = found.decode(errors="replace")
        if self.secret:
            seal, _, text = text.partition(" ")
            if not hmac.compare_digest(self._seal(key, text).encode(), f"{seal} ".encode()):
                return None
        return text

    def _request(self, method: str, key: str, body: bytes | None = None) -> bytes | None:
        """Return what the store answers; None if it does not know the key."""
        for left in reversed(range(_TRIES)):
            connection = http.client.HTTPConnection(self.host, self.port, timeout=_REQUEST_S)
            try:
                connection.request(method, f"/{self.scope}/{key}", body)
                answer = connection.getresponse()
                text = answer.read()
                break
            except (OSError, http.client.HTTPException) as error:
                if left and not isinstance(error, ConnectionRefusedError):
                    continue  # many ranks may ask at the same time
                raise InitError(
                    f"The horovodrun that started this process should answer at {self.host}, port "
                    f"{self.port}: does it still run, and can this host reach it? "
                    f"Received: {type(error).__name__}: {error}"
                ) from error
            finally:
                connection.close()
        if answer.status == http.HTTPStatus.NOT_FOUND:
            return None
        if answer.status != http.HTTPStatus.OK:
            raise InitError(
                f"The store of horovodrun at {self.host}, port {self.port}, should take and give values. "
                f"Received: status {answer.status}"
            )
        return text
