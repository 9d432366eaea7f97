"""Write any readable checkpoint as a safetensors directory that transformers loads too.

All or nothing: everything goes to a hidden directory beside the target, which is renamed last.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from widening.made import transformers_config_of

from offload_runtime.errors import OptionError, StorageError
from offload_runtime.sizes import format_bytes
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.loader import Progress

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OTHER_FILES_BYTES = 64_000_000  # tokenizer and configuration, generously
_WRITERS = 8  # files made at a time: 26 GB take 23 s on 16 cores, one after the other 75 (H200's host)


def storage_error(error: Exception, target: Path, needed_bytes: int) -> StorageError:
    """What to say of an output that cannot be written."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        # The parent may be what could not be made.
        existing = next(parent for parent in target.parents if os.path.exists(parent))
        free_bytes = shutil.disk_usage(existing).free
        return StorageError(
            f"{target} needs {format_bytes(needed_bytes)} and {format_bytes(free_bytes)} is free on that disk: "
            "free some space or choose another directory"
        )
    reason = getattr(error, "strerror", None) or error
    return StorageError(f"writing {target} failed ({reason}): check the permissions or choose another directory")


def check_space(directory: Path, needed_bytes: int) -> None:
    """Raise the system's own error where a disk has less room than that."""
    if shutil.disk_usage(directory).free < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def atomic_directory(target: Path, needed_bytes: int) -> Iterator[Path]:
    """Give a temporary directory that becomes `target` when the block ends well, and vanishes when it does not.

    Args:
        target: Must not exist, or be empty.
        needed_bytes: What will be written; checked against the free space first.

    Raises:
        OptionError: `target` is there already.
        StorageError: Not enough space, no permission, or the disk failed.
    """
    temporary: Path | None = None
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise OptionError(f"{target} exists already: choose a new directory or remove it first")
        target.parent.mkdir(parents=True, exist_ok=True)
        check_space(target.parent, needed_bytes)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        yield temporary
        if target.exists():
            target.rmdir()
        temporary.chmod(0o755)  # mkdtemp makes it private
        temporary.rename(target)
    except (OSError, SafetensorError) as error:  # the library says so what the disk refuses
        raise storage_error(error, target, needed_bytes) from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _write_descriptions(source: CheckpointSource, directory: Path, dtype: torch.dtype) -> None:
    """Configuration, generation settings, tokenizer and chat template."""
    hf_config = transformers_config_of(source)
    hf_config.dtype = dtype
    hf_config.architectures = [source.config().architecture]
    if source.read_mtp() is not None:
        hf_config.mtp_num_hidden_layers = 1
    hf_config.save_pretrained(directory)
    settings = source.generation
    if settings is None:
        ids = {name: getattr(transformers_config_of(source), name, None) for name in _TOKEN_IDS}
        settings = {name: value for name, value in ids.items() if value is not None}
    (directory / "generation_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    source.tokenizer().save_pretrained(directory)


def convert_to_safetensors(
    source: CheckpointSource,
    out_dir: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: float = 7e8,
    on_progress: Progress | None = None,
) -> Path:
    """Write a checkpoint directory: configuration, tokenizer with chat template, generation settings and weights, with
    those of an MTP layer that the source carries.

    Args:
        source: What to convert.
        out_dir: New directory; it appears only when it is complete.
        dtype: Of the written weights.
        max_shard_bytes: Largest file, unless a tensor is larger; eight are held in memory until they are written.
        on_progress: Called with (bytes converted, bytes of all weights).

    Returns:
        The directory.

    Raises:
        OptionError: The directory exists and is not empty, or its path means nothing.
        StorageError: Not enough space or no permission; nothing half-written stays behind.
        CheckpointError: The source has no usable tokenizer, or broke while it was read.
    """
    try:
        target = Path(out_dir).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no such user, or the current directory is gone
        raise OptionError(f"{out_dir} is no usable path ({error}): write it in full, without ~") from error
    fills, mtp = dict(source.fills), source.read_mtp()
    needed = checkpoint_tensors(source.config())
    if isinstance(mtp, CheckpointSource):
        fills |= mtp.fills
        needed |= checkpoint_tensors(mtp.config())
    shapes = {name: torch.empty(needed[name].shape, dtype=dtype, device="meta") for name in fills}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=int(max_shard_bytes))
    total_bytes, done_bytes = sum(shape.nbytes for shape in shapes.values()), 0
    counting, stopped = threading.Lock(), threading.Event()
    with atomic_directory(target, total_bytes + _OTHER_FILES_BYTES) as directory:
        _write_descriptions(source, directory, dtype)

        def write(file_name: str, names: Sequence[str]) -> None:
            nonlocal done_bytes
            tensors = {name: torch.empty_like(shapes[name], device="cpu") for name in names}
            for name, tensor in tensors.items():
                if stopped.is_set():
                    return
                fills[name](tensor)
                with counting:
                    done_bytes += tensor.nbytes
                    if on_progress is not None:
                        on_progress(done_bytes, total_bytes)
            save_file(tensors, directory / file_name, metadata={"format": "pt"})

        with ThreadPoolExecutor(_WRITERS) as pool:
            try:
                list(pool.map(write, *zip(*split.filename_to_tensors.items(), strict=True)))
            finally:
                stopped.set()  # of the others where one has failed, or somebody has no time
                pool.shutdown(cancel_futures=True)
        if split.is_sharded:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": split.tensor_to_filename}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return target
