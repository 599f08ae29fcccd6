"""The status of a running edge server over HTTP, for this machine only: a page, JSON and metrics.

There is no password, so the server listens on loopback addresses only, and the Host of a request must be one. This
stops DNS rebinding, where a foreign page's host name is made to point here. To look from elsewhere, forward the port
or put a proxy with passwords in front.
"""

import errno
import json
import logging
import re
import socket
import socketserver
import threading
import time
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from ipaddress import IPv6Address, ip_address
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from adaptsfl.deploy.status.board import Board, Status, status_data
from adaptsfl.deploy.status.metrics import metrics_text
from adaptsfl.errors import InvalidInput
from adaptsfl.report.markup import asset, embedded, filled, security

ROOM = "adaptsfl.deploy.status"
SILENCE_S = 5.0  # timeout of a client that sends nothing
TIMEOUT_S = 15.0  # of a whole connection
LOOK_UP_S = 0.1  # how often the server checks whether it should stop, or a client has timed out
MOST_CLIENTS = 32  # concurrent clients; more are rejected
LARGEST_HEAD = 16 * 1024  # bytes of a request
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
REMEDY_HOST = (
    "Listen on 127.0.0.1 or ::1; to look from elsewhere, forward the port (ssh -L 8080:127.0.0.1:PORT SERVER) or put "
    "a reverse proxy with a password in front"
)

log = logging.getLogger(__name__)


