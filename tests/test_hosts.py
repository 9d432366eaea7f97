"""Layers of other machines, which are processes here, reached over loopback: the same tokens, what is refused, and what
happens when one of them is gone."""

import json
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch
import torch.distributed as dist

from offload_runtime.config import ServerConfig
from offload_runtime.core import Batch, TokenTree
from offload_runtime.engine import Conversation, Runtime
from offload_runtime.errors import HostError, OptionError
from offload_runtime.hardware import MachineProfile, profile_toml
from offload_runtime.hosts.link import BUSY, FAILED, MORE, PASS, Message, Orders
from offload_runtime.hosts.stage import RemoteStage, serve_passes
from offload_runtime.plan.hosts import parse_network
from offload_runtime.runners.model_runner import CapturedPasses, ModelRunner
from offload_runtime.server.app import Server
from offload_runtime.stream.copy_engine import CopyEngine
from offload_runtime.weights.part import part_of
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers.assembly import HostKV, in_memory, make_runner, same
from tests.helpers.engine import write_checkpoint
from tests.helpers.families import family_model
from tests.helpers.hosts import LOOPBACK, OtherRank, first_rank, free_port, rank_environment
from tests.helpers.models import random_model
from tests.test_cli_process import command, environment
from tests.test_hidden_states import DEVICES, play, random_passes
from tests.test_prefix_cache import say

TARGET = "deep_target"
TEXTS = ["the quick brown fox jumps over the lazy dog and the quick brown fox", "a link, a layer, a link, a", "on"]
LONG = "the quick brown fox jumps over the lazy dog and " * 16  # several pieces of a prompt


@pytest.fixture(scope="module")
def others() -> Iterator[list[OtherRank]]:
    other = OtherRank()
    yield [other]
    other.close()


@pytest.fixture(scope="module")
def third() -> Iterator[OtherRank]:
    other = OtherRank()
    yield other
    other.close()


@pytest.fixture
def doomed() -> Iterator[OtherRank]:
    """One that nobody else uses."""
    other = OtherRank()
    yield other
    other.close()


def tokens(runtime: Runtime, prompts: list[str], **options: Any) -> list[list[int]]:
    results = runtime.generate_batch(prompts, max_new_tokens=8, ignore_eos=True, **options)
    return [result.tokens for result in results]


def compare(others: list[OtherRank], target: Path, device: str = "cpu", **options: Any) -> None:
    """Answers of several ranks are those of one: greedy and sampled, short and long prompts, one after the other and at
    once, and a turn that goes on from what the slots hold."""

    def answers(runtime: Runtime) -> list[Any]:
        found: list[Any] = [tokens(runtime, TEXTS[:2], temperature=0.8, seed=3), tokens(runtime, [LONG, TEXTS[2]])]
        talk = runtime.conversation()
        for text in (TEXTS[0], TEXTS[1]):
            found.append("".join(talk.say(text, max_new_tokens=6, temperature=0.0)))
        return [*found, tokens(runtime, [TEXTS[0]], speculate=False)]

    with Runtime.load(target, device=device, max_batch=2, **options) as one:
        expected = answers(one)
    with first_rank(others, target, device=device, max_batch=2, **options) as several:
        assert strides_of(several) == 1
        assert answers(several) == expected
        assert several.engine.target.runner.captured is not None or device == "cpu"
    assert [one.ended() for one in others] == [""] * len(others)


@pytest.mark.slow
def test_two_ranks_say_what_one_says(others: list[OtherRank], target: Path) -> None:
    compare(others, target, draft="ngram")


@pytest.mark.gpu
def test_two_ranks_with_graphs_say_what_one_says(others: list[OtherRank], target: Path) -> None:
    """Both on one card."""
    compare(others, target, device="cuda:0", vram="4GB", dtype="bf16", draft="ngram", host_timeout_s=60.0)


@pytest.mark.slow
def test_trees_of_a_draft_over_three_ranks(
    others: list[OtherRank], third: OtherRank, target: Path, draft: Path
) -> None:
    compare([*others, third], target, draft=draft, tree_nodes=16, resident_layers=1, dtype="bf16")


