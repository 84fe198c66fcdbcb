"""Who is who among the processes: the supervisor's ears and hands in its loop.

The actor says what to start and what to signal (`Io.call_io`, so it is done after the batch that
says so); the keeper posts what became of it. All of it runs on the main thread, whose end would be
taken for the supervisor's by the kernel (`children.spawn`), and nothing here decides anything.

A session is not our child but the fork process's: its pid and pidfd come from there, and so does
its exit status. Its end is told when both are in, or when the fork process has ended as well, whose
sessions nobody can be asked about any more (FLT-29c).
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from callboard.peer import Io
from callboard.supervisor import children
from callboard.supervisor.tree import MAIN_LOOP_ENDED

PACKET_BYTES_MAX: Final = 65_536
FORK: Final = "fork"


@dataclass(frozen=True, slots=True)
class Said:
    """A child wrote a line: `ready`, or `error` with what it could not do."""

    name: str
    run: int
    line: dict[str, object]


@dataclass(frozen=True, slots=True)
class Began:
    """A process exists."""

    name: str
    run: int
    pid: int


@dataclass(frozen=True, slots=True)
class NotBegun:
    """The system had no room for a session's process (FLT-53a)."""

    name: str
    run: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A process's end is proven; `status` is none when its parent ended before it told."""

    name: str
    run: int
    status: int | None
    why: str = ""


@dataclass(slots=True)
class _Program:
    """A child that was executed."""

    name: str
    run: int
    pid: int
    pidfd: int
    channel: socket.socket
    stderr: int
    waiting: deque[bytes]
    """Packets for the fork process that its socket could not take yet."""
    heard: bytes = b""


@dataclass(slots=True)
class _Forked:
    """A session: ordered, then born, then ended."""

    name: str
    run: int
    pid: int = 0
    pidfd: int = -1
    signalled: signal.Signals | None = None
    """What it is to get as soon as it is born."""
    ended: bool = False


