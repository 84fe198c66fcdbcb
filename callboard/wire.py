"""Frames <-> messages: what stands between bytes of a socket and the values of messages.py.

A message is a header and a body, both msgpack maps. On the bus they are two frames, so that an
actor can look at one without the other; on the door they are one map behind a length of four
bytes. Header fields at their default are left out.

Decoding follows FLT-54 and FLT-56. One pass over the raw bytes (`_survey`) judges structure,
depth, number of items and numbers before anything is built, so hostile bytes cost no memory; only
then msgpack builds the values, judging text and keys. Every refusal is a `CallboardError`. What a
process of our own without agent code has encoded is spared the pass (`decode_trusted`).

Pure: no clock, no socket, no state but `Unframer`'s buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from math import isfinite
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, cast

from msgpack import packb, unpackb
from pydantic import ValidationError

from callboard import messages
from callboard.errors import CallboardError, InvalidRequest, PayloadTooLarge, ProtocolUnsupported
from callboard.limits import (
    BUS_MESSAGE_BYTES_MAX,
    CLIENT_MESSAGE_BYTES_MAX,
    INT_ABS_MAX,
    JSON_DEPTH_MAX,
    MESSAGE_ID_CHARS_MAX,
    MESSAGE_ITEMS_MAX,
    PROTOCOL,
    TURN_DEADLINE_MS_MAX,
)

_HEADER_FIELDS: Final = 6  # v, and those of Header
_TEXTS: Final[Mapping[str, int]] = MappingProxyType(  # of a header, and their longest
    {
        "kind": MESSAGE_ID_CHARS_MAX,
        "id": MESSAGE_ID_CHARS_MAX,
        "cid": MESSAGE_ID_CHARS_MAX,
        "token": 4 * MESSAGE_ID_CHARS_MAX,  # role, scope (a session reference) and MAC
    }
)


class Header(NamedTuple):
    """What a message is, apart from its body.

    `id` names a request, `cid` the request that this message answers; `deadline` is the time left
    in milliseconds, 0 for none; `token` is the sender's credential.
    """

    kind: str
    id: str = ""
    cid: str = ""
    token: str = ""
    deadline: int = 0


# ---- A survey of raw msgpack ----


def _fixed_sizes() -> tuple[int, ...]:
    """Give the bytes of a value by its first byte, 0 where the first byte alone does not tell."""
    sizes = [0] * 256
    for first in (*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3):
        sizes[first] = 1
    for first in range(0xA0, 0xC0):  # short texts
        sizes[first] = 1 + (first & 0x1F)
    for first, size in {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xD0: 2, 0xD1: 3, 0xD2: 5}.items():
        sizes[first] = size
    return tuple(sizes)


_FIXED_SIZES: Final = _fixed_sizes()
_LENGTH_BYTES: Final[Mapping[int, int]] = MappingProxyType(
    {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bytes and texts
)
_COUNT_BYTES: Final[Mapping[int, int]] = MappingProxyType(
    {**dict.fromkeys(range(0x80, 0xA0), 0), 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # lists and maps
)
_NUMBERS: Final[Mapping[int, struct.Struct]] = MappingProxyType(
    {first: struct.Struct(f">{code}") for first, code in {0xCA: "f", 0xCB: "d"}.items()}
    | {first: struct.Struct(f">{code}") for first, code in {0xCF: "Q", 0xD3: "q"}.items()}
)


class _Refused(Exception):
    """Bytes that are no message of ours; the argument is the reason."""


def _survey(data: bytes) -> None:
    """Walk over one msgpack value without building it, in time linear in its items.

    Raises:
        _Refused: malformed (cut, trailing bytes, an extension type, more than MESSAGE_ITEMS_MAX
            items), too_deep, int_range or not_finite.

    """
    sizes = _FIXED_SIZES
    at, left, items = 0, 1, 0
    outer: list[int] = []  # what is left to read in each container around the present one
    number = ""
    try:
        while True:
            while left:
                left -= 1
                first = data[at]
                if size := sizes[first]:
                    at += size
                elif (width := _COUNT_BYTES.get(first)) is not None:
                    count = _count(data, at, first, width)
                    items += count
                    if items > MESSAGE_ITEMS_MAX:
                        raise _Refused("malformed")
                    if len(outer) == JSON_DEPTH_MAX:
                        raise _Refused("too_deep")
                    outer.append(left)
                    left = count * 2 if _is_map(first) else count
                    at += 1 + width
                else:
                    size, wrong = _sized(data, at, first)
                    number = number or wrong
                    at += size
            if not outer:
                break
            left = outer.pop()
    except IndexError:
        raise _Refused("malformed") from None
    if at != len(data):
        raise _Refused("malformed")
    if number:  # told last: noise that holds a NaN is noise
        raise _Refused(number)


def _is_map(first: int) -> bool:
    return first < 0x90 or first >= 0xDE


def _count(data: bytes, at: int, first: int, width: int) -> int:
    """Read how many entries a container claims; a cut length reads as less, found later."""
    return int.from_bytes(data[at + 1 : at + 1 + width], "big") if width else first & 0x0F


def _sized(data: bytes, at: int, first: int) -> tuple[int, str]:
    """Give the bytes of a long text, of bytes or of a wide number, and what is wrong with it."""
    width = _LENGTH_BYTES.get(first)
    if width is not None:
        return 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "big"), ""
    shape = _NUMBERS.get(first)
    if shape is None or len(data) < at + 1 + shape.size:
        raise _Refused("malformed")  # extension types, the unused byte 0xC1, a cut number
    (value,) = shape.unpack_from(data, at + 1)
    if isinstance(value, float):
        return 1 + shape.size, "" if isfinite(value) else "not_finite"
    return 1 + shape.size, "" if abs(value) <= INT_ABS_MAX else "int_range"


# ---- Values ----


def _unique(pairs: list[tuple[object, object]]) -> dict[str, object]:
    """Build a map, refusing equal keys and keys that are no text."""
    found = cast("dict[str, object]", dict(pairs))
    if len(found) != len(pairs):
        raise _Refused("duplicate_key")
    "".join(found)  # a TypeError for bytes, the only other kind of key that got here
    return found


def _unpack(data: bytes) -> dict[str, object]:
    """Build the values of one map.

    Raises:
        InvalidRequest: anything FLT-56 forbids.

    """
    if (plain := _unpack_plain(data)) is not None:
        return plain
    try:
        _survey(data)
        return _build(data, MESSAGE_ITEMS_MAX, MESSAGE_ITEMS_MAX)
    except Exception as error:
        raise _refusal(error) from None


_PLAIN_BYTES_MAX: Final = 16_384
"""So few bytes hold no more items than a message may have, whatever they are."""


def _unpack_plain(data: bytes) -> dict[str, object] | None:
    """Build the values of a small map as our own encoder spells it; None for all others.

    What encodes to the very bytes it came from has no equal keys and nothing behind it; how deep
    it nests, and what its keys are, its model says (`messages.Free`). It takes a third of the time
    of `_survey` and `_build`, which judge, and name the reason for, everything else.
    """
    if len(data) > _PLAIN_BYTES_MAX or _may_hold_odd_numbers(data):
        return None
    try:
        value: object = unpackb(data, max_ext_len=0, ext_hook=_no_extension)
        if type(value) is dict and packb(value) == data:
            return cast("dict[str, object]", value)
    except Exception:  # whatever is wrong with it, the survey says it
        return None
    return None


def _no_extension(code: int, _: bytes) -> NoReturn:
    raise _Refused(f"extension type {code}")


def _may_hold_odd_numbers(data: bytes) -> bool:
    """Tell whether a byte may begin a float or an integer beyond INT_ABS_MAX; texts have some."""
    if b"\xca" in data or b"\xcb" in data or b"\xd3" in data:
        return True
    at = data.find(b"\xcf")
    while at >= 0:
        if data[at + 1 : at + 3] > b"\x00\x1f":
            return True
        at = data.find(b"\xcf", at + 1)
    return False


def _build(data: bytes, list_max: int, map_max: int) -> dict[str, object]:
    value: object = unpackb(
        data,
        raw=False,
        strict_map_key=True,
        object_pairs_hook=_unique,
        max_array_len=list_max,
        max_map_len=map_max,
        max_ext_len=0,
    )
    if type(value) is not dict:
        raise _Refused("type")
    return cast("dict[str, object]", value)


def _refusal(error: Exception) -> InvalidRequest:
    """Turn whatever a decoder's parts may raise into its one typed refusal (FLT-54a)."""
    if isinstance(error, _Refused):
        return InvalidRequest(reason=str(error))
    return InvalidRequest(reason="encoding" if isinstance(error, UnicodeError) else "malformed")


