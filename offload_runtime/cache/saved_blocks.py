"""Blocks of keys and values that slots have lost, found by the tokens up to their ends: in ordinary host memory
(`BlockStore`), or in a directory (`BlockFiles`).

Of a layer with a sliding window a saved text has what that reaches from the text's end: a cache need not have what is
before that. So a block is *whole*, or has the layers alone that attend to everything.

In a directory a block is a file, named by a hash of all tokens up to its end. It is written once, as a whole or not at
all, and never changed: to save a text that has grown adds the blocks that are new, and a process that is killed leaves
no block that is half there. At the end of each file stands a checksum.
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
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count, cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.errors import SessionError, StorageError
from offload_runtime.files import write_atomically, writing
from offload_runtime.models.config import ModelConfig
from offload_runtime.stream import HostArena, Registrar, check_host_memory, touch

# A block of a sequence: by layer its keys and values, [2, H_kv, 256, D], host.
SavedBlock = Mapping[int, torch.Tensor]


def first_whole_block(config: ModelConfig, length: int) -> int:
    """Return the first block that has to be whole for a text to go on behind its first `length` tokens."""
    reach = max((window for window in config.layer_windows if window is not None), default=length + 1)
    return max(0, length + 1 - reach) // BLOCK_TOKENS


def num_restorable(config: ModelConfig, whole: Sequence[bool]) -> int:
    """Return how many leading blocks of a text bring it back, of which these are whole."""
    counts = range(len(whole), 0, -1)
    return next((n for n in counts if all(whole[first_whole_block(config, n * BLOCK_TOKENS) : n])), 0)


class _Key(NamedTuple):
    """What a block is found by: the block before it, or the kind of the chain that it begins, and its own tokens."""

    before: Hashable
    tokens: tuple[int, ...]


class _Held(NamedTuple):
    """A block, and a number that no other one has or ever had."""

    number: int
    block: SavedBlock


class BlockStore:
    """Holds blocks up to a limit; those that were used least recently go first.

    Sequences with the same beginning share the blocks of that, and tokens are compared one by one, never by a hash
    alone. A block is used whenever one behind it is, so what goes first has none behind it.

    Args:
        config: The model's shape.
        most_blocks: That it holds, at least one.
    """

    def __init__(self, config: ModelConfig, most_blocks: int) -> None:
        assert most_blocks > 0
        self._config, self._most_blocks, self._numbers = config, most_blocks, count()
        self._held: dict[_Key, _Held] = {}  # the least recently used one comes first

    def find(self, kind: Hashable, tokens: Sequence[int]) -> list[SavedBlock]:
        """The leading blocks that are held of a sequence and bring it back; this uses them.

        Args:
            kind: Of its keys and values: those of another kind are others.
            tokens: Of the sequence.
        """
        chain = self._chain(kind, tokens)
        blocks = [self._held[key].block for key in chain]
        count = num_restorable(self._config, [len(block) == self._config.num_layers for block in blocks])
        self._use(chain[:count])
        return blocks[:count]

    def put(self, kind: Hashable, tokens: Sequence[int], save: Callable[[int, bool], SavedBlock]) -> None:
        """Hold the full blocks of a sequence, from the first one on as many as the limit allows.

        Args:
            kind: As of `find`.
            tokens: Of the sequence.
            save: Copies a block, by its index, whole or not. Called for those that are not held so.
        """
        chain = self._chain(kind, tokens)
        self._use(chain)
        first_whole, held = first_whole_block(self._config, len(tokens)), len(chain)
        try:
            for index in range(min(len(tokens) // BLOCK_TOKENS, self._most_blocks)):
                whole = index >= first_whole
                if index >= held:
                    if len(self._held) >= self._most_blocks:  # of the chain there are fewer
                        del self._held[next(iter(self._held))]
                    key = self._key(kind, tokens, index, chain)
                    self._held[key] = _Held(next(self._numbers), save(index, whole))
                    chain.append(key)
                elif whole and len(self._held[chain[index]].block) < self._config.num_layers:
                    self._held[chain[index]] = self._held[chain[index]]._replace(block=save(index, whole))
        finally:
            self._use(chain)

    def _chain(self, kind: Hashable, tokens: Sequence[int]) -> list[_Key]:
        """The leading blocks of a sequence that are held."""
        chain: list[_Key] = []
        for index in range(len(tokens) // BLOCK_TOKENS):
            key = self._key(kind, tokens, index, chain)
            if key not in self._held:
                break
            chain.append(key)
        return chain

    def _key(self, kind: Hashable, tokens: Sequence[int], index: int, chain: Sequence[_Key]) -> _Key:
        """Of block `index`, which follows the blocks of a chain."""
        before = self._held[chain[-1]].number if chain else ("first", kind)
        return _Key(before, tuple(tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]))

    def _use(self, chain: Sequence[_Key]) -> None:
        """These were used most recently, the first one last."""
        for key in reversed(chain):
            self._held[key] = self._held.pop(key)


_DIGEST_BYTES = 20
# A block, or what a process that was killed has left of one.
_FILE = re.compile(rf"\.?([0-9a-f]{{{2 * _DIGEST_BYTES}}})\.kv(-.*\.part)?")
# Behind the layers: what kind of file it is, its name, and zlib's CRC-32 of the layers.
_FOOTER, _MAGIC = struct.Struct(f"<8s{2 * _DIGEST_BYTES}sI"), b"kvblock1"
# Blocks are on their way at once, a thread each, in so much host memory: enough for a fast disk, and at least two, so
# that the disk works while one is copied.
_STAGING_BYTES, _MOST_STAGED = 256 << 20, 8


def block_names(kind: str, tokens: Sequence[int]) -> list[str]:
    """What the blocks of a text are called, the open one at its end included.

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
    """What a block is on its way: by layer the shape of its keys and values, [2, H_kv, 256, D], and their dtype;
    `locks` says whether the host memory that it passes through is page-locked, if the system allows it, for a GPU's
    full speed."""

    shapes: Mapping[int, tuple[int, ...]]
    dtype: torch.dtype
    locks: bool = False

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, *, whole: bool = True, locks: bool = False) -> BlockLayout:
        """Return the layout of a block that is whole, or not."""
        attentions = enumerate(layer.attention for layer in config.layers)
        shapes = {layer: one.kv_block_shape for layer, one in attentions if whole or one.window is None}
        return cls(shapes, dtype, locks)

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return sum(map(math.prod, self.shapes.values())) * self.dtype.itemsize

    def views(self, memory: torch.Tensor) -> SavedBlock:
        """A block at the beginning of memory, uint8."""
        parts = memory[: self.nbytes].view(self.dtype).split([math.prod(shape) for shape in self.shapes.values()])
        return {layer: part.view(shape) for (layer, shape), part in zip(self.shapes.items(), parts, strict=True)}


