"""Framing: what goes through whole, and what is refused before it is read."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from pytest_cudaforge.evaluation.channel import (
    BUILDER_CAPS,
    MAX_DESCRIPTORS,
    WORKER_CAPS,
    Channel,
    ChannelClosed,
    ChannelGarbage,
    ChannelTimeout,
    ReplyCaps,
    pair,
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel, socket.socket]]:
    ours, theirs = pair()
    child = Channel(theirs)
    yield ours, child, theirs
    ours.close()
    child.close()


def test_a_request_arrives_whole_with_its_descriptors(ends: tuple[Channel, Channel, socket.socket]) -> None:
    ours, child, _ = ends
    reader, writer = os.pipe()
    received = []
    thread = threading.Thread(target=lambda: received.append(child.receive_request()))
    thread.start()
    nonce = ours.send_request(5, {"a": [1, 2.5, None]}, blob=b"x" * 3_000_000, descriptors=[writer])
    thread.join(10)
    os.close(writer)
    (request,) = received
    assert (request.operation, request.nonce, request.payload) == (5, nonce, {"a": [1, 2.5, None]})
    assert request.blob == b"x" * 3_000_000
    assert not os.get_inheritable(request.descriptors[0])
    os.write(request.descriptors[0], b"through")
    assert os.read(reader, 10) == b"through"
    for fd in (reader, *request.descriptors):
        os.close(fd)


def test_a_reply_arrives_whole(ends: tuple[Channel, Channel, socket.socket]) -> None:
    ours, child, _ = ends
    nonce = ours.send_request(1, None)
    child.receive_request()
    child.send_reply(nonce, 3, [0, 2**64 - 1], "ü", b"blob")
    reply = ours.receive_reply(nonce, BUILDER_CAPS, 1)
    assert (reply.status, reply.values, reply.text, reply.blob) == (3, (0, 2**64 - 1), "ü", b"blob")


def _header(
    nonce: int, *, magic: int = 0x43464752, reserved: int = 0, sizes: tuple[int, int, int] = (0, 0, 0)
) -> bytes:
    return struct.pack("<IHHQIII", magic, 0, reserved, nonce, *sizes)


@pytest.mark.parametrize(
    "case",
    ["magic", "nonce", "reserved", "too many values", "too much text", "a blob from a worker"],
)
def test_a_malformed_reply_is_garbage(ends: tuple[Channel, Channel, socket.socket], case: str) -> None:
    ours, _, raw = ends
    nonce = ours.send_request(1, None)
    raw.sendall(
        {
            "magic": _header(nonce, magic=1),
            "nonce": _header(nonce ^ 1),
            "reserved": _header(nonce, reserved=1),
            "too many values": _header(nonce, sizes=(WORKER_CAPS.values + 1, 0, 0)),
            "too much text": _header(nonce, sizes=(0, WORKER_CAPS.text_bytes + 1, 0)),
            "a blob from a worker": _header(nonce, sizes=(0, 0, 1)),
        }[case]
    )
    with pytest.raises(ChannelGarbage):
        ours.receive_reply(nonce, WORKER_CAPS, 1)


def test_text_that_is_not_utf8_is_garbage(ends: tuple[Channel, Channel, socket.socket]) -> None:
    ours, _, raw = ends
    nonce = ours.send_request(1, None)
    raw.sendall(_header(nonce, sizes=(0, 2, 0)) + b"\xff\xfe")
    with pytest.raises(ChannelGarbage, match="UTF-8"):
        ours.receive_reply(nonce, WORKER_CAPS, 1)


def test_half_a_reply_is_a_timeout_and_a_closed_end_is_said(ends: tuple[Channel, Channel, socket.socket]) -> None:
    ours, child, raw = ends
    nonce = ours.send_request(1, None)
    raw.sendall(_header(nonce)[:7])
    with pytest.raises(ChannelTimeout):
        ours.receive_reply(nonce, ReplyCaps(0, 0, 0), 0.05)
    child.close()
    with pytest.raises(ChannelClosed):
        ours.receive_reply(nonce, ReplyCaps(0, 0, 0), 1)
    with pytest.raises(ChannelClosed):
        ours.send_request(1, None)


def test_a_reader_that_never_reads_is_a_timeout(ends: tuple[Channel, Channel, socket.socket]) -> None:
    ours, _, _ = ends
    with pytest.raises(ChannelTimeout):
        ours.send_request(1, None, blob=b"x" * (64 << 20), timeout_s=0.2)


def test_too_many_descriptors_are_refused(ends: tuple[Channel, Channel, socket.socket]) -> None:
    with pytest.raises(ValueError, match="at most"):
        ends[0].send_request(1, None, descriptors=[0] * (MAX_DESCRIPTORS + 1))