def _pack(value: Mapping[str, object]) -> bytes:
    """Encode our own values.

    Raises:
        InvalidRequest: a text with a lone surrogate, an integer beyond 64 bits, a nesting beyond
            msgpack's own limit.

    """
    try:
        return packb(value)
    except UnicodeEncodeError:
        raise InvalidRequest(reason="encoding") from None
    except OverflowError:
        raise InvalidRequest(reason="int_range") from None
    except ValueError:
        raise InvalidRequest(reason="too_deep") from None


# ---- Headers ----


def encode_header(header: Header, token: str = "") -> bytes:
    """Encode the first frame of a bus message.

    Args:
        header: the header.
        token: takes the place of the header's own token unless empty.

    """
    return _pack(_header_fields(header, token))


def _header_fields(header: Header, token: str) -> dict[str, object]:
    kind, name, cid, own, deadline = header
    fields: dict[str, object] = {"v": PROTOCOL, "kind": kind}
    if name:
        fields["id"] = name
    if cid:
        fields["cid"] = cid
    if token or own:
        fields["token"] = token or own
    if deadline:
        fields["deadline"] = deadline
    return fields


def decode_header(data: bytes) -> Header:
    """Decode the first frame of a bus message.

    Raises:
        InvalidRequest: malformed, a field missing, unknown or of the wrong kind.
        ProtocolUnsupported: another version.
        PayloadTooLarge: more than BUS_MESSAGE_BYTES_MAX.

    """
    _of_bus_size(data)
    try:
        # Flat, so it needs no survey; and a short map tells its entries in its first byte, so
        # equal keys show without a look at each: this runs once for every message.
        fields: object = unpackb(data, max_map_len=_HEADER_FIELDS, max_array_len=0)
        if type(fields) is not dict or len(cast("dict[str, object]", fields)) != data[0] - 0x80:
            fields = _build(data, 0, _HEADER_FIELDS)
    except Exception as error:
        raise _refusal(error) from None
    return _read_header(cast("dict[str, object]", fields))


