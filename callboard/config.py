"""Settings: gathered from four places, checked once, handed on as one frozen value.

A later place wins: defaults, `config.toml`, environment (`CALLBOARD_<NAME>`), flags. A key that
nobody knows is an error that names it, wherever it stands. Nothing else in callboard reads the
environment, and no file of a working directory is ever read (reliability page, T-10). A parent
hands its settings to a child process as `Settings.model_dump_json`.
"""

import codecs
import difflib
import errno
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, LiteralString, cast

import platformdirs
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from callboard.errors import INVALID_REQUEST_REASONS, HomeUnsafe, InvalidRequest
from callboard.limits import (
    ACTIVATION_QUEUE_BYTES_MAX,
    ACTIVATION_QUEUE_MAX,
    ACTIVE_TURNS_MAX,
    CHECKPOINT_BYTES,
    CHECKPOINT_MS,
    CLIENT_CONNECTIONS_MAX,
    CONFIG_BYTES_MAX,
    JOURNAL_SEGMENT_BYTES,
    RANGES,
    RESIDENT_IDLE_MS,
    RESIDENT_SESSIONS_MAX,
    TURN_QUEUE_MAX,
    WORKSPACE_PATH_BYTES_MAX,
)

PREFIX: Final = "CALLBOARD_"
OTHER_VARIABLES: Final = frozenset({"CONFIG", "FAULT", "USER_SHELL"})
"""What may stand behind the prefix and is no setting."""

_INTEGER: Final = re.compile(r"[+-]?[0-9]+")
_MODULE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_BOMS: Final = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_REASONS: Final = {
    "missing": "missing",
    "extra_forbidden": "unknown",
    "literal_error": "format",
    "int_parsing_size": "out_of_range",
}


def _refusal(reason: LiteralString, text: str) -> PydanticCustomError:
    return PydanticCustomError(reason, "{text}", {"text": text})


def _within(limit: str) -> AfterValidator:
    """Make the check that a configured value of a limit lies in its range."""
    low, high = RANGES[limit]

    def check(value: int) -> int:
        if not low <= value <= high:
            raise _refusal("out_of_range", f"it goes from {low} to {high}")
        return value

    return AfterValidator(check)


def _absolute(path: Path) -> Path:
    """Check a path before anything is done with it."""
    text = str(path)
    if "\0" in text:
        raise _refusal("nul", "it has a NUL in it")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _refusal("encoding", "it is not UTF-8") from None
    if size > WORKSPACE_PATH_BYTES_MAX:
        raise _refusal("too_long", f"it has {size} bytes, {WORKSPACE_PATH_BYTES_MAX} are allowed")
    if not path.is_absolute():
        raise _refusal("format", "it must be an absolute path")
    return path


def _module(name: str) -> str:
    if not _MODULE.fullmatch(name):
        raise _refusal("format", f"{name!r} is no name of a module")
    return name


