"""Whole tensors under the user's own names: out of any strategy, and into any other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep.checkpoint.files import WEIGHTS, OptimizerState, State
from evenstep.checkpoint.sharded_safetensors import Readable, SlicedTensor, StoredTensor, Writable
from evenstep.checkpoint.shards import is_sharded, own_rows, sharded_like, with_rows
from evenstep.distributed.parameter_slices import PartOfParameter, slice_of, slices_of, whole_state
from evenstep.errors import CheckpointError, shorten
from evenstep.sampling.order import SORTED_UP_TO

Tensors = dict[str, torch.Tensor]
Shape = tuple[int, ...]
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def whole(tensor: torch.Tensor, keep: bool) -> torch.Tensor | None:
    """A copy on the CPU, gathered from all ranks; with `keep` false, this rank only takes part."""
    if is_sharded(tensor):
        tensor = tensor.full_tensor()
    # A copy even on the CPU: views of one buffer cannot be written as separate tensors.
    return tensor.detach().to("cpu", copy=True).contiguous() if keep else None


def weights(module: nn.Module) -> dict[str, Writable]:
    """Parameters and buffers by name, as they lie on this rank."""
    slices = slices_of(module)
    return {name: _of_slice(value, slices.get(name)) for name, value in _tensors(module)}


def _of_slice(value: torch.Tensor, part: PartOfParameter | None) -> Writable:
    return value if part is None else SlicedTensor(value, part)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, value) for name, value in module.state_dict().items() if isinstance(value, torch.Tensor))


@torch.no_grad()
def load_weights(module: nn.Module, loaded: Mapping[str, Readable], source: str) -> str | None:
    """Copy `loaded` into the model; returns a message on stripped prefixes. A partial match is refused."""
    own, slices = dict(_tensors(module)), slices_of(module)
    found, stripped = _matching(loaded, own, source, slices)
    for name, target in own.items():
        if not target.is_meta:
            target.copy_(_of_part(found[name], target, slices.get(name)))
    return stripped


def check_weights(module: nn.Module, path: str, allow_pickle: bool) -> None:
    """Refuse a file of weights that would not load into `module`; nothing is changed."""
    _matching(read_weights(path, allow_pickle), dict(_tensors(module)), path, slices_of(module))


def _matching(
    loaded: Mapping[str, Readable], own: Tensors, source: str, slices: Mapping[str, PartOfParameter]
) -> tuple[dict[str, Readable], str | None]:
    found, stripped = _matching_names(loaded, own)
    here = {name: tuple(tensor.shape) for name, tensor in own.items()}
    here |= {name: part.shape for name, part in slices.items() if name in own}
    refuse_difference(here, {name: tuple(tensor.shape) for name, tensor in found.items()}, source)
    return found, stripped


def _matching_names(loaded: Mapping[str, Readable], own: Mapping[str, Any]) -> tuple[dict[str, Readable], str | None]:
    if set(loaded) == set(own):
        return dict(loaded), None
    bare: dict[str, Readable] = {}
    removed: set[str] = set()
    for name, value in loaded.items():
        for wrapper in _WRAPPERS:
            if wrapper in name:
                removed.add(wrapper)
                name = name.replace(wrapper, "")
        while name.startswith("module.") and name not in own:
            removed.add("module.")
            name = name.removeprefix("module.")
        bare[name] = value
    stripped = " and ".join(map(repr, sorted(removed)))
    return bare, f"stripped {stripped} from parameter names" if removed else None


def refuse_difference(own: Mapping[str, Shape], found: Mapping[str, Shape], source: str) -> None:
    """Raise CheckpointError with the first differing names and shapes, if any differ."""
    missing = [name for name in own if name not in found]
    extra = [name for name in found if name not in own]
    shapes = [
        f"{name} has shape {found[name]} instead of {own[name]}"
        for name in own
        if name in found and found[name] != own[name]
    ]
    problems = [f"missing keys: {_first(missing)}"] * bool(missing)
    problems += [f"unexpected keys: {_first(extra)}"] * bool(extra)
    problems += [_first(shapes)] * bool(shapes)
    if problems:
        raise CheckpointError(
            f"{source} is from another model: {'; '.join(problems)}.\nNothing was loaded; use the task that wrote it."
        )


def _first(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def loaded(value: Readable) -> torch.Tensor:
    """A tensor, which may still lie in a file."""
    return value.read() if isinstance(value, StoredTensor) else value


def _of_part(value: Readable, target: torch.Tensor, part: PartOfParameter | None) -> torch.Tensor:
    """What this rank holds of a tensor that lies in a file."""
    if part is None:
        return placed_like(value, target)
    whole_one = loaded(value)
    given = part.take(whole_one)
    # Buffers of other stages may be whole here too.
    return whole_one if given.is_meta else given


def placed_like(value: Readable, target: torch.Tensor) -> torch.Tensor:
    """`sharded_like`, of what may still lie in a file: then this rank reads its own rows alone."""
    if not isinstance(value, StoredTensor):
        return sharded_like(value, target)
    rows = own_rows(target)
    if rows is None or not rows.is_range or not is_sharded(target) or not target.ndim:
        return sharded_like(value.read(), target)
    return with_rows(value.read(rows.start, rows.start + len(rows.values)), target)


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Writable], dict[str, Any]]:
    """Optimizer state as ("parameter/state" tensors, JSON values), as it lies on this rank."""
    names = {id(weight): name for name, weight in module.named_parameters()}
    tensors: dict[str, Writable] = {}
    values: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            name = names[id(weight)]
            for key, value in whole_state(weight, optimizer.state.get(weight, {})).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    values.setdefault(name, {})[key] = value
    groups = [
        {
            **{key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")},
            "params": [names[id(weight)] for weight in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return tensors, {"class": type(optimizer).__name__, "values": values, "groups": groups}


def load_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Readable], saved: OptimizerState
) -> None:
    """Restore what `optimizer_state` returned, by parameter name."""
    names = {id(weight): name for name, weight in module.named_parameters()}
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint was trained with {saved['class']} and the optimizer is now {type(optimizer).__name__};\n"
            "to go on with another optimizer, start from weights.safetensors alone"
        )
    own = [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]
    if [set(group["params"]) for group in saved["groups"]] != [set(group) for group in own]:
        raise CheckpointError(
            f"the checkpoint's {len(saved['groups'])} optimizer parameter groups do not match this task's; "
            "to train these weights with another optimizer, resume from weights.safetensors alone"
        )
    by_parameter: dict[str, dict[str, Any]] = {name: dict(state) for name, state in saved["values"].items()}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        by_parameter.setdefault(name, {})[kind] = tensor
    weights_by_name = dict(module.named_parameters())
    unknown = [name for name in by_parameter if name not in weights_by_name]
    if unknown:
        raise CheckpointError(f"unexpected keys in the checkpoint's optimizer state: {shorten(_first(unknown))}")
    order = [name for group in own for name in group]
    numbers = _number_kinds(by_parameter, weights_by_name)
    for name, state in by_parameter.items():
        for kind, value in state.items():
            if isinstance(value, torch.Tensor | StoredTensor):
                state[kind] = _placed(value, weights_by_name[name], is_number=kind in numbers)
    groups = []
    start = 0
    for group, saved_group, group_names in zip(optimizer.param_groups, saved["groups"], own, strict=True):
        options = {key: _typed(value, group.get(key)) for key, value in saved_group.items() if key != "params"}
        # How the update is computed is chosen by this run, whose devices may be others.
        options |= {key: group[key] for key in HOW if key in group}
        groups.append({**options, "params": list(range(start, start + len(group_names)))})
        start += len(group_names)
    state_by_index = {index: by_parameter[name] for index, name in enumerate(order) if name in by_parameter}
    optimizer.load_state_dict({"state": state_by_index, "param_groups": groups})
    for name, state in by_parameter.items():
        _keep_scalars(optimizer.state[weights_by_name[name]], state, numbers)


def _placed(value: Readable, weight: torch.Tensor, *, is_number: bool) -> torch.Tensor:
    """A saved value for this rank: its part of one shaped like the parameter, or all of any other."""
    part = slice_of(weight)
    shape = weight.shape if part is None else part.shape
    if value.shape != shape or (not value.ndim and is_number):
        return loaded(value)
    return placed_like(value, weight) if part is None else part.take(loaded(value))


NUMBER_KINDS = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's optimizers keep one number of for a parameter of any shape."""