def _read_header(fields: Mapping[str, object]) -> Header:
    """Take a header's fields out of a decoded map that holds nothing else."""
    get = fields.get
    _check_version(get("v"))
    for name, value in fields.items():
        chars_max = _TEXTS.get(name)
        if chars_max is not None:
            if type(value) is not str:
                raise InvalidRequest(field=name, reason="type")
            if len(value) > chars_max:
                raise InvalidRequest(field=name, reason="too_long")
        elif name == "deadline":
            _check_deadline(value)
        elif name != "v":
            raise InvalidRequest(field=_named(name), reason="field")
    if "kind" not in fields:
        raise InvalidRequest(field="kind", reason="field")
    found: Any = get  # every value was checked above
    return Header(
        found("kind"), found("id", ""), found("cid", ""), found("token", ""), found("deadline", 0)
    )


def _check_version(version: object) -> None:
    if type(version) is int and version == PROTOCOL:
        return
    if version is None:
        raise InvalidRequest(field="v", reason="field")
    if type(version) is not int:
        raise InvalidRequest(field="v", reason="type")
    raise ProtocolUnsupported(min=PROTOCOL, max=PROTOCOL)


def _check_deadline(value: object) -> None:
    """Absent is none; one that is there is at least 1 ms."""
    if type(value) is not int:
        raise InvalidRequest(field="deadline", reason="type")
    if not 1 <= value <= TURN_DEADLINE_MS_MAX:
        raise InvalidRequest(field="deadline", reason="deadline")


# ---- Bodies ----


