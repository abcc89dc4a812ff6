"""Records a training bit for bit: digests of all tensors of every step, and of one step every operation.

Dropout and other draws stay as they are: with virtual replicas they belong to the training. A traced step lists for
each micro-batch what every torch function of forward returned, then what every node of backward passed on, in the order
in which they ran; two runs are compared entry by entry.
"""

from __future__ import annotations

import hashlib
import json
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, resolve_name

from evenstep.checkpoint.state_dict import Tensors
from evenstep.data.nested import leaves
from evenstep.distributed.worker_process import read_rank
from evenstep.plan import Plan
from evenstep.record import Step
from evenstep.task import Task
from evenstep.training.loss_context import computes_samples
from evenstep.training.trainer import Event, perform
from evenstep.verify.recorder import FOLDER, Norms, Watch, as_real, innermost

T = TypeVar("T")
TRACES = "traces"
WARNED = "does not have a deterministic implementation"
"""Part of torch's warning about a kernel whose result may differ from call to call."""
_DRAWS = ("rand", "normal", "bernoulli", "dropout", "multinomial", "uniform", "exponential", "poisson", "cauchy")


def digest(tensor: torch.Tensor) -> bytes:
    """SHA-256 of the bits of a tensor, in the order of its elements."""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    # A copy: fully_shard cannot free memory that NumPy has seen.
    flat = as_real(dense.detach()).to("cpu", copy=True).contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()


class Traced(NamedTuple):
    """A step of which every operation is listed, or the evaluation after it."""

    step: int
    is_evaluation: bool = False


def perform_bits(plan: Plan, task: Task, run_folder: Path, *, traced: Traced | None = None) -> Iterator[Event]:
    """`perform`, with a file of digests for each step; and a list of all operations of one step."""
    watch = BitWatch(plan, run_folder / FOLDER, traced)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for event in perform(plan, watch.over(task), run_folder):
            if isinstance(event, Step):
                watch.write(event.step)
            yield event
    watch.finish()
    watch.finish_trace([str(one.message) for one in caught])


class BitWatch(Watch):
    """Records digests in place of numbers."""

    def __init__(self, plan: Plan, folder: Path, traced: Traced | None) -> None:
        super().__init__(plan, folder)
        self._traced = traced
        self._calls: list[Call] = []
        self._num_calls = 0
        self._step = 1

    def _without_dropout(self) -> None:
        return None

    def _kept(self, key: str, tensor: torch.Tensor) -> Tensors:
        return {key: torch.frombuffer(bytearray(digest(tensor)), dtype=torch.uint8)}

    def write(self, step: int) -> None:
        super().write(step)
        self._step = step + 1

    def over(self, task: Task, norms: Norms = "own") -> Task:
        recorded = super().over(task, norms)
        return replace(recorded, metrics=self._checked(task.metrics)) if task.metrics is not None else recorded

    def _checked(self, loss: Callable[..., T]) -> Callable[..., T]:
        """The same function of a model and a batch, traced in one step or evaluation."""

        def traced(model: Any, batch: Any) -> T:
            if not self._is_traced():
                return loss(model, batch)
            call = Call(_data_key(batch))
            self._calls.append(call)
            return call.trace(loss, model, batch)

        return traced

    def _is_traced(self) -> bool:
        if self._traced is None or not computes_samples():
            return False
        step, is_evaluation = self._traced
        return self._step == step + is_evaluation and torch.is_grad_enabled() != is_evaluation

    def finish_trace(self, warned: Sequence[str]) -> None:
        """Write what this rank traced, and which kernels torch warned of."""
        folder = self._folder / TRACES
        folder.mkdir(exist_ok=True, parents=True)
        kernels = [text.partition(WARNED)[0].strip() for text in warned if WARNED in text]
        found = {
            "calls": [{"data": call.data, "entries": [asdict(one) for one in call.entries]} for call in self._calls],
            "kernels": list(dict.fromkeys(kernels)),
            "threads": torch.get_num_threads(),
        }
        (folder / f"rank{read_rank()[0]}.json").write_text(json.dumps(found))


