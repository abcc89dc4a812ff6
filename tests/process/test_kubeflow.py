"""Progress for Kubeflow Trainer, sent to a local HTTPS server as the controller's is."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import evenstep as library

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/mine/status"
TASK = """
import time
import torch
from torch import nn
from evenstep import Task

x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


def loss(model, batch):
    time.sleep(0.01)
    return (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()


def task() -> Task:
    return Task(
        model=lambda: nn.Linear(4, 1),
        train=(x,),
        valid=(x,),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch=8,
        epochs=4,
    )
"""


@contextmanager
def controller(monkeypatch: pytest.MonkeyPatch, status: int = 200) -> Iterator[list[tuple[str, str, Any]]]:
    """Path, authorization and content of every request that was made; the variables lead to it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    make = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem -out ca.crt -days 2"
    )
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*make.split(), *name], check=True, capture_output=True)
    Path("token").write_text("a token of the kubelet's\n")
    made: list[tuple[str, str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            made.append((self.path, self.headers["Authorization"], json.loads(content)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *words: object) -> None:
            """Nothing on the screen."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("ca.crt", "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://localhost:{server.server_port}{PATH}")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(Path("ca.crt").resolve()))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(Path("token").resolve()))
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def train(**choices: Any) -> library.Record:
    Path("my_task.py").write_text(TASK)
    return library.train("my_task.py", name="mine", devices="cpu", **choices)


def test_the_controller_learns_of_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenstep.launcher.kubeflow_progress.INTERVAL_SECONDS", 0.05)
    with controller(monkeypatch) as requests:
        record = train(progress=False)
    assert {(path, token) for path, token, _ in requests} == {(PATH, "Bearer a token of the kubelet's")}
    states = [content["trainerStatus"] for _, _, content in requests]
    percents = [state["progressPercentage"] for state in states if "progressPercentage" in state]
    assert percents == sorted(percents)
    assert 0 < percents[0] < 100
    assert any(state.get("estimatedRemainingSeconds", 0) > 0 for state in states)
    last = states[-1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    metrics = {metric["name"]: metric["value"] for metric in last["metrics"]}
    assert metrics == {
        "loss": f"{record.losses[-1]:.6g}",
        "lr": "0.05",
        "valid.loss": f"{record.evaluations[-1].values['loss']:.6g}",
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forbidden", "gone", "untrusted", "plain"])
def test_a_controller_that_does_not_answer_costs_a_line_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    with controller(monkeypatch, 403 if how == "forbidden" else 200) as requests:
        if how == "gone":
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://localhost:9/status")
        elif how == "untrusted":
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", "")
        elif how == "plain":
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://localhost:9/status")
        record = train(quiet=True)
    assert len(record.steps) == 20
    said = capsys.readouterr().err
    assert said.count("Kubeflow does not take the progress of this run, which goes on: ") == 1, said
    words = {
        "forbidden": "answered 403",
        "gone": "refused",
        "untrusted": "certificate",
        "plain": "not an https address",
    }
    assert words[how] in said
    assert bool(requests) == (how == "forbidden")
