"""What is served of an edge server: over real HTTP, to clients good and bad."""

import html
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adaptsfl.deploy.status import server as status_server
from adaptsfl.deploy.status.board import Board, Status
from adaptsfl.deploy.status.server import StatusServer, page_text, serve_status
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import Device, Fleet, Server
from browser import asked, dom, needs_chromium

HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">{{js}}\n\\"
ROOT = Path(__file__).parents[2]
PATHS = ("/", "/status.json", "/metrics")
JETSON = Device(
    "jetson", 2e9, 8e6, 16e6, 32e6, 64e6, forward_s=0.003, backward_s=0.003, uplink_s=0.02, fed_uplink_s=0.04
)
SERVER = Server(3e10, 2e9, 1e11, turn_s=0.001, to_fed_s=0.005, averaging_s=0.002, averaging_bps=4e9)
ESTIMATES = {
    **{"kappa": 0.15, "kappa_low": 0.02, "kappa_high": 1.2, "averagings": 4},
    **{"relative_rounds": 1.25, "relative_rounds_low": 1.125, "relative_rounds_high": 2.5},
}
WAIT_S = 600.0  # only reached by a test that fails


@pytest.fixture
def board() -> Board:
    board = Board(Status(run="four boards", started_at=1_000_000.0, rounds_planned=500))
    board.update(round=120, block=7, interval=12, deepest=9, round_s=1.5, predicted_round_s=1.25)
    board.update(micro_batches=4, wire_dtype="int8")
    board.update(received_bytes=3_000_000, sent_bytes=4_000_000, received_bps=2e6, sent_bps=3e6)
    board.update(phases=(("a1", 0.5, 0.75), ("b3", None, 0.125)))
    board.update_device("jetson", state="training", cut=9, round=120, rounds=118, forward_s=0.25)
    board.update_device("pi", state="away", violations=2, last_error="connection lost")
    for round in range(1, 121):
        board.add_loss(round, 2 - round / 100)
    board.add_evaluation(100, 0.625)
    board.update_beliefs(ESTIMATES, Fleet.of([JETSON], SERVER))
    return board


@pytest.fixture
def server(board: Board) -> Iterator[StatusServer]:
    with closing(serve_status(board)) as server:
        yield server


def answer(
    server: StatusServer, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read().decode()


def connected(server: StatusServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)


def said(client: socket.socket) -> bytes:
    """Everything that the server says until it hangs up."""
    heard = b""
    while chunk := client.recv(65536):
        heard += chunk
    return heard


def raw(server: StatusServer, request: bytes) -> bytes:
    with connected(server) as client:
        client.sendall(request)
        return said(client)


def metrics(server: StatusServer) -> dict[tuple[str, ...], float]:
    response, text = answer(server, "/metrics")
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_the_data_is_what_the_board_says_now(board, server):
    response, text = answer(server, "/status.json")
    assert response.headers["Content-Type"] == "application/json"
    assert json.loads(text)["devices"][1]["last_error"] == "connection lost"
    board.update(round=121)
    assert json.loads(answer(server, "/status.json?any")[1])["round"] == 121


def test_the_page_holds_the_state_that_it_came_with(server):
    response, text = answer(server, "/")
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text).group(1)
    assert json.loads(data)["run"] == "four boards"