def _number_kinds(states: Mapping[str, Mapping[str, Any]], weights: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The kinds of state that are one number for any parameter, as Adam's step is.

    The shape does not tell for a parameter that is one number itself; other parameters do.
    """
    tensors = (
        (kind, value, weights[name])
        for name, state in states.items()
        for kind, value in state.items()
        if isinstance(value, torch.Tensor | StoredTensor)
    )
    return NUMBER_KINDS | {kind for kind, value, weight in tensors if weight.ndim and not value.ndim}


def _keep_scalars(state: dict[str, Any], saved: Mapping[str, Any], numbers: frozenset[str]) -> None:
    """torch casts loaded state to the parameter's dtype; a scalar, such as NAdam's mu_product, keeps its own."""
    for key, value in saved.items():
        is_number = key in numbers and isinstance(value, torch.Tensor) and not value.ndim
        if is_number and state[key].dtype is not value.dtype:
            state[key] = value.to(state[key].device)


HOW = ("foreach", "fused", "capturable")
COMPARED = {"lr": "learning rate", "weight_decay": "weight decay"}
"""Options that may change on resume, and their names in messages."""


def unused_options(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], resets_lr: bool) -> list[str]:
    """Messages about options of the optimizer that a checkpoint overrides; call this before loading.

    Other options are not compared: schedulers and optimizers change them.
    """
    messages = []
    made = saved.get("made_with") or [{} for _ in saved["groups"]]
    for key, name in COMPARED.items():
        groups = zip(saved["groups"], made, optimizer.param_groups, strict=False)
        pairs = [_before_schedules(*both, key) for both in groups]
        other = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if other is not None and not (resets_lr and key == "lr"):
            messages.append(
                f"the checkpoint's {name}, {other[0]}, is kept; "
                f"the one of this task's optimizer, {other[1]}, is not used"
            )
    return messages


def made_with(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group that are compared on resume; read before the first step."""
    return [{key: _plain(group[key]) for key in COMPARED if key in group} for group in optimizer.param_groups]


def _before_schedules(
    saved: Mapping[str, Any], made: Mapping[str, Any], own: Mapping[str, Any], key: str
) -> tuple[Any, Any]:
    """A group's option in the checkpoint and in the new optimizer: the scheduler's initial value."""
    initial = f"initial_{key}"
    if initial in saved and initial in own:
        key = initial
    elif initial not in saved and initial not in own:
        # ReduceLROnPlateau, and loops that set the rate themselves, record no initial value.
        saved = {**saved, **made}
    return _plain(saved.get(key)), _plain(own.get(key))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _typed(value: Any, now: Any) -> Any:
    """JSON knows no tuples: AdamW's betas come back as a list. A tensor learning rate stays one."""
    if isinstance(now, tuple):
        return tuple(value)
    return torch.tensor(value, dtype=now.dtype, device=now.device) if isinstance(now, torch.Tensor) else value


def _looks_like_torch_save(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4).startswith((b"PK\x03\x04", b"\x80"))
    except OSError:
        return False


def _in_short(error: Exception) -> str:
    first_line, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first_line[:100]}".rstrip(": ")