@pytest.fixture(scope="module")
def slow_link(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A machine whose link is so slow that nothing else takes any time, and whose layers are then dealt out in
    strides."""
    return profile_with(1e-6, tmp_path_factory.mktemp("profiles"))


def profile_with(link_gbps: float, folder: Path) -> str:
    """A profile of a machine that is fast but for its link."""
    figures = MachineProfile(
        "slow", "made up", gpus=1, ram_bytes=1 << 40, gpu_name="CPU", vram_bytes=1 << 40, link_gbps=link_gbps,
        hbm_gbps=1e6, tflops={"fp32": 1e6},
    )  # fmt: skip
    (path := folder / "slow.toml").write_text(profile_toml(figures))
    return str(path)


@pytest.fixture(scope="module")
def sixteen_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "deeper", num_layers=16, context=4096)


def strides_of(runtime: Runtime) -> int:
    return len(runtime.engine.target.runner.decoder.config.strides)


@pytest.mark.slow
def test_a_faster_link_takes_more_strides(
    others: list[OtherRank], sixteen_layers: Path, tmp_path: Path, slow_link: str
) -> None:
    """The ring of the other rank is full in a quarter of the time."""
    theirs = {"profile": profile_with(4e-6, tmp_path)}
    options = {"draft": "none", "resident_layers": 0, "profile": slow_link}
    with first_rank(others, sixteen_layers, theirs=theirs, **options) as runtime:
        assert strides_of(runtime) == 3
    assert others[0].ended() == ""


KINDS = ["linear_attention", "full_attention"] * 2
HYBRID = {"num_hidden_layers": 4, "layer_types": KINDS}
# Of each family what is asked for, and what its configuration says; a head is made for those that name one.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "windows that slide in some layers": ("gemma3_text", {"draft": "ngram"}, {}),
    "other sizes in some layers": ("gemma4_text", {"draft": "ngram"}, {}),
    "parallel layers": ("cohere2", {"draft": "ngram", "kv": "host"}, {}),
    "states": ("qwen3_5_text", {"draft": "ngram"}, HYBRID),
    "states and KV on the host": ("qwen3_5_text", {"draft": "ngram", "kv": "host", "resident_layers": 1}, HYBRID),
    "experts": ("gpt_oss", {"draft": "ngram"}, {}),
    "MTP": ("qwen3_5_text", {"draft": "mtp", "gamma": 3, "tree_nodes": 0}, HYBRID),
    "EAGLE-3": ("llama", {"draft": "eagle3", "gamma": 4, "tree_nodes": 12}, {"num_hidden_layers": 4}),
    "DFlash": ("llama", {"draft": "dflash", "gamma": 4, "tree_nodes": 12}, {"num_hidden_layers": 4}),
}  # fmt: skip
# Those of which the most is elsewhere, over layers that are streamed in strides.
MANY = {"num_hidden_layers": 16, "layer_types": KINDS * 4}
IN_STRIDES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "states and KV on the host": ("qwen3_5_text", {"draft": "ngram", "kv": "host"}, MANY),
    "experts and states": ("qwen3_next", {"draft": "none", "expert_pool": 200_000}, MANY),
    "MTP": ("qwen3_5_text", {"draft": "mtp", "gamma": 3, "tree_nodes": 0}, MANY),
    "EAGLE-3": ("llama", {"draft": "eagle3", "gamma": 4, "tree_nodes": 12}, {"num_hidden_layers": 16}),
}  # fmt: skip
LONGER = [5 + (3 * i * i + i // 7) % 280 for i in range(300)]  # than a piece of a prompt, and a block


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strides"), [*((kind, 1) for kind in FAMILIES), *((kind, 2) for kind in IN_STRIDES)])
def test_families(others: list[OtherRank], tmp_path: Path, slow_link: str, kind: str, strides: int) -> None:
    """With prompts of which a part is in a slot already. Heads, whose windows are given, take as many passes, too: they
    read the same."""
    family, options, changes = FAMILIES[kind] if strides == 1 else IN_STRIDES[kind]
    theirs = {} if strides == 1 else {"resident_layers": 0, "profile": slow_link}
    target, options = written_family(tmp_path, family, changes, options["draft"]), {**options}
    if (head := tmp_path / "head").exists():
        options["draft"] = str(head)

    def answers(runtime: Runtime) -> Any:
        found = list[Any]()
        for prompts in ([[5, 9, 5, 9, 7, 5], LONGER], [LONGER[:200]], [[*LONGER[:70], 7, 8], [3]]):
            results = runtime.generate_batch(prompts, max_new_tokens=8, ignore_eos=True, temperature=0.7, seed=3)
            found += [(one.tokens, one.stats.passes if "gamma" in options else None) for one in results]
        return found

    with Runtime.load(target, device="cpu", max_batch=2, **options) as one:
        expected = answers(one)
    with first_rank(others, target, max_batch=2, **options, **theirs) as several:
        assert strides_of(several) == strides
        assert answers(several) == expected
    assert others[0].ended() == ""


def written_family(directory: Path, family: str, changes: dict[str, Any], draft: str) -> Path:
    """A model of a family, and a random head for it where that drafts."""
    from tests.helpers.dflash import config_of, random_tensors, settings, write_dflash
    from tests.helpers.engine import byte_level_tokenizer
    from tests.helpers.families import family_model
    from tests.helpers.heads import Eagle3, add_random_mtp

    model = family_model(family, 0, **changes)
    model.save_pretrained(directory / "target")
    byte_level_tokenizer(model.config.vocab_size).save_pretrained(directory / "target")
    if draft == "mtp":
        return add_random_mtp(directory / "target", directory / "with a head")
    if draft == "eagle3":
        Eagle3.of(model, taps=(1, 2, 4) if model.config.num_hidden_layers == 4 else (2, 6, 16)).write(
            directory / "head"
        )
    if draft == "dflash":
        stated = settings(open_checkpoint(directory / "target").config())
        write_dflash(directory / "head", stated, random_tensors(config_of(stated)))
    return directory / "target"


def turn(talk: Conversation, text: str) -> tuple[list[int], int]:
    """An answer's tokens, and how many of its prompt were not read."""
    reply = talk.say(text, max_new_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    list(reply)
    return reply.result.tokens, reply.result.stats.kept_tokens


def go_on(runtime: Runtime, path: Path, text: str) -> tuple[list[int], int]:
    """A turn of a conversation that comes from a file, and goes there again."""
    talk = runtime.load_conversation(path)
    said = turn(talk, text)
    talk.save(path)
    return said


def check_sessions(
    groups: Sequence[list[OtherRank]], target: Path, directory: Path, device: str = "cpu", *,
    profile: str | None = None, strides: int = 1, **options: Any,
) -> None:  # fmt: skip
    """A conversation that one machine has begun goes on with other ranks, and on one again, as it does on one alone:
    with the same tokens, of which as few are read again."""
    alone, shared = directory / "alone", directory / "shared"
    theirs = {} if profile is None else {"profile": profile, "resident_layers": 0}
    with Runtime.load(target, device=device, **options) as one:
        talk = one.conversation()
        turn(talk, LONG * 2)
        for path in (alone, shared):
            talk.save(path)
        for others in groups:
            expected = [go_on(one, alone, text) for text in TEXTS]
            assert expected[0][1] > 512
            with first_rank(others, target, device=device, **options, **theirs) as several:
                assert strides_of(several) == strides
                assert [go_on(several, shared, text) for text in TEXTS[:2]] == expected[:2]
            assert [rank.ended() for rank in others] == [""] * len(others)
            assert go_on(one, shared, TEXTS[2]) == expected[2]


@pytest.mark.slow
def test_sessions_go_from_one_machine_to_two_and_back(
    others: list[OtherRank], windowed_target: Path, tmp_path: Path
) -> None:
    check_sessions([others], windowed_target, tmp_path, draft="ngram")


@pytest.mark.gpu
def test_sessions_go_from_one_process_on_a_gpu_to_two_and_back(
    others: list[OtherRank], windowed_target: Path, tmp_path: Path
) -> None:
    """All on one card."""
    options: dict[str, Any] = {"device": "cuda:0", "vram": "4GB", "dtype": "bf16", "host_timeout_s": 60.0}
    check_sessions([others], windowed_target, tmp_path, draft="ngram", **options)


@pytest.mark.slow
def test_sessions_of_layers_in_strides(others: list[OtherRank], tmp_path: Path, slow_link: str) -> None:
    """Which lie elsewhere than on one machine, and in blocks where it has them."""
    family, options, changes = IN_STRIDES["MTP"]
    target = written_family(tmp_path, family, {**changes, "max_position_embeddings": 2048}, options["draft"])
    check_sessions([others], target, tmp_path, profile=slow_link, strides=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["states and KV on the host", "windows that slide in some layers", "MTP"])
def test_sessions_of_families(others: list[OtherRank], third: OtherRank, tmp_path: Path, kind: str) -> None:
    """Three ranks go on from what two have saved."""
    family, options, changes = FAMILIES[kind]
    if changes:
        changes = {"num_hidden_layers": 6, "layer_types": KINDS[:2] * 3}  # of which each rank has two
    target = written_family(tmp_path, family, {**changes, "max_position_embeddings": 2048}, options["draft"])
    check_sessions([others, [*others, third]], target, tmp_path, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "on_disk"), [("deep_target", False), ("windowed_target", True), ("states", True)])
def test_what_slots_lose_comes_back_to_all_ranks(
    others: list[OtherRank], request: pytest.FixtureRequest, tmp_path: Path, name: str, on_disk: bool
) -> None:
    """From memory, or from files that one machine has begun. Where the second of two layers has a window, the first
    rank, which has none, knows what that reaches."""
    one, two, options = LONGER * 2, LONGER[::-1], {"max_batch": 1, "draft": "none", "context": 900}
    prompts, changes = [one, two, one, one[:100], two, one[:300], [*one, 5]], {**HYBRID, "max_position_embeddings": 900}
    if name == "states":
        target = written_family(tmp_path, "qwen3_5_text", changes, "none")
    else:
        target = request.getfixturevalue(name)

    def answers(runtime: Runtime) -> list[tuple[list[int], int]]:
        store: dict[str, Any] = {"sessions": tmp_path / "kept"} if on_disk else {"prefix_cache_bytes": 1 << 30}
        with runtime.serving(**store) as engine:
            said = [say(runtime, engine, prompt) for prompt in prompts]
        return [(one.tokens, one.num_kept) for one in said]

    with Runtime.load(target, device="cpu", **options) as runtime:
        expected = [answers(runtime) for _ in range(2)][on_disk]
    assert expected[2][1] >= 512
    with first_rank(others, target, **options) as several:
        assert answers(several) == expected
    assert others[0].ended() == ""


class Reaching:
    """A stage that does something where it has some of a prompt, behind a stride, or when it has saved or restored a
    block."""

    def __init__(self, stage: Any, when: str, act: Callable[[], None]) -> None:
        self._stage, self._when, self._act = stage, when, act
        self.begin_restore = stage.begin_restore

    def _reach(self, when: str) -> None:
        if when == self._when:
            self._act()

    def run_stride(self, number: int, batch: Any, committed: Any, residuals: Iterator[Any]) -> Any:
        found = self._stage.run_stride(number, batch, committed, residuals)
        self._reach("stride")
        return found

    def run(self, batch: Any, committed: Any, residuals: Iterator[Any], num_kept: int) -> Any:
        def some() -> Iterator[Any]:
            for number, residual in enumerate(residuals):
                if number and batch.prompts:
                    self._reach("prefill")
                yield residual

        return self._stage.run(batch, committed, some(), num_kept)

    def save_block(self, slot: int, block: int, to: Any, *, length: int) -> None:
        self._stage.save_block(slot, block, to, length=length)
        self._reach("save")

    def restore_block(self, slot: int, saved: Any, count: int) -> None:
        self._stage.restore_block(slot, saved, count)
        self._reach("restore")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["prefill", "save", "stride"])
