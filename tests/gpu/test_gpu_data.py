"""On one card: however batches get there, they are the right ones, whole, and in time.

Run where there is a card: python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import evenstep
from evenstep import Scaler, samplers
from evenstep.audit import audit
from evenstep.plan import Plan
from tests.fleet import furthest, result, run_jobs
from tests.small_tasks import DATA_KINDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
]

WORLDS = {"single-1": 1, "dp-2": 1, "ddp-1": 1, "ddp-2": 2}
GPU = torch.device("cuda:0")


def plan(where: str, device: str, **more: Any) -> Plan:
    strategy, _, num = where.partition("-")
    devices = (device,) * int(num)
    how: dict[str, Any] = {"batch": 10, "steps": 20, "accumulate": 2, "precision": "fp64", "threads": 1, "audit": True}
    return Plan(strategy=strategy, devices=devices, **{**how, **more})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu-data")
    for size in (1, 2):
        wheres = [where for where, num in WORLDS.items() if num == size]
        jobs = [
            (f"{where}/{kind}", plan(where, "cuda:0", workers=number % 3), f"mlp/adamw/mean/{kind}")
            for where in wheres
            for number, kind in enumerate(DATA_KINDS)
        ]
        jobs += [(f"{where}/resident", plan(where, "cuda:0", resident=True), "mlp/adamw/mean") for where in wheres]
        if size == 1:
            jobs += [
                (f"cpu/{kind}", plan("single-1", "cpu", workers=0), f"mlp/adamw/mean/{kind}") for kind in DATA_KINDS
            ]
            jobs += [("cpu/resident", plan("single-1", "cpu"), "mlp/adamw/mean")]
        run_jobs(folder, size, jobs)
    return folder


@pytest.mark.parametrize("where", WORLDS)
@pytest.mark.parametrize("kind", [*DATA_KINDS, "resident"])
def test_data_of_every_kind_teaches_on_the_gpu_what_it_teaches_on_the_cpu(runs: Path, where: str, kind: str) -> None:
    on_cpu, on_gpu = result(runs, f"cpu/{kind}"), result(runs, f"{where}/{kind}")
    # Numbers drawn for a batch are float32 on any device; sums differ in the last bits.
    assert on_gpu.record.losses == pytest.approx(on_cpu.record.losses, rel=1e-7)
    names = [name for name in on_cpu.weights if not name.endswith(".rest")]
    assert furthest({n: on_gpu.weights[n] for n in names}, {n: on_cpu.weights[n] for n in names}) < 1e-6
    assert audit([runs / where / kind]).is_clean


class Rows(Dataset[Any]):
    def __init__(self, columns: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, id_: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.columns[0][id_], self.columns[1][id_]


def pictures(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num, 3, 64, 64), dtype=torch.uint8, generator=generator), torch.arange(num)


WAYS: dict[str, Callable[[Any], tuple[Any, dict[str, Any]]]] = {
    "prefetched": lambda data: (data, {}),
    "resident": lambda data: (data, {"resident": True}),
    "loader workers": lambda data: (Rows(data), {"workers": 2}),
    "arrays": lambda data: (tuple(column.numpy() for column in data), {}),
}


@pytest.mark.parametrize("config", WAYS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_batches_arrive_whole_while_the_gpu_is_busy(config: str, replicas: int) -> None:
    """What a batch holds is looked at on the card, behind work that keeps both streams busy."""
    data = pictures(3000)
    team = evenstep.join("dp" if replicas == 2 else "single", devices=("cuda:0",) * replicas)
    given, how = WAYS[config](data)
    loader = team.loader(given, batch=100, **how)
    busy = torch.randn(2048, 2048, device=GPU)
    expected = data[0].long().flatten(1).sum(1)
    wrong = torch.zeros((), dtype=torch.int64, device=GPU)
    seen: list[int] = []
    for _ in range(3):
        for batch in loader:
            for micro_batch in batch.micro_batches[0]:
                images, labels = micro_batch.data
                assert images.is_cuda
                for _ in range(3):
                    busy = (busy @ busy).tanh()
                wrong += (images.long().flatten(1).sum(1) != expected[micro_batch.ids].to(GPU)).sum()
                wrong += (labels != torch.from_numpy(micro_batch.ids).to(GPU)).sum()
                seen += micro_batch.ids.tolist()
                del images, labels
    assert wrong.item() == 0
    assert sorted(seen) == sorted(list(range(3000)) * 3)
    loader.close()


@pytest.mark.parametrize("config", WAYS)
def test_an_epoch_left_early_goes_on_with_the_next_step(config: str) -> None:
    team = evenstep.join("single", devices=("cuda:0",))
    given, how = WAYS[config](pictures(300))
    loader = team.loader(given, batch=20, sampler=samplers.Sequential(), **how)
    for batch in loader:
        batch.finish()
        if batch.span.start == 60:
            break
    rest = [batch.micro_batches[0][0].data[1].tolist() for batch in loader]
    assert [label for step in rest for label in step] == list(range(80, 300))
    loader.close()


def test_draws_are_the_same_on_the_gpu_and_on_the_cpu() -> None:
    def shift(batch: Any, draws: Any) -> Any:
        return batch[0] + draws.uniform()[:, None, None, None] + draws.integers(0, 9)[:, None, None, None], batch[1]

    seen = {}
    for device in ("cpu", "cuda:0"):
        team = evenstep.join("single", devices=(device,))
        loader = team.loader(pictures(40), batch=20, augment_batch=shift)
        seen[device] = torch.cat([batch.micro_batches[0][0].data[0].cpu() for batch in loader])
    torch.testing.assert_close(seen["cpu"], seen["cuda:0"], rtol=0, atol=0)


def test_an_error_in_the_thread_that_reads_ahead_reaches_the_training() -> None:
    class Bad(Rows):
        def __getitem__(self, id_: int) -> Any:
            if id_ == 50:
                raise ValueError("spoilt")
            return super().__getitem__(id_)

    team = evenstep.join("single", devices=("cuda:0",))
    loader = team.loader(Bad(pictures(100)), batch=20, workers=1)
    with pytest.raises(evenstep.EvenstepError, match="sample 50 cannot be read: ValueError: spoilt"):
        list(loader)
    loader.close()


def test_a_scaler_on_the_gpu_scales_as_on_the_cpu_and_does_not_make_the_host_wait() -> None:
    images = pictures(200)[0]
    scaler = Scaler(3, dim=1).fit([images])
    expected = scaler(images)
    on_gpu = scaler.to(GPU)
    batch = images.to(GPU)
    torch.cuda.set_sync_debug_mode("error")
    try:
        scaled = on_gpu(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(scaled.cpu(), expected)
    assert np.allclose(expected.mean((0, 2, 3)), 0, atol=1e-5)
    assert nn.Sequential(scaler).cuda().state_dict()["0.mean"].dtype == torch.float64


def test_the_plan_of_a_run_may_be_resumed_with_other_workers(runs: Path, tmp_path: Path) -> None:
    saved = sorted((runs / "dp-2/rows/checkpoints").glob("step-*"))[0]
    on = replace(plan("single-1", "cuda:0", workers=2), resume=str(saved))
    run_jobs(tmp_path, 1, [("on", on, "mlp/adamw/mean/rows")])
    rest = result(tmp_path, "on").record.losses
    assert rest == pytest.approx(result(runs, "cpu/rows").record.losses[-len(rest) :], rel=1e-7)
