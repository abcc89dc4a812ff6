"""Private parts of torch and CPython: each is there, does what evenstep needs, and is used through one file."""

from __future__ import annotations

import ast
import multiprocessing
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import evenstep
from evenstep import private_apis

SOURCE = Path(evenstep.__file__).parent
ELSEWHERE = {
    "worker/lazy_compiler.py": "a stub of torch._dynamo, which has tests of its own",
    "training/cuda_graphs/capture_checks.py": "the names of what a module keeps of its own",
    "adopt/hf_metrics.py": "a method of transformers' Trainer, which tests/process/test_adopt.py calls",
}
DOCUMENTED = {"_exit", "_getframe", "_current_frames", "_fields", "_replace"}


def private_uses(nodes: Iterable[ast.AST], own: set[str]) -> list[str]:
    """Private names of other packages that a file imports or reads."""
    found = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("evenstep"):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            found += [name for name in names if is_private(name)]
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            found.append(node.attr)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(nodes: Iterable[ast.AST]) -> set[str]:
    """Private names that a file gives to functions, variables and attributes."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_private_parts_of_others_are_used_in_one_file() -> None:
    kinds = (ast.ImportFrom, ast.Attribute, ast.Name, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    files = {
        str(file.relative_to(SOURCE)): [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)
        ]
        for file in SOURCE.rglob("*.py")
    }
    own = {name for nodes in files.values() for name in defined(nodes)} | DOCUMENTED
    used = {name: private_uses(nodes, own) for name, nodes in files.items() if name != "private_apis.py"}
    assert {name: uses for name, uses in used.items() if uses and name not in ELSEWHERE} == {}
    assert private_uses(files["private_apis.py"], own)


@pytest.mark.parametrize("name", private_apis.LAZY)
def test_each_name_is_there(name: str) -> None:
    assert getattr(private_apis, name) is not None


def test_it_imports_no_torch_and_knows_no_other_name() -> None:
    check = (
        "import sys, evenstep.private_apis; assert 'torch' not in sys.modules and 'multiprocessing' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = private_apis.no_such_name


def test_several_tensors_are_changed_in_one_call() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    private_apis.foreach_mul_(tensors, 2.0)
    private_apis.foreach_add_(tensors, [torch.ones(2), torch.ones(3)])
    private_apis.foreach_copy_(tensors[:1], [torch.zeros(2)])
    assert [one.tolist() for one in tensors] == [[0, 0], [3, 3, 3]]
    flat = private_apis.flatten_dense_tensors(tensors)
    assert [one.tolist() for one in private_apis.unflatten_dense_tensors(flat, tensors)] == [[0, 0], [3, 3, 3]]


def test_a_number_that_is_not_finite_sets_the_flag() -> None:
    flag = torch.zeros(())
    private_apis.flag_non_finite_([torch.tensor([1.0])], flag, torch.ones(()))
    assert flag.item() == 0
    private_apis.flag_non_finite_([torch.tensor([float("nan")])], flag, torch.ones(()))
    assert flag.item() == 1


def test_backward_starts_from_a_given_number() -> None:
    weight = nn.Parameter(torch.ones(2))
    start = torch.tensor(3.0)
    private_apis.autograd_engine.run_backward(
        (weight.sum(),), (start,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3]


def test_hooks_of_one_optimizer_and_of_all_are_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert not private_apis.has_step_hooks(optimizer)
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    assert private_apis.has_step_hooks(optimizer)
    before, after = private_apis.step_hooks(optimizer)
    assert (len(before), len(after)) == (1, 0)
    hook.remove()
    for register, hooks in (
        (register_optimizer_step_pre_hook, private_apis.hooks_before_steps),
        (register_optimizer_step_post_hook, private_apis.hooks_after_steps),
    ):
        everywhere = register(lambda *_: None)
        assert len(hooks) == 1
        everywhere.remove()
        assert not hooks


def test_a_profiler_that_runs_is_seen_and_follows_all_threads() -> None:
    assert not private_apis.is_profiling()
    with torch.profiler.profile(experimental_config=private_apis.profile_all_threads()) as profiler:
        assert private_apis.is_profiling()
        thread = threading.Thread(target=lambda: torch.ones(2).add(1))
        thread.start()
        thread.join()
    assert any(event.key == "aten::add" for event in profiler.key_averages())


def test_a_scheduler_does_not_warn_of_a_step_that_was_taken_around_it(recwarn: pytest.WarningsRecorder) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler: LRScheduler = StepLR(optimizer, 1)
    private_apis.note_step_for_scheduler(optimizer, optimizer.step)
    scheduler.step()
    assert not recwarn.list


def test_a_grad_scaler_has_two_tensors_once_it_scaled() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert private_apis.scaler_tensors(scaler) == []
    scaler.scale(torch.ones(()))
    assert [one.item() for one in private_apis.scaler_tensors(scaler)] == [8.0, 0]


@pytest.mark.parametrize("gradient", [1.0, float("inf")])
def test_a_grad_scaler_keeps_a_flag_of_infinities(gradient: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([gradient])
    optimizer = torch.optim.SGD([weight])
    scaler.unscale_(optimizer)
    assert [flag.item() for flag in private_apis.infinity_flags(scaler, optimizer)] == [float(gradient > 1)]


def test_modules_share_buffers_and_batch_norms_have_a_base() -> None:
    one, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    private_apis.take_buffers(one, other)
    assert one.running_mean is other.running_mean
    assert isinstance(one, private_apis.BatchNorm)
    assert isinstance(nn.InstanceNorm1d(2), private_apis.NormBase)


def test_a_replaced_function_is_found_by_functional(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (torch, torch._VF):
        monkeypatch.setattr(owner, "dropout", torch.dropout)
    private_apis.replace_function("dropout", lambda *_: "replaced")
    assert nn.functional.dropout(torch.ones(1)) == "replaced"


def test_what_ranks_send_and_compare_works_in_a_group_of_one(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    assert isinstance(store, private_apis.Store)
    assert private_apis.TCPStore("127.0.0.1", 0, 1, True).port > 0
    had_group = dist.is_initialized()
    if not had_group:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        tensors = [torch.ones(2), torch.zeros(3)]
        private_apis.broadcast_coalesced(dist.group.WORLD, tensors, 2**20, 0)
        private_apis.refuse_different_shapes(dist.group.WORLD, tensors)
    finally:
        if not had_group:
            dist.destroy_process_group()


def test_what_fully_shard_keeps_of_a_unit(tmp_path: Path) -> None:
    run_in_child(
        exec,
        f"""
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from evenstep import private_apis
store = dist.FileStore({str(tmp_path / "store")!r}, 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
fully_shard(model[0]); fully_shard(model)
like = model[0].weight
made = private_apis.tensor_of_shards(torch.ones(2, 2), like.device_mesh, like.placements, like.shape, like.stride())
assert type(made) is type(like.data) and torch.equal(made.full_tensor(), torch.ones(2, 2))
for unit in (model[0], model):
    unit.set_custom_all_gather(private_apis.DefaultAllGather())
    unit.set_custom_reduce_scatter(private_apis.DefaultReduceScatter())
(name, unit, group), (first, _, _) = private_apis.fsdp_groups(model)
assert (name, unit, first) == ("", model, "0")
assert callable(group.post_backward) and group.reduce_grads
assert [private_apis.has_gradient(one) for one in group.fsdp_params] == [False, False]
assert not private_apis.give_gradient(group.fsdp_params[0], torch.zeros_like)
model.set_requires_gradient_sync(False)
model(torch.ones(1, 2)).sum().backward()
assert [private_apis.has_gradient(one) for one in group.fsdp_params] == [True, True]
assert [tuple(one.shape) for one in private_apis.unsharded_parameters(group)] == [(1, 2), (1,)]
assert private_apis.give_gradient(group.fsdp_params[0], torch.zeros_like)
private_apis.widen_gradients(group)
assert [one.unsharded_accumulated_grad for one in group.fsdp_params] == [None, None]
group.fsdp_params[1].reduce_dtype = group.fsdp_params[0].reduce_dtype = torch.float64
group.fsdp_params[0].to_accumulated_grad_if_needed()
private_apis.widen_gradients(group)
assert [one.unsharded_accumulated_grad.dtype for one in group.fsdp_params] == [torch.float64] * 2
dist.destroy_process_group()
""",
        {},
    )


def test_hooks_on_accumulated_gradients_are_seen() -> None:
    weights = [torch.zeros(2, requires_grad=True), torch.zeros(2)]
    assert not private_apis.has_accumulation_hooks(weights)
    hook = weights[0].register_post_accumulate_grad_hook(lambda weight: None)
    assert private_apis.has_accumulation_hooks(weights)
    hook.remove()
    assert not private_apis.has_accumulation_hooks(weights)


def test_a_backward_inside_a_backward_is_another_task() -> None:
    tasks: list[int] = []

    def note(gradient: torch.Tensor) -> None:
        tasks.append(private_apis.current_graph_task())
        if len(tasks) == 1:
            with torch.enable_grad():
                inner = torch.ones(2, requires_grad=True)
                inner.register_hook(note)
                inner.sum().backward()
            note(gradient)

    outer = torch.ones(2, requires_grad=True)
    outer.register_hook(note)
    outer.sum().backward()
    first, nested, again = tasks
    assert first == again != nested


def test_a_parameter_of_one_row_becomes_zero_dimensional(tmp_path: Path) -> None:
    run_in_child(
        exec,
        f"""
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from evenstep import private_apis
store = dist.FileStore({str(tmp_path / "store")!r}, 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = nn.Linear(2, 1)
model.scale = nn.Parameter(torch.ones(1))
model.forward = lambda x: model.scale * nn.functional.linear(x, model.weight, model.bias)
fully_shard(model)
((_, _, group),) = private_apis.fsdp_groups(model)
(one,) = [one for one in group.fsdp_params if one.sharded_param is model.scale]
private_apis.replicate_scalar(one, torch.tensor(3.0))
assert model.scale.shape == () and model.scale.placements[0].is_replicate()
out = model(torch.ones(1, 2))
out.sum().backward()
assert model.scale.grad.shape == () and 3 * model.scale.grad.full_tensor() == out.sum()
with torch.no_grad():
    model.scale.copy_(torch.distributed.tensor.distribute_tensor(torch.tensor(0.0), model.scale.device_mesh))
model.load_state_dict(model.state_dict())
assert model(torch.ones(1, 2)).sum() == 0
dist.destroy_process_group()
""",
        {},
    )


def test_ddp_says_which_gradients_it_waits_for_and_another_wrapper_takes_its_place(tmp_path: Path) -> None:
    run_in_child(
        exec,
        f"""
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from evenstep import private_apis
store = dist.FileStore({str(tmp_path / "store")!r}, 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = nn.ModuleDict(dict(used=nn.Linear(2, 2), spare=nn.Linear(2, 2)))
model.forward = lambda x: model["used"](x)
first = DistributedDataParallel(model)
first(torch.ones(1, 2)).sum().backward()
assert private_apis.unreduced(first) == [2, 3]
spare = list(model["spare"].parameters())
torch.autograd.backward(spare, [torch.zeros_like(one) for one in spare])
assert private_apis.unreduced(first) == []
model["spare"].requires_grad_(False)
second = DistributedDataParallel(model)
private_apis.take_over(second, first)
for _ in range(2):
    second(torch.ones(1, 2)).sum().backward()
    assert private_apis.unreduced(second) == []
dist.destroy_process_group()
""",
        {},
    )


def test_ddp_frees_its_reducer_before_its_group(tmp_path: Path) -> None:
    run_in_child(
        exec,
        f"""
import copy, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from evenstep import private_apis
private_apis.free_group_after_reducer()
store = dist.FileStore({str(tmp_path / "store")!r}, 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = DistributedDataParallel(nn.Linear(2, 2))
for one in (model, copy.deepcopy(model)):
    names = list(vars(one))
    # The logger owns the reducer, too.
    assert names.index("process_group") > max(names.index("reducer"), names.index("logger"))
    assert one.process_group is dist.group.WORLD
dist.destroy_process_group()
""",
        {},
    )


class OfAll(IterableDataset[bool]):
    def __iter__(self) -> Any:
        before = get_worker_info() is not None
        private_apis.hide_worker_info()
        yield before and get_worker_info() is None


def test_a_dataset_does_not_see_that_it_is_in_a_worker() -> None:
    assert [bool(one) for one in DataLoader(OfAll(), num_workers=1)] == [True]


def test_a_child_of_the_fork_server_becomes_a_main_process_and_threads_are_waited_for() -> None:
    run_in_child(become_main)
    assert private_apis.fork_server_pid() > 0
    assert private_apis.has_resource_tracker()


def become_main() -> None:
    assert multiprocessing.parent_process() is not None
    private_apis.become_main_process()
    assert multiprocessing.parent_process() is None
    assert multiprocessing.current_process().name == "MainProcess"


def test_exit_handlers_are_forgotten_and_run() -> None:
    code = """
import atexit, weakref
from evenstep import private_apis
atexit.register(print, "forgotten")
weakref.finalize(private_apis, print, "forgotten, too")
private_apis.forget_exit_handlers()
atexit.register(print, "run")
weakref.finalize(private_apis, print, "finalized")
private_apis.run_exit_handlers()
print("end")
"""
    assert run_alone(code).split() == ["finalized", "run", "end"]


def test_an_optimizer_that_is_made_fused_later_is_as_one_that_was_made_so() -> None:
    weight = nn.Parameter(torch.ones(2))
    later, fused = torch.optim.SGD([weight]), torch.optim.SGD([weight], fused=True)
    later.param_groups[0]["fused"] = True
    private_apis.make_fused(later)
    assert {name for name in vars(fused) if name.endswith(("scaling", "for_fused"))} <= vars(later).keys()
    weight.grad = torch.ones(2)
    later.step()
    assert weight.tolist() == pytest.approx([0.999, 0.999])


def test_workers_of_a_loader_end_when_they_are_to() -> None:
    iterator: Any = iter(DataLoader([1, 2], num_workers=1))
    (worker,) = iterator._workers
    private_apis.end_workers(iterator)
    assert not worker.is_alive()


def test_threads_are_waited_for() -> None:
    code = "import threading, time; from evenstep import private_apis\n"
    code += (
        "threading.Thread(target=lambda: (time.sleep(0.2), print('done'))).start(); private_apis.wait_for_threads()\n"
    )
    assert run_alone(f"{code}print('end')").split() == ["done", "end"]


def test_the_generators_behind_random_and_numpy() -> None:
    python, numpy = private_apis.global_generators()
    assert random.random.__self__ is python  # type: ignore[attr-defined]
    assert np.random.rand.__self__ is numpy


def test_the_state_of_pythons_generator_is_read_and_written_in_its_memory() -> None:
    assert private_apis._python_words() is not None
    random.seed(7)
    random.gauss(0, 1)
    kept, public = private_apis.python_state(), random.getstate()
    drawn = [random.gauss(0, 1), random.random()]
    assert private_apis.python_state() != kept
    private_apis.set_python_state(kept)
    assert random.getstate() == public
    assert [random.gauss(0, 1), random.random()] == drawn
    for seed in (0, 7, 2**63 - 1):
        random.gauss(0, 1)
        private_apis.seed_python(seed)
        ours = random.getstate()
        random.seed(seed)
        assert random.getstate() == ours


def test_the_normal_number_that_numpy_keeps_is_read_and_written_in_its_memory() -> None:
    normal = private_apis.numpy_normal()
    assert normal is not None
    np.random.seed(7)
    assert not any(normal)
    np.random.randn()
    kept, second = bytes(normal), np.random.randn()
    assert struct.unpack("i4xd", kept) == (1, second)
    assert not any(normal)
    normal[:] = kept
    assert np.random.get_state()[3:] == (1, second)
    assert np.random.randn() == second


def test_a_seeded_state_of_torchs_generator_is_that_of_seeding_it() -> None:
    torch.manual_seed(2**40 + 7)
    assert private_apis.seeded_torch_state(2**40 + 7).equal(torch.get_rng_state())


def test_processes_of_the_elastic_agent_before_and_after_their_start() -> None:
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    assert "_pc" in Path(sys.modules[MultiprocessContext.__module__].__file__ or "").read_text()
    assert private_apis.elastic_processes(SimpleNamespace(_pc=None)) == []
    assert private_apis.elastic_processes(SimpleNamespace(_pc=SimpleNamespace(processes=[1]))) == [1]


def run_in_child(target: Callable[..., Any], *args: Any) -> None:
    """In a child of the fork server, which has imported torch with `make test`."""
    child = multiprocessing.get_context("forkserver").Process(target=target, args=args)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def run_alone(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_an_operator_declares_which_arguments_it_writes() -> None:
    ones, twos = torch.ones(2), torch.full((2,), 2.0)
    assert private_apis.written_arguments(torch.ops.aten.add.Tensor, (ones, twos)) == []
    (written,) = private_apis.written_arguments(torch.ops.aten.add_.Tensor, (ones, twos))
    assert written is ones
