"""Sessions: what was read stays read when a conversation, or a server, goes on in another process."""

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from offload_runtime import Conversation, Runtime, Scheduler
from offload_runtime.config import SpeculationOptions
from offload_runtime.engine.sessions import session_files
from offload_runtime.errors import ContextLengthError, SessionError, StorageError
from tests.helpers.engine import load, write_checkpoint
from tests.helpers.server import MODEL, serving

TARGET, CONTEXT = "two_layer_target", 900
LONG = "the quick brown fox jumps over the lazy dog, " * 30
TRIFORCE = SpeculationOptions("triforce", budget_tokens=96, chunk_size=8, gamma_draft=4)
SETUPS: dict[str, dict[str, Any]] = {
    "device": {"draft": "ngram", "kv": "gpu"},
    "host": {"draft": "ngram", "kv": "host", "resident_layers": 1},
    "tree": {"kv": "gpu", "resident_layers": 1},
    "triforce": {"kv": "host", "speculation": TRIFORCE},
    "streaming draft": {"kv": "gpu", "speculation": SpeculationOptions(draft_cache="streaming", recent_tokens=128)},
    "retrieval draft": {"kv": "gpu", "speculation": SpeculationOptions(draft_cache="retrieval", budget_tokens=128)},
    "two cards": {"draft": "none", "kv": "host", "device": "cpu,cpu", "resident_layers": 2},
}
loaded = partial(Runtime.load, context=CONTEXT)
Answer = tuple[list[int], Any, int]  # its tokens, the logits behind them as far as they tell, and what was not read


def say(conversation: Conversation, text: str, **options: Any) -> Answer:
    asked = {"max_new_tokens": 12, "temperature": 0.8, "seed": 3, "logprobs": 5, "ignore_eos": True, **options}
    reply = conversation.say(text, **asked)
    for _ in reply:
        pass
    return reply.result.tokens, reply.logprobs, reply.result.stats.kept_tokens


def begin(runtime: Runtime) -> Conversation:
    """A conversation of two turns and two to three blocks."""
    conversation = runtime.conversation("be brief")
    for text in (LONG, "a link, a layer"):
        say(conversation, text)
    assert conversation.num_tokens > 600
    return conversation


def blocks(path: Path) -> dict[str, int]:
    """The bytes of a session's blocks, by their names."""
    return {file.name: file.stat().st_size for file in Path(f"{path}.kv").glob("*.kv")}


def check_goes_on(target: Path, path: Path, **options: Any) -> None:
    """In the same runtime and in another one answers are bit for bit what they would have been, and read as little."""
    with loaded(target, **options) as runtime:
        conversation = begin(runtime)
        conversation.save(path)
        expected = [say(conversation, text) for text in ("and then?", "and now?")]
        other = runtime.conversation()
        say(other, "what does a slot hold?")
        other.load(path)
        assert say(other, "and then?") == expected[0]
        messages = other.messages
        other.save(path)
    with loaded(target, **options) as runtime:
        later = runtime.load_conversation(path)
        state = runtime.engine.drafter.draft_state
        if state is not None and state.streaming is None:
            draft = runtime.engine.draft
            assert draft is not None and draft.runner.cache.length(0) > 600
        assert later.messages == messages
        assert say(later, "and now?") == expected[1]
    assert expected[0][2] > 600


@pytest.mark.few(2)
@pytest.mark.parametrize("setup", SETUPS)
def test_a_loaded_session_goes_on_as_if_it_had_never_ended(
    target: Path, draft: Path, tmp_path: Path, setup: str
) -> None:
    check_goes_on(target, tmp_path / "chat.json", **{"draft": draft, "device": "cpu", **SETUPS[setup]})


@pytest.mark.few(1)
@pytest.mark.parametrize("setup", ["device", "host"])
def test_a_session_behind_sliding_windows_goes_on(windowed_target: Path, tmp_path: Path, setup: str) -> None:
    check_goes_on(windowed_target, tmp_path / "chat.json", **{"device": "cpu", **SETUPS[setup]})


@pytest.mark.gpu
@pytest.mark.parametrize("setup", [setup for setup in SETUPS if setup != "two cards"])
def test_a_loaded_session_goes_on_on_a_gpu(target: Path, draft: Path, tmp_path: Path, setup: str) -> None:
    options = {"draft": draft, "device": "cuda", "dtype": "bf16", **SETUPS[setup]}
    check_goes_on(target, tmp_path / "chat.json", **options)


@pytest.fixture(scope="module")
def runtime(target: Path) -> Iterator[Runtime]:
    with load(target, draft="none", context=CONTEXT) as runtime:
        yield runtime


