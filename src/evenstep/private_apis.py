"""Every use of private parts of torch, CPython and transformers: an upgrade that moves one fails in this file's tests.

It ran with CPython 3.11, torch 2.13 and transformers 5.22 on CPUs (with its own tests, and those of adopt), and with
CPython 3.12 and torch 2.11 on a GPU (in tests/gpu). Apart from these, `evenstep.worker.lazy_compiler` stands in for
torch's private compiler module.
"""

from __future__ import annotations

import _random
import atexit
import ctypes
import functools
import importlib
import random
import re
import struct
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch._C import DisableTorchFunction as DisableTorchFunction
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather as DefaultAllGather
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter as DefaultReduceScatter
    from torch.nn.modules import batchnorm
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_leaves as tree_leaves

    BatchNorm = batchnorm._BatchNorm
    NormBase = batchnorm._NormBase
    NodeDesc = dynamic_rendezvous._NodeDesc
    RendezvousState = dynamic_rendezvous._RendezvousState
    run_module_as_main: Callable[[str], object]
    close_multiprocessing: Callable[[], None]
    # Several tensors in one kernel.
    foreach_add_: Callable[..., None]
    foreach_copy_: Callable[..., None]
    foreach_mul_: Callable[..., None]
    flag_non_finite_: Callable[..., None]
    fused_adam_: Callable[..., None]
    fused_adamw_: Callable[..., None]
    flatten_dense_tensors: Callable[..., torch.Tensor]
    unflatten_dense_tensors: Callable[..., tuple[torch.Tensor, ...]]
    autograd_engine: Any
    current_graph_task: Callable[[], int]
    """The number of the backward that runs; one that a node of another runs has its own."""
    refuse_different_shapes: Callable[..., None]
    """`refuse_different_shapes(group, tensors)` raises on all ranks if their tensors differ in number or shape."""
    broadcast_coalesced: Callable[..., None]
    """`broadcast_coalesced(group, tensors, message_bytes, rank)` sends a rank's tensors in a few large messages."""
    hooks_before_steps: dict[int, Any]
    hooks_after_steps: dict[int, Any]
    """The hooks of all optimizers."""

LAZY = {
    "BatchNorm": "torch.nn.modules.batchnorm:_BatchNorm",
    "NormBase": "torch.nn.modules.batchnorm:_NormBase",
    "DisableTorchFunction": "torch._C:DisableTorchFunction",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "is_traceable_wrapper_subclass": "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "foreach_add_": "torch:_foreach_add_",
    "foreach_copy_": "torch:_foreach_copy_",
    "foreach_mul_": "torch:_foreach_mul_",
    "flag_non_finite_": "torch:_amp_foreach_non_finite_check_and_unscale_",
    "fused_adam_": "torch:_fused_adam_",
    "fused_adamw_": "torch:_fused_adamw_",
    "flatten_dense_tensors": "torch._utils:_flatten_dense_tensors",
    "unflatten_dense_tensors": "torch._utils:_unflatten_dense_tensors",
    "autograd_engine": "torch.autograd.variable:Variable._execution_engine",
    "current_graph_task": "torch._C:_current_graph_task_id",
    "hooks_before_steps": "torch.optim.optimizer:_global_optimizer_pre_hooks",
    "hooks_after_steps": "torch.optim.optimizer:_global_optimizer_post_hooks",
    "Store": "torch._C._distributed_c10d:Store",
    "TCPStore": "torch._C._distributed_c10d:TCPStore",
    "PrefixStore": "torch._C._distributed_c10d:PrefixStore",
    "broadcast_coalesced": "torch.distributed:_broadcast_coalesced",
    "refuse_different_shapes": "torch.distributed.utils:_verify_param_shape_across_processes",
    "NodeDesc": "torch.distributed.elastic.rendezvous.dynamic_rendezvous:_NodeDesc",
    "RendezvousState": "torch.distributed.elastic.rendezvous.dynamic_rendezvous:_RendezvousState",
    "run_module_as_main": "runpy:_run_module_as_main",
    "close_multiprocessing": "multiprocessing.util:_exit_function",
    "DefaultAllGather": "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultAllGather",
    "DefaultReduceScatter": "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultReduceScatter",
}
"""Imported when first used: this module is also for processes without torch, and torch's FSDP takes a second."""


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = LAZY[name].partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


# Optimizers and fp16's GradScaler.


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer has hooks of its own."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks of this optimizer before and after its steps."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def is_profiling() -> bool:
    """Whether torch's profiler runs."""
    return bool(sys.modules["torch.autograd.profiler"]._is_profiler_enabled)


