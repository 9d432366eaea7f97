"""Lines of the packages to break on purpose, each with the tests that must see it: the list of `test_mutations`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One broken line.

    Attributes:
        name: What is wrong, in a few words.
        path: The file, from the root of the repository on.
        old: Text that occurs in it exactly once.
        new: What stands there instead.
        tests: Node ids of tests that must all fail then; the fastest that look at it.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


_STEP = "offload_runtime/speculation/step.py"
_TARGET = "offload_runtime/runners/model_runner.py"
_KV = "offload_runtime/cache"
_KERNELS = "kernels/offload_runtime_kernels"
_IDENTITY = ("tests/test_verify.py::test_generations_are_those_of_plain_decoding",)
_POSITIONS = "[start + depth for tree, start in zip(trees, starts, strict=True) for depth in tree.depths]"

MUTATIONS = (
    Mutation(
        "rollback: a cut on the device keeps a token too many",
        f"{_KV}/device.py",
        "self._lengths[slot] = length = self.keeps(slot, length)",
        "self._lengths[slot] = length = min(self.keeps(slot, length) + 1, self._lengths[slot])",
        ("tests/test_cache_histories.py::test_a_cut_and_what_is_written_behind_it",),
    ),
    Mutation(
        "slot reuse: chunks of the request that held a slot before stay retrieved",
        f"{_KV}/retrieval.py",
        "self.chunks.forget(slot)\n        self.recent[slot] = range(0)",
        "self.recent[slot] = self.recent[slot]",
        ("tests/test_scheduler.py::test_a_slot_that_is_used_again_is_as_good_as_new[triforce]",),
    ),
    Mutation(
        "rollback: an accepted path of a tree lands one place too far",
        f"{_KV}/device.py",
        "compact_rows(KVBlocks(data), sources[data.device], first)",
        "compact_rows(KVBlocks(data), sources[data.device], first + 1)",
        ("tests/test_cache_histories.py::test_a_path_of_a_tree",),
    ),
    Mutation(
        "rollback: what agrees behind a rejection is accepted",
        f"{_KERNELS}/window_steps.py",
        "accepted = (links.paths & ~found == 0) & goes_on[:, None]  # [B, n]",
        "accepted = matches & goes_on[:, None]",
        ("tests/kernels/test_window_steps.py::test_what_agrees_behind_a_difference_is_not_accepted[public]",),
    ),
    Mutation(
        "position: siblings of a tree do not share theirs",
        "offload_runtime/core.py",
        "positions += [start + depth for depth in tree.depths] + [-1] * padding",
        "positions += [*range(start, start + count)] + [-1] * padding",
        _IDENTITY,
    ),
    Mutation(
        "slot reuse: a buffer is filled again while its last user holds it",
        "offload_runtime/stream/queue.py",
        "        ring.held.append(buffer)\n",
        "        ring.held.append(buffer)\n        ring.idle.append(buffer)\n",
        ("tests/test_streaming.py::test_every_layer_arrives_intact_over_many_passes[1-resident0]",),
    ),
    Mutation(
        "mask: a prompt's token does not see itself",
        f"{_KERNELS}/attention.py",
        "visible = key_positions <= positions[..., None]",
        "visible = key_positions < positions[..., None]",
        ("tests/kernels/test_attention_cpu.py::test_matches_the_reference[dtype0-1]",),
    ),
    Mutation(
        "noise key: sequences of a batch share their noise",
        f"{_KERNELS}/gumbel_argmax.py",
        "philox4x32_reference((c0, c1, noise_id, c3), (seed[0], seed[1]))",
        "philox4x32_reference((c0, c1, c3, c3), (seed[0], seed[1]))",
        ("tests/kernels/test_gumbel_argmax.py::test_noise_takes_its_words_where_the_contract_says",),
    ),
    Mutation(
        "penalties: a row does not count the tokens of its own path",
        _TARGET,
        "found[at + above - 1] = tree.tokens[t]",
        "found[at + above - 1] = -1",
        ("tests/test_penalties.py::test_deep_windows_and_trees_count_the_tokens_of_their_own_paths[some]",),
    ),
    Mutation(
        "speculation: a proposal is held against the sample of the next place",
        _STEP,
        "if parent == last and token == samples[last + 1]:",
        "if parent == last and token == samples[last + 2 if last + 2 < len(samples) else last + 1]:",
        _IDENTITY,
    ),
    Mutation(
        "verify: a proposal too many is accepted",
        _STEP,
        "            last = node\n    return path\n",
        "            last = node\n"
        "    return [*path, *[node for node, parent in enumerate(proposal.parents) if parent == last][:1]]\n",
        _IDENTITY,
    ),
    Mutation(
        "noise: siblings of a tree have some of their own",
        _TARGET,
        _POSITIONS,
        _POSITIONS.replace("+ depth", "+ row").replace("depth in tree.depths", "row, _ in enumerate(tree.tokens)"),
        _IDENTITY,
    ),
)