def test_saving_again_writes_what_is_new(runtime: Runtime, tmp_path: Path) -> None:
    path, conversation = tmp_path / "chat.json", begin(runtime)
    conversation.save(path)
    first, times = blocks(path), {file: file.stat().st_mtime_ns for file in Path(f"{path}.kv").glob("*.kv")}
    assert len(first) == 3
    say(conversation, "and then?")
    conversation.save(path)
    assert len(first.keys() & blocks(path).keys()) == 2 and len(blocks(path)) == 3  # the open block is another one
    kept = [file for file in times if file.exists()]
    assert all(file.stat().st_mtime_ns == times[file] for file in kept)
    # What another call has driven out of the cache is on the disk, and stays.
    runtime.generate("something else", max_new_tokens=1)
    conversation.save(path)
    assert kept and all(file.exists() for file in kept)
    assert runtime.load_conversation(path).num_tokens == conversation.num_tokens
    # What has never been saved is read again, by the tokens that it was.
    other, before = tmp_path / "other.json", conversation.num_tokens
    conversation.save(other)
    assert not blocks(other)
    later = runtime.conversation()
    assert later.load(other) == 0 and later.num_tokens == before
    assert say(later, "and now?")[0] == say(conversation, "and now?")[0]
    conversation.reset()
    conversation.save(path)
    assert not blocks(path) and runtime.load_conversation(path).messages == conversation.messages


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def put(path: Path, new: str, old: str) -> None:
    path.write_text(path.read_text().replace(old, new))


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a byte": (lambda path, block: flip(block), "checksum"),
    "cut": (lambda path, block: os.truncate(block, block.stat().st_size - 1), "bytes of"),
    "missing": (lambda path, block: block.unlink(), "missing"),
    "no file": (lambda path, block: block.rename(block.parent.parent / "x") and block.mkdir(), "bytes of"),
    "another's": (lambda path, block: block.write_bytes(min(block.parent.glob("*.kv")).read_bytes()), "checksum"),
    "tokens": (lambda path, block: put(path, '"tokens": "1 ', '"tokens": "'), "damaged"),
    "no kind": (lambda path, block: put(path, '"x"', '"made_with"'), "damaged"),
    "a word": (lambda path, block: put(path, "be long", "be brief"), "damaged"),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_refused_and_costs_nothing(runtime: Runtime, tmp_path: Path, damage: str) -> None:
    path, conversation = tmp_path / "chat.json", begin(runtime)
    conversation.save(path)
    say(conversation, "and then?")
    work, message = DAMAGES[damage]
    work(path, max(Path(f"{path}.kv").glob("*.kv")))
    before, held = conversation.to_json(), conversation.num_tokens
    remedy = "(delete .*chat.json.kv|take `session` and `earlier` out of it) to have its messages read again"
    with pytest.raises(SessionError, match=f"{message}.*{remedy}"):
        conversation.load(path)
    assert conversation.to_json() == before
    assert say(conversation, "and now?")[2] == held - 1  # its keys and values, too


def test_another_model_dtype_or_length_is_refused(runtime: Runtime, target: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    begin(runtime).save(path)
    other = write_checkpoint(tmp_path / "other", seed=9, num_layers=2, context=CONTEXT)
    for model, options, error, message in (
        (other, {}, SessionError, "another model .*two_layer_target"),
        (target, {"dtype": "bf16"}, SessionError, "another dtype .float32, and here it is bfloat16"),
        (target, {"context": 300}, ContextLengthError, "raise --context"),
    ):  # fmt: skip
        with load(model, **{"draft": "none", "context": CONTEXT, **options}) as wrong:
            conversation = wrong.conversation()
            say(conversation, "the fox")
            before = conversation.to_json()
            with pytest.raises(error, match=message):
                conversation.load(path)
            assert conversation.to_json() == before and say(conversation, "fox")[2] > 0


def test_a_full_disk_keeps_the_old_session(runtime: Runtime, tmp_path: Path) -> None:
    path, conversation = tmp_path / "chat.json", begin(runtime)
    conversation.save(path)
    before = conversation.num_tokens
    say(conversation, "and then?")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="choose another place"):
            conversation.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert runtime.load_conversation(path).num_tokens == before
    conversation.save(path)
    assert runtime.load_conversation(path).num_tokens == conversation.num_tokens


@contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """Another process that works until it is killed, or the block ends."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_two_processes_do_not_share_a_session(runtime: Runtime, tmp_path: Path) -> None:
    path, conversation = tmp_path / "chat.json", begin(runtime)
    conversation.save(path)
    ready, is_held = os.pipe()

    def hold() -> None:
        with session_files(path):
            os.write(is_held, b"!")
            time.sleep(60)

    with forked(hold):
        assert os.read(ready, 1) == b"!"
        for work in (conversation.save, conversation.load):
            with pytest.raises(StorageError, match="in use by another process"):
                work(path)
    with session_files(path):  # of one chat that is one
        conversation.save(path)
        conversation.load(path)


@pytest.mark.slow
def test_who_is_killed_leaves_a_whole_session(runtime: Runtime, tmp_path: Path) -> None:
    path, chance = tmp_path / "chat.json", random.Random(5)
    conversation = begin(runtime)
    conversation.save(path)
    tokens = conversation.num_tokens

    def work(is_saved: int) -> None:
        for number in count():
            if number % 2 == 0:
                later = runtime.load_conversation(path)
            say(later, "fox", max_new_tokens=2)
            later.save(path)
            os.write(is_saved, b"!")
            if later.num_tokens > CONTEXT - 60:  # and shorter again
                conversation.save(path)
                later = conversation

    seen = set()
    for _ in range(6):
        has_saved, is_saved = os.pipe()
        with forked(partial(work, is_saved)), os.fdopen(has_saved, "rb") as saved:
            os.close(is_saved)
            assert saved.read(1) == b"!"
            time.sleep(chance.uniform(0.0, 0.2))
        later = runtime.load_conversation(path)
        seen.add(later.num_tokens)
        assert later.num_tokens >= tokens
        later.save(path)
        assert not list(tmp_path.rglob("*.part"))
        if later.num_tokens > CONTEXT - 60:
            conversation.save(path)
    assert len(seen) > 1


# --- a server


def ask(url_of: Any, *texts: str) -> tuple[str, int]:
    """What is answered behind a conversation, and how many tokens of it were not read."""
    messages: Any = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate((LONG, *texts))]
    answer = url_of.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    (choice,) = answer.to_dict()["choices"]
    return choice["message"]["content"], choice["x_stats"]["kept_tokens"]


@pytest.mark.few(1)
@pytest.mark.parametrize("kv", ["gpu", "host"])
def test_a_server_that_is_started_again_reads_nothing_again(target: Path, draft: Path, tmp_path: Path, kv: str) -> None:
    options = {"kv": kv, "context": CONTEXT, "max_batch": 1, "draft": draft}
    with serving(target, load_options=options, sessions=tmp_path / "kept") as served:
        first = ask(served)
        other = served.chat(messages=[{"role": "user", "content": LONG[5:]}]).json()["choices"][0]  # drives that out
        expected = ask(served, first[0], "and?")
    assert first[1] == 0 and expected[1] == 512 and other["x_stats"]["kept_tokens"] < 256
    kept = list((tmp_path / "kept").glob("*.kv"))
    assert len(kept) == 2 * 4  # of target and draft, of either text
    with serving(target, load_options=options, sessions=tmp_path / "kept") as served:
        state = served.runtime.engine.drafter.draft_state
        assert ask(served, first[0], "and?") == expected and state is not None
        with pytest.raises(StorageError, match="in use"), load(target, context=64) as runtime:
            Scheduler(runtime, sessions=tmp_path / "kept")
    for file in kept:
        flip(file)
    with serving(target, load_options=options, sessions=tmp_path / "kept") as served:
        assert ask(served, first[0], "and?") == (expected[0], 0)
        served.chat(messages=[{"role": "user", "content": LONG[5:]}])  # damaged as well, and read again
    for tokens in (256, 512):  # the block behind the one that was damaged stayed, was found damaged, and is new then
        with serving(target, load_options=options, sessions=tmp_path / "kept") as served:
            assert ask(served, first[0], "and?") == (expected[0], tokens)


def test_a_server_reads_again_what_windows_reach_of_a_damaged_block(windowed_target: Path, tmp_path: Path) -> None:
    """The block before it is there, but not what the windows behind it reach."""
    options, answers = {"context": CONTEXT, "max_batch": 1, "draft": "none"}, list[tuple[str, int]]()
    for _ in range(2):
        with serving(windowed_target, load_options=options, sessions=tmp_path) as served:
            answers.append(ask(served))
        flip(max(tmp_path.glob("*.kv"), key=lambda file: file.stat().st_size))  # the one that is whole
    assert answers == [(answers[0][0], 0)] * 2
    with serving(windowed_target, load_options=options, sessions=tmp_path) as served:
        assert ask(served)[0] == answers[0][0]
