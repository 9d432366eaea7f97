"""Sessions: keys and values on disk, so that nothing is read again that was read before.

Of a conversation FILE has the messages and the tokens that they are, and the directory FILE.kv its blocks. A save adds
the blocks that are new, then replaces FILE, then deletes what nobody needs any more: whenever a process is killed, the
old session or the new one is whole. A server has blocks alone, of all prompts in one directory.

Kept are the target's blocks, and the draft's where its cache holds all of a text. What a retrieval verifier knows of
chunks is made anew of each block as it comes; a streaming draft reads the few tokens that it holds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.cache import BlockFiles, BlockLayout, block_names
from offload_runtime.cache.saved_blocks import first_whole_block, num_restorable
from offload_runtime.engine.load_model import LoadedModel
from offload_runtime.errors import BudgetError, ContextLengthError, OptionError, SessionError, StorageError
from offload_runtime.files import delete_leftovers, regular_file, write_atomically
from offload_runtime.options import require, require_unicode
from offload_runtime.plan import RunPlan
from offload_runtime.runners import DraftKVState
from offload_runtime.sizes import GB
from offload_runtime.weights import CheckpointSource

# To be raised with every change by which the target's keys and values get other bits: what was saved before is refused.
_ARITHMETIC = 1
# What a server's blocks may take where nobody says how much.
_SERVER_BYTES = 64 * GB
_REMEDY = "nothing was changed, choose another place"
_ROLES = ("system", "user", "assistant")


def made_with(source: CheckpointSource, model: LoadedModel) -> dict[str, str]:
    """All that the bits of a model's keys and values depend on besides the tokens.

    Raises:
        CheckpointError: The model's files cannot be read any more.
    """
    device, cpu = model.rope.device, torch.backends.cpu.get_cpu_capability()
    return {
        "model": source.fingerprint,
        "dtype": str(model.plan.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU with {cpu}",
        "arithmetic": f"{_ARITHMETIC}, torch {torch.__version__}",
    }  # fmt: skip


def _opened(source: Any) -> CheckpointSource:
    assert isinstance(source, CheckpointSource), "a runtime that is loaded has opened its checkpoints"
    return source


@dataclass(frozen=True)
class SessionCache:
    """A model's cache, whose blocks go to files and come from there.

    Attributes:
        model: Whose it is.
        source: Its checkpoint.
        made_with: All that its keys and values depend on, besides tokens and frequencies.
        draft_state: What it holds, of a draft's; None of the target's.
        locks: Whether memory may be page-locked for blocks on their way.
    """

    model: LoadedModel
    source: CheckpointSource
    made_with: Mapping[str, str]
    draft_state: DraftKVState | None = None
    locks: bool = False

    def blocks(self, files: BlockFiles, tokens: Sequence[int], prompt_tokens: int) -> dict[str, BlockLayout]:
        """What the blocks of a text are called, whose prompt had so many tokens, and what is in them: the open one and
        those that its windows reach are whole, and others where they are there so alone."""
        # A draft's cache keeps all of its layers.
        first_whole = first_whole_block(self.model.config, len(tokens)) if self.draft_state is None else 0
        config, dtype = self.model.config, self.model.plan.dtype
        layouts = [BlockLayout.of(config, dtype, whole=one, locks=self.locks) for one in (False, True)]
        found = dict[str, BlockLayout]()
        for block, (name, other) in enumerate(self._names(tokens, prompt_tokens)):
            whole = block >= first_whole or (name in files and other not in files)
            found[name if whole else other] = layouts[whole]
        return found

    def num_stored(self, files: BlockFiles, tokens: Sequence[int], prompt_tokens: int) -> int:
        """How many leading blocks of a text are there and bring it back."""
        names = self._names(tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS], prompt_tokens)
        there = takewhile(lambda pair: pair[0] in files or pair[1] in files, names)
        return num_restorable(self.model.config, [name in files for name, _ in there])

    def _names(self, tokens: Sequence[int], prompt_tokens: int) -> list[tuple[str, str]]:
        """What each block of a text is called where it is whole, and where it is not."""
        # How a draft was rotated changes no token.
        frequencies = self.model.rope.frequency_set(prompt_tokens) if self.draft_state is None else 0
        kind = f"{json.dumps(self.made_with)} {frequencies}"
        return list(zip(block_names(kind, tokens), block_names(f"{kind} without windows", tokens), strict=True))

    def save(self, files: BlockFiles, slot: int, blocks: Mapping[str, BlockLayout]) -> None:
        """Save those of a slot's blocks that are not there yet. Raises as `BlockFiles.save`."""
        self._synchronize()
        files.save(blocks, partial(self.model.runner.cache.save_block, slot))

    def restore(self, files: BlockFiles, slot: int, tokens: Sequence[int], blocks: Mapping[str, BlockLayout]) -> None:
        """Bring a slot, which holds whole blocks of these tokens or nothing, to all of them. What came before an error
        stays. Raises as `BlockFiles.read`, and `ContextLengthError`."""
        self._synchronize()  # what is queued for the slot would write over it
        cache = self.model.runner.cache
        cache.begin_restore(slot, len(tokens))
        try:
            for saved in files.read(dict(islice(blocks.items(), cache.length(slot) // BLOCK_TOKENS, None))):
                cache.restore_block(slot, saved, min(BLOCK_TOKENS, len(tokens) - cache.length(slot)))
        finally:
            if self.draft_state is not None:
                self.draft_state.restored(slot, tokens[: cache.length(slot)])

    def _synchronize(self) -> None:
        for device in self.model.runner.decoder.partition.devices:
            if device.type == "cuda":  # a draft has a stream of its own
                torch.cuda.synchronize(device)


def session_caches(
    plan: RunPlan, target: LoadedModel, draft: LoadedModel | None, draft_state: DraftKVState | None
) -> dict[str, SessionCache]:
    """The caches whose blocks sessions have: `target`, and `draft` where there is one. Raises as `made_with`."""
    source = _opened(plan.request.target)
    locks = target.rope.device.type == "cuda" and plan.request.pinned is None
    caches = {"target": SessionCache(target, source, made_with(source, target), locks=locks)}
    if draft is not None and draft_state is not None:
        source = _opened(plan.request.draft)
        made = made_with(source, draft) | {"cache": draft.plan.cache}
        caches["draft"] = SessionCache(draft, source, made, draft_state, locks)
    return caches


def prefix_files(directory: Path, most_bytes: int | None = None) -> BlockFiles:
    """The blocks of a server, which no other one may use meanwhile. Raises `StorageError`."""
    remedy = "choose another directory for --sessions"
    return BlockFiles(directory, remedy=remedy, most_bytes=most_bytes or _SERVER_BYTES)


class SavedPrefixes:
    """Blocks of all prompts that a server has read, in a directory. What cannot be written, or is damaged, is told to
    the log: a request is never refused for it.

    Args:
        files: Where they are.
        caches: Whose they are, by `session_caches`.
    """

    def __init__(self, files: BlockFiles, caches: Mapping[str, SessionCache]) -> None:
        self._files, self._caches = files, caches.values()

    def save(self, slot: int, tokens: Sequence[int], prompt_tokens: int) -> None:
        """Save whole blocks of a slot, of which the target's cache may hold the first tokens only."""
        for cache in self._caches:
            state, kv = cache.draft_state, cache.model.runner.cache
            held = min(kv.length(slot), len(tokens)) if state is None else state.num_held(slot, tokens)
            held = kv.keeps(slot, held // BLOCK_TOKENS * BLOCK_TOKENS)
            try:
                cache.save(self._files, slot, cache.blocks(self._files, tokens[:held], prompt_tokens))
            except (StorageError, BudgetError) as error:
                logging.getLogger(__name__).warning("%s", error)

    def restore(self, slot: int, prompt: Sequence[int]) -> None:
        """Bring a slot, which holds some of a prompt's first tokens, to all whole blocks that there are of it, but for
        its last token."""
        for cache in self._caches:
            state, kv = cache.draft_state, cache.model.runner.cache
            count = cache.num_stored(self._files, prompt[:-1], len(prompt))
            held = kv.length(slot) if state is None else state.num_held(slot, prompt)
            if not held < count * BLOCK_TOKENS <= kv.capacity_tokens:
                continue
            if state is not None:
                state.catch_up(slot, ())
            else:
                kv.truncate(slot, held // BLOCK_TOKENS * BLOCK_TOKENS)
            tokens = prompt[: count * BLOCK_TOKENS]
            blocks = cache.blocks(self._files, tokens, len(prompt))
            self._files.find(list(blocks))
            try:
                cache.restore(self._files, slot, tokens, blocks)
            except SessionError as error:
                logging.getLogger(__name__).warning("%s: it is deleted, and read again", error)
                self._files.delete([list(blocks)[kv.length(slot) // BLOCK_TOKENS]])
            except (StorageError, BudgetError) as error:
                logging.getLogger(__name__).warning("%s", error)


# --- conversations


@dataclass(frozen=True)
class SavedText:
    """What a session has besides the messages.

    Attributes:
        text: That the messages are, as far as the model has seen or said it.
        tokens: That this text is.
        prompt_tokens: Of the newest prompt, by which keys are rotated.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int


@contextmanager
def session_files(path: Path) -> Iterator[BlockFiles]:
    """The blocks of the session in a file, which no other process may write or read meanwhile.

    Raises:
        StorageError: It cannot be written, or is in use.
    """
    real = regular_file(path, remedy=_REMEDY)
    with BlockFiles(_directory(real), remedy=_REMEDY) as files:
        delete_leftovers(real)
        yield files


def _directory(real: Path) -> Path:
    return real.with_name(f"{real.name}.kv")


def save_session(
    path: Path, conversation: Mapping[str, Any], saved: SavedText, caches: Mapping[str, SessionCache], *, slot: int,
    held: int,
) -> None:  # fmt: skip
    """Save a conversation, and what caches hold of it.

    Args:
        path: Its file.
        conversation: The messages, as `Conversation.to_json` gives them.
        saved: What they are to the model.
        caches: By `session_caches`.
        slot: Of the caches.
        held: Tokens that the target's cache has there.

    Raises:
        StorageError: It cannot be written, or is in use; what was saved before is there as it was.
    """
    tokens, held_by, needed = saved.tokens, dict[str, int](), list[str]()
    with session_files(path) as files:
        for name, cache in caches.items():
            state = cache.draft_state
            count = held if state is None else state.num_held(slot, tokens)
            stored = cache.num_stored(files, tokens, saved.prompt_tokens)
            count = max(count, stored * BLOCK_TOKENS)  # where another call has used the cache since
            blocks = cache.blocks(files, tokens[:count], saved.prompt_tokens)
            cache.save(files, slot, blocks)
            held_by[name], needed = count, [*needed, *blocks]
        record = {**conversation, "session": {
            "name": Path(caches["target"].source.reference).name, "made_with": caches["target"].made_with,
            "text": saved.text, "tokens": " ".join(map(str, tokens)), "prompt_tokens": saved.prompt_tokens,
            "held": held_by,
        }}  # fmt: skip
        record["session"]["checksum"] = _checksum(record)
        write_atomically(path, json.dumps(record, indent=1), remedy=_REMEDY)
        files.delete_others(needed)


def _checksum(record: Mapping[str, Any]) -> str:
    """Of all but the checksum."""
    session = {name: value for name, value in record["session"].items() if name != "checksum"}
    content = json.dumps({**record, "session": session}, sort_keys=True)
    return blake2b(content.encode(), digest_size=16).hexdigest()


def _require_whole(path: Path, record: Mapping[str, Any]) -> None:
    """Raise `SessionError` unless a file is as it was written."""
    try:
        is_whole = bool(record["session"]["checksum"] == _checksum(record))
    except (KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        remedy = "take `session` and `earlier` out of it to have its messages read again as they are"
        raise SessionError(f"{path} is damaged, or was changed by hand: {remedy}")


@contextmanager
def reading_session(path: Path) -> Iterator[Any]:
    """What a file says, which no other process changes meanwhile where there is a directory of blocks.

    Raises:
        OptionError: As of `read_conversation`; StorageError: as of `session_files`.
    """
    record = read_conversation(path)
    if not _directory(path.resolve()).is_dir():
        yield record
        return
    with session_files(path):
        yield read_conversation(path)  # it may have been saved again before


def read_conversation(path: Path) -> Any:
    """What a file says, without the blocks.

    Raises:
        OptionError: It cannot be read, or is no saved conversation.
    """
    try:
        is_other = path.exists() and not path.is_file()  # one that may keep whoever reads it waiting
        record = None if is_other else json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror or error}") from error
    # Arrays nested thousands deep, integers of thousands of digits, a name with a NUL.
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is not a saved conversation: {error}") from error
    messages_of(record)
    return record


def messages_of(saved: Any) -> list[dict[str, str]]:
    """The messages of a conversation that was saved. Raises `OptionError`."""
    messages = saved.get("messages") if isinstance(saved, dict) else None
    if not isinstance(messages, list) or saved.get("version") != 1:
        raise OptionError("this is not a saved conversation: it needs version 1 and a list of messages")
    for number, message in enumerate(messages):
        fine = isinstance(message, dict) and message.get("role") in _ROLES
        fine = fine and isinstance(message.get("content"), str)
        require(fine, f"message {number} of the saved conversation has no role of {_ROLES} or no text")
        require_unicode(f"message {number} of the saved conversation", message["content"])
    return [{"role": message["role"], "content": message["content"]} for message in messages]


class SavedSession:
    """A conversation whose keys and values are there, and of this very run's kind.

    Args:
        path: Its file.
        record: What that says.
        files: Its blocks.
        caches: By `session_caches`.

    Raises:
        SessionError: It is damaged, or of another model, dtype, type of GPU or version.
        ContextLengthError: The runtime was loaded for fewer tokens.

    Attributes:
        saved: What the messages are to the model.
        held_tokens: Of these tokens, those that need not be read again.
    """

    def __init__(
        self, path: Path, record: Mapping[str, Any], files: BlockFiles, caches: Mapping[str, SessionCache]
    ) -> None:  # fmt: skip
        self._files, self._remedy = files, f"delete {_directory(path.resolve())} to have its messages read again"
        session, made = record["session"], caches["target"].made_with
        _require_whole(path, record)
        was = session["made_with"]
        self._require(was["model"] == made["model"], f"{path} was saved with another model ({session['name']})")
        for name in ("dtype", "device", "arithmetic"):
            differs = f"another {name} ({was[name]}, and here it is {made[name]})"
            self._require(was[name] == made[name], f"{path} was saved with {differs}")
        self.saved = _saved_text(session)
        tokens = self.saved.tokens
        capacity = caches["target"].model.runner.cache.capacity_tokens
        if len(tokens) > capacity:
            raise ContextLengthError(f"{path} has {len(tokens)} tokens and the context {capacity}: raise --context")
        # Of each cache as many leading tokens as it was saved with; a draft that is another one reads them itself.
        self.held_tokens = session["held"]["target"]
        self._caches = list[tuple[SessionCache, Sequence[int], dict[str, BlockLayout]]]()
        for name, cache in caches.items():
            own = tokens[: session["held"].get(name, 0)]
            blocks = cache.blocks(files, own, self.saved.prompt_tokens)
            is_there = files.find(list(blocks)) == len(blocks)
            self._require(is_there or cache.draft_state is not None, f"blocks of {path} are missing")
            if is_there and len(own) <= cache.model.runner.cache.capacity_tokens:
                self._caches.append((cache, own, blocks))

    def verify(self) -> None:
        """Raise `SessionError` unless every block is whole: before anything is given up for it."""
        for _, _, blocks in self._caches:
            with self._refusing():
                for _ in self._files.read(blocks):
                    pass

    def restore(self, slot: int) -> None:
        """Bring the caches to it, in an empty slot. Raises as `verify`."""
        for cache, tokens, blocks in self._caches:
            if cache.draft_state is not None:
                cache.draft_state.catch_up(slot, ())
            with self._refusing():
                cache.restore(self._files, slot, tokens, blocks)

    def _require(self, fine: bool, message: str) -> None:
        if not fine:
            raise SessionError(f"{message}: {self._remedy}")

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except SessionError as error:
            raise SessionError(f"{error}: {self._remedy}") from error


def _saved_text(session: Mapping[str, Any]) -> SavedText:
    return SavedText(session["text"], tuple(map(int, session["tokens"].split())), session["prompt_tokens"])


def has_messages_alone(record: Mapping[str, Any]) -> bool:
    """Whether a file is from elsewhere, so that nothing is known of what its messages are to a model."""
    return record.keys().isdisjoint(("session", "earlier"))


def has_blocks(path: Path, record: Mapping[str, Any]) -> bool:
    """Whether a file has more than messages and their tokens: one from elsewhere, or whose blocks were deleted, does
    not."""
    return "session" in record and any(_directory(path.resolve()).glob("*.kv"))


def text_without_blocks(
    path: Path, record: Mapping[str, Any], target: SessionCache
) -> tuple[str, tuple[int, ...]]:  # fmt: skip
    """What a session without blocks has been to the model, and its tokens; nothing where that was another model.
    Raises `SessionError` if it is damaged."""
    _require_whole(path, record)
    if record["session"]["made_with"]["model"] != target.made_with["model"]:
        return "", ()
    saved = _saved_text(record["session"])
    return saved.text, saved.tokens
