"""Prefetching: batches are read in DataLoader workers, and copied to the GPU in a thread on a separate CUDA stream."""

from __future__ import annotations

import atexit
import os
import queue
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from evenstep.data.augmentation import Augment
from evenstep.data.batches import BatchSplit, HostBatch, Reader, Request, WorkerFailure, requests
from evenstep.data.dataset import Source
from evenstep.data.iterable import Stream, StreamInWorkers, StreamPart
from evenstep.distributed.devices import num_cores
from evenstep.distributed.temporary_folders import make_socket_folder
from evenstep.distributed.worker_process import die_with, set_process_name
from evenstep.errors import TaskError, TrainingError
from evenstep.private_apis import end_workers
from evenstep.sampling.order import Order, Span
from evenstep.sampling.rng import Draws
from evenstep.task import Batch as Data

T = TypeVar("T")
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
PREFETCH_FACTOR = 2
"""Batches that each worker, and the thread, may prefetch."""
MAX_WORKERS = 4


def choose_workers(workers: int | None, is_slow: bool, num_processes: int, most: int = MAX_WORKERS) -> int:
    """Loader workers of one process: as many as requested; else one for each core that the training leaves free."""
    if not is_slow:
        return 0
    if workers is not None:
        return workers
    return max(0, min(most, num_cores() // num_processes - 1))


class Pool:
    """Worker processes that read requests; they are kept from epoch to epoch."""

    def __init__(self, reader: Reader, num_workers: int, begin: WorkerInit) -> None:
        self._queue = _Queue()
        self._loader = _made(reader, num_workers, begin, sampler=self._queue, persistent_workers=True)
        self._iterator: Any = None
        self._num_passes = 0

    def read(self, requests: Iterable[Request]) -> Iterator[HostBatch]:
        """The requested batches, in order; ends an earlier pass that is not finished."""
        self._queue.requests = requests
        self._num_passes += 1
        self._iterator = _started(self._loader)
        return self._batches(self._num_passes)

    def _batches(self, number: int) -> Iterator[HostBatch]:
        for batch in _received(self._iterator):
            if number != self._num_passes:
                raise TaskError("a newer iteration of this loader has begun; finish one first, or make two loaders")
            yield batch

    def close(self) -> None:
        if self._iterator is not None:
            _end(self._iterator)
            self._iterator = None


def read_stream(stream: StreamInWorkers, num_workers: int, begin: WorkerInit) -> Generator[HostBatch]:
    """An epoch of a stream, read by worker processes that end with it."""
    iterator = _started(_made(stream, num_workers, begin))
    try:
        yield from _received(iterator)
    finally:
        _end(iterator)


def _made(data: Any, num_workers: int, begin: WorkerInit, **how: Any) -> DataLoader[Any]:
    make_socket_folder()
    with _without_warnings():
        return DataLoader(
            data,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=PREFETCH_FACTOR,
            worker_init_fn=begin,
            generator=torch.Generator(),  # not the one that the training draws from
            collate_fn=unchanged,
            # The user's dataset may hold objects that cannot be pickled; a forked process has them already.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
            **how,
        )


_begun_iterators: weakref.WeakSet[Any] = weakref.WeakSet()


def _started(loader: DataLoader[Any]) -> Any:
    with _without_warnings():
        iterator = iter(loader)
    _begun_iterators.add(iterator)
    # Register again: the last one registered runs first, before those of torch and multiprocessing.
    atexit.unregister(_end_all)
    atexit.register(_end_all, os.getpid())
    return iterator


def _end_all(process: int) -> None:
    """End all workers before multiprocessing would: it sends SIGTERM, which they ignore, and waits."""
    if os.getpid() == process:
        for iterator in list(_begun_iterators):
            _end(iterator)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore torch's advice on the number of workers, and Python's on forking beside gloo's threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        warnings.filterwarnings("ignore", "This process .* is multi-threaded")
        yield


def _end(iterator: Any) -> None:
    """End a DataLoader's workers; torch may raise for a dead worker until all have ended."""
    for _ in range(2):
        try:
            end_workers(iterator)
            break
        except RuntimeError:
            continue
    # torch has waited for one that is still busy, and then sent SIGTERM, which it ignores.
    for worker in iterator._workers:
        worker.kill()


def is_worker_death(error: BaseException) -> bool:
    """Whether torch reports that a loader worker died, which it does in any line of the main thread."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


@contextmanager
def explain_worker_death() -> Iterator[None]:
    """Turn torch's error for a dead worker, which it raises in any line of the main thread, into ours."""
    try:
        yield
    except RuntimeError as error:
        if is_worker_death(error):
            raise worker_death_error(error) from error
        raise


def worker_death_error(error: BaseException) -> TrainingError:
    first = (str(error) or type(error).__name__).splitlines()[0]
    return TrainingError(
        f"a loader worker died: {first}\n"
        "Often memory or /dev/shm ran out: try fewer --workers, or --workers 0 to see the error itself."
    )


def _received(batches: Iterator[HostBatch | WorkerFailure]) -> Iterator[HostBatch]:
    while True:
        try:
            batch = next(batches, None)
        except (RuntimeError, ConnectionError, EOFError) as error:
            # A worker that dies while it sends breaks its connection before torch notices its death.
            if isinstance(error, RuntimeError) and not is_worker_death(error):
                raise
            _end(batches)
            raise worker_death_error(error) from error
        if batch is None:
            return
        if isinstance(batch, WorkerFailure):
            raise TaskError(batch.message)
        yield batch


class _Queue(Sampler[Any]):
    """Requests for the workers, as the sampler of their DataLoader."""

    requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.requests)


class WorkerInit:
    """Starts a loader worker: it dies with its training process, which alone handles signals."""

    def __init__(self, init: Callable[[int], None] | None, dataset: Any) -> None:
        self._init = init
        self._dataset = dataset
        self._parent = os.getpid()

    def __call__(self, number: int) -> None:
        # A cluster signals every process of a job; the training process handles that.
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        set_process_name("evenstep-reader")
        die_with(self._parent)
        sys.excepthook = _ignoring_lost_peers(sys.excepthook)
        if self._init is not None:
            info = get_worker_info()
            assert info is not None
            # The user's function may expect their own dataset.
            object.__setattr__(info, "dataset", self._dataset)
            self._init(number)


def _ignoring_lost_peers(hook: ExceptHook) -> ExceptHook:
    """The same hook, except that a connection lost in a thread is not reported.

    multiprocessing hands tensors over in a thread and reports to `sys.excepthook` from there. If its rank is killed
    during a handover, the launcher reports that; a traceback of the worker would only hide it.
    """

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_lost = isinstance(error, ConnectionError | EOFError)
        if not is_lost or threading.current_thread() is threading.main_thread():
            hook(kind, error, trace)

    return report


class Prefetcher(Generic[T]):
    """Calls `make` on the next few items in a thread, while the training computes."""

    def __init__(self, items: Iterator[Any], make: Callable[[Any], T]) -> None:
        self._items = items
        self._make = make
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(PREFETCH_FACTOR)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="evenstep-prefetch")
        self._thread.start()

    def made(self) -> Generator[T]:
        try:
            while True:
                made, error = self._ready.get()
                if error is not None:
                    raise error
                if made is None:
                    return
                yield made
        finally:
            self.close()

    def close(self) -> None:
        """Stop reading and drop the prefetched batches."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)
            except queue.Empty:
                continue

    def _work(self) -> None:
        try:
            for item in self._items:
                self._put(self._make(item), None)
                if self._stop.is_set():
                    return
            self._put(None, None)
        except BaseException as error:
            self._put(None, error)

    def _put(self, made: T | None, error: BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put((made, error), timeout=0.1)
                return
            except queue.Full:
                continue


class GpuCopy:
    """Copies host tensors to a GPU on a separate CUDA stream; `arrive` hands them to the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start copying; called within `begin`. Tensors on a GPU are left to `arrive`."""
        if tensor.is_cuda:
            return tensor
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def begin(self) -> Any:
        """The context in which tensors are sent."""
        return torch.cuda.stream(self._stream)

    def sent(self) -> torch.cuda.Event:
        """What to wait for before the tensors sent so far are used."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def arrive(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that was sent, for use in the current stream."""
        if tensor.device != self.device:
            return tensor.to(self.device, non_blocking=True)
        tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor


