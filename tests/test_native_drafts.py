"""Heads as drafts: the target's tokens, whatever they propose, and proposals that are what the head says."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from offload_runtime import Runtime
from offload_runtime.core import Batch, DraftBudget
from offload_runtime.params import SamplingParams
from offload_runtime.runners.model_runner import ModelRunner
from offload_runtime.speculation.draft import Children
from offload_runtime.speculation.tree import ModelDrafter
from tests.helpers import native_drafts as natives
from tests.helpers.assembly import RUNNERS, make_runner, runner_of
from tests.helpers.dflash import counting_dflash2, dflash2_of
from tests.helpers.models import VOCAB_SIZE, random_model, random_tokens

PLAINLY, CHAIN, TREE = DraftBudget("plain", 0), DraftBudget("chain", 5), DraftBudget("tree", 8, tree_nodes=12)
AWARE = DraftBudget("tree", 8, tree_nodes=12, cost_aware=True)
NOISY = SamplingParams(temperature=0.8, seed=7)
KINDS = {"mtp": natives.mtp_of, "eagle3": natives.eagle_of}


def compare(decoding: natives.Decoding, head: ModelRunner, slot: int, text: list[int], *, start: int = 1) -> int:
    """What the head has said behind nodes of a tree that was begun behind this text, with what it should have said.
    Returns the depth of the deepest."""
    assert isinstance(decoding.drafter.draft, ModelDrafter)
    tree, paths, said = decoding.drafter.draft.trees[slot], list[list[int]](), list[Children]()
    for at, node in tree.nodes.items():
        if node.said is None:
            continue
        said.append(node.said)
        paths.append([])
        while at != tree.root:
            paths[-1].insert(0, tree.nodes[at].token)
            at = tree.nodes[at].parent
    logits = natives.logits_behind(decoding.target, head, text, paths, start=start)
    for children, own in zip(said, logits, strict=True):
        best = own.topk(len(children.tokens))
        assert children.tokens == best.indices.tolist()
        torch.testing.assert_close(torch.tensor(children.scores), best.values, rtol=1e-4, atol=1e-4)
    return max(map(len, paths))


def step_anew(decoding: natives.Decoding, head: ModelRunner, slot: int, *, start: int = 1) -> int:
    """A step with a tree that is begun anew, compared as `compare` does."""
    assert isinstance(decoding.drafter.draft, ModelDrafter)
    decoding.drafter.draft.trees.clear()
    text = list(decoding.texts[slot])
    decoding.step({slot: TREE})
    return compare(decoding, head, slot, text, start=start)


@pytest.mark.parametrize("kind", KINDS)
def test_children_are_what_the_head_says(kind: str) -> None:
    """Behind a prompt in pieces, and after rounds of trees, chains, plain tokens and what n-grams have said."""
    target = make_runner(random_model("llama-gqa"), capacity_tokens=400).runner
    head = natives.make_head(target, KINDS[kind])
    prompt = random_tokens(40) + random_tokens(30)
    drafter = natives.drafter_of(head)
    assert isinstance(drafter.draft, ModelDrafter)
    drafter.draft.runner.warm_up()
    assert not any(head.cache.length(slot) for slot in range(3))
    decoding, deepest = natives.Decoding.of(target, drafter, {0: prompt}), 0
    for before in ((), (CHAIN,), (PLAINLY, TREE), (DraftBudget("ngram", 4), CHAIN), (PLAINLY,) * 12):
        for budget in before:
            decoding.step({0: budget})
        deepest = max(deepest, step_anew(decoding, head, 0))
    assert deepest > 1


def test_a_head_begins_at_the_first_token_that_it_knows() -> None:
    """What another has read it has not, and never guesses; what it has read stays, however a text goes on."""
    target = make_runner(random_model("llama-gqa"), capacity_tokens=400).runner
    head = natives.make_head(target)
    prompt = random_tokens(50)
    target.forward(Batch(prompts={0: prompt[:30]}))  # as if a cache had brought it back
    decoding = natives.Decoding.of(target, natives.drafter_of(head), {0: prompt})
    for _ in range(3):
        step_anew(decoding, head, 0, start=31)
    for kept, behind, start in ((45, [5, 6, 7], 31), (20, random_tokens(20, seed=3), 1), (18, [9], 1)):
        text = decoding.leave(0)[:kept]
        if kept == 20:
            target.cache.truncate(0, 0)  # the whole text is read again
        state = decoding.drafter.draft_state
        assert state is not None
        first = state.first_needed(0, text + behind)
        target.cache.truncate(0, min(kept, target.cache.length(0), first))
        decoding.join({0: text + behind})
        for _ in range(2):
            step_anew(decoding, head, 0, start=start)


@pytest.fixture(params=["streamed", *[*RUNNERS][2:], "two cards"])
def target(request: pytest.FixtureRequest, tmp_path: Path, short_target: Path) -> Iterator[ModelRunner]:
    if request.param == "two cards":
        with Runtime.load(short_target, draft="none", device="cpu,cpu", resident_layers=2, max_batch=3) as runtime:
            yield runtime.engine.target.runner
        return
    made = runner_of(request.param, tmp_path, capacity_tokens=400)
    yield made.runner
    made.close()


def random_history(target: ModelRunner, head: ModelRunner, seed: int, *, least: int = 0) -> None:
    """Texts that begin, grow by all kinds of budgets, end and go on otherwise: their tokens are the target's own, and
    so many of each window of the head."""
    luck, budgets = random.Random(seed), [PLAINLY, CHAIN, TREE, TREE, DraftBudget("ngram", 6), AWARE]
    params = [natives.PLAIN, NOISY][seed % 2]
    prompts = {slot: random_tokens(luck.choice((1, 2, 40, 70)), seed=seed + slot) for slot in (0, 1)}
    wanted = {slot: natives.plainly(target, prompt, 16, params) for slot, prompt in prompts.items()}
    drafter = natives.drafter_of(head, seed=seed)
    decoding = natives.Decoding.of(natives.SlowRunner(target, drafter, luck.choice((0, 8))), drafter, {}, params)
    for _ in range(8):
        for slot in {0, 1} - {*decoding.texts}:
            if luck.random() < 0.7:
                decoding.join({slot: wanted[slot][: luck.randint(len(prompts[slot]), len(prompts[slot]) + 12)]}, params)
        running = {slot for slot in decoding.texts if len(decoding.texts[slot]) < len(wanted[slot])}
        if running:
            asked = {slot: luck.choice(budgets) for slot in sorted(running)}
            for slot, output in decoding.step(asked).items():
                assert {*output.proposal.sources} <= {head.decoder.config.name, "ngram"}
                assert len(output.path) >= least or not asked[slot].drafts or asked[slot].cost_aware
        for slot, text in [*decoding.texts.items()]:
            most = min(len(text), len(wanted[slot]))
            assert text[:most] == wanted[slot][:most]
            if luck.random() < 0.2 or most == len(wanted[slot]):
                decoding.leave(slot)
                kept = luck.randint(0, target.cache.length(slot))
                target.cache.truncate(slot, min(kept, len(prompts[slot]) - 1))


@pytest.mark.slow
def test_whatever_a_head_proposes_the_tokens_are_the_targets(target: ModelRunner) -> None:
    for seed, kind in enumerate((*KINDS.values(), dflash2_of)):
        for slot in range(3):
            target.cache.truncate(slot, 0)
        random_history(target, natives.make_head(target, kind), seed)


@pytest.mark.parametrize("seed", range(2))
def test_a_head_stays_right_whatever_happens(seed: int) -> None:
    """It reads what belongs before each token, in slots that texts come to and leave."""
    target = make_runner(natives.counting_target(), capacity_tokens=400).runner
    random_history(target, natives.make_head(target, change=natives.counting_head()), seed, least=4)


def test_texts_that_a_head_has_no_room_for_are_decoded_plainly() -> None:
    """Before they grow so long, and of what comes after them, nothing is lost."""
    target = make_runner(natives.counting_target(), capacity_tokens=400).runner
    head = natives.make_head(target, change=natives.counting_head(), capacity_tokens=256)
    decoding = natives.Decoding.of(target, natives.drafter_of(head), {})
    for length in (240, 300, 100):
        prompt = random_tokens(length, seed=length)
        expected = natives.plainly(target, prompt, 50)
        decoding.join({0: prompt})
        while (before := len(decoding.texts[0])) < length + 40:
            output = decoding.step({0: CHAIN if length % 100 else TREE})[0]
            assert "mtp" not in output.proposal.sources if before > 257 else len(output.path) > 3 or before > 240
        text = decoding.leave(0)
        assert text == expected[: len(text)]
        target.cache.truncate(0, 0)


@pytest.mark.parametrize("seed", range(2))
def test_a_drafter_of_blocks_is_believed_where_it_is_right(seed: int) -> None:
    target = make_runner(natives.counting_target(), capacity_tokens=400).runner
    head = natives.make_head(
        target, partial(dflash2_of, selector_top_k=VOCAB_SIZE, selector_rank=VOCAB_SIZE), change=counting_dflash2
    )
    random_history(target, head, seed, least=4)
