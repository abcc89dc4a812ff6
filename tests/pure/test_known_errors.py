"""Known failures are answered; the messages are those that torch 2.13 (CUDA ones: 2.11, NCCL 2.28) really gave."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError
from torch.utils.data import DistributedSampler

from evenstep.errors import TrainingError
from evenstep.monitor.known_errors import Situation, answer, is_out_of_memory, is_victim, message_of
from evenstep.monitor.out_of_memory import largest_that_fits
from tests.marks import first_is_quick

NAMES = ["a.weight", "a.bias", "b.weight", "b.bias"]
UNUSED = RuntimeError(
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
    "your module has parameters that were not used in producing loss. You can enable unused parameter detection by "
    "passing the keyword argument `find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and "
    "by \nmaking sure all `forward` function outputs participate in calculating loss. \nIf you already have done the "
    "above, then the distributed data parallel module wasn't able to locate the output tensors in the return value of "
    "your module's `forward` function. Please include the loss function and the structure of the return value of "
    "`forward` of your module when reporting this issue (e.g. list, dict, iterable).\n"
    "Parameter indices which did not receive grad for rank 1: 2 3\n In addition, you can set the environment variable "
    "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to print out information about which particular parameters did "
    "not receive gradient on this rank as part of this error"
)
TWICE = RuntimeError(
    "Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a "
    "module parameter outside the `forward` function. Please make sure model parameters are not shared across "
    "multiple concurrent forward-backward passes. or try to use _set_static_graph() as a workaround if this module "
    "graph does not change during training loop.2) Reused parameters in multiple reentrant backward passes.\n"
    "Parameter at index 1 with name model.a.bias has been marked as ready twice. This means that multiple autograd "
    "engine  hooks have fired for this particular parameter during this iteration."
)
SAME_GPU = DistBackendError(
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN "
    "for details), NCCL version 2.28.9\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 60"
)
GPU_FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 11.29 GiB is "
    "free. Including non-PyTorch memory, this process has 128.51 GiB memory in use. Of the allocated memory 128.00 GiB "
    "is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
)
MACHINE_FULL = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000 bytes. Error code 12 (Cannot allocate memory)"
)
PORT = DistNetworkError(
    "The server socket has failed to listen on any local network address. port: 29831, useIpv6: false, code: -98, "
    "name: EADDRINUSE, message: address already in use"
)
PORT_OLD_SERVER = DistNetworkError(
    "The server socket has failed to listen on any local network address. The server socket has failed to bind to "
    "[::]:29831 (errno: 98 - Address already in use). The server could not be initialized on any address for "
    "port=29831, family=10 The server socket has failed to bind to 0.0.0.0:29831 (errno: 98 - Address already in use)."
)
GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"
VICTIMS = [
    (
        RuntimeError(f"{GLOO}/pair.cc:553] Connection closed by peer [127.0.0.1]:35714. This is typically"),
        "ended first",
    ),
    (RuntimeError(f"{GLOO}/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. This is"), "ended first"),
    (RuntimeError(f"{GLOO}/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"), "for 5 s in a coll"),
    (
        DistBackendError(
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=2, "
            "NumelOut=2, Timeout(ms)=600000) ran for 600061 milliseconds before timing out."
        ),
        "this rank waited",
    ),
    (
        DistBackendError(
            "NCCL error: remote process exited or there was a network error, NCCL version 2.14.3\nncclRemoteError: A "
            "call failed possibly due to a network error or a remote process exiting prematurely."
        ),
        "ended first",
    ),
    (DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote"), "ended first"),
    (
        DistNetworkError("The client socket has timed out after 2000ms while trying to connect to (127.0.0.1, 29833)."),
        "nothing answers at 127.0.0.1:29833",
    ),
    (
        DistStoreError("Timed out after 3 seconds waiting for clients. 1/2 clients joined."),
        "1 of 2 ranks joined in time",
    ),
    (DistStoreError("wait timeout after 3000ms, keys: /0//cpu//0/2"), "not all ranks joined in time"),
    (RuntimeError("Wait timeout"), "not all ranks joined in time"),
]


@pytest.mark.parametrize(("error", "said"), VICTIMS, ids=[said for _, said in VICTIMS])
def test_a_rank_that_lost_the_others_is_a_victim(error: Exception, said: str) -> None:
    assert is_victim(error)
    assert said in (answer(error) or "")


def test_a_dataset_that_lost_its_server_is_the_cause_and_no_victim() -> None:
    assert not is_victim(ConnectionResetError(104, "Connection reset by peer"))
    assert not is_victim(
        RuntimeError("Caught HTTPError in DataLoader worker process 0.\ngloo/ Connection reset by peer")
    )
    assert not is_victim(RuntimeError("my server: wait timeout"))
    assert not is_victim(TrainingError("replicas differ"))


def test_parameters_without_a_gradient_are_named() -> None:
    said = answer(UNUSED, NAMES) or ""
    assert said.startswith("no gradient reached b.weight, b.bias in the step before")
    assert "requires_grad_(False)" in said
    assert "parameter 2, parameter 3" in (answer(UNUSED) or "")
    assert not is_victim(UNUSED)


def test_a_parameter_that_was_ready_twice_is_named() -> None:
    assert "the gradient of a.bias was ready twice" in (answer(TWICE, NAMES) or "")
    assert "model.a.bias" in (answer(TWICE) or "")
    assert "use_reentrant=False" in (answer(TWICE) or "")


@pytest.mark.parametrize(
    "message",
    [
        "aten.add_.Tensor got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before "
        "calling distributed operators!",
        ".tolist() is not supported for tensor subclasses, got DTensor",
    ],
)
def test_a_slice_of_a_parameter_is_recognised(message: str) -> None:
    said = answer(RuntimeError(message)) or ""
    assert said.startswith("a parameter was used outside its layer's forward, where fsdp holds only this rank's shard")


def test_a_loss_without_a_graph_is_sent_to_team_backward() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.ones(()).backward()
    assert "only\ninside team.backward(loss, model, batch)" in (answer(failed.value) or "")


def test_two_ranks_on_one_gpu_get_one_each() -> None:
    said = answer(SAME_GPU) or ""
    assert said.startswith("ranks 0 and 1 are on the same GPU")
    assert "--devices cuda:0,cuda:1" in said


@pytest.mark.parametrize("error", [PORT, PORT_OLD_SERVER])
def test_a_port_in_use_is_named(error: Exception) -> None:
    assert (answer(error) or "").startswith("port 29831 is in use by another program")
    assert not is_victim(error)


def test_a_port_in_use_may_have_no_name() -> None:
    assert (answer(OSError(98, "Address already in use")) or "").startswith("the port is in use")


@pytest.mark.parametrize(
    "message",
    [
        "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_7094_2620261654_0>: "
        "No space left on device (28)",
        "unable to open shared memory object </torch_1_2> in read-write mode: No space left on device (28)",
        "DataLoader worker (pid 7094) is killed by signal: Bus error. It is possible that dataloader's workers are "
        "out of shared memory. Please try to raise your shared memory limit.",
    ],
)
def test_too_little_shared_memory_says_how_to_get_more(message: str) -> None:
    said = answer(RuntimeError(message)) or ""
    assert "--shm-size" in said
    assert "--workers 0" in said


def test_a_full_disk_is_not_shared_memory() -> None:
    assert answer(OSError(28, "No space left on device")) is None


def test_a_full_gpu_says_what_fits_and_keeps_the_result() -> None:
    said = answer(GPU_FULL, situation=Situation(share=256, fits=64, was_tried=True)) or ""
    assert said == (
        "out of memory on GPU 0: 32.00 GiB more were needed, 11.29 GiB of 139.80 GiB are free.\n"
        "It fits with --accumulate 4 (64 samples at once instead of 256; tried): the result stays the same"
    )
    assert "--accumulate 6 (17 " in (answer(GPU_FULL, situation=Situation(share=100, accumulate=3, fits=17)) or "")
    assert "but for BatchNorm" in (answer(GPU_FULL, situation=Situation(share=8, fits=4, has_batchnorm=True)) or "")
    assert "Not even one" in (answer(GPU_FULL, situation=Situation(share=8, was_tried=True)) or "")
    assert "--accumulate 2" in (answer(GPU_FULL) or "")
    assert "out of memory on the device" in (answer(torch.OutOfMemoryError()) or "")


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MACHINE_FULL, "3.7 GiB were requested"),
        (MemoryError("Unable to allocate 74.5 GiB for an array with shape (10000000000,)"), "74.5 GiB were requested"),
        (MemoryError(), "out of memory on this machine; "),
        (RuntimeError("std::bad_alloc"), "out of memory on this machine; "),
    ],
)
def test_a_full_machine_says_how_much_was_asked_for(error: Exception, asked: str) -> None:
    assert asked in (answer(error) or "")
    assert is_out_of_memory(error)


def test_batchnorm_on_one_sample_says_how_to_give_it_more() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as failed:
        torch.nn.BatchNorm1d(3)(torch.ones(1, 3))
    assert "drop_last=True in the Task, or --sync-batchnorm" in (answer(failed.value) or "")


def test_a_second_gradient_through_weights_that_fsdp_freed_is_known() -> None:
    error = RuntimeError(
        "setStorage: sizes [64, 16], strides [1, 64], storage offset 0, and itemsize 8 requiring a storage size of "
        "8192 are out of bounds for storage of size 0"
    )
    assert "Use --strategy ddp" in (answer(error) or "")


@pytest.mark.parametrize(
    ("share", "room", "found", "tries"),
    first_is_quick(
        [
            (100, 25, 25, [50, 25]),
            (2, 0, None, [1]),
            (100, 12, 12, [50, 25, 12]),
            (100, 0, None, [50, 25, 12, 6, 3, 1]),
        ],
        num_quick=2,
    ),
)
def test_halves_until_it_fits(share: int, room: int, found: int | None, tries: list[int]) -> None:
    tried: list[int] = []

    def try_micro(micro: int) -> None:
        tried.append(micro)
        if micro > room:
            # For real: no machine has this much.
            torch.empty(10**15, dtype=torch.uint8)

    assert largest_that_fits(try_micro, share) == found
    assert tried == tries


def test_another_failure_while_trying_is_not_hidden() -> None:
    def fails(micro: int) -> None:
        raise ValueError(micro)

    with pytest.raises(ValueError, match="4"):
        largest_that_fits(fails, 8)


def test_a_sampler_that_asks_for_a_process_group_says_how_to_have_one() -> None:
    if dist.is_initialized():
        # Another test has joined in this process.
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="process group has not been initialized") as failed:
        DistributedSampler(range(4))  # type: ignore[arg-type]
    assert "call team = evenstep.join()" in str(answer(failed.value))
    assert "can be left out" in str(answer(failed.value))


def test_what_is_not_known_is_not_answered() -> None:
    assert answer(ValueError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert not is_victim(ValueError("Connection closed by peer"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "part", ["gloo/ ", "shared memory ", "DataLoader worker ", "client socket has timed out ", "DistError: ", "port"]
)
def test_a_message_of_megabytes_is_looked_through_at_once(part: str) -> None:
    # 160 KB took 26 s, and each further letter more than the one before: 16 MB would take days.
    assert answer(RuntimeError(part * (2**24 // len(part)))) is None


def test_the_end_of_a_very_long_message_is_known_too() -> None:
    said = answer(RuntimeError("x" * 10**6 + ": unable to open shared memory object </torch_1_2> in read-write mode"))
    assert "--shm-size" in (said or "")


def test_an_exception_that_cannot_say_what_it_is_still_has_a_report() -> None:
    class Mute(ValueError):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert message_of(Mute()) == "(its message cannot be shown: RuntimeError)"
    assert answer(Mute()) is None
