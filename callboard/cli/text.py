"""What stands between text from anywhere and a terminal (FLT-60).

Sessions hold what models, tools and web pages wrote. Shown as it is, such text could move the
cursor, set the clipboard, or forge a line that looks like ours. So all of it goes through `escape`.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

_UNSAFE: Final = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # C0, DEL, C1
    "\u2028\u2029"  # line separators
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction marks
    "\ufeff\ufff9-\ufffb"  # marks that show as nothing
    "\U000e0000-\U000e007f"  # tags
    "\ud800-\udfff"  # lone surrogates
    "]"
)
_NAMES: Final = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def escape(text: str) -> str:
    """Give a text as one line that a terminal shows and does not obey."""
    return _UNSAFE.sub(_spell, text)


def _spell(found: re.Match[str]) -> str:
    char = found[0]
    return _NAMES.get(char) or (
        f"\\u{ord(char):04x}" if char <= "\uffff" else f"\\U{ord(char):08x}"
    )


def block(text: str) -> list[str]:
    """Give a text as the lines that it has, each of them escaped; tabs become spaces."""
    return [escape(line.expandtabs(4)) for line in text.split("\n")]


def escape_json(text: str) -> str:
    r"""Escape what a terminal would obey in a JSON text, so that its meaning stays.

    Of these characters JSON itself only allows some within strings, where `\uXXXX` says the same.
    """
    return _UNSAFE.sub(_spell_json, text)


def _spell_json(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def shorten(text: str, chars: int) -> str:
    """Give a text as one escaped line of at most so many characters."""
    line = escape(text)
    return line if len(line) <= chars else f"{line[: chars - 1]}…"


def instant(microseconds: int) -> str:
    """Give an instant in the local zone, as RFC 3339 to the second."""
    return datetime.fromtimestamp(microseconds / 1e6).astimezone().isoformat(timespec="seconds")
