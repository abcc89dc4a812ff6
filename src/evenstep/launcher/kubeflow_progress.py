"""Progress of a run for Kubeflow Trainer, which shows it as the status of the TrainJob: percent, time left, metrics.

It is sent where the controller has set `KUBEFLOW_TRAINER_SERVER_URL` (kubeflow/trainer, KEP 2779), by a thread: the run
does not wait for the server, and does not fail with it.
"""

from __future__ import annotations

import http.client
import json
import math
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evenstep.launcher.variables import KubeflowVariables, kubeflow_variables
from evenstep.record import Evaluation, Step, Summary
from evenstep.training.trainer import Event

INTERVAL_SECONDS = 5.0
"""Kubeflow asks its clients for no more than that."""
TIMEOUT_SECONDS = 5.0
MOST_METRICS, MOST_CHARACTERS = 256, 64
"""Limits of the TrainJob's status."""


def with_progress(events: Iterator[Event], num_steps: int | None) -> Iterator[Event]:
    """Pass the events of a run on, and send its progress every five seconds and at the end."""
    reports = Reports(kubeflow_variables(), num_steps)
    try:
        for event in events:
            reports.take(event)
            yield event
            yield from reports.problems()
    finally:
        reports.close()
    yield from reports.problems()


class Reports:
    """The latest progress, and the thread that sends it."""

    def __init__(self, server: KubeflowVariables, num_steps: int | None) -> None:
        self._server = server
        self._num_steps = num_steps
        self._step: Step | None = None
        self._first: tuple[int, float] | None = None
        """The first step that was seen, and when."""
        self._valid: Mapping[str, float] = {}
        self._is_done = False
        self._closed = threading.Event()
        self._problem: str | None = None
        self._is_shown = False
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def take(self, event: Event) -> None:
        """Note what an event says of the progress."""
        if isinstance(event, Step):
            self._first = self._first or (event.step, time.monotonic())
            self._step = event
        elif isinstance(event, Evaluation):
            self._valid = event.values
        elif isinstance(event, Summary):
            self._is_done = True

    def problems(self) -> Iterator[str]:
        """A line to show, once, if the server cannot be reached."""
        if self._problem is not None and not self._is_shown:
            self._is_shown = True
            yield f"Kubeflow does not take the progress of this run, which goes on: {self._problem}"

    def close(self) -> None:
        """Send the last state; wait no longer than two requests may take."""
        self._closed.set()
        self._thread.join(2 * TIMEOUT_SECONDS)

    def status(self) -> dict[str, Any]:
        """The request's content, as the controller reads it."""
        values = {**({"loss": self._step.loss, "lr": self._step.lr} if self._step is not None else {})}
        values |= {f"valid.{name}": value for name, value in self._valid.items()}
        metrics = [{"name": name[:MOST_CHARACTERS], "value": f"{value:.6g}"} for name, value in values.items()]
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        if self._is_done:
            status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        elif self._step is not None and self._num_steps:
            status |= self._remaining(self._step.step, self._num_steps)
        return {"trainerStatus": {**status, "metrics": metrics[:MOST_METRICS]}}

    def _remaining(self, step: int, num_steps: int) -> dict[str, int]:
        """100 % is for a run that is done, with its last evaluation."""
        assert self._first is not None
        first, since = self._first
        found = {"progressPercentage": min(99, 100 * step // num_steps)}
        if step > first:
            seconds = (num_steps - step) * (time.monotonic() - since) / (step - first)
            found["estimatedRemainingSeconds"] = min(2**31 - 1, max(0, math.ceil(seconds)))
        return found

    def _send_all(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(INTERVAL_SECONDS)
            try:
                self._send()
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._problem = str(error) or type(error).__name__

    def _send(self) -> None:
        """One request; certificate and token are read each time, since the kubelet renews them."""
        url = urlsplit(self._server.KUBEFLOW_TRAINER_SERVER_URL)
        if url.scheme != "https" or url.hostname is None:
            raise ValueError(f"KUBEFLOW_TRAINER_SERVER_URL is {url.geturl()!r}, not an https address")
        context = ssl.create_default_context(cafile=self._server.KUBEFLOW_TRAINER_SERVER_CA_CERT or None)
        token = Path(self._server.KUBEFLOW_TRAINER_SERVER_TOKEN).read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection = http.client.HTTPSConnection(url.hostname, url.port, timeout=TIMEOUT_SECONDS, context=context)
        try:
            connection.request("POST", url.path, json.dumps(self.status()), headers)
            answer = connection.getresponse()
            text = answer.read(2**16).decode(errors="replace")
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(f"{url.hostname} answered {answer.status} {answer.reason}: {text[:200]}")