def test_metrics(server):
    found = metrics(server)
    assert found["adaptsfl_run_info", "four boards"] == 1
    assert found["adaptsfl_start_time_seconds",] == 1_000_000
    assert found["adaptsfl_round",] == 120
    assert found["adaptsfl_planned_rounds",] == 500
    assert found["adaptsfl_block",] == 7
    assert found["adaptsfl_interval_rounds",] == 12
    assert found["adaptsfl_deepest_cut",] == 9
    assert found["adaptsfl_micro_batches",] == 4
    assert found["adaptsfl_waiting",] == 0
    assert found["adaptsfl_loss",] == pytest.approx(0.8)
    assert found["adaptsfl_accuracy_ratio",] == 0.625
    assert found["adaptsfl_round_seconds",] == 1.5
    assert found["adaptsfl_predicted_round_seconds",] == 1.25
    assert found["adaptsfl_received_bytes_total",] == 3_000_000
    assert found["adaptsfl_sent_bytes_total",] == 4_000_000
    assert found["adaptsfl_phase_seconds", "a1"] == 0.75
    assert found["adaptsfl_predicted_phase_seconds", "a1"] == 0.5
    assert found["adaptsfl_device_present", "jetson"] == 1
    assert found["adaptsfl_device_present", "pi"] == 0
    assert found["adaptsfl_device_state", "pi", "away"] == 1
    assert found["adaptsfl_device_state", "pi", "training"] == 0
    assert found["adaptsfl_device_cut", "jetson"] == 9
    assert found["adaptsfl_device_last_round", "jetson"] == 120
    assert found["adaptsfl_device_rounds_total", "jetson"] == 118
    assert found["adaptsfl_device_violations_total", "pi"] == 2
    assert found["adaptsfl_device_forward_seconds", "jetson"] == 0.25


def test_what_is_believed_is_in_the_metrics_under_documented_names(server):
    found = metrics(server)
    assert found["adaptsfl_device_flop_per_second", "jetson"] == 2e9
    assert found["adaptsfl_device_uplink_bits_per_second", "jetson"] == 8e6
    assert found["adaptsfl_device_fed_downlink_bits_per_second", "jetson"] == 64e6
    assert found["adaptsfl_device_forward_fixed_seconds", "jetson"] == 0.003
    assert found["adaptsfl_device_fed_uplink_fixed_seconds", "jetson"] == 0.04
    assert found["adaptsfl_server_flop_per_second",] == 3e10
    assert found["adaptsfl_server_turn_fixed_seconds",] == 0.001
    assert found["adaptsfl_server_to_fed_fixed_seconds",] == 0.005
    assert found["adaptsfl_server_averaging_bits_per_second",] == 4e9
    for name, ends in (("kappa", (0.02, 0.15, 1.2)), ("relative_rounds", (1.125, 1.25, 2.5))):
        assert tuple(found[f"adaptsfl_believed_{name}", share] for share in ("0.1", "0.5", "0.9")) == ends
    assert found["adaptsfl_believed_averagings",] == 4
    documented = set(re.findall(r"`(adaptsfl_\w+)`", (ROOT / "docs" / "deploy.md").read_text()))
    for name, *_ in found:
        assert name.removesuffix("_total").removesuffix("_info") in documented, name


def test_what_is_not_known_is_left_out_of_the_metrics(server):
    found = metrics(server)
    absent = [("device_cut", "pi"), ("device_backward_seconds", "jetson"), ("predicted_phase_seconds", "b3")]
    assert not [key for key in absent if (f"adaptsfl_{key[0]}", *key[1:]) in found]
    with closing(serve_status(Board(Status(run="new", started_at=0.0)))) as new:
        assert "adaptsfl_loss" not in {name for name, *_ in metrics(new)}


def test_names_from_outside_come_back_from_the_metrics_as_they_are(board, server):
    board.update_device(HOSTILE, cut=4)
    board.update_device("\ud800", cut=5)  # no UTF-8 says this letter
    found = metrics(server)
    assert found["adaptsfl_device_cut", HOSTILE] == 4
    assert found["adaptsfl_device_cut", r"\ud800"] == 5


def test_names_from_outside_are_no_markup(board, server):
    board.update(run=HOSTILE, waiting_for=HOSTILE, last_error=HOSTILE)
    board.update_device(HOSTILE, last_error=HOSTILE)
    text = answer(server, "/")[1]
    assert text.count("</script>") == 2
    assert "<img" not in text
    assert json.loads(answer(server, "/status.json")[1])["devices"][-1]["name"] == HOSTILE


