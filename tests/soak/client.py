"""A client for many connections at once: HTTP/1.1 over asyncio's streams, nothing that it does not need."""
import asyncio
import json
import re
import struct
import socket


class Left(Exception):
    """The client has left in the middle, on purpose."""


class Client:
    """One connection, made when it is needed. `leave_after`: the bytes of an answer after which it goes away, -1 for within the request."""

    def __init__(self, host, port):
        self.host, self.port, self.reader, self.writer = host, port, None, None

    async def ask(self, method, path, body=b"", leave_after=None, pause=0.0):
        """Status and body of the answer; a stream's body is its events."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        if leave_after == -1:
            self.writer.write((head + body)[:len(head) + len(body) // 2])
            self.leave()
        self.writer.write(head + body)
        if leave_after == 0:
            self.leave()
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status = int(head[9:12])
        if match := re.search(r"content-length: (\d+)", head, re.I):
            text = await self.reader.readexactly(int(match[1]))
        else:
            text = await self.read_chunks(leave_after, pause)
        if "connection: close" in head.lower():
            self.close()
        return status, text

    async def read_chunks(self, leave_after, pause):
        text = b""
        while size := int(await self.reader.readline(), 16):
            text += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
            if leave_after is not None and len(text) > leave_after:
                self.leave()
            if pause:
                await asyncio.sleep(pause)
        await self.reader.readexactly(2)
        return text

    def leave(self):
        """Half of those who leave do so by a reset."""
        if id(self.writer) // 64 % 2:
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()
        raise Left

    def close(self):
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


def events(text):
    """The JSON of a stream's events."""
    return [json.loads(data) for data in re.findall(r"^data: (\{.*)$", text.decode(), re.M)]