class Settings(BaseModel):
    """What a plane runs with; the same in each of its processes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    home: Annotated[Path, AfterValidator(_absolute)]
    """The folder that holds everything durable; absolute."""
    resident_sessions: Annotated[int, _within("RESIDENT_SESSIONS_MAX")] = RESIDENT_SESSIONS_MAX
    """How many sessions have a process at the same time."""
    resident_idle_ms: Annotated[int, _within("RESIDENT_IDLE_MS")] = RESIDENT_IDLE_MS
    """After how long without work a session gives up its process."""
    active_turns: Annotated[int, _within("ACTIVE_TURNS_MAX")] = ACTIVE_TURNS_MAX
    """How many turns run at the same time."""
    turn_queue: Annotated[int, _within("TURN_QUEUE_MAX")] = TURN_QUEUE_MAX
    """How many turns may wait to run."""
    activation_queue: Annotated[int, _within("ACTIVATION_QUEUE_MAX")] = ACTIVATION_QUEUE_MAX
    """How many requests may wait for their session's process."""
    activation_queue_bytes: Annotated[int, _within("ACTIVATION_QUEUE_BYTES_MAX")] = (
        ACTIVATION_QUEUE_BYTES_MAX
    )
    """How many bytes these requests may have together."""
    client_connections: Annotated[int, _within("CLIENT_CONNECTIONS_MAX")] = CLIENT_CONNECTIONS_MAX
    """How many clients may be connected at the same time."""
    checkpoint_ms: Annotated[int, _within("CHECKPOINT_MS")] = CHECKPOINT_MS
    """How long the journal goes without a checkpoint; for tests."""
    checkpoint_bytes: Annotated[int, _within("CHECKPOINT_BYTES")] = CHECKPOINT_BYTES
    """How many bytes of frames it goes without one; for tests."""
    journal_segment_bytes: Annotated[int, _within("JOURNAL_SEGMENT_BYTES")] = JOURNAL_SEGMENT_BYTES
    """How large a segment of the journal grows; for tests."""
    preload: tuple[Annotated[str, AfterValidator(_module)], ...] = ()
    """Modules that the fork process imports beside callboard; libraries, never agent code."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe lines that the logs keep."""