def test_a_session_outlives_a_rank(
    others: list[OtherRank], target: Path, sixteen_layers: Path, slow_link: str, tmp_path: Path, when: str
) -> None:
    """Whenever that is killed, which is named: what was saved last is whole, and others go on from it."""
    path, other, theirs = tmp_path / "chat", OtherRank(), dict[str, Any]()
    if when == "stride":
        target, theirs = sixteen_layers, {"profile": slow_link, "resident_layers": 0}
    with first_rank([other], target, draft="none", **theirs) as several:
        talk, runner = several.conversation(), several.engine.target.runner
        turn(talk, LONG)
        talk.save(path)
        runner.following = cast(Any, Reaching(runner.following, when, other.close))
        with pytest.raises(HostError, match="rank 1"):
            turn(talk, LONG * 2)
            assert when == "save"
            talk.save(path)
        assert other.process.poll() is not None
    with Runtime.load(target, device="cpu", draft="none") as one:
        talk = one.conversation()
        turn(talk, LONG)
        expected = turn(talk, TEXTS[0])
    with first_rank(others, target, draft="none") as several:
        assert turn(several.load_conversation(path), TEXTS[0]) == expected
    assert others[0].ended() == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "when"), [("states and KV on the host", "save"), ("windows that slide in some layers", "restore")]
)
def test_a_session_that_is_interrupted_leaves_all_ranks_alike(
    others: list[OtherRank], tmp_path: Path, kind: str, when: str
) -> None:
    """By Ctrl-C behind a block that only the others have. The talk goes on, and so does what was saved."""
    path, (family, options, changes) = tmp_path / "chat", FAMILIES[kind]
    target = written_family(tmp_path, family, {**changes, "max_position_embeddings": 2048}, options["draft"])
    with Runtime.load(target, device="cpu", **options) as one:
        talk = one.conversation()
        turn(talk, LONG * 2)
        talk.save(path)
        expected = [turn(talk, text)[0] for text in (TEXTS[0], LONG)]
    with first_rank(others, target, **options) as several:
        talk, runner = several.load_conversation(path), several.engine.target.runner
        assert turn(talk, TEXTS[0])[0] == expected[0]
        following = runner.following
        runner.following = cast(Any, Reaching(following, when, lambda: signal.raise_signal(signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            if when == "save":
                talk.save(tmp_path / "other")
            talk.load(path)
        runner.following = following
        assert turn(talk, LONG)[0] == expected[1]
        talk.load(path)
        assert turn(talk, TEXTS[0])[0] == expected[0]
    assert others[0].ended() == ""


REFUSED = [
    ({"draft": "self", "resident_layers": 0}, "--draft self"),
    ({"device": "cpu,cpu"}, "one card"),
    ({"interface": "nowhere"}, "nowhere is not an interface"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=str)
def test_what_ranks_do_not_do_is_refused_before_they_meet(target: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said), first_rank([], target, size=2, **options):
        pass


def test_an_interface_without_other_ranks_is_refused(target: Path) -> None:
    with pytest.raises(OptionError, match="does nothing for one machine"):
        Runtime.load(target, device="cpu", interface=LOOPBACK)


@pytest.mark.slow
def test_another_file_or_element_type_is_refused_and_named(
    others: list[OtherRank], target: Path, two_layer_target: Path
) -> None:
    for theirs, said in (
        ({"target": str(two_layer_target)}, "rank 1 .* has another file of the target"),
        ({"dtype": "bf16"}, "rank 1 .* has another element type .*: bf16, not fp32"),
    ):
        with pytest.raises(OptionError, match=said), first_rank(others, target, theirs=theirs):
            pass
        assert "rank 1" in others[0].ended()


@pytest.mark.slow
def test_a_share_of_states_alone_is_refused_by_name(others: list[OtherRank], third: OtherRank, tmp_path: Path) -> None:
    """The first of three ranks would have one of four layers."""
    target = written_family(tmp_path, "qwen3_5_text", HYBRID, "none")
    said = r"rank . .* has layers . to ., .* start fewer ranks"
    with pytest.raises(OptionError, match=said), first_rank([*others, third], target):
        pass
    assert "start fewer ranks" in others[0].ended() and "start fewer ranks" in third.ended()


@pytest.mark.slow
def test_layers_that_do_not_fit_there_are_refused_by_name(others: list[OtherRank], target: Path) -> None:
    with (
        pytest.raises(HostError, match=r"rank 1 .* has failed: .*--ram"),
        first_rank(others, target, theirs={"ram": 50_000_000}),
    ):
        pass
    assert "BudgetError" in others[0].ended()


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [0, 1, 99])
def test_an_interrupted_prompt_leaves_all_ranks_alike(others: list[OtherRank], target: Path, pieces: int) -> None:
    """Ctrl-C comes when so many pieces of the prompt have left for another rank, or it has read all of them: then its
    answer comes to nobody. The prompt goes on from what the slot holds."""
    said = {"max_new_tokens": 12, "temperature": 0.0}
    with Runtime.load(target, device="cpu", draft="ngram") as one:
        talk = one.conversation()
        expected = ["".join(talk.say(text, **said)) for text in (TEXTS[0], LONG)]
    with first_rank(others, target, draft="ngram") as several:
        talk = several.conversation()
        assert "".join(talk.say(TEXTS[0], **said)) == expected[0]
        runner = several.engine.target.runner
        following = runner.following
        assert following is not None
        runner.following = Interrupted(following, pieces)
        with pytest.raises(KeyboardInterrupt):
            "".join(talk.say(LONG, **said))
        runner.following = following
        assert "".join(talk.say(LONG, **said)) == expected[1]
    assert others[0].ended() == ""


class Interrupted:
    """A stage that gets some pieces of a pass, and of whose passes nobody waits for the end."""

    def __init__(self, stage: Any, pieces: int) -> None:
        self._stage, self._pieces = stage, pieces

    def run(self, batch: Any, committed: Any, residuals: Iterator[Any], num_kept: int) -> Any:
        def some() -> Iterator[Any]:
            for number, residual in enumerate(residuals):
                if number == self._pieces:
                    raise KeyboardInterrupt
                yield residual

        self._stage.run(batch, committed, some(), num_kept)
        raise KeyboardInterrupt


class End:
    """One end of a connection whose sends wait for their receiver, as gloo's do."""

    def __init__(self, out: SimpleQueue[Any], back: SimpleQueue[Any]) -> None:
        self._out, self._back, self.peer, self.group = out, back, 1, SimpleNamespace(lost=None)

    def send(self, kind: int, says: dict[str, Any], rows: Sequence[torch.Tensor] = ()) -> None:
        is_received = threading.Event()
        self._out.put((Message(kind, says, torch.cat([torch.empty(0, dtype=torch.uint8), *rows])), is_received))
        is_received.wait()

    beats = at_work = at_rest = nullcontext  # who waits here waits for ever

    def receive(self) -> Message:
        message, is_received = self._back.get()
        is_received.set()
        return message


@contextmanager
def served(parts: Sequence[ModelRunner]) -> Iterator[None]:
    """The runner of a model's first layers with those of the others behind it, each in a thread of its own."""
    with ExitStack() as stack:
        for one, behind in pairwise(parts):
            orders = stack.enter_context(neighbour(lambda link, runner=behind: serve_passes(link, runner)))
            stack.callback(orders.close)
            RemoteStage(orders, one)
        yield


@pytest.mark.parametrize("device", DEVICES)
def test_captured_parts_say_what_a_whole_model_says(device: dict[str, Any]) -> None:
    """Three of them, in passes over windows and trees of several sequences; on a GPU the second time most of these are
    replayed."""
    source, passes = in_memory(random_model("llama-gqa")), random_passes(3)[:12]
    layers, lengths = [range(2), range(2, 3), range(3, source.config().num_layers)], (40, 9, 1)
    whole, *parts = (
        make_runner(one, capacity_tokens=1600, **device) for one in (source, *(part_of(source, own) for own in layers))
    )
    expected = play(whole.runner, passes, lengths)
    with served([one.runner for one in parts]):
        for runner in (one.runner for one in parts):
            runner.captured = CapturedPasses(runner.decoder, runner.streamer, runner.cache, runner.rope)
        for _ in range(2 if device else 1):
            assert all(map(same, play(parts[0].runner, passes, lengths), expected))
    for one in parts:
        assert (one.runner.captured is not None and one.runner.captured.graphs.num_graphs > 3) or not device
        one.close()
    whole.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("host_kv", [None, HostKV()], ids=["KV here", "KV on the host"])
@pytest.mark.parametrize("layers", [[(0, 3), (1, 4), (2, 5)], [(0, 1, 4), (2, 3, 5)]], ids=["three", "two"])
def test_strides_say_what_a_whole_model_says(layers: list[tuple[int, ...]], host_kv: HostKV | None) -> None:
    """In passes over windows and trees of several sequences. One was given up between two strides, of which the other
    ranks hear by the next one."""
    source, passes = in_memory(family_model("llama", 1, num_hidden_layers=6)), random_passes(3)[:8]
    whole, *parts = (
        make_runner(one, capacity_tokens=400, buffers=2, host_kv=host_kv)
        for one in (source, *(part_of(source, own) for own in layers))
    )
    expected = play(whole.runner, passes, (300, 9, 1))[: len(passes)]
    with served([one.runner for one in parts]):
        first = parts[0].runner
        stage = first.following
        first.following = cast(Any, Reaching(stage, "stride", lambda: signal.raise_signal(signal.SIGINT)))
        for batch in (Batch(prompts={0: [5] * 70}), Batch(passes[0])):
            with pytest.raises(KeyboardInterrupt):
                first.forward(batch)
        first.following = stage
        assert all(map(same, play(first, passes, (300, 9, 1))[: len(passes)], expected))
    for one in (whole, *parts):
        one.close()


class Elsewhere:
    """Layers of other machines that do nothing, and note what a ring has brought by the time that rows are there."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine, self.brought_bytes = engine, list[int]()

    def run_stride(self, number: int, batch: Batch, committed: Any, residuals: Iterator[Any]) -> torch.Tensor:
        rows = torch.cat([*residuals])
        self._engine.drain()
        self.brought_bytes.append(self._engine.bytes_copied)
        return rows

    def run(self, batch: Any, committed: Any, residuals: Iterator[Any], num_kept: int) -> Any:
        return self.run_stride(0, batch, committed, residuals), []


def test_the_link_brings_a_ring_whenever_rows_are_elsewhere() -> None:
    """So of six layers in three strides, with two buffers, all come meanwhile, and of consecutive ones two."""
    source, found = in_memory(family_model("llama", 1, num_hidden_layers=12)), list[list[int]]()
    for layers in ((0, 1, 4, 5, 8, 9), range(6)):
        one = make_runner(part_of(source, layers), buffers=2)
        one.runner.following = stage = Elsewhere(one.engine)
        for _ in range(2):
            one.runner.forward(Batch({0: TokenTree((5,))}))
        layer_bytes = one.weights.block(0).nbytes
        found.append([nbytes // layer_bytes for nbytes in stage.brought_bytes])
        one.close()
    assert found == [[4, 6, 8, 10, 12, 14], [8, 14]]


@contextmanager
def neighbour(answer: Callable[[Any], None]) -> Iterator[Orders]:
    """Orders to a rank that does this with its end of a connection."""
    out, back = SimpleQueue[Any](), SimpleQueue[Any]()
    thread = threading.Thread(target=answer, args=(End(back, out),), daemon=True)
    thread.start()
    yield Orders(cast(Any, End(out, back)))
    thread.join()


def test_a_rank_is_heard_while_rows_wait_for_it() -> None:
    """That it is busy, and that it has failed with pieces of a prompt left."""
    found = list[int]()

    def fail(link: Any) -> None:
        found.append(len(link.receive().rows))
        link.send(BUSY, {})
        link.send(MORE, {})
        found.append(len(link.receive().rows))
        link.send(FAILED, {"error": "rank 1 has failed: no memory"})

    with neighbour(fail) as orders, pytest.raises(HostError, match="no memory"):
        orders.ask(PASS, {}, torch.ones(3), [torch.ones(2), torch.ones(1)])
    assert found == [3, 2]


def test_what_an_order_fails_by_that_was_given_up_is_told_to_the_next_one() -> None:
    is_asked = threading.Event()

    def fail(link: Any) -> None:
        link.receive()
        is_asked.wait()
        link.send(FAILED, {"error": "rank 1 has failed: no memory"})

    def parts(and_then: Callable[[], None]) -> Iterator[torch.Tensor]:
        and_then()
        yield torch.ones(1)

    with neighbour(fail) as orders:
        with pytest.raises(KeyboardInterrupt):
            orders.ask(PASS, {}, torch.ones(1), parts(lambda: signal.raise_signal(signal.SIGINT)))
        with pytest.raises(HostError, match="no memory"):
            orders.ask(PASS, {}, torch.ones(1), parts(is_asked.set))


@pytest.mark.slow
def test_a_command_that_is_another_rank_says_how_it_ends(target: Path, tmp_path: Path) -> None:
    """By a signal, which is heard while it waits for the first rank."""
    port = free_port()
    words = command("generate", "--target", str(target), "--prompt", "x", "--device", "cpu", "--interface", LOOPBACK)
    own = {**environment(tmp_path), **rank_environment(1, 2, port)}
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own) as other,
        first_rank([], target, size=2, port=port) as runtime,
    ):
        stream = runtime.stream(TEXTS[0], max_new_tokens=2000, ignore_eos=True)
        next(stream)
        other.send_signal(signal.SIGTERM)
        with pytest.raises(HostError, match=r"rank 1 .* has ended: it was stopped by SIGTERM"):
            list(stream)
        said, lines = other.communicate(timeout=60)
        assert (other.returncode, said) == (128 + signal.SIGTERM, "")
        assert "5 layers (5 to 9) on rank 1" in " ".join(lines.split())


@pytest.mark.slow
def test_a_rank_that_hangs(doomed: OtherRank, target: Path) -> None:
    """The answer ends with an error that names it, once the time-out is over, and so does every further one."""
    with first_rank([doomed], target, host_timeout_s=2.5) as runtime:
        stream = runtime.stream(TEXTS[0], max_new_tokens=2000, ignore_eos=True)
        next(stream)
        doomed.process.send_signal(signal.SIGSTOP)
        with pytest.raises(HostError, match=r"rank 1 .* not been heard from for 2.5 s"):
            list(stream)
        with pytest.raises(HostError, match="rank 1"):
            runtime.generate(TEXTS[1])


@pytest.mark.slow
def test_the_server_says_who_is_gone(doomed: OtherRank, target: Path) -> None:
    """To the request that was running, and to those that come later."""
    with (
        first_rank([doomed], target, host_timeout_s=5.0, max_batch=2) as runtime,
        Server(ServerConfig(port=0, grace_s=0.0)) as server,
        server.serving(runtime, "small"),
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        asked = {"messages": [{"role": "user", "content": TEXTS[0]}], "max_tokens": 4}
        assert client.post("/v1/chat/completions", json=asked).status_code == 200
        doomed.process.kill()
        for _ in range(2):
            answer = client.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 503
            assert "rank 1" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_server_goes_on_when_the_other_rank_is_there_again(target: Path, tmp_path: Path) -> None:
    """One that was killed, and then one that was started again beside it, as a machine is that was switched off. What
    slots hold is kept at the end. The store is here, as it is torchrun's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = {"target": str(target), "device": "cpu", "interface": LOOPBACK}
    words = command("serve", "--target", str(target), "--device", "cpu", "--interface", LOOPBACK, "--port", "0")
    words += ["--sessions", str(tmp_path / "kept")]
    own = {**environment(tmp_path), **rank_environment(0, 2, store.port, has_store=True)}
    asked = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 8, "temperature": 0.0}
    found, urls, others = list[str](), list[str](), list[OtherRank]()
    with subprocess.Popen([*words, "--grace", "0"], stderr=subprocess.PIPE, text=True, env=own) as first:
        assert first.stderr is not None
        try:
            for _ in range(3):
                others.append(OtherRank())
                others[-1].start(1, 2, store.port, has_store=True, **options)
                while "ready:" not in (line := next(first.stderr)):
                    urls += re.findall(r"(http\S+):", line)
                answer = httpx.post(f"{urls[0]}/v1/chat/completions", json=asked, timeout=60, trust_env=False)
                found.append(answer.json()["choices"][0]["message"]["content"])
                if len(others) == 1:
                    others[0].close()
                    answer = httpx.post(f"{urls[0]}/v1/chat/completions", json=asked, timeout=60, trust_env=False)
                    assert answer.status_code == 503
                    assert "rank 1" in answer.json()["error"]["message"]
            first.send_signal(signal.SIGTERM)
            assert first.wait(timeout=60) == 0
            assert others[2].ended() == ""
        finally:
            first.kill()
            for one in others:
                one.close()
    assert len(found) == 3 and len({*found}) == 1
    assert len(list((tmp_path / "kept").glob("*.kv"))) == 1


@pytest.mark.slow
def test_the_network_is_measured(tmp_path: Path) -> None:
    """Of each other rank, and what `plan` is to be told of it."""
    port, words = free_port(), command("profile", "--interface", LOOPBACK, "--json")
    own = [{**environment(tmp_path), **rank_environment(rank, 3, port)} for rank in range(3)]
    ranks = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=one) for one in own]
    said = [one.communicate(timeout=120)[0] for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0, 0] and said[1:] == ["", ""]
    record = json.loads(said[0])
    assert [one["rank"] for one in record["round_trips"]] == [1, 2]
    assert all(0 < seconds < 60 for one in record["round_trips"] for seconds in one["seconds"].values())
    assert parse_network(record["network"]) > 0
