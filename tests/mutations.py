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
_OTHER_POSITIONS = {
    "noise of the next position, which is plain decoding's too": _POSITIONS.replace("+ depth", "+ depth + 1"),
    "noise of the place in the step": _POSITIONS.replace("start + depth", "depth"),
    "siblings of a tree have noise of their own":
        _POSITIONS.replace("+ depth", "+ row").replace("depth in tree.depths", "row, _ in enumerate(tree.tokens)"),
}  # fmt: skip

MUTATIONS = (
    Mutation(
        "rollback: a cut on the device keeps a token too many",
        f"{_KV}/device.py",
        "self._lengths[slot] = length = self.keeps(slot, length)",
        "self._lengths[slot] = length = min(self.keeps(slot, length) + 1, self._lengths[slot])",
        ("tests/test_cache_histories.py::test_a_cut_and_what_is_written_behind_it",),
    ),
    Mutation(
        "rollback: a cut in host memory does not bring back all that the ring had let go of",
        f"{_KV}/host.py",
        "missing = range(lowest, min(",
        "missing = range(lowest + 1, min(",
        ("tests/test_cache_histories.py::test_a_cut_behind_what_the_ring_holds[700]",),
    ),
    Mutation(
        "slot reuse: chunks of the request that held a slot before stay retrieved",
        f"{_KV}/retrieval.py",
        "self.chunks.forget(slot)\n        self.recent[slot] = range(0)",
        "self.recent[slot] = self.recent[slot]",
        ("tests/test_scheduler.py::test_a_slot_that_is_used_again_is_as_good_as_new[triforce]",),
    ),
    Mutation(
        "slot reuse: a draft takes a new text for the one that held its slot before",
        "offload_runtime/runners/draft_kv.py",
        'until the next one does."""\n        self._agreed[slot] = 0',
        'until the next one does."""\n        self._agreed[slot] += 0',
        ("tests/test_scheduler.py::test_a_slot_that_is_used_again_is_as_good_as_new[chain]",),
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
        "position: nodes of a tree take the noise of the place before theirs",
        _TARGET,
        "positions = [start + depth for",
        "positions = [start + max(0, depth - 1) for",
        _IDENTITY,
    ),
    Mutation(
        "refresh: steps choose chunks anew in all passes but the first",
        f"{_KV}/retrieval.py",
        "self._refresh = first",
        "self._refresh = not first",
        ("tests/test_cache_histories.py::test_the_first_step_chooses_and_the_others_use",),
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
        "mask: in the kernel of the GPU a token does not see itself",
        f"{_KERNELS}/attention_kernels.py",
        "visible = (key[None, :] <= position[:, None])",
        "visible = (key[None, :] < position[:, None])",
        (
            "tests/kernels/test_attention_blocks.py::test_a_window_in_the_only_block_is_not_merged_and_has_the_bits_of_a_merge[None-triton]",
        ),
    ),
    Mutation(
        "noise key: sequences of a batch share their noise",
        f"{_KERNELS}/gumbel_argmax.py",
        "philox4x32_reference((c0, c1, noise_id, c3), (seed[0], seed[1]))",
        "philox4x32_reference((c0, c1, c3, c3), (seed[0], seed[1]))",
        ("tests/kernels/test_gumbel_argmax.py::test_noise_takes_its_words_where_the_contract_says",),
    ),
    Mutation(
        "sampling: top-p keeps a token too many",
        "offload_runtime/sampling.py",
        "before_cutoff = _weights(ordered, maximum).cumsum(dim=1) < required",
        "before_cutoff = _weights(ordered, maximum).cumsum(dim=1) <= required",
        ("tests/test_sampling.py::test_top_p_stops_exactly_where_its_share_is_reached",),
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
    *(
        Mutation(f"verify: {what}", _TARGET, _POSITIONS, changed, _IDENTITY)
        for what, changed in _OTHER_POSITIONS.items()
    ),
)