class StatusServer:
    """Serves in a thread of its own until it is closed."""

    def __init__(self, server: "_Server") -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(LOOK_UP_S,), name="status", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page."""
        host = str(self._server.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def close(self) -> None:
        """Stop listening and end all connections; further calls do nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_status(board: Board, host: str = "127.0.0.1", port: int = 0) -> StatusServer:
    """Serve the page at /, its data at /status.json and metrics for Prometheus at /metrics.

    Args:
        host: a loopback address, or localhost.
        port: 0 for any free port.
    """
    address = "127.0.0.1" if host.lower() == "localhost" else host
    if not _is_loopback(address):
        raise InvalidInput(
            "host", f"{host!r} is no loopback address, and the status page asks nobody for a password", REMEDY_HOST
        )
    if not 0 <= port <= 65535:
        raise InvalidInput("port", f"{port} is no port", "Give one from 1024 to 65535, or 0 for any that is free")
    try:
        return StatusServer(_Server(board, address, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem, remedy = f"{port} on {host} is in use", "Give another port, or 0 for any that is free"
            raise InvalidInput("port", problem, remedy) from None
        reason = error.strerror or str(error)
        problem = f"{port} on {host} cannot be listened on ({reason})"
        raise InvalidInput("port", problem, "Give a port above 1023 on an address that this machine has") from None


def page_text(status: Status) -> str:
    """Return the page, with the status that it shows until it fetches the next one."""
    parts = {"policy": _policy(), "css": _css(), "js": _script(), "data": embedded(_data(status))}
    return filled(asset("status.html", ROOM), parts)


@cache
def _css() -> str:
    return asset("page.css") + asset("status.css", ROOM)


@cache
def _script() -> str:
    return asset("chart.js") + asset("status.js", ROOM)


@cache
def _policy() -> str:
    return security(_css(), _script(), fetches=True)


def _data(status: Status) -> dict[str, Any]:
    """Return the status with the server's time: the browser's clock may differ."""
    return {**status_data(status), "now": time.time()}


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


class _Server(ThreadingHTTPServer):
    """Limits the number of concurrent clients, and the time of each."""

    daemon_threads = True
    request_queue_size = MOST_CLIENTS

    def __init__(self, board: Board, address: str, port: int) -> None:
        self.board = board
        self._clients: dict[socket.socket, float] = {}  # the deadline of each
        self._counting = threading.Lock()
        self.address_family = socket.AF_INET6 if isinstance(ip_address(address), IPv6Address) else socket.AF_INET
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        """Bind without the DNS lookup of this machine's name that `HTTPServer` makes."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Reject clients while there are too many."""
        with self._counting:
            welcome = len(self._clients) < MOST_CLIENTS
            if welcome:
                self._clients[request] = time.monotonic() + TIMEOUT_S
        return welcome

    def shutdown_request(self, request: Any) -> None:
        """Close the connection of a client."""
        with self._counting:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Disconnect clients that exceed the timeout: they send a byte at a time, or do not read."""
        self._hang_up(time.monotonic())

    def server_close(self) -> None:
        """Close, and end all connections that are still open."""
        super().server_close()
        self._hang_up(float("inf"))

    def _hang_up(self, now: float) -> None:
        with self._counting:
            for client, until in self._clients.items():
                if until < now:
                    with suppress(OSError):  # already disconnected
                        client.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error: it is a bug, as lost clients are handled elsewhere, and must not end training."""
        log.exception("the status page could not be shown")


class _Handler(BaseHTTPRequestHandler):
    """Handles one request per connection, and reads its whole head before parsing it."""

    server: _Server
    timeout = SILENCE_S
    command = requestline = ""  # until a request is read
    request_version = "HTTP/1.0"

    def handle(self) -> None:
        """Answer, unless the client disconnects or times out."""
        try:
            head = self._head()
            if len(head) > LARGEST_HEAD:
                self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            elif head:
                self.rfile.close()
                self.rfile = BytesIO(head)
                self.handle_one_request()
        except (ConnectionError, TimeoutError):
            pass  # the client disconnected or timed out

    def _head(self) -> bytes:
        """Return the request up to its empty line, or one byte more than is allowed; empty if it ends before."""
        head = b""
        while len(head) <= LARGEST_HEAD and not head.endswith((b"\n\r\n", b"\n\n")):
            line = self.rfile.readline(LARGEST_HEAD + 1 - len(head))
            if not line:
                return b""
            head += line
        return head

    def parse_request(self) -> bool:
        """Reject all methods but GET and HEAD."""
        if not super().parse_request():
            return False
        if self.command in ("GET", "HEAD"):
            return True
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        return False

    def do_GET(self) -> None:
        """Answer with the page, its data or the metrics."""
        path = self.path.partition("?")[0]
        if not self._meant_for_here():
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"Ask for 127.0.0.1, [::1] or localhost.\n")
        elif path not in ("/", "/status.json", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            try:
                kind, body = self._found(path)
            except Exception:
                log.exception("%s of the edge server's status could not be made", path)
                self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            else:
                self._answer(HTTPStatus.OK, kind, body)

    def do_HEAD(self) -> None:
        """Answer as to GET, without a body."""
        self.do_GET()

    def _meant_for_here(self) -> bool:
        """Whether the request's Host is a loopback address, with any port: it may be forwarded."""
        hosts = self.headers.get_all("Host") or []
        found = re.fullmatch(r"(?:\[([\da-f:]+)\]|([\w.]+))(?::\d+)?", hosts[0].lower()) if len(hosts) == 1 else None
        name = (found.group(1) or found.group(2)) if found else ""
        return name == "localhost" or _is_loopback(name)

    def _found(self, path: str) -> tuple[str, bytes]:
        board = self.server.board
        if path == "/metrics":
            return CONTENT_TYPE_LATEST, metrics_text(board)
        if path == "/status.json":
            return "application/json", json.dumps(_data(board.status), allow_nan=False).encode()
        return "text/html; charset=utf-8", page_text(board.status).encode()

    def _answer(self, code: HTTPStatus, kind: str, body: bytes) -> None:
        policy = _policy() if kind.startswith("text/html") else "default-src 'none'"
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", f"{policy}; frame-ancestors 'none'")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if code == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error that repeats nothing from the request."""
        status = HTTPStatus(code)
        self._answer(status, "text/plain", f"{status.phrase}\n".encode())

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "adaptsfl"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a page that fetches the status every second would fill the log."""