def note_step_for_scheduler(optimizer: Any, step: Any) -> None:
    """Let a scheduler, which has wrapped `step`, know that a step was taken around it."""
    if hasattr(step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True


def scaler_tensors(scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
    """The scale and the steps since it last changed, once there are any."""
    return [one for one in (scaler._scale, scaler._growth_tracker) if one is not None]


def infinity_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What `unscale_` found: for each device 1 if a gradient is not finite."""
    flags: dict[Any, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return list(flags.values())


def make_fused(optimizer: Any) -> None:
    """Set what the constructor sets with fused=True: the kernel then checks for infinities, not fp16's scaler."""
    optimizer._step_supports_amp_scaling = True
    optimizer._need_device_dtype_check_for_fused = True


# Modules.


def version_of(tensor: torch.Tensor) -> int:
    """How often operations have changed it in place; torch's batch_norm is not counted."""
    return tensor._version


def has_accumulation_hooks(weights: Iterable[torch.Tensor]) -> bool:
    """Whether something is called when a gradient of one of these has been added to."""
    return any(weight._post_accumulate_grad_hooks for weight in weights)


def take_buffers(target: nn.Module, source: nn.Module) -> None:
    """Let `target` hold the very buffers of `source`, those that it does not save included."""
    target._buffers.update(source._buffers)


def call_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """What runs around a call of this module itself: hooks before and after forward and backward."""
    return [
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    ]


def replace_function(name: str, function: Any) -> None:
    """Replace a function of `torch`, also where `torch.nn.functional` takes it from."""
    import torch

    setattr(torch._VF, name, function)
    setattr(torch, name, function)


# CUDA graphs.


def clear_cublas_workspaces() -> None:
    """Free cuBLAS's workspaces: those made during a capture then belong to the graph."""
    import torch

    torch._C._cuda_clearCublasWorkspaces()


def release_pool(device: torch.device, pool: Any) -> None:
    """End the allocation of a capture that CUDA broke off; torch refuses where it has ended it already."""
    import torch

    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


# DDP.


def unreduced(wrapper: nn.Module) -> list[int]:
    """The indices of parameters for whose gradients DDP still waits, after a backward; usually none."""
    reducer: Any = wrapper.reducer
    try:
        reducer._check_reducer_finalized()
    except RuntimeError as error:
        found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
        if found is None:
            raise
        return [int(index) for index in found[1].split()]
    return []


def take_over(wrapper: nn.Module, before: nn.Module) -> None:
    """Let a new DDP wrapper take the place of another: the only hooks on the parameters are its own."""
    reducer: Any = before.reducer
    reducer._remove_autograd_hooks()
    if before._compiled_call_impl is not None:
        wrapper.compile()


@cache
def free_group_after_reducer() -> None:
    """Let a DDP wrapper free its reducer before its process group.

    When the reducer is the last owner of a gloo group, as after destroy_process_group, torch joins the group's threads
    without releasing the GIL, and waits forever for a thread that needs it to free a tensor (torch 2.13).
    """
    from torch.nn.parallel import DistributedDataParallel

    kind: Any = DistributedDataParallel
    make_reducer = getattr(kind, "_ddp_init_helper", None)
    if make_reducer is None:
        # Programs that never destroy a group early have no use for this, and must not fail for it.
        return

    @functools.wraps(make_reducer)
    def make_reducer_first(wrapper: Any, *arguments: Any, **options: Any) -> None:
        make_reducer(wrapper, *arguments, **options)
        # CPython frees the values of a dict as large as this one, which shares no keys, in the order of insertion.
        wrapper.process_group = vars(wrapper).pop("process_group")

    kind._ddp_init_helper = make_reducer_first


# transformers.


def num_items_in_batch(trainer: Any, batch: Any, device: torch.device) -> torch.Tensor | None:
    """The number of labels by which a Trainer divides the loss of a batch; None if it divides by none."""
    found: torch.Tensor | None = trainer._get_num_items_in_batch([batch], device)
    return found


# DTensor and FSDP.


def global_offset(shape: Any, mesh: Any, placements: Any) -> tuple[int, ...]:
    """Where the part of a sharded tensor begins that this rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found: tuple[int, ...] = compute_local_shape_and_global_offset(shape, mesh, placements)[1]
    return found


def tensor_of_shards(own: torch.Tensor, mesh: Any, placements: Any, shape: torch.Size, stride: tuple[int, ...]) -> Any:
    """A sharded tensor whose part lies where `own` does; `DTensor.from_local` moves it to the devices of the mesh."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, tuple(stride), own.dtype))
    return DTensor(own, spec, requires_grad=False)


def fsdp_groups(root: nn.Module) -> list[tuple[str, Any, Any]]:
    """The units that have parameters of their own: their names, modules, and what `fully_shard` keeps of each."""
    from torch.distributed.fsdp import FSDPModule

    units = [(name, module) for name, module in root.named_modules() if isinstance(module, FSDPModule)]
    states: list[Any] = [module._get_fsdp_state() for _, module in units]
    groups = [state._fsdp_param_group for state in states]
    return [(*unit, group) for unit, group in zip(units, groups, strict=True) if group is not None]


def unsharded_parameters(group: Any) -> list[torch.Tensor]:
    """The gathered parameters of a unit, which only torch sees; none before it first ran."""
    return [one._unsharded_param for one in group.fsdp_params if hasattr(one, "_unsharded_param")]


def gathered_parameter(fsdp_parameter: Any) -> torch.Tensor:
    """The whole parameter, of which `.grad` is kept between steps of accumulation; before it first ran, its shard."""
    found: torch.Tensor = getattr(fsdp_parameter, "_unsharded_param", fsdp_parameter.sharded_param)
    return found


def give_shard(fsdp_parameter: Any, gradient: torch.Tensor) -> None:
    """Make this rank's rows of a gradient that of the sharded parameter."""
    fsdp_parameter.sharded_param.grad = fsdp_parameter.to_sharded_dtensor(gradient.view(fsdp_parameter.sharded_size))


def has_gradient(fsdp_parameter: Any) -> bool:
    """Whether backward reached a parameter of a unit."""
    if fsdp_parameter.unsharded_accumulated_grad is not None:
        return True
    # A unit that never ran has no such tensor yet.
    unsharded = getattr(fsdp_parameter, "_unsharded_param", None)
    return unsharded is not None and unsharded.grad is not None


def give_gradient(fsdp_parameter: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Give a parameter of a unit, before it is reduced, the gradient that backward did not; False if it never ran."""
    unsharded = getattr(fsdp_parameter, "_unsharded_param", None)
    if unsharded is None:
        return False
    unsharded.grad = make(unsharded)
    return True


def widen_gradients(group: Any) -> None:
    """Before a unit is reduced: if some of its gradients were kept in a wider type between micro-batches, all are."""
    if any(one.unsharded_accumulated_grad is not None for one in group.fsdp_params):
        for one in group.fsdp_params:
            if one.unsharded_accumulated_grad is None and has_gradient(one):
                one.to_accumulated_grad_if_needed()


def replicate_scalar(fsdp_parameter: Any, value: torch.Tensor) -> None:
    """Make a parameter that `fully_shard` took as one row zero-dimensional, and whole on every rank.

    A gather brings one number from each rank, and the parameter is the first of them. Its gradient is repeated before
    it is reduced and scattered, so that every rank gets the sum.
    """
    import torch
    from torch.distributed.tensor import Replicate

    one = fsdp_parameter
    before, mesh = one.sharded_param, one.sharded_param.device_mesh
    local = value.to(before.to_local().device, copy=True)
    replicated = tensor_of_shards(local, mesh, [Replicate()] * mesh.ndim, torch.Size(()), ())
    one.sharded_param = torch.nn.Parameter(replicated, before.requires_grad)
    num_rows = mesh.size(mesh.ndim - 1)
    one._orig_size = one.sharded_size = one.padded_sharded_param_size = torch.Size(())
    one._contiguous_orig_stride = one.contiguous_sharded_stride = ()
    one._get_grad_inner_tensor = lambda gradient: gradient.reshape(1).repeat(num_rows)
    one.reset_sharded_param = lambda: _reset_scalar(one)
    one._setattr_on_modules(one.sharded_param)
    _reset_scalar(one)


def _reset_scalar(fsdp_parameter: Any) -> None:
    """Let what is gathered lie where the parameter does, which may have been moved or loaded."""
    module = fsdp_parameter._module_info
    fsdp_parameter.sharded_param = getattr(module.module, module.param_name)
    fsdp_parameter._sharded_param_data = fsdp_parameter.sharded_param._local_tensor.view(-1)
    fsdp_parameter._sharding_spec = fsdp_parameter.sharded_param._spec


# The profiler, loader workers and torch's elastic agent.


def profile_all_threads() -> Any:
    """The option of torch's profiler to follow every thread of the process."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)


def hide_worker_info() -> None:
    """Let a dataset believe that it is read by one process, not by one of several loader workers."""
    from torch.utils.data._utils import worker

    worker._worker_info = None


def end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader that is being iterated over."""
    iterator._shutdown_workers()


def elastic_processes(context: Any) -> list[Any]:
    """The processes that torch's elastic agent forked; none before their start."""
    return context._pc.processes if context._pc is not None else []


# CPython.


def become_main_process() -> None:
    """Let multiprocessing treat a child of the fork server as a main process, with servers of its own."""
    import multiprocessing
    from multiprocessing import forkserver, process, resource_tracker

    # CPython deletes the name of the class.
    (main,) = (kind for kind in process.BaseProcess.__subclasses__() if kind.__name__ == "_MainProcess")
    process._parent_process = None  # type: ignore[attr-defined]
    process._current_process = main()  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    # Replaced in place: module functions are bound to these objects.
    vars(forkserver._forkserver).update(vars(forkserver.ForkServer()))
    vars(resource_tracker._resource_tracker).update(vars(resource_tracker.ResourceTracker()))


def forget_exit_handlers() -> None:
    """Drop the exit handlers and finalizers that a fork inherited."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def run_exit_handlers() -> None:
    """Run the exit handlers now, before an `os._exit`."""
    atexit._run_exitfuncs()


def fork_server_pid() -> int:
    """The process id of multiprocessing's fork server."""
    from multiprocessing import forkserver

    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def has_resource_tracker() -> bool:
    """Whether multiprocessing has started its resource tracker."""
    from multiprocessing import resource_tracker

    return resource_tracker._resource_tracker._fd is not None  # type: ignore[attr-defined]


def wait_for_threads() -> None:
    """What Python does after the last line of a program: wait for its threads."""
    threading._shutdown()  # type: ignore[attr-defined]


def global_generators() -> tuple[object, object]:
    """Those behind the functions of `random` and `numpy.random`."""
    from numpy.random import mtrand

    return random._inst, mtrand._rand


def seed_python(seed: int) -> None:
    """`random.seed(seed)`, without what it does for other types than int."""
    python: Any = random._inst
    _random.Random.seed(python, seed)
    python.gauss_next = None


_PYTHON_BYTES = 625 * 4
"""The index of the next word of its state, and the words."""


def memory_at(address: int, num_bytes: int) -> memoryview:
    """Memory in place: `bytes(view)` copies it, and `view[:] = words` writes it."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


@cache
def _python_words() -> memoryview | None:
    """The state of the generator behind `random`, in place, if it lies where CPython has it."""
    python = random._inst
    if type(python).__basicsize__ < object.__basicsize__ + _PYTHON_BYTES:
        return None
    view = memory_at(id(python) + object.__basicsize__, _PYTHON_BYTES)
    index, *words = array("I", bytes(view))
    return view if python.getstate()[1] == (*words, index) else None


def has_python_words() -> bool:
    """Whether `python_state` is (its memory: the index of the next word and the words, a cached normal number)."""
    return _python_words() is not None


def python_state() -> Any:
    """What `set_python_state` takes: in a hundredth of the time of `random.getstate`, which makes 625 ints."""
    view = _python_words()
    if view is None:
        return random.getstate()
    python: Any = random._inst
    return bytes(view), python.gauss_next


def set_python_state(state: Any) -> None:
    """Restore the generator behind `random`."""
    view = _python_words()
    if view is None:
        random.setstate(state)
        return
    python: Any = random._inst
    view[:], python.gauss_next = state


@cache
def numpy_normal() -> memoryview | None:
    """The normal number that NumPy's generator keeps for the next call, in place: an int, whether it has one, and it.

    Found by setting two, in the memory of the generator's object; None if it is not there. For an MT19937 only.
    """
    from numpy.random import mtrand

    numpy = mtrand._rand
    memory = memory_at(id(numpy), type(numpy).__basicsize__)
    before = numpy.get_state()
    try:
        places = [_place_of_normal(numpy, memory, number) for number in (0.7310585786300049, -1.2533141373155003)]
    finally:
        numpy.set_state(before)
    return memory[places[0] : places[0] + NORMAL_BYTES] if places[0] == places[1] >= 0 else None


NORMAL_BYTES = 16


def _place_of_normal(numpy: Any, memory: memoryview, number: float) -> int:
    """Where the generator keeps a normal number that it is given; -1 if that is not seen."""
    numpy.set_state((*numpy.get_state()[:3], 1, number))
    place = bytes(memory).find(struct.pack("d", number)) - NORMAL_BYTES // 2
    is_there = place >= 0 and memory[place : place + 4] == struct.pack("i", 1)
    numpy.set_state((*numpy.get_state()[:3], 0, 0.0))
    return place if is_there and not any(memory[place : place + 4]) else -1


def seeded_torch_state(seed: int) -> torch.Tensor:
    """The state of torch's generator of the CPU after `manual_seed(seed)`, as its `set_state` takes it."""
    import torch

    return torch.Generator().manual_seed(seed).get_state()


def written_arguments(operator: Any, args: Any) -> list[Any]:
    """The arguments that an operator changes; one for lists of tensors does not return them."""
    declared = (one.alias_info for one in operator._schema.arguments)
    return [value for value, alias in zip(args, declared, strict=False) if alias is not None and alias.is_write]