@pytest.mark.parametrize("path", [*PATHS, "/nothing"])
def test_every_answer_keeps_strangers_out(server, path):
    headers = answer(server, path)[0].headers
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert policy.endswith("frame-ancestors 'none'")
    assert "unsafe" not in policy
    assert ("connect-src 'self'" in policy) == (path == "/")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Server"] == "adaptsfl"


@pytest.mark.parametrize("path", ["/nothing", "/status.json/", "/../pyproject.toml", "/assets/status.js", "*"])
def test_nothing_else_is_found(server, path):
    response, text = answer(server, path)
    assert (response.status, text) == (404, "Not Found\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_nothing_can_be_changed(server, method):
    response, text = answer(server, "/", method)
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")
    assert text == "Method Not Allowed\n"


@pytest.mark.parametrize("path", PATHS)
def test_head_is_get_without_a_body(server, path):
    heard = raw(server, f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert heard.startswith(b"HTTP/1.0 200 ")
    assert re.search(rb"\r\nContent-Length: [1-9]\d\d", heard)
    assert heard.index(b"\r\n\r\n") == len(heard) - 4


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:80", "localhost", "LocalHost:8080", "[::1]", "[::1]:9", "127.9.9.9"]
)
def test_hosts_that_are_this_machine(server, host):
    assert answer(server, "/metrics", Host=host)[0].status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[fe80::1]", "", "localhost:x",
     "localhost@evil.example", "evil.example:80", "0.0.0.0", "[localhost]", "[::1", "::1"],
)  # fmt: skip
@pytest.mark.parametrize("path", [*PATHS, "/nothing"])
def test_hosts_that_are_not(server, path, host):
    response, text = answer(server, path, Host=host)
    assert response.status == 421
    assert text == "Ask for 127.0.0.1, [::1] or localhost.\n"


def test_no_host_and_two_hosts(server):
    assert raw(server, b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.0 200 ")
    assert raw(server, b"GET /metrics HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 421 ")
    twice = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n"
    assert raw(server, twice).startswith(b"HTTP/1.0 421 ")
    elsewhere = b"GET http://evil.example/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert raw(server, elsewhere).startswith(b"HTTP/1.0 404 ")


def test_requests_that_are_none(server):
    assert raw(server, b"<script>\r\n\r\n").endswith(b"Bad Request\n")
    assert raw(server, b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n").endswith(b"HTTP Version Not Supported\n")
    assert raw(server, b"\r\n\r\n") == b""


def test_requests_that_are_too_long(server):
    line = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: "
    fitting = line + b"x" * (status_server.LARGEST_HEAD - len(line) - 4) + b"\r\n\r\n"
    assert raw(server, fitting).startswith(b"HTTP/1.0 200 ")
    assert raw(server, fitting[:-4] + b"x\r\n\r\n").startswith(b"HTTP/1.0 431 ")
    assert raw(server, b"x" * (status_server.LARGEST_HEAD + 1)).startswith(b"HTTP/1.0 431 ")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "edge.example", "", "127.0.0.1:80"])
def test_only_this_machine_can_be_listened_on(board, host):
    with pytest.raises(InvalidInput, match=r"no loopback address.*ssh -L.*reverse proxy"):
        serve_status(board, host)