def load_settings(
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Gather the settings from all places and check them.

    Args:
        flags: settings by name, from the command line or a caller; None stands for "not given".
            A relative home is taken from the working directory.
        environ: the environment; default: that of the process.
        file: the configuration file, which must exist; default: `CALLBOARD_CONFIG`, which must
            exist too, else `callboard/config.toml` in the user's configuration folder, if any.

    Raises:
        InvalidRequest: an unknown key, or a value that does not fit; `field` names it.
        HomeUnsafe: the file is not a regular file of the user (`what` is `config`).

    """
    environ = os.environ if environ is None else environ
    found: dict[str, tuple[object, str]] = {
        "home": (platformdirs.user_data_path("callboard", appauthor=False), "the default")
    }
    for source in (_from_file(environ, file), _from_environ(environ), _from_flags(flags or {})):
        found.update(source)
    try:
        return Settings.model_validate(
            {name: _typed(name, value, origin) for name, (value, origin) in found.items()}
        )
    except ValidationError as error:
        raise _invalid(error, {name: origin for name, (_, origin) in found.items()}) from None


def _typed(name: str, value: object, origin: str) -> object:
    """Give a value the type of its setting where its place has none for it."""
    if name == "home" and isinstance(value, str):
        if not value:
            raise InvalidRequest(f"{origin} is empty.", field=name, reason="empty")
        return Path(value)
    if name == "preload" and isinstance(value, list):
        return tuple(cast("list[object]", value))
    return value


def _from_flags(flags: Mapping[str, object]) -> Iterator[tuple[str, tuple[object, str]]]:
    for name, value in flags.items():
        if value is None:
            continue
        _known(name, name, "a flag")
        if name == "home" and isinstance(value, str | Path) and str(value):
            value = Path.cwd() / value
        yield name, (value, f"--{name.replace('_', '-')}")


def _from_environ(environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[object, str]]]:
    for variable, text in sorted(environ.items()):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in OTHER_VARIABLES:
            continue
        setting = _known(variable, name.lower() if name.isupper() else "", "the environment")
        yield setting, (_value_of_text(setting, text, variable), variable)


def _value_of_text(setting: str, text: str, variable: str) -> object:
    """Read a variable as the type of its setting."""
    if setting == "preload":
        return [part.strip() for part in text.split(",") if part.strip()]
    if Settings.model_fields[setting].annotation is not int:
        return text
    if not _INTEGER.fullmatch(text):
        raise InvalidRequest(f"{variable} must be a whole number.", field=setting, reason="format")
    return int(text[:20])  # what is longer is out of every range, and stays so


def _from_file(
    environ: Mapping[str, str], file: Path | None
) -> Iterator[tuple[str, tuple[object, str]]]:
    named = file is not None
    if file is None and (text := environ.get(PREFIX + "CONFIG")) is not None:
        file, named = _config_path(text), True
    file = file or platformdirs.user_config_path("callboard", appauthor=False) / "config.toml"
    for key, value in _parse(_read_own(file, named=named), file).items():
        yield _known(key, key, str(file)), (value, str(file))


def _config_path(text: str) -> Path:
    origin = PREFIX + "CONFIG"
    if not text:
        raise InvalidRequest(f"{origin} is empty.", field="config", reason="empty")
    try:
        return _absolute(Path(text))
    except PydanticCustomError as error:
        raise InvalidRequest(
            f"{origin} does not fit: {error.message()}.", field="config", reason=error.type
        ) from None


def _read_own(file: Path, *, named: bool) -> bytes:
    """Read a file that only its owner may have written; tighten its mode if it is looser."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(file, flags)
    except FileNotFoundError:
        if named:
            raise InvalidRequest(f"There is no {file}.", field="config", reason="missing") from None
        return b""
    except (OSError, ValueError) as error:
        raise _unopened(file, error) from None
    try:
        _tighten(descriptor, file)
        with open(descriptor, "rb", closefd=False) as stream:
            content = stream.read(CONFIG_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    if len(content) > CONFIG_BYTES_MAX:
        raise InvalidRequest(
            f"{file} has more than {CONFIG_BYTES_MAX} bytes.", field="config", reason="too_long"
        )
    return content


def _tighten(descriptor: int, file: Path) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise HomeUnsafe(f"{file} is no regular file.", what="config", reason="not_regular")
    if status.st_uid != os.geteuid():
        raise HomeUnsafe(f"{file} is another user's.", what="config", reason="owner")
    if status.st_mode & 0o077:
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & 0o700)


def _unopened(file: Path, error: OSError | ValueError) -> InvalidRequest | HomeUnsafe:
    number = error.errno if isinstance(error, OSError) else errno.EINVAL
    if number in (errno.ELOOP, errno.EMLINK):
        return HomeUnsafe(f"{file} is a symbolic link.", what="config", reason="symlink")
    if number in (errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP):  # a socket, a device
        return HomeUnsafe(f"{file} is no regular file.", what="config", reason="not_regular")
    return InvalidRequest(f"{file} cannot be read: {error}.", field="config", reason="not_allowed")


def _parse(content: bytes, file: Path) -> dict[str, object]:
    try:
        if content.startswith(_BOMS):
            raise InvalidRequest(f"{file} has a BOM.", field="config", reason="encoding")
        return tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise InvalidRequest(f"{file} is not UTF-8.", field="config", reason="encoding") from None
    except RecursionError:
        raise InvalidRequest(
            f"{file} is nested too deep.", field="config", reason="too_deep"
        ) from None
    except ValueError as error:
        raise InvalidRequest(f"{file}: {error}.", field="config", reason="malformed") from None


def _known(key: str, name: str, origin: str) -> str:
    """Return the name of a setting, or refuse the key under which it was given."""
    if name in Settings.model_fields:
        return name
    near = difflib.get_close_matches(name or key.lower(), Settings.model_fields, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise InvalidRequest(
        f"There is no such setting, in {origin}{hint}", field=key, reason="unknown"
    )


def _invalid(error: ValidationError, origins: Mapping[str, str]) -> InvalidRequest:
    """Say what is wrong with the first value that does not fit, and where it stands."""
    first = error.errors(include_url=False, include_input=False)[0]
    name, kind = str(first["loc"][0]), first["type"]
    reason = kind if kind in INVALID_REQUEST_REASONS else "type"
    return InvalidRequest(
        f"The setting {name}, from {origins.get(name, 'nowhere')}, does not fit: {first['msg']}.",
        field=name,
        reason=_REASONS.get(kind, reason),
    )