def encode_body(body: messages.Body) -> bytes:
    """Encode the second frame of a bus message, which is also the `body` of a door message.

    Raises:
        PayloadTooLarge: more than BUS_MESSAGE_BYTES_MAX; sent, it would cost the connection.
        InvalidRequest: a value that cannot be encoded.

    """
    # Not `model_dump`: its many options cost as much as the encoding.
    return _of_bus_size(_pack(body.__pydantic_serializer__.to_python(body)))


def error_body(error: CallboardError) -> bytes:
    """Encode the body of kind `error`: the code and what it carries, never the message."""
    return _pack(error.to_wire())


def decode_body(kind: str, data: bytes) -> messages.Body:
    """Decode the second frame of a bus message.

    Raises:
        InvalidRequest: malformed, or not what the kind asks for.
        PayloadTooLarge: more than BUS_MESSAGE_BYTES_MAX.

    """
    return validate_body(kind, _unpack(_of_bus_size(data)))


def decode_trusted(kind: str, data: bytes) -> messages.Body:
    """Decode what `encode_body` made in a process of ours that runs no agent code.

    Structure and numbers need no second look there (FLT-56 was held when it was encoded), which
    is half the cost of decoding; the model is checked all the same.

    Raises:
        InvalidRequest: malformed, or not what the kind asks for.

    """
    try:
        value: object = unpackb(data)
        if type(value) is not dict:
            raise _Refused("type")
    except Exception as error:
        raise _refusal(error) from None
    return validate_body(kind, cast("dict[str, object]", value))


def _of_bus_size(data: bytes) -> bytes:
    if len(data) > BUS_MESSAGE_BYTES_MAX:
        raise PayloadTooLarge(limit="BUS_MESSAGE_BYTES_MAX", maximum=BUS_MESSAGE_BYTES_MAX)
    return data


_VALIDATORS: Final[Mapping[str, Callable[[Mapping[str, object]], messages.Body]]] = (
    MappingProxyType(
        {
            kind: model.__pydantic_validator__.validate_python  # not through all of its options
            for kind, model in messages.BODIES.items()
        }
    )
)


def validate_body(kind: str, obj: Mapping[str, object]) -> messages.Body:
    """Make the body of a kind out of decoded values, strictly.

    Raises:
        InvalidRequest: an unknown kind, an unknown or missing field, a value of another kind or
            outside its limits; `field` is the body's field, `reason` as reliability section 9.

    """
    validate = _VALIDATORS.get(kind)
    if validate is None:
        raise InvalidRequest(field="kind", reason="kind")
    try:
        return validate(obj)
    except ValidationError as error:
        _refuse(error)


_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "missing": "field",
        "extra_forbidden": "field",
        "union_tag_not_found": "field",
        "union_tag_invalid": "unknown",
        "literal_error": "unknown",
        "enum": "unknown",
        "too_long": "too_long",
        "string_too_long": "too_long",
        "bytes_too_long": "too_long",
        "greater_than": "out_of_range",
        "greater_than_equal": "out_of_range",
        "less_than": "out_of_range",
        "less_than_equal": "out_of_range",
        "finite_number": "not_finite",
        "string_unicode": "encoding",
    }
)


_WHOLE: Final[Mapping[str, str]] = MappingProxyType(  # what is told of no field
    {"too_deep": "too_deep", "malformed": "malformed", "invalid_key": "malformed"}
)
_ERRORS_READ_MAX: Final = 1_024  # pydantic can only spell out all of them: 2 µs each


def _refuse(error: ValidationError) -> NoReturn:
    """Tell the first thing that pydantic found wrong."""
    if error.error_count() > _ERRORS_READ_MAX:
        raise InvalidRequest(field="body", reason="type") from None
    first = error.errors(include_url=False, include_input=False)[0]
    kind = first["type"]
    if kind in _WHOLE:
        raise InvalidRequest(reason=_WHOLE[kind]) from None
    reason = _REASONS.get(kind) or ("type" if kind.endswith("_type") else "format")
    if kind.endswith("too_short") and first.get("ctx", {}).get("min_length") == 1:
        reason = "empty"
    field = _named(first["loc"][0]) if first["loc"] else "body"
    raise InvalidRequest(field=field, reason=reason) from None


