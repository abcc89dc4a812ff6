"""A live page of one run, served to this machine only, during the training."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep.errors import BadInput
from evenstep.record import FILE, Record, RecordReader, Row, Start, Step
from evenstep.report import comparison
from evenstep.report.html.curves import ReadRun
from evenstep.report.html.page import Page, need_bokeh, render, runs_page

if TYPE_CHECKING:
    from evenstep.report.html.charts import Chart

HOST = "127.0.0.1"
QUIET_SECONDS = 30.0
"""Without a new row for this long, the page shows for how long."""


def serve(run: Path, port: int = 0) -> None:
    """Serve the page of a run until Ctrl-C; the address is printed first."""
    need_bokeh()
    with WatchServer(Watched(run), port) as server:
        print(f"http://{HOST}:{server.server_port}/", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            # Nothing is running that could be lost.
            signal.signal(signal.SIGINT, signal.SIG_IGN)


class Watched:
    """A Record that grows: read on from where the last look ended."""

    def __init__(self, run: Path) -> None:
        if os.path.isfile(run / comparison.FILE):
            raise BadInput(f"{run} is a comparison, which is over; evenstep report {run} writes its page")
        if not os.path.exists(run):
            raise BadInput(f"{run} is not there; give the folder of a run, such as runs/2026-11-15-digits-ddp")
        self.path = run / FILE if os.path.isdir(run) else run
        self._read_to = 0
        self._inode = 0
        self._reader = RecordReader(self.path)
        self._run: ReadRun | None = None
        self._lock = threading.Lock()
        self._num_rows = 0
        self._page: tuple[int, Page] | None = None

    def page(self) -> str:
        with self._lock:
            return render(self._look())

    def news(self) -> dict[str, Any]:
        with self._lock:
            return news(self._look(), self._reader.record)

    def _look(self) -> Page:
        self._read_on()
        return self._made()

    def _read_on(self) -> None:
        try:
            with self.path.open("rb") as file:
                self._reset_if_replaced(os.fstat(file.fileno()))
                file.seek(self._read_to)
                for row in self._reader.read_on(file):
                    self._num_rows += 1
                    self._read_to = file.tell()
                    self._draw(row)
        except OSError:
            # Not there yet, or no longer.
            return

    def _reset_if_replaced(self, file: os.stat_result) -> None:
        """Start over if the Record is shorter or another file: a new run has the same name."""
        if file.st_size < self._read_to or self._inode not in (0, file.st_ino):
            self._read_to, self._reader, self._run = 0, RecordReader(self.path), None
            # It may have as many rows as the other one had.
            self._num_rows, self._page = 0, None
        self._inode = file.st_ino

    def _draw(self, row: Start | Row) -> None:
        assert self._reader.record is not None
        if self._run is None or isinstance(row, Start):
            # After a restart, curves that have lost their end are drawn again from what is left.
            self._run = ReadRun.of(self._reader.record)
        elif isinstance(row, Step):
            self._run.curves.add(row)

    def _made(self) -> Page:
        """The page of what is known; charts are made again only when there is more to draw."""
        if self._page is None or self._page[0] != self._num_rows:
            known = runs_page([self._run]) if self._run is not None else _waiting(self.path)
            # Tables that nobody keeps up to date would soon be wrong; the charts and the first table are.
            self._page = (self._num_rows, replace(known, numbers={}))
        page = self._page[1]
        quiet = time.time() - self.path.stat().st_mtime if self.path.exists() else 0.0
        return replace(page, status=status_of(self._run, quiet), shape=shape(page))


def _waiting(path: Path) -> Page:
    return Page(title=path.parent.name, about=str(path.parent), commands=[], charts=[])


def status_of(run: ReadRun | None, quiet_seconds: float) -> str:
    """The state of the run in one sentence."""
    if run is None:
        return "waiting for the first row of the Record"
    record, last = run.record, run.curves.last
    if record.summary is not None:
        return f"ended after {record.summary.steps:,} steps, {record.summary.seconds:.1f} s"
    at = f"step {last.step:,}, epoch {last.epoch + 1}" if last is not None else "starting"
    again = f", restarted {len(record.restarts)} x" if record.restarts else ""
    quiet = f"; nothing new for {quiet_seconds:.0f} s" if quiet_seconds > QUIET_SECONDS else ""
    return f"training: {at}{again}{quiet}"


def shape(page: Page) -> str:
    """Which charts, lines and tables there are, as a short text: only when it changes must a page be loaded again."""
    parts: list[object] = [[chart.name, sorted(sources(chart))] for chart in page.charts]
    parts += [page.runs.columns if page.runs is not None else None]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def news(page: Page, record: Record | None) -> dict[str, Any]:
    """What the page's script requests: the numbers of all charts, and the cells of the table."""
    return {
        "shape": page.shape,
        "status": page.status,
        "has_ended": record is not None and record.summary is not None,
        "charts": {chart.name: _values(chart) for chart in page.charts},
        "runs": [list(row) for row in page.runs.rows] if page.runs is not None else [],
    }


def sources(chart: Chart) -> dict[str, dict[str, Any]]:
    """The named columns of a chart."""
    from bokeh.models import ColumnDataSource

    found = chart.figure.select({"type": ColumnDataSource})
    return {one.name: dict(one.data) for one in found if isinstance(one, ColumnDataSource) and one.name is not None}


def _values(chart: Chart) -> dict[str, Any]:
    from bokeh.models import FactorRange, Range1d

    y_range, x_range = chart.figure.y_range, chart.figure.x_range
    return {
        "sources": {
            name: {key: _plain(column) for key, column in data.items()} for name, data in sources(chart).items()
        },
        "rows": list(y_range.factors) if isinstance(y_range, FactorRange) else [],
        "reach": x_range.end if isinstance(x_range, Range1d) and x_range.name == "reach" else None,
    }


def _plain(column: list[Any]) -> list[Any]:
    """JSON has no NaN."""
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in column]


class WatchServer(ThreadingHTTPServer):
    """Two paths, this machine only; no file is ever served."""

    daemon_threads = True
    most_connections = 32
    """One more ends the oldest, which may never have sent a request."""

    def __init__(self, watched: Watched, port: int) -> None:
        self.watched = watched
        self._connections: list[socket.socket] = []
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise BadInput(f"port {port} is taken ({error.strerror}); give another --port, or none") from error

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        if len(self._connections) > self.most_connections:
            with suppress(OSError):
                self._connections.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with suppress(ValueError):
            self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore tabs that were closed during a response, and connections that were ended."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def hosts(self) -> set[str]:
        """Host headers that are allowed: a foreign page whose name resolves to this address is refused."""
        return {f"{name}:{self.server_port}" for name in (HOST, "localhost")}


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = 10.0
    server_version = "evenstep"
    sys_version = ""

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", f"use http://{HOST}:{self.server.server_port}/\n")
        elif self.path not in ("/", "/news.json"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is / and /news.json\n")
        else:
            self._look()

    def _look(self) -> None:
        watched = self.server.watched
        try:
            if self.path == "/":
                self._answer(HTTPStatus.OK, "text/html", watched.page())
            else:
                self._answer(HTTPStatus.OK, "application/json", json.dumps(watched.news(), allow_nan=False))
        except BadInput as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{error}\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode("utf-8", errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the address is all that is printed."""
