"""The far end of the loopback ceiling: a process that sends and takes plain bytes over a socket, nothing else.

    bench_store_peer.py [SOCKET_PATH]

Without a path it listens on a free TCP port of the loopback interface and prints it. A request is 8 bytes, a signed
little-endian number: positive asks for so many bytes, negative announces as many, which are answered by one byte.
Ends when its stdin is closed. One thread a connection.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading

HOST = "127.0.0.1"
REQUEST = struct.Struct("<q")
TAKEN = b"k"


def receive(connection: socket.socket, buffer: memoryview) -> bool:
    """Fill `buffer`; False when the other side has closed."""
    while buffer.nbytes:
        count = connection.recv_into(buffer)
        if not count:
            return False
        buffer = buffer[count:]
    return True


def serve(connection: socket.socket) -> None:
    """Answer one connection until it is closed."""
    request, content = memoryview(bytearray(REQUEST.size)), memoryview(bytearray())
    with connection:
        while receive(connection, request):
            (num_bytes,) = REQUEST.unpack(request)
            if abs(num_bytes) > content.nbytes:
                content = memoryview(bytearray(abs(num_bytes)))
            if num_bytes > 0:
                connection.sendall(content[:num_bytes])
            elif receive(connection, content[:-num_bytes]):
                connection.sendall(TAKEN)


def accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def main() -> None:
    """Command line: see the module."""
    path = sys.argv[1] if len(sys.argv) > 1 else None
    listener = socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)
    listener.bind((HOST, 0) if path is None else path)
    listener.listen()
    threading.Thread(target=accept, args=(listener,), daemon=True).start()
    print(listener.getsockname()[1] if path is None else path, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
