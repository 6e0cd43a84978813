"""Messages between the supervisor and its children: fixed headers, length caps, descriptors by SCM_RIGHTS.

Requests come from the supervisor, which is trusted; they carry JSON data and raw bytes. Replies come from a process
that may be hostile: a fixed header, a counted list of unsigned 64-bit values, a text and (builder only) raw bytes, each
under a cap that is checked before anything is read. Nothing is ever unpickled.
"""

from __future__ import annotations

import array
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BUILDER_CAPS",
    "WORKER_CAPS",
    "Channel",
    "ChannelClosed",
    "ChannelGarbage",
    "ChannelTimeout",
    "Reply",
    "ReplyCaps",
    "Request",
    "pair",
    "wait_readable",
]

#: magic, operation, number of descriptors, nonce, JSON bytes, blob bytes
_REQUEST = struct.Struct("<IHHQII")
#: magic, status, reserved, nonce, number of values, text bytes, blob bytes
_REPLY = struct.Struct("<IHHQIII")
_REQUEST_MAGIC = 0x43464751
_REPLY_MAGIC = 0x43464752
#: Linux refuses more than 253 descriptors in one message.
MAX_DESCRIPTORS = 64
_MAX_REQUEST_BYTES = 1 << 30


class ChannelClosed(Exception):
    """The other side is gone."""


class ChannelTimeout(Exception):
    """Nothing, or only a part of a message, arrived in time."""


class ChannelGarbage(Exception):
    """What arrived is not a message of this protocol, or is larger than its caps."""


@dataclass(frozen=True)
class ReplyCaps:
    """The most a reply may hold; larger is garbage."""

    values: int
    text_bytes: int
    blob_bytes: int


WORKER_CAPS = ReplyCaps(values=1 << 17, text_bytes=8192, blob_bytes=0)
BUILDER_CAPS = ReplyCaps(values=16, text_bytes=64 << 20, blob_bytes=256 << 20)


@dataclass(frozen=True)
class Request:
    """``descriptors`` are open in the receiver, which owns them."""

    operation: int
    nonce: int
    payload: Any
    blob: bytes
    descriptors: tuple[int, ...]


@dataclass(frozen=True)
class Reply:
    """``status`` 0 is success; other numbers belong to the child's own table."""

    status: int
    values: tuple[int, ...]
    text: str
    blob: bytes


class Channel:
    """One end of a connected AF_UNIX stream socket. One request is under way at a time; not thread-safe by itself."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    # -- supervisor's side

    def send_request(
        self,
        operation: int,
        payload: Any,
        *,
        blob: bytes = b"",
        descriptors: Sequence[int] = (),
        timeout_s: float = 60.0,
    ) -> int:
        """Send one request; returns the nonce its reply must echo. Raises ChannelClosed or ChannelTimeout."""
        if len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(f"{len(descriptors)} descriptors in one request, at most {MAX_DESCRIPTORS} are passed")
        text = json.dumps(payload).encode()
        nonce = secrets.randbits(64)
        header = _REQUEST.pack(_REQUEST_MAGIC, operation, len(descriptors), nonce, len(text), len(blob))
        deadline = time.monotonic() + timeout_s
        self._send_with_descriptors(header, descriptors, deadline)
        self._send(text, deadline)
        self._send(blob, deadline)
        return nonce

    def receive_reply(self, nonce: int, caps: ReplyCaps, timeout_s: float) -> Reply:
        """The reply to ``nonce``. Raises ChannelClosed, ChannelTimeout or ChannelGarbage."""
        deadline = time.monotonic() + timeout_s
        header = _REPLY.unpack(self._receive(_REPLY.size, deadline))
        magic, status, reserved, echoed, values, text_bytes, blob_bytes = header
        if magic != _REPLY_MAGIC or reserved != 0 or echoed != nonce:
            raise ChannelGarbage("the reply's header is not the protocol's")
        if values > caps.values or text_bytes > caps.text_bytes or blob_bytes > caps.blob_bytes:
            raise ChannelGarbage(f"a reply of {values} values, {text_bytes} and {blob_bytes} bytes is over its caps")
        numbers = struct.unpack(f"<{values}Q", self._receive(8 * values, deadline))
        try:
            text = self._receive(text_bytes, deadline).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ChannelGarbage("the reply's text is not UTF-8") from error
        return Reply(status, numbers, text, self._receive(blob_bytes, deadline))

    # -- child's side

    def receive_request(self) -> Request:
        """The next request, without a time limit. Raises ChannelClosed when the supervisor is gone."""
        header, descriptors = self._receive_with_descriptors(_REQUEST.size)
        magic, operation, count, nonce, text_bytes, blob_bytes = _REQUEST.unpack(header)
        if magic != _REQUEST_MAGIC or count != len(descriptors) or text_bytes + blob_bytes > _MAX_REQUEST_BYTES:
            raise ChannelGarbage("the request's header is not the protocol's")
        payload = json.loads(self._receive(text_bytes, None))
        return Request(operation, nonce, payload, self._receive(blob_bytes, None), descriptors)

    def send_reply(
        self, nonce: int, status: int = 0, values: Sequence[int] = (), text: str = "", blob: bytes = b""
    ) -> None:
        """Answer the request that carried ``nonce``."""
        encoded = text.encode("utf-8", "replace")
        header = _REPLY.pack(_REPLY_MAGIC, status, 0, nonce, len(values), len(encoded), len(blob))
        self._send(b"".join([header, struct.pack(f"<{len(values)}Q", *values), encoded]), None)
        self._send(blob, None)

    # -- bytes

    def _send(self, data: bytes, deadline: float | None) -> None:
        view = memoryview(data)
        while view:
            self._limit(deadline)
            try:
                view = view[self._sock.send(view, socket.MSG_NOSIGNAL) :]
            except TimeoutError as error:
                raise ChannelTimeout("the other side does not read") from error
            except OSError as error:
                raise ChannelClosed(os.strerror(error.errno or 0)) from error

    def _send_with_descriptors(self, data: bytes, descriptors: Sequence[int], deadline: float) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self._limit(deadline)
        try:
            sent = self._sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        except TimeoutError as error:
            raise ChannelTimeout("the other side does not read") from error
        except OSError as error:
            raise ChannelClosed(os.strerror(error.errno or 0)) from error
        self._send(data[sent:], deadline)

    def _receive(self, count: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._limit(deadline)
            try:
                part = self._sock.recv(min(count - len(data), 1 << 20))
            except TimeoutError as error:
                raise ChannelTimeout("no complete answer in time") from error
            except OSError as error:
                raise ChannelClosed(os.strerror(error.errno or 0)) from error
            if not part:
                raise ChannelClosed("the other side is gone")
            data += part
        return bytes(data)

    def _receive_with_descriptors(self, count: int) -> tuple[bytes, tuple[int, ...]]:
        self._sock.settimeout(None)
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, _, _ = self._sock.recvmsg(count, space, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise ChannelClosed("the other side is gone")
        descriptors = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
        return data + self._receive(count - len(data), None), tuple(descriptors)

    def _limit(self, deadline: float | None) -> None:
        if deadline is None:
            self._sock.settimeout(None)
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ChannelTimeout("the time for this message is over")
        self._sock.settimeout(left_s)


def wait_readable(sock: socket.socket, limit_s: float) -> bool:
    """Whether there is something to read, or the end, within ``limit_s``. Unlike select, takes any descriptor."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(max(limit_s, 0.0) * 1e3))


def pair() -> tuple[Channel, socket.socket]:
    """A connected channel for the supervisor and the socket to hand to its child; both close on exec."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(ours), theirs
