"""Sessions: conversations on disk, with keys and values, so that nothing is read again that was read before.

FILE has the messages and the tokens that they are, and the directory FILE.kv its blocks. A save adds the blocks that
are new, then replaces FILE, then deletes what nobody needs any more: whenever a process is killed, the old session or
the new one is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.cache.saved_blocks import BlockFiles
from offload_runtime.engine.prefix_cache import SavedCache
from offload_runtime.errors import ContextLengthError, OptionError, SessionError
from offload_runtime.files import delete_leftovers, regular_file, write_atomically
from offload_runtime.options import require, require_unicode

_REMEDY = "nothing was changed, choose another place"
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class SavedText:
    """Holds what a session has besides the messages.

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
    """Open the blocks of the session in a file, which no other process may write or read meanwhile.

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
    path: Path, conversation: Mapping[str, Any], saved: SavedText, caches: Mapping[str, SavedCache], *, slot: int,
    held: int,
) -> None:  # fmt: skip
    """Save a conversation, and what caches hold of it.

    Args:
        path: Its file.
        conversation: The messages, as `Conversation.to_json` gives them.
        saved: What they are to the model.
        caches: By `SavedCache.of`.
        slot: Of the caches.
        held: Tokens that the target's cache has there.

    Raises:
        StorageError: It cannot be written, or is in use; what was saved before is there as it was.
    """
    tokens, held_by, needed = saved.tokens, dict[str, int](), list[str]()
    with session_files(path) as files:
        for name, cache in caches.items():
            own = cache.num_held(slot, tokens if cache.draft_state is not None else tokens[:held])
            stored = cache.find(files, tokens, saved.prompt_tokens)
            count = max(own, len(stored) * BLOCK_TOKENS)  # where another call has used the cache since
            blocks = cache.blocks(files, tokens[:count], saved.prompt_tokens, slot, own)
            cache.save(files, slot, blocks, count)
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
    """Return the checksum of a record, of which its own is no part."""
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
    """Return what a file says, which no other process changes meanwhile where there is a directory of blocks.

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
    """Return what a file says, without the blocks.

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
    """Return the messages of a conversation that was saved. Raises `OptionError`."""
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
        caches: By `SavedCache.of`.

    Raises:
        SessionError: It is damaged, or of another model, dtype, type of GPU or version.
        ContextLengthError: The runtime was loaded for fewer tokens.

    Attributes:
        saved: What the messages are to the model.
        held_tokens: Of these tokens, those that need not be read again.
    """

    def __init__(
        self, path: Path, record: Mapping[str, Any], files: BlockFiles, caches: Mapping[str, SavedCache]
    ) -> None:  # fmt: skip
        self._files, self._remedy = files, f"delete {_directory(path.resolve())} to have its messages read again"
        session, made = record["session"], caches["target"].made_with
        _require_whole(path, record)
        was = session["made_with"]
        self._require(was["model"] == made["model"], f"{path} was saved with another model ({session['name']})")
        for name in (name for name in made if name != "model"):
            differs = f"another {name} ({was.get(name, 'none')}, and here it is {made[name]})"
            self._require(was.get(name) == made[name], f"{path} was saved with {differs}")
        self.saved = _saved_text(session)
        tokens = self.saved.tokens
        capacity = caches["target"].model.runner.cache.capacity_tokens
        if len(tokens) > capacity:
            raise ContextLengthError(f"{path} has {len(tokens)} tokens and the context {capacity}: raise --context")
        # Of each cache as many leading tokens as it was saved with; a draft that is another one reads them itself.
        self.held_tokens = session["held"]["target"]
        self._caches = list[tuple[SavedCache, Sequence[int], list[str]]]()
        for name, cache in caches.items():
            own = tokens[: session["held"].get(name, 0)]
            names = cache.names(files, own, self.saved.prompt_tokens)
            is_there = files.find(names) == len(names)
            self._require(is_there or cache.draft_state is not None, f"blocks of {path} are missing")
            if is_there and len(own) <= cache.model.runner.cache.capacity_tokens:
                self._caches.append((cache, own, names))

    def verify(self) -> None:
        """Raise `SessionError` unless every block is whole: before anything is given up for it."""
        with self._refusing():
            for cache, _, names in self._caches:
                for _ in self._files.read(names, cache.layouts):
                    pass

    def restore(self, slot: int) -> None:
        """Bring the caches to it, in an empty slot. Raises as `verify`."""
        with self._refusing():
            for cache, tokens, names in self._caches:
                cache.restore(self._files, slot, tokens, names)

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
    """Return whether a file is from elsewhere, so that nothing is known of what its messages are to a model."""
    return record.keys().isdisjoint(("session", "earlier"))


def has_blocks(path: Path, record: Mapping[str, Any]) -> bool:
    """Return whether a file has more than messages and their tokens: one from elsewhere, or whose blocks were deleted,
    does not."""
    return "session" in record and any(_directory(path.resolve()).glob("*.kv"))


def text_without_blocks(path: Path, record: Mapping[str, Any], target: SavedCache) -> tuple[str, tuple[int, ...]]:
    """Return what a session without blocks has been to the model, and its tokens; nothing where that was another model.
    Raises `SessionError` if it is damaged."""
    _require_whole(path, record)
    if record["session"]["made_with"]["model"] != target.made_with["model"]:
        return "", ()
    saved = _saved_text(record["session"])
    return saved.text, saved.tokens