def read_weights(path: str, allow_pickle: bool) -> Tensors:
    """Weights from a file that others made: safetensors, or torch.save with nothing but tensors in it."""
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:
        if (
            not allow_pickle
            and _looks_like_torch_save(path)
            and re.search("weights_only|Unsupported|UnpicklingError", f"{type(error).__name__} {error}")
        ):
            raise CheckpointError(
                f"{path} holds Python objects, which can run code when loaded. Ask for a .safetensors file, "
                "or, if you trust it, add --allow-pickle"
            ) from None
        # torch's advice on pickles is for those who wrote one.
        why = "" if "weights_only" in str(error) else f" ({_in_short(error)})"
        raise CheckpointError(
            f"{path} is not a weights file{why}; "
            "give a .safetensors file, or one of torch.save(model.state_dict(), ...)"
        ) from error
    if isinstance(loaded, nn.Module):
        loaded = loaded.state_dict()
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise CheckpointError(f"{path} holds no state_dict; save one with torch.save(model.state_dict(), ...)")
    return dict(loaded)


def check_same_order(path: Path, state: State, seed: int, num_samples: int | None, order: str) -> None:
    """Raise CheckpointError where the position of a checkpoint would mean other samples than it did."""
    before = state["loader"]["num_samples"]
    # Before orders had names, long ones were shuffled differently.
    unnamed = "shuffled" if before is None or before <= SORTED_UP_TO else "shuffled by an older evenstep"
    other_order = state["loader"].get("order", unnamed)
    problem = None
    if before != num_samples:
        problem = f"was trained on {before} samples and the data now has {num_samples}"
    elif state["seed"] != seed:
        problem = f"was trained with seed {state['seed']} and the seed is now {seed}"
    elif other_order != order:
        problem = f"took its samples in another order ({other_order}) than the one now requested ({order})"
    if problem is not None:
        raise CheckpointError(
            f"{path} {problem}: resuming would repeat some samples and miss others.\n"
            "Use the data, seed and order that it was trained with, or start from its weights: "
            f"--resume {path / WEIGHTS}"
        )