def _named(field: object) -> str:
    """Echo a field's name if it can be one; a caller's bytes go nowhere else."""
    text = str(field)
    plain = text.isascii() and text.isidentifier() and len(text) <= MESSAGE_ID_CHARS_MAX
    return text if plain else "body"


# ---- The door ----

_BODY_KEY: Final = packb("body")
_LENGTH: Final = struct.Struct("<I")


def door_frame(header: Header, body: bytes) -> bytes:
    """Frame a message for the door.

    Args:
        header: the header.
        body: an encoded body; it is spliced in as it is.

    Returns:
        A length of four bytes, little endian, and one msgpack map.

    Raises:
        PayloadTooLarge: more than CLIENT_MESSAGE_BYTES_MAX.

    """
    packed = encode_header(header)  # at most six entries: its first byte is the count alone
    size = len(packed) + len(_BODY_KEY) + len(body)
    if size > CLIENT_MESSAGE_BYTES_MAX:
        raise _too_large_for_door(CLIENT_MESSAGE_BYTES_MAX)
    return b"".join((_LENGTH.pack(size), bytes((packed[0] + 1,)), packed[1:], _BODY_KEY, body))


def decode_door(payload: bytes) -> tuple[Header, Mapping[str, object]]:
    """Decode one message of the door, without its length.

    Returns:
        The header, and the body as it came: its kind may be unknown (see `validate_body`).

    Raises:
        InvalidRequest: malformed, a field missing, unknown or of the wrong kind, or a deadline
            outside 1..TURN_DEADLINE_MS_MAX.
        ProtocolUnsupported: another version.
        PayloadTooLarge: more than CLIENT_MESSAGE_BYTES_MAX.

    """
    if len(payload) > CLIENT_MESSAGE_BYTES_MAX:
        raise _too_large_for_door(CLIENT_MESSAGE_BYTES_MAX)
    fields = _unpack_door(payload)
    _check_version(fields.get("v"))  # before anything another version may have moved
    if "body" not in fields:
        raise InvalidRequest(field="body", reason="field")
    body = fields.pop("body")
    if not isinstance(body, dict):
        raise InvalidRequest(field="body", reason="type")
    return _read_header(fields), cast("dict[str, Any]", body)


def _unpack_door(payload: bytes) -> dict[str, object]:
    """Unpack; a deadline beyond every integer we take is a bad deadline, not a bad integer."""
    try:
        return _unpack(payload)
    except InvalidRequest as refused:
        if refused.carried["reason"] == "int_range":
            _look_at_deadline(payload)
        raise


def _look_at_deadline(payload: bytes) -> None:
    try:
        fields = _build(payload, MESSAGE_ITEMS_MAX, MESSAGE_ITEMS_MAX)
    except Exception as error:
        raise _refusal(error) from None
    if "deadline" in fields:
        _check_deadline(fields["deadline"])


class Unframer:
    """Cuts what a door socket gives into messages.

    Args:
        limit: the most bytes a message may have, its length not counted.

    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self.whole: list[bytes] = []
        """After a refusal: the messages that came whole before the refused one."""

    @property
    def pending(self) -> int:
        """Bytes of a message that is not whole yet, its length included."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Take what was read and give the messages that are whole now, in order.

        Raises:
            PayloadTooLarge: a length above the limit; nothing behind it may be read any more, and
                every further call raises the same.

        """
        buffer = self._buffer
        buffer += data
        whole, at = list[bytes](), 0
        while len(buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, at)
            if size > self._limit:
                self.whole = self.whole or whole
                del buffer[:at], buffer[_LENGTH.size :]
                raise _too_large_for_door(self._limit)
            end = at + _LENGTH.size + size
            if len(buffer) < end:
                break
            whole.append(bytes(buffer[at + _LENGTH.size : end]))
            at = end
        del buffer[:at]
        return whole


def _too_large_for_door(maximum: int) -> PayloadTooLarge:
    return PayloadTooLarge(limit="CLIENT_MESSAGE_BYTES_MAX", maximum=maximum)
