"""The live page, in a real browser, of a training that goes on meanwhile."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.browser.conftest import Visit
from tests.waiting import wait_until

TASK = '''
import time
from pathlib import Path
import torch
from torch import nn
from evenstep import Task

x = torch.randn(640, 4)


def loss(model, batch):
    """After thirty steps, wait until somebody has looked."""
    if model.training:
        loss.calls += 1
    while loss.calls > 30 and not Path("go").exists():
        time.sleep(0.02)
    return model(batch[0]).square().mean()


loss.calls = 0


def task():
    return Task(
        model=lambda: nn.Linear(4, 1),
        train=(x,),
        valid=(x[:64],),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
'''


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`evenstep` with these arguments, in a process of its own."""
    command = [sys.executable, "-m", "evenstep", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_live_page_follows_a_training_to_its_end(visit: Visit) -> None:
    from playwright.sync_api import expect

    Path("waits.py").write_text(TASK)
    with running("train", "waits.py", "--epochs", "5", "--name", "mine") as training:
        wait_until(Path("runs/mine/record.jsonl").exists)
        with running("report", "--watch", "runs/mine") as watching:
            assert watching.stdout is not None
            address = watching.stdout.readline().strip()
            seen = visit(address)
            expect(seen.page.locator("#status")).to_contain_text(re.compile(r"training: step \d+"), timeout=30_000)
            before = seen.page.locator("#runs td").all_inner_texts()
            Path("go").touch()
            expect(seen.page.locator("#status")).to_contain_text("ended after 50 steps", timeout=30_000)
            assert seen.page.locator("#runs td").all_inner_texts() != before
            assert num_points(seen.page.evaluate) == 50
            assert training.wait(30) == 0
            assert {url.removeprefix(address) for url in seen.requests} == {"", "news.json"}
            assert seen.complaints == []
            watching.send_signal(signal.SIGINT)
            assert watching.wait(10) == 0


def num_points(evaluate: object) -> int:
    """Of the loss, as it is drawn."""
    assert callable(evaluate)
    return int(
        evaluate(
            "Bokeh.documents.flatMap((doc) => doc.get_model_by_name('run 0 line') ?? [])"
            ".find((source) => 'label' in source.data && source.data.x.length > 3).data.x.length"
        )
    )