NOT_RESIDENT = (
    "--resident keeps tensors and arrays on the device, without augment or collate; use augment_batch, "
    "which works there, or leave --resident out"
)


def can_be_resident(source: Source | Stream, augments: bool) -> bool:
    """Whether the samples can be kept in a device's memory."""
    return not isinstance(source, Stream) and not source.is_slow(augments)


def unchanged(value: T) -> T:
    return value


@dataclass(frozen=True)
class LoaderOptions:
    """How samples are read and prepared."""

    seed: int = 0
    accumulate: int = 1
    augment: Augment | None = None
    augment_batch: Callable[[Data, Draws], Data] | None = None
    workers: int | None = None
    """Loader processes; None: one for each core that the training leaves free, where they help."""
    worker_init: Callable[[int], None] | None = None
    dataset: Any = None
    """What `worker_init` finds as its dataset."""
    drop_last: bool = False
    """Whether a stream's last batch is left out if it is short; other data has an order that knows."""
    resident: bool = False
    """Whether the data is kept in the memory of the devices."""
    compare: bool = True
    """Whether the ranks compare what they read in the first batches."""
    fit: Callable[[torch.Tensor], torch.Tensor] = unchanged
    """The last change of a tensor on its device, such as its dtype."""


@dataclass
class Passes:
    """Passes over the data in one order; worker processes are kept for the next pass, except a stream's."""

    source: Stream | list[Source]
    order: Order | None
    split: BatchSplit
    batch: int
    options: LoaderOptions
    num_workers: int
    pinned: bool
    least: int = 1
    """Samples of a step; a last one with fewer is joined with the step before."""

    def __post_init__(self) -> None:
        options = self.options
        self._begin = WorkerInit(options.worker_init, options.dataset)
        self._reader = None
        if not isinstance(self.source, Stream):
            self._reader = Reader(self.source, self.split, options.seed, options.augment, self.pinned)
        self._pool: Pool | None = None
        self._stream: Any = None

    def begin(self, epoch: int, start: int, num_checked: int) -> Iterator[HostBatch]:
        """The batches of an epoch from sample `start` on."""
        if isinstance(self.source, Stream):
            return self._begin_stream(self.source, epoch, start, num_checked)
        assert self._reader is not None
        assert self.order is not None
        self.source[0].check_length()
        length = self.order.lengths.of(epoch)
        assert length is not None
        steps = requests(self.order, self.batch, Span(epoch, start, length), num_checked, self.least)
        if not self.num_workers:
            return map(self._reader.read, steps)
        if self._pool is None:
            self._pool = Pool(self._reader, self.num_workers, self._begin)
        return self._pool.read(steps)

    def _begin_stream(self, stream: Stream, epoch: int, start: int, num_checked: int) -> Iterator[HostBatch]:
        options = self.options
        how = (options.seed, options.augment, options.drop_last)
        part = StreamPart(self.split, self.batch, *how, epoch, start, num_checked)
        if not self.num_workers:
            return stream.batches(part)
        self.close()
        self._stream = read_stream(StreamInWorkers(stream, part), self.num_workers, self._begin)
        return self._stream  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None
