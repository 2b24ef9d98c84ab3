"""Server-sent events: the lines of a stream, put together to events (HTML standard, section 9.2.6)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

RECONNECT_S = 1.0
"""Before a broken stream is opened again."""
SILENCE_S = 60.0
"""A stream without a line, not even a comment, for so long is taken for broken."""


class LineBuffer:
    """Splits text that arrives in parts into lines. Only CR, LF and CRLF end a line, not what `str.splitlines` adds."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """The lines that end with this text, without their line breaks."""
        text = self._rest + text
        # A CR at the end may be the first half of a CRLF.
        held = "\r" if text.endswith("\r") else ""
        *lines, self._rest = re.split("\r\n|\r|\n", text.removesuffix("\r"))
        self._rest += held
        return lines


@dataclass(frozen=True)
class ServerEvent:
    """One event."""

    kind: str
    data: str
    id: str | None
    """The id of the last event that had one."""


@dataclass
class EventParser:
    """Puts lines together to events."""

    last_id: str | None = None
    """The id of the last event that was received as a whole and had one."""
    _id: str | None = None
    _kind: str = ""
    _data: list[str] = field(default_factory=list)

    def feed(self, line: str) -> ServerEvent | None:
        """The event that ends with this line, which has no line break; None if none does."""
        if not line:
            self.last_id = self.last_id if self._id is None else self._id
            event = ServerEvent(self._kind or "message", "\n".join(self._data), self.last_id) if self._data else None
            self.restart()
            return event
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def restart(self) -> None:
        """Forget what was received of an event."""
        self._id, self._kind, self._data = None, "", []

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request that continues after the last event."""
        headers = {"accept": "text/event-stream", "cache-control": "no-store"}
        return headers | ({"last-event-id": self.last_id} if self.last_id else {})