def test_a_port_that_is_taken(board, server):
    with pytest.raises(InvalidInput, match=rf"^port: {server.port} on 127\.0\.0\.1 is in use\. Give another port"):
        serve_status(board, port=server.port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none(board, port):
    with pytest.raises(InvalidInput, match=f"^port: {port} is no port"):
        serve_status(board, port=port)


def test_the_other_loopback(board):
    try:
        server = serve_status(board, "::1")
    except InvalidInput as error:
        pytest.skip(f"no IPv6 here: {error}")
    with closing(server), closing(http.client.HTTPConnection("::1", server.port, timeout=WAIT_S)) as connection:
        assert server.url == f"http://[::1]:{server.port}/"
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 200


def test_localhost_is_looked_up_nowhere(board, monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("the DNS was asked"))
    with closing(serve_status(board, "LOCALHOST")) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/"


def test_a_client_that_says_nothing_is_hung_up_on_and_keeps_nobody_waiting(server, monkeypatch, caplog):
    assert status_server._Handler.timeout == status_server.SILENCE_S
    with socket.socket() as idle:
        idle.settimeout(WAIT_S)
        idle.bind(("127.0.0.1", 0))
        silent = idle.getsockname()
        timeout = property(lambda handler: 0.05 if handler.client_address == silent else WAIT_S)
        monkeypatch.setattr(status_server._Handler, "timeout", timeout)
        idle.connect(("127.0.0.1", server.port))
        assert answer(server, "/metrics")[0].status == 200
        assert said(idle) == b""
    assert caplog.records == []


def test_a_client_that_takes_too_long_is_hung_up_on(board, monkeypatch):
    monkeypatch.setattr(status_server._Handler, "timeout", None)  # never silent for too long
    monkeypatch.setattr(status_server, "TIMEOUT_S", 0.0)
    with closing(serve_status(board)) as server, connected(server) as slow, suppress(ConnectionError):
        slow.sendall(b"GET / HTTP/1.1\r\nHost: ")  # an error if it was hung up on before that
        assert said(slow) == b""


def test_too_many_clients_are_turned_away_until_one_goes(server, monkeypatch):
    monkeypatch.setattr(status_server._Handler, "timeout", None)
    monkeypatch.setattr(status_server, "MOST_CLIENTS", 2)
    with connected(server), connected(server) as second:
        with connected(server) as third:
            assert said(third) == b""
        second.shutdown(socket.SHUT_WR)
        assert said(second) == b""  # the server has noticed
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            with connected(server) as fourth:
                fourth.sendall(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
                try:
                    if said(fourth).startswith(b"HTTP/1.0 404 "):
                        break
                except ConnectionError:
                    continue  # turned away before it was heard
        else:
            pytest.fail("nobody is let in again")


def test_clients_that_leave_early_are_no_errors(server, caplog):
    for request in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with connected(server) as client:
            client.sendall(request)
    assert answer(server, "/metrics")[0].status == 200
    assert caplog.records == []


class BrokenBoard(Board):
    """A board on which a bug wrote."""

    @property
    def status(self) -> Status:
        raise RuntimeError("bug")


@pytest.mark.parametrize("path", PATHS)
def test_a_bug_is_logged_and_said_but_not_shown(path, caplog):
    with closing(serve_status(BrokenBoard(Status(run="x", started_at=0.0)))) as server:
        response, text = answer(server, path)
    assert (response.status, text) == (500, "Internal Server Error\n")
    assert f"{path} of the edge server's status could not be made" in caplog.text
    assert "RuntimeError: bug" in caplog.text


def test_closing_hangs_up(board, monkeypatch):
    monkeypatch.setattr(status_server._Handler, "timeout", None)
    server = serve_status(board)
    with connected(server) as client:
        client.sendall(b"GET")
        assert answer(server, "/metrics")[0].status == 200  # so that the first was accepted
        server.close()
        assert said(client) == b""
    with pytest.raises(ConnectionRefusedError):
        connected(server)
    server.close()


# ---- in a browser ------------------------------------------------------------------------------------------------


class LivingBoard(Board):
    """Every look at it is another round; some do more."""

    looks = 0

    def looked(self) -> None:
        pass

    @property
    def status(self) -> Status:
        self.looks += 1
        self.looked()
        self.update(round=self.looks)
        return super().status


def shown(text: str, id: str) -> str:
    """What a person sees of an element without children."""
    found = re.search(rf'<(\w+)[^>]* id="{id}"[^>]*>([^<]*)</\1>|<(\w+) id="{id}"[^>]*>([^<]*)</\3>', text)
    assert found is not None, id
    return html.unescape(found.group(2) or found.group(4) or "")


def cells(text: str, id: str) -> list[list[str]]:
    """The text of a table, row by row."""
    found = re.search(rf'<table id="{id}".*?</table>', text, re.DOTALL).group()
    rows = re.findall("<tr.*?</tr>", found, re.DOTALL)
    return [[cell.replace("&nbsp;", " ") for cell in re.findall(r"<t[hd][^>]*>([^<]*)<", row)] for row in rows]


def no_fault(text: str) -> bool:
    return re.search(r'<p id="errors" role="alert" hidden=""></p>', text) is not None


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_its_server(board, tmp_path, scheme):
    living = LivingBoard(board.status)
    with closing(serve_status(living)) as server:
        text = dom(tmp_path, server.url, scheme=scheme)
    assert no_fault(text)
    assert living.looks > 2
    round = int(re.match(r"Round (\d+) of 500", shown(text, "rounds")).group(1))
    assert 2 < round <= living.looks
    assert re.search(r'id="gone"[^>]* hidden=""', text)
    assert shown(text, "h-progress") == "Training"
    assert shown(text, "present") == "1 of 2"
    assert shown(text, "round-s") == "1.5 s"
    assert shown(text, "round-s-note") == "a round; predicted 1.25 s, 1.20× that"
    assert (shown(text, "loss"), shown(text, "accuracy")) == ("0.8", "62.5 %")
    assert (shown(text, "interval"), shown(text, "deepest"), shown(text, "parts")) == ("12", "9", "4")
    assert shown(text, "parts-note") == "k, parts of a mini-batch, in int8"
    assert (shown(text, "received"), shown(text, "sent-note")) == ("2 Mbit/s", "sent, 4 MB in all")
    rows = cells(text, "devices")
    assert rows[1] == ["jetson", "training", "9", "118", "250 ms", "–", "0", ""]
    assert rows[2] == ["pi", "away", "–", "0", "–", "–", "2", "connection lost"]
    assert len(rows[0]) == len(rows[1])
    phases = re.search(r'<table id="phases".*?</table>', text, re.DOTALL).group()
    assert "a1 client forward" in phases
    assert "1.50×" in phases
    assert shown(text, "relative-rounds") == "1.25×"
    expected = "rounds needed with I = 12, relative to I = 1, between 1.13 and 2.5"
    assert shown(text, "relative-rounds-note") == expected
    assert (shown(text, "kappa"), shown(text, "averagings")) == ("0.15", "4")
    assert shown(text, "kappa-note").endswith("between 0.02 and 1.2")
    processor, *links = [
        "2 GFLOPS + 3 ms",
        "8 Mbit/s + 20 ms",
        "16 Mbit/s + 0 ms",
        "32 Mbit/s + 40 ms",
        "64 Mbit/s + 0 ms",
    ]
    assert cells(text, "believed")[1:] == [["jetson", processor, *links]]
    assert cells(text, "servers")[1:] == [
        ["edge server’s turn in a round", "30 GFLOPS", "1 ms"],
        ["link from edge server to fed server", "2,000 Mbit/s", "5 ms"],
        ["link from fed server to edge server", "100,000 Mbit/s", "0 ms"],
        ["averaging at the fed server", "4,000 Mbit/s", "2 ms"],
    ]
    assert text.count('<path class="loss"') == 2  # as it is, and smoothed
    assert "NaN" not in text
    assert "undefined" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


@needs_chromium
def test_the_last_state_stays_when_the_server_is_gone(board, tmp_path):
    class Ending(LivingBoard):
        def looked(self) -> None:
            if self.looks == 3:  # the page, and twice its data
                closing_thread.start()
            if self.looks > 3:
                closing_thread.join()  # nobody is answered any more

    living = Ending(board.status)
    server = serve_status(living)
    closing_thread = threading.Thread(target=server.close)
    text = dom(tmp_path, server.url)
    closing_thread.join()
    assert no_fault(text)
    assert re.search(r'<p id="gone" role="alert" aria-live="assertive">Not reachable since \d\d:\d\d:\d\d', text)
    assert "<title>not reachable – four boards</title>" in text
    assert re.match(r"Round [23] of 500", shown(text, "rounds"))
    assert ">jetson</th>" in text


@needs_chromium
def test_hostile_names_are_text(board, tmp_path):
    board.update(run=HOSTILE, waiting_for=HOSTILE, last_error=HOSTILE)
    board.update_device(HOSTILE, state="waiting", last_error=HOSTILE)
    with closing(serve_status(board)) as server:
        text = dom(tmp_path, server.url)
    assert no_fault(text)
    assert "<title>owned" not in text
    assert "<img" not in text
    assert text.count("<script") == 2
    assert shown(text, "run") == HOSTILE


@needs_chromium
def test_nothing_is_known_yet(tmp_path):
    board = Board(Status(run="", started_at=0.0, waiting_for="2 of 4 devices"))
    board.add_loss(1, float("nan"))
    with closing(serve_status(board)) as server:
        text = dom(tmp_path, server.url)
    assert no_fault(text)
    assert shown(text, "h-progress") == "Waiting for 2 of 4 devices"
    assert shown(text, "run") == "Unnamed run"
    for words in ("None has come yet.", "No round is done yet.", "Not evaluated yet.", "Nothing is measured yet."):
        assert f">{words}</p>" in text
    assert shown(text, "believed-note") == "Nothing is planned yet."
    assert re.search(r'<div id="resources" hidden="">', text)
    assert "NaN" not in text


@needs_chromium
@pytest.mark.parametrize("width", [360, 700, 1280])
def test_nothing_sticks_out(board, tmp_path, width):
    board.update(run="r" * 200, last_error="e" * 200, waiting_for="w" * 200)
    board.update_device("d" * 200, state="quarantined", cut=3, rounds=1234567, round=99, last_error="e" * 200)
    board.update_beliefs(
        ESTIMATES, Fleet.of([replace(JETSON, name="d" * 200, flops=9.876e14, backward_s=1.234)], SERVER)
    )
    page = written(board, tmp_path)
    question = """
        const doc = page.document, root = doc.documentElement;
        const charts = [...doc.querySelectorAll(".chart svg")];
        const tables = [...doc.querySelectorAll(".scroll")].map((box) => box.scrollWidth - box.clientWidth);
        return [root.scrollWidth - root.clientWidth, charts.length, Math.max(...tables),
            doc.getElementById("errors").textContent];
    """
    too_wide, charts, scrolled, faults = asked(tmp_path, page, question, width=width)
    assert (too_wide, charts, scrolled, faults) == (0, 2, 0, "")


@needs_chromium
def test_a_script_that_got_in_does_not_run(board, tmp_path):
    page = written(board, tmp_path)
    page.write_text(page.read_text().replace("<main>", "<main><script>document.title = 'owned'</script>"))
    text = dom(tmp_path, page)
    assert "<title>owned" not in text
    assert shown(text, "run") == "four boards"


@needs_chromium
def test_the_pointer_shows_values(board, tmp_path):
    question = """
        const chart = page.document.querySelector("#chart-loss svg"), place = chart.getBoundingClientRect();
        const pointer = { clientX: place.right - 12, clientY: place.top + 40, bubbles: true };
        chart.dispatchEvent(new page.PointerEvent("pointermove", pointer));
        return page.document.querySelector("#chart-loss .tip").textContent;
    """
    assert re.fullmatch(r"round 1(19|20)0\.8\d*", asked(tmp_path, written(board, tmp_path), question, width=900))


def written(board: Board, folder: Path) -> Path:
    page = folder / "status.html"
    page.write_text(page_text(board.status))
    return page