def _data_key(batch: Any) -> str:
    """Which micro-batch this is, on whatever device."""
    whole = hashlib.sha256()
    for leaf in leaves(batch):
        whole.update(digest(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return whole.hexdigest()


@dataclass(frozen=True)
class Operation:
    """One operation of a traced micro-batch, and a digest of what it returned."""

    is_backward: bool
    name: str
    """A torch function, the class of a module, or a node of backward."""
    module: str
    """The innermost module in which it ran; "" in the loss itself."""
    line: str
    """Of the user's code, in forward."""
    draws: bool
    bits: str

    @property
    def kind(self) -> tuple[bool, str, str]:
        return self.is_backward, self.name, self.module

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else " in the loss"
        line = f" ({self.line})" if self.line else ""
        return f"{self.name}{where}{', in backward' if self.is_backward else ''}{line}"


class Origin(NamedTuple):
    """Where a node of backward comes from."""

    module: str
    line: str


class Call:
    """One call of the loss, and its backward."""

    def __init__(self, data: str) -> None:
        self.data = data
        self.entries: list[Operation] = []
        self._modules: dict[int, str] = {}
        self._stack: list[str] = []
        self._thread = threading.get_ident()
        self._origins: dict[Any, Origin] = {}

    def trace(self, loss: Callable[..., T], model: Any, batch: Any) -> T:
        """Compute the loss; what its backward does is listed when it runs."""
        bare = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        self._modules = {id(module): name for name, module in bare.named_modules()}
        hooks = register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)
        try:
            with Functions(self):
                amount = loss(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        start = amount[0] if isinstance(amount, tuple | list) else amount
        if isinstance(start, torch.Tensor) and start.grad_fn is not None:
            self._watch_backward(start.grad_fn)
        return amount

    def add(self, name: str, result: Any, draws: bool = False) -> None:
        """List an operation of forward, if it returned tensors."""
        tensors = [one for one in leaves(result) if isinstance(one, torch.Tensor)]
        if not tensors:
            return
        module = self._stack[-1] if self._stack else ""
        line = innermost(traceback.extract_stack()) or ""
        self.entries.append(Operation(False, name, module, line, draws, _bits(tensors)))
        for tensor in tensors:
            if tensor.grad_fn is not None:
                self._origins.setdefault(tensor.grad_fn, Origin(module, line))

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() == self._thread:
            self._stack.append(self._modules.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._stack:
            # What a custom autograd function returned is seen here alone.
            self.add(type(module).__name__, output)
            self._stack.pop()

    def _watch_backward(self, root: Any) -> None:
        """A node that no torch function returned belongs to the function whose node leads to it."""
        left = deque([(root, Origin("", ""))])
        seen = {root}
        while left:
            node, before = left.popleft()
            origin = self._origins.get(node, before)
            if node.name().endswith("AccumulateGrad"):
                node.register_prehook(_Listed(self, "the gradient", origin))
            else:
                node.register_hook(_Listed(self, node.name().removeprefix("torch::autograd::"), origin))
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    left.append((following, origin))
        self._origins.clear()


class _Listed:
    """Lists a node of backward when it has run."""

    def __init__(self, call: Call, name: str, origin: Origin) -> None:
        self._call, self._name, self._origin = call, name, origin

    def __call__(self, gradients: tuple[torch.Tensor | None, ...], *more: Any) -> None:
        tensors = [one for one in gradients if one is not None]
        entry = Operation(True, self._name, self._origin.module, self._origin.line, False, _bits(tensors))
        self._call.entries.append(entry)


class Functions(TorchFunctionMode):
    """Inside, every torch function is listed."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = resolve_name(func) or getattr(func, "__name__", "")
        if not name.endswith(("__get__", "__set__")):
            short = getattr(func, "__name__", name)
            self._call.add(name, result, any(short.lstrip("_").startswith(word) for word in _DRAWS))
        return result


def _bits(tensors: Sequence[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(digest(tensor))
    return whole.hexdigest()


class Traces(NamedTuple):
    """What the ranks of a run traced."""

    calls: list[tuple[str, list[Operation]]]
    """In the order of ranks; of one device, in the order of virtual replicas."""
    kernels: list[str]
    threads: list[int]


def read_traces(run_folder: Path) -> Traces:
    paths = sorted((run_folder / FOLDER / TRACES).glob("rank*.json"), key=lambda path: int(path.stem[4:]))
    found = [json.loads(path.read_text()) for path in paths]
    calls = [
        (call["data"], [Operation(**entry) for entry in call["entries"]])
        for of_rank in found
        for call in of_rank["calls"]
    ]
    kernels = list(dict.fromkeys(kernel for of_rank in found for kernel in of_rank["kernels"]))
    return Traces(calls, kernels, [of_rank["threads"] for of_rank in found])


class FirstOperation(NamedTuple):
    """The first operation that gave other bits."""

    number: int
    """Of the micro-batch, counted from 0 over those of all virtual replicas."""
    operation: Operation | None
    """None where the micro-batch itself was read otherwise."""


def first_other(one: Traces, other: Traces) -> FirstOperation | None:
    """Where two runs first differ; None if every operation of both gave the same bits."""
    theirs: dict[str, list[list[Operation]]] = {}
    for data, entries in other.calls:
        theirs.setdefault(data, []).append(entries)
    for number, (data, entries) in enumerate(one.calls):
        if not theirs.get(data):
            return FirstOperation(number, None)
        found = _first_of_call(entries, theirs[data].pop(0))
        if found is not None:
            return FirstOperation(number, found)
    return None


def _first_of_call(one: Sequence[Operation], other: Sequence[Operation]) -> Operation | None:
    """Operations that only one of them has are left out: fully_shard has some of its own."""
    matched = SequenceMatcher(None, [entry.kind for entry in one], [entry.kind for entry in other], autojunk=False)
    for start, theirs, num in matched.get_matching_blocks():
        for at in range(num):
            if one[start + at].bits != other[theirs + at].bits:
                return one[start + at]
    return None