class Keeper:
    """Processes by name and run.

    Args:
        io: the loop whose descriptors these are.

    """

    def __init__(self, io: Io) -> None:
        self._io = io
        self._programs: dict[str, _Program] = {}
        self._forked: dict[int, _Forked] = {}

    # ---- What the actor asks for ----

    def start(self, name: str, run: int, program: children.Program) -> None:
        """Start a program."""
        try:
            made = children.spawn(program)
        except OSError as error:
            why = f"cannot start: {os.strerror(error.errno or 0)}"
            self._io.post(Ended(name, run, MAIN_LOOP_ENDED, why))
            return
        kept = _Program(name, run, made.pid, made.pidfd, made.channel, made.stderr, waiting=deque())
        made.channel.setblocking(False)
        self._programs[name] = kept
        self._io.add_fd(made.channel.fileno(), partial(self._on_channel, kept))
        self._io.add_fd(made.pidfd, partial(self._on_program_end, kept))
        self._io.post(Began(name, run, made.pid))

    def fork(self, name: str, run: int, order: bytes) -> None:
        """Have the fork process fork a session.

        Args:
            name: the session's reference.
            run: the number of this start.
            order: its `home.Order`, as JSON.

        """
        self._forked[run] = _Forked(name, run)
        program = self._programs.get(FORK)
        if program is None:
            self._tell_end(self._forked[run], None)
            return
        program.waiting.append(b'{"fork":%d}\n%b' % (run, order))
        self._flush(program)

    def signal(self, name: str, run: int, number: signal.Signals) -> None:
        """Signal a child; a session that is not born yet gets it when it is."""
        program = self._programs.get(name)
        if program is not None and program.run == run:
            children.send_signal(program.pidfd, number)
        elif (session := self._forked.get(run)) is not None and session.name == name:
            session.signalled = number
            if session.pidfd >= 0:
                children.send_signal(session.pidfd, number)

    # ---- Channels ----

    def _flush(self, program: _Program) -> None:
        while program.waiting:
            try:
                program.channel.send(program.waiting[0])
            except BlockingIOError:
                break
            except OSError:
                return  # it has ended; its pidfd says so
            program.waiting.popleft()
        self._io.modify_fd(program.channel.fileno(), write=bool(program.waiting))

    def _on_channel(self, program: _Program, _mask: int) -> None:
        if program.name == FORK:
            self._read_packets(program)
            if self._programs.get(FORK) is program and program.waiting:
                self._flush(program)
        else:
            self._read_lines(program)

    def _read_lines(self, program: _Program) -> None:
        """Take what storage or gateway says; the end of the line is no end of the process."""
        try:
            data = program.channel.recv(PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, program.heard = (program.heard + data).split(b"\n")
        for line in lines:
            self._said(program, line)
        if not data or len(program.heard) > PACKET_BYTES_MAX:
            self._io.remove_fd(program.channel.fileno())
            program.channel.close()

    def _said(self, program: _Program, line: bytes) -> None:
        fields = _object(line)
        if fields is not None:
            self._io.post(Said(program.name, program.run, fields))

    def _read_packets(self, program: _Program) -> None:
        """Take what the fork process says: each packet is whole, with its descriptor or none."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(
                    program.channel, PACKET_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                return
            fields = _object(data)
            if not data or fields is None:
                for fd in fds:
                    os.close(fd)
                if not data:
                    self._io.modify_fd(program.channel.fileno(), write=False, read=False)
                    return
                continue
            self._fork_said(program, fields, fds[0] if fds else -1)

    def _fork_said(self, program: _Program, fields: dict[str, object], fd: int) -> None:
        match fields:
            case {"forked": int(run), "pid": int(pid)} if fd >= 0:
                self._born(run, pid, fd)
            case {"refused": int(run)}:
                session = self._forked.pop(run, None)
                if session is not None:
                    self._io.post(NotBegun(session.name, run))
            case {"exited": int(run), "status": int(status)}:
                session = self._forked.get(run)
                if session is not None:
                    self._tell_end(session, status)
            case _:
                self._io.post(Said(program.name, program.run, fields))

    def _born(self, run: int, pid: int, pidfd: int) -> None:
        session = self._forked.get(run)
        if session is None:
            children.send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            return
        session.pid, session.pidfd = pid, pidfd
        self._io.add_fd(pidfd, partial(self._on_session_end, session))
        if session.signalled is not None:
            children.send_signal(pidfd, session.signalled)
        self._io.post(Began(session.name, run, pid))

    # ---- Ends ----

    def _on_session_end(self, session: _Forked, _mask: int) -> None:
        """Keep its end in mind until its status comes; without its parent there is none."""
        session.ended = True
        self._io.remove_fd(session.pidfd)
        os.close(session.pidfd)
        session.pidfd = -1
        if FORK not in self._programs:
            self._tell_end(session, None)

    def _tell_end(self, session: _Forked, status: int | None) -> None:
        del self._forked[session.run]
        if session.pidfd >= 0:
            self._io.remove_fd(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = -1
        self._io.post(Ended(session.name, session.run, status))

    def _on_program_end(self, program: _Program, _mask: int) -> None:
        status = children.reap(program.pidfd)
        self._io.remove_fd(program.pidfd)
        os.close(program.pidfd)
        if program.channel.fileno() >= 0:
            self._on_last_words(program)
        why = children.last_words(program.stderr) if status else ""
        os.close(program.stderr)
        del self._programs[program.name]
        shown = MAIN_LOOP_ENDED if status is None else status
        self._io.post(Ended(program.name, program.run, shown, why))
        if program.name == FORK:
            self._fork_process_ended()

    def _on_last_words(self, program: _Program) -> None:
        """Read what it said before it ended."""
        if program.name == FORK:
            self._read_packets(program)
        else:
            self._read_lines(program)
        if program.channel.fileno() >= 0:
            self._io.remove_fd(program.channel.fileno())
            program.channel.close()

    def _fork_process_ended(self) -> None:
        """Tell the end of its sessions; those that the kernel has not ended yet, when it has."""
        for session in list(self._forked.values()):
            if session.pidfd < 0:
                self._tell_end(session, None)
            else:
                children.send_signal(session.pidfd, signal.SIGKILL)


def _object(line: bytes) -> dict[str, object] | None:
    """Read one JSON object."""
    try:
        found: object = json.loads(line)
    except ValueError:
        return None
    return cast("dict[str, object]", found) if isinstance(found, dict) else None
