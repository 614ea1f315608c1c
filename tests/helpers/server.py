"""A web server on this machine."""

import hashlib
import re
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """A web server of files in memory that answers ranges, and makes mistakes when asked to.

    Attributes:
        faults: taken one by one, a word for each request: the number of an error, "reset", "short",
            "slow", "whole".
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: Iterator[str] = iter(())
        self.num_requests = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            do_HEAD = do_POST = do_GET  # noqa: N815  names that the server calls

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.num_requests += 1
        fault = next(self.faults, "")
        content = self.files.get(request.path.lstrip("/"))
        if fault.isdigit() or content is None:
            request.send_error(int(fault) if fault.isdigit() else 404)
            return
        if fault == "reset":  # a RST instead of an answer
            linger = struct.pack("ii", 1, 0)
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            request.connection.close()
            return
        if fault == "slow":  # longer than `TIMEOUT_S` of the tests
            threading.Event().wait(1.0)
        first, last = map(int, re.findall(r"\d+", request.headers["Range"]))
        part = content[first : last + 1]
        request.send_response(200 if fault == "whole" else 206 if part else 416)
        end = f"{first}-{first + len(part) - 1}" if part else "*"
        request.send_header("Content-Range", f"bytes {end}/{len(content)}")
        request.send_header("Content-Length", str(len(part)))
        request.send_header("ETag", hashlib.sha256(content).hexdigest()[:16])
        request.end_headers()
        request.wfile.write(part[: len(part) // 2] if fault == "short" else part)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
