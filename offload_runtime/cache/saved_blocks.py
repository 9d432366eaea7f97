"""Blocks of sequences that slots have lost, found by the tokens up to their ends: in ordinary host memory
(`BlockStore`), or in a directory (`BlockFiles`).

A block's name is a hash of all tokens up to its end, and of all that the bits of its keys and values depend on besides.
Of a layer with a sliding window a saved text has what that reaches from the text's end: a cache need not have what is
before that. So a block is *whole*, or has what every longer text needs of it alone, as its size tells; a whole one
takes the place of one that is not.

In a directory a block is a file. It is written as a whole or not at all: to save a text that has grown adds the blocks
that are new, and a process that is killed leaves no block that is half there. At the end of each file stands a
checksum.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy as copy_of
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain, cycle, islice, takewhile
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.errors import SessionError, StorageError
from offload_runtime.files import write_atomically, writing
from offload_runtime.models.config import ModelConfig
from offload_runtime.stream.arena import HostArena, Registrar, check_host_memory, touch

# A block of a sequence: by layer what its state saves of it, host. Of attention that is one tensor, [2, H_kv, 256, D].
SavedBlock = Mapping[int, Sequence[torch.Tensor]]


def first_whole_block(config: ModelConfig, length: int) -> int:
    """Return the first block that has to be whole for a text to go on behind its first `length` tokens."""
    return min(layer.attention.first_whole(length) for layer in config.layers) // BLOCK_TOKENS


_DIGEST_BYTES = 20
# A block, or what a process that was killed has left of one.
_FILE = re.compile(rf"\.?([0-9a-f]{{{2 * _DIGEST_BYTES}}})\.kv(-.*\.part)?")
# Behind the layers: what kind of file it is, its name, and zlib's CRC-32 of the layers.
_FOOTER, _MAGIC = struct.Struct(f"<8s{2 * _DIGEST_BYTES}sI"), b"kvblock1"
# Blocks are on their way at once, a thread each, in so much host memory: enough for a fast disk, and at least two, so
# that the disk works while one is copied.
_STAGING_BYTES, _MOST_STAGED = 256 << 20, 8


def block_names(kind: str, tokens: Sequence[int]) -> list[str]:
    """Return what the blocks of a text are called, the open one at its end included.

    Args:
        kind: Of its keys and values: those of another kind have other names.
        tokens: Of the text.
    """
    names, before = list[str](), blake2b(kind.encode(), digest_size=_DIGEST_BYTES).digest()
    for first in range(0, len(tokens), BLOCK_TOKENS):
        own = array("q", tokens[first : first + BLOCK_TOKENS]).tobytes()
        before = blake2b(before + own, digest_size=_DIGEST_BYTES).digest()
        names.append(before.hex())
    return names


@dataclass(frozen=True)
class BlockLayout:
    """Says what a block is on its way.

    Attributes:
        tensors: By layer the shape and the dtype of each tensor that its state saves.
        locks: Whether the host memory that it passes through is page-locked, if the system allows it, for a GPU's full
            speed.
    """

    tensors: Mapping[int, Sequence[tuple[tuple[int, ...], torch.dtype]]]
    locks: bool = False

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, *, whole: bool = True, locks: bool = False) -> BlockLayout:
        """Return the layout of a block that is whole, or not."""
        tensors = enumerate(layer.attention.saved_tensors(dtype, whole=whole) for layer in config.layers)
        return cls({layer: parts for layer, parts in tensors if parts}, locks)

    @property
    def nbytes(self) -> int:
        """Return the bytes of a block."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in chain(*self.tensors.values()))

    def views(self, memory: torch.Tensor) -> SavedBlock:
        """Return a block at the beginning of memory, uint8."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in chain(*self.tensors.values())]
        parts = iter(memory[: sum(sizes)].split(sizes))
        return {
            layer: [next(parts).view(dtype).view(shape) for shape, dtype in tensors]
            for layer, tensors in self.tensors.items()
        }


class BlockStore:
    """Holds blocks by their names; those that were used least recently go first. This one holds them in host memory.

    A block is used whenever one behind it is, so what goes first has none behind it.

    Args:
        most_bytes: That the blocks may take.
    """

    lasts = False  # beyond the process
    more_bytes = 0  # of each block, than its layers

    def __init__(self, most_bytes: float = math.inf) -> None:
        self._most_bytes = most_bytes
        self._sizes = dict[str, int]()  # the least recently used one comes first
        self._memory = dict[str, torch.Tensor]()

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def snapshot(self) -> BlockStore:
        """Let what is read of it be what it holds now, whatever goes meanwhile."""
        now = copy_of(self)
        now._memory = dict(self._memory)
        return now

    def holds(self, name: str, layout: BlockLayout) -> bool:
        """Return whether a block is here, with as much as a layout has of it."""
        return self._sizes.get(name, 0) >= layout.nbytes + self.more_bytes

    def find(self, names: Sequence[str]) -> int:
        """Return how many leading ones of these are here; this uses them."""
        count = next((index for index, name in enumerate(names) if name not in self), len(names))
        for name in reversed(names[:count]):
            self._sizes[name] = self._sizes.pop(name)
        return count

    def num_fitting(self, blocks: Mapping[str, BlockLayout]) -> int:
        """Return how many leading ones of some blocks there would be room for beside nothing else."""
        sizes = accumulate(layout.nbytes + self.more_bytes for layout in blocks.values())
        return sum(1 for _ in takewhile(lambda nbytes: nbytes <= self._most_bytes, sizes))

    def save(self, blocks: Mapping[str, BlockLayout], copy: Callable[[int, SavedBlock], None]) -> None:
        """Take the blocks that are not here, or have less, from the first one on as many as the limit allows.

        Args:
            blocks: By their names the layouts of a text's blocks, all from the first one on.
            copy: Copies a block, by its index, to host memory.

        Raises:
            StorageError: The disk is full, or the directory cannot be written; what is here already stays.
            BudgetError: There is no host memory for them.
        """
        for index, (name, layout) in enumerate(blocks.items()):
            if not self.holds(name, layout):
                if not self._make_room(layout.nbytes - self._sizes.get(name, 0), blocks):
                    break
                check_host_memory(layout.nbytes, what="the prefix cache")
                memory = torch.empty(layout.nbytes, dtype=torch.uint8)
                copy(index, layout.views(memory))
                self._memory[name], self._sizes[name] = memory, layout.nbytes
        self.find(list(blocks))

    def read(self, names: Sequence[str], layouts: Sequence[BlockLayout]) -> Iterator[SavedBlock]:
        """Return the blocks of these names, each by the one of the layouts that it has, in host memory until the next
        one is asked for.

        Raises:
            SessionError: One is not here, or damaged.
            StorageError: One cannot be read, which may pass.
            BudgetError: As of `save`.
        """
        of_sizes = {layout.nbytes: layout for layout in layouts}
        return (of_sizes[memory.nbytes].views(memory) for memory in map(self._memory.__getitem__, names))

    def delete(self, names: Collection[str]) -> None:
        """Delete blocks, as far as the system lets us."""
        for name in names:
            self._sizes.pop(name, None)
            self._memory.pop(name, None)

    def _make_room(self, nbytes: int, but: Collection[str]) -> bool:
        """Delete what was used least recently, but none of these; whether there is room for so many bytes then."""
        if self._most_bytes == math.inf:
            return True
        held = sum(self._sizes.values())
        for name in list(self._sizes):
            if held + nbytes <= self._most_bytes:
                break
            if name not in but:
                held -= self._sizes[name]
                self.delete([name])
        return held + nbytes <= self._most_bytes


class BlockFiles(BlockStore, AbstractContextManager["BlockFiles"]):
    """A directory of blocks, which no other process uses until this is closed.

    Args:
        directory: Made if it is not there; the one that it is in has to be.
        remedy: What to do where nothing can be written, for messages.
        most_bytes: That the blocks may take.

    Raises:
        StorageError: It cannot be written, or is in use.
    """

    lasts, more_bytes = True, _FOOTER.size

    def __init__(self, directory: Path, *, remedy: str, most_bytes: float = math.inf) -> None:
        super().__init__(most_bytes)
        self._directory, self._remedy = directory, remedy
        with writing(directory, remedy):
            directory.mkdir(mode=0o700, exist_ok=True)
            # Of one thread that asks again it is the same lock.
            self._lock = FileLock(directory / "lock", timeout=0, is_singleton=True)
            try:
                self._lock.acquire()
            except Timeout:
                raise StorageError(f"{directory} is in use by another process: {remedy}") from None
            try:
                self._sizes = self._scan()  # the least recently used one comes first
            except BaseException:
                self._lock.release()
                raise

    def _scan(self) -> dict[str, int]:
        """The bytes of the blocks that are here, by their names; what was left half written is deleted."""
        blocks = list[tuple[int, str, int]]()
        for entry in os.scandir(self._directory):
            if (ours := _FILE.fullmatch(entry.name)) and ours[2]:
                os.unlink(entry)
            elif ours:
                blocks.append((entry.stat().st_mtime_ns, ours[1], entry.stat().st_size))
        return {name: size for _, name, size in sorted(blocks)}

    def find(self, names: Sequence[str]) -> int:
        count, now_ns = super().find(names), time.time_ns()
        for number, name in enumerate(reversed(names[:count] if self._most_bytes < math.inf else ())):
            with suppress(OSError):
                os.utime(self._path(name), ns=(now_ns, now_ns + number))
        return count

    def save(self, blocks: Mapping[str, BlockLayout], copy: Callable[[int, SavedBlock], None]) -> None:
        missing = [(index, name) for index, name in enumerate(blocks) if not self.holds(name, blocks[name])]
        with _staging(len(missing), [*blocks.values()]) as buffers, _threads() as pool:
            jobs = deque[Future[None]]()
            for (index, name), buffer in zip(missing, cycle(buffers), strict=False):
                nbytes = blocks[name].nbytes + self.more_bytes
                if not self._make_room(nbytes - self._sizes.get(name, 0), blocks):
                    break
                if len(jobs) == len(buffers):
                    jobs.popleft().result()  # it has been written from this buffer
                layers = blocks[name].views(buffer)
                copy(index, layers)
                self._sizes[name] = nbytes
                jobs.append(pool.submit(self._write, name, layers))
            for job in jobs:
                job.result()
        self.find(list(blocks))

    def read(self, names: Sequence[str], layouts: Sequence[BlockLayout]) -> Iterator[SavedBlock]:
        with _staging(len(names), layouts) as buffers, _threads() as pool:
            pairs = zip(names, cycle(buffers), strict=False)
            jobs = deque(pool.submit(self._read, *one, layouts) for one in islice(pairs, len(buffers)))
            while jobs:
                yield jobs.popleft().result()
                jobs += (pool.submit(self._read, *one, layouts) for one in islice(pairs, 1))

    def delete(self, names: Collection[str]) -> None:
        super().delete(names)
        for name in names:
            with suppress(OSError):
                self._path(name).unlink()

    def delete_others(self, names: Collection[str]) -> None:
        """Keep these alone."""
        self.delete(self._sizes.keys() - set(names))

    def close(self) -> None:
        """Let other processes use the directory."""
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.kv"

    def _write(self, name: str, layers: SavedBlock) -> None:
        def pieces() -> Iterator[bytes | memoryview]:
            checksum = 0
            for layer in map(_bytes_of, chain(*layers.values())):
                checksum = zlib.crc32(layer, checksum)
                yield layer
            yield _FOOTER.pack(_MAGIC, name.encode(), checksum)

        try:
            write_atomically(self._path(name), pieces(), remedy=self._remedy)
        except BaseException:
            del self._sizes[name]
            raise

    def _read(self, name: str, buffer: torch.Tensor, layouts: Sequence[BlockLayout]) -> SavedBlock:
        path, checksum, of_sizes = self._path(name), 0, {layout.nbytes + _FOOTER.size: layout for layout in layouts}
        try:
            about = path.lstat()
            if not stat.S_ISREG(about.st_mode) or about.st_size not in of_sizes:
                raise SessionError(f"{path} is damaged: it has {about.st_size} bytes of {max(of_sizes)}")
            layers = of_sizes[about.st_size].views(buffer)
            with path.open("rb") as file:
                for layer in map(_bytes_of, chain(*layers.values())):
                    file.readinto(layer)  # all of it, most without the buffer
                    checksum = zlib.crc32(layer, checksum)
                footer = file.read()
        except FileNotFoundError as error:
            raise SessionError(f"{path} is missing") from error
        except OSError as error:
            raise StorageError(f"{path} cannot be read ({error.strerror or error}): try again") from error
        if footer != _FOOTER.pack(_MAGIC, name.encode(), checksum):
            raise SessionError(f"{path} is damaged: its checksum is another one")
        return layers


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_STAGED, thread_name_prefix="kv-files")


@contextmanager
def _staging(num_blocks: int, layouts: Sequence[BlockLayout]) -> Iterator[list[torch.Tensor]]:
    """Host memory for blocks on their way, if there are any: uint8, of the largest each."""
    nbytes = max((layout.nbytes for layout in layouts), default=0)
    count = min(num_blocks, max(2, min(_MOST_STAGED, _STAGING_BYTES // max(1, nbytes))))
    if not count:
        yield []
        return
    check_host_memory(count * nbytes, what="reading or writing a session")
    arena = HostArena(max(1, count * nbytes), name="blocks of a session")
    touch([arena])
    if layouts[0].locks:
        arena.lock(Registrar())
    try:
        yield list(arena.buffer[: count * nbytes].view(count, nbytes))
    finally:
        arena.close()


def _bytes_of(layer: torch.Tensor) -> memoryview:
    return layer.view(-1).view(torch.uint8).numpy().data