class BlockFiles(AbstractContextManager["BlockFiles"]):
    """A directory of blocks, which no other process uses until this is closed.

    Args:
        directory: Made if it is not there; the one that it is in has to be.
        remedy: What to do where nothing can be written, for messages.
        most_bytes: That the blocks may take; what was used least recently goes first. None: there is no limit.

    Raises:
        StorageError: It cannot be written, or is in use.
    """

    def __init__(self, directory: Path, *, remedy: str, most_bytes: int | None = None) -> None:
        self._directory, self._remedy, self._most_bytes = directory, remedy, most_bytes
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

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def find(self, names: Sequence[str]) -> int:
        """How many leading ones of these are here; this uses them."""
        count = next((index for index, name in enumerate(names) if name not in self), len(names))
        now_ns = time.time_ns()
        for number, name in enumerate(reversed(names[:count])):  # what goes first has none behind it
            self._sizes[name] = self._sizes.pop(name)
            if self._most_bytes is not None:
                with suppress(OSError):
                    os.utime(self._path(name), ns=(now_ns, now_ns + number))
        return count

    def save(self, blocks: Mapping[str, BlockLayout], copy: Callable[[int, SavedBlock], None]) -> None:
        """Write the blocks that are not here, from the first one on as many as the limit allows.

        Args:
            blocks: By their names the layouts of a text's blocks, all from the first one on.
            copy: Copies a block, by its index, to host memory.

        Raises:
            StorageError: The disk is full, or the directory cannot be written; what is here already stays.
            BudgetError: There is no host memory for what is on its way.
        """
        missing = [(index, name) for index, name in enumerate(blocks) if name not in self]
        with _staging([blocks[name] for _, name in missing]) as buffers, _threads() as pool:
            free, jobs = deque(buffers), deque[tuple[Future[None], torch.Tensor]]()
            for index, name in missing:
                nbytes = blocks[name].nbytes + _FOOTER.size
                if not self._make_room(nbytes, blocks):
                    break
                if not free:
                    job, buffer = jobs.popleft()
                    job.result()
                    free.append(buffer)
                buffer = free.popleft()
                layers = blocks[name].views(buffer)
                copy(index, layers)
                self._sizes[name] = nbytes
                jobs.append((pool.submit(self._write, name, layers), buffer))
            for job, _ in jobs:
                job.result()
        self.find(list(blocks))

    def read(self, blocks: Mapping[str, BlockLayout]) -> Iterator[SavedBlock]:
        """The blocks, in host memory, each until the next one is asked for. Arguments as of `save`.

        Raises:
            SessionError: One is not here, or damaged.
            StorageError: One cannot be read, which may pass.
            BudgetError: As of `save`.
        """
        with _staging(list(blocks.values())) as buffers, _threads() as pool:
            pairs = zip(blocks.items(), cycle(buffers), strict=False)
            views = ((name, layout.views(buffer)) for (name, layout), buffer in pairs)
            jobs = deque((pool.submit(self._read, *one), one[1]) for one in islice(views, len(buffers)))
            while jobs:
                job, layers = jobs.popleft()
                job.result()
                yield layers
                jobs += ((pool.submit(self._read, *one), one[1]) for one in islice(views, 1))

    def delete(self, names: Collection[str]) -> None:
        """Delete blocks, as far as the system lets us."""
        for name in names:
            self._sizes.pop(name, None)
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

    def _make_room(self, nbytes: int, but: Collection[str]) -> bool:
        """Delete what was used least recently, but none of these; whether there is room for so many bytes then."""
        if self._most_bytes is None:
            return True
        held = sum(self._sizes.values())
        for name in list(self._sizes):
            if held + nbytes <= self._most_bytes:
                break
            if name not in but:
                held -= self._sizes[name]
                self.delete([name])
        return held + nbytes <= self._most_bytes

    def _write(self, name: str, layers: SavedBlock) -> None:
        def pieces() -> Iterator[bytes | memoryview]:
            checksum = 0
            for layer in map(_bytes_of, layers.values()):
                checksum = zlib.crc32(layer, checksum)
                yield layer
            yield _FOOTER.pack(_MAGIC, name.encode(), checksum)

        try:
            write_atomically(self._path(name), pieces(), remedy=self._remedy)
        except BaseException:
            del self._sizes[name]
            raise

    def _read(self, name: str, layers: SavedBlock) -> None:
        path, checksum = self._path(name), 0
        try:
            about = path.lstat()
            size = sum(layer.nbytes for layer in layers.values()) + _FOOTER.size
            if not stat.S_ISREG(about.st_mode) or about.st_size != size:
                raise SessionError(f"{path} is damaged: it has {about.st_size} bytes of {size}")
            with path.open("rb") as file:
                for layer in map(_bytes_of, layers.values()):
                    file.readinto(layer)  # all of it, most without the buffer
                    checksum = zlib.crc32(layer, checksum)
                footer = file.read()
        except FileNotFoundError as error:
            raise SessionError(f"{path} is missing") from error
        except OSError as error:
            raise StorageError(f"{path} cannot be read ({error.strerror or error}): try again") from error
        if footer != _FOOTER.pack(_MAGIC, name.encode(), checksum):
            raise SessionError(f"{path} is damaged: its checksum is another one")


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_STAGED, thread_name_prefix="kv-files")


@contextmanager
def _staging(layouts: Sequence[BlockLayout]) -> Iterator[list[torch.Tensor]]:
    """Host memory for blocks on their way, if there are any: uint8, of the largest each."""
    nbytes = max((layout.nbytes for layout in layouts), default=0)
    count = min(len(layouts), max(2, min(_MOST_STAGED, _STAGING_BYTES // max(1, nbytes))))
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
