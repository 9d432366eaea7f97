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
_GGUF_ROWS = "offload_runtime/weights/formats.py"
_QUANTISED = "offload_runtime/weights/quantised.py"
_BY_FORMULA = "tests/test_weights_quantised.py::test_weights_are_what_the_formula_says"
_OF_THE_PACKAGE = "tests/test_weights_gguf_rows.py::test_weights_are_those_of_the_gguf_package[dtype0]"

_IDENTITY = ("tests/test_verify.py::test_generations_are_those_of_plain_decoding",)
_SAMPLING = "tests/test_sampling.py"
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
        "rollback: a block that is cut and filled again still counts as written",
        f"{_KV}/host_io.py",
        "self.arrived[slot] = min(self.arrived[slot], block)",
        "self.arrived[slot] = min(self.arrived[slot], block + 1)",
        ("tests/test_cache_histories.py::test_a_block_that_is_written_anew_is_not_taken_for_there",),
    ),
    Mutation(
        "rollback: what is retrieved of a cut sequence stays a chunk too far",
        f"{_KV}/retrieval.py",
        "resident.masked_fill_(resident >= length // self.chunk_size, -1)",
        "resident.masked_fill_(resident > length // self.chunk_size, -1)",
        ("tests/test_cache_histories.py::test_any_history_of_what_is_retrieved",),
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
        "position: after a move the sinks are rotated as if nothing had been let go of",
        f"{_KV}/device.py",
        "self.rope_shifts[slot] += dropped",
        "self.rope_shifts[slot] += 0",
        ("tests/test_cache_histories.py::test_any_history_of_a_window_over_a_text",),
    ),
    Mutation(
        "position: nodes of a tree take the noise of the place before theirs",
        _TARGET,
        "positions = [start + depth for",
        "positions = [start + max(0, depth - 1) for",
        _IDENTITY,
    ),
    Mutation(
        "position: tokens that a captured pass chooses take the noise of the place behind theirs",
        _TARGET,
        "rows.query.positions.view(-1) + 1,",
        "rows.query.positions.view(-1) + 2,",
        ("tests/test_captured_passes.py::test_captured_passes_choose_what_their_logits_say[cpu-sampled]",),
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
        "slot reuse: what an interrupted pass still reads is not recorded",
        "offload_runtime/stream/queue.py",
        "self._let_go(ring)",
        "ring.idle.append(ring.held.popleft())",
        (
            "tests/test_streaming.py::test_reads_of_an_interrupted_pass_are_recorded_before_its_slot_is_filled_again[1-3]",
        ),
    ),
    Mutation(
        "slot reuse: an event that is armed again counts as fired",
        "offload_runtime/stream/queue.py",
        "ready.copy = self._last = self._worker.submit(self._copy, dst, src, free.copy, label)",
        "self._last = self._worker.submit(self._copy, dst, src, free.copy, label)\n"
        "        ready.copy = ready.__dict__.setdefault('first', self._last)",
        ("tests/test_copy_engine.py::test_an_event_stands_for_its_latest_copy",),
    ),
    Mutation(
        "mask: a prompt's token does not see itself",
        f"{_KERNELS}/attention.py",
        "visible = key_positions <= positions[..., None]",
        "visible = key_positions < positions[..., None]",
        ("tests/kernels/test_attention_cpu.py::test_matches_the_reference[dtype0-1]",),
    ),
    Mutation(
        "mask: a token of a window sees the one behind it",
        f"{_KERNELS}/attention.py",
        "stop = (position + 1).clamp",
        "stop = (position + 2).clamp",
        ("tests/kernels/test_attention_cpu.py::test_blocks_of_other_sequences_and_of_the_future_are_not_read",),
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
        "penalties: what a pass brought is not counted by the next",
        "offload_runtime/sampling.py",
        "self._new_tokens[slot] += tokens[self._num_seen[slot] :]",
        "self._new_tokens[slot] += tokens[self._num_seen[slot] + 1 :]",
        ("tests/test_penalties.py::test_tokens_are_those_of_transformers_processors",),
    ),
    Mutation(
        "log-probabilities: those of the row before an accepted proposal's",
        _STEP,
        "rows[slot] = [first, *(first + 1 + node for node in path)]",
        "rows[slot] = [first, *(first + node for node in path)]",
        ("tests/test_logprobs.py::test_they_are_those_of_the_models_own_logits[ngram]",),
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
        "verify: the first proposal is said where it is rejected",
        _STEP,
        "        if logprobs:\n",
        "        if len(results) == 1 and proposals and proposals[0] and not results[0].path:\n"
        "            results = [replace(results[0], tokens=[proposals[0].tokens[0]])]\n"
        "        if logprobs:\n",
        _IDENTITY,
    ),
    Mutation(
        "encoding: the kernel adds no minima",
        f"{_KERNELS}/gguf_blocks.py",
        "low, high = low + m, high + m",
        "low, high = low + 0 * m, high + 0 * m",
        ("tests/kernels/test_gguf_blocks.py::test_kernel_has_the_bits_of_the_reference[dtype0-Q4_1]",),
    ),
    Mutation(
        "encoding: exceptions of the 12-bit code stay the first of their table",
        f"{_KERNELS}/coded_bf16.py",
        "tl.where(column // 256 == tile, change, 0)",
        "0 * change",
        ("tests/kernels/test_coded_bf16.py::test_every_bit_comes_back[exceptions-shape0]",),
    ),
    Mutation(
        "encoding: every part of a matrix is decoded over the first",
        "offload_runtime/weights/encoding.py",
        "first - part.start, out[first - start : last - start])",
        "first - part.start, out[: last - first])",
        (_OF_THE_PACKAGE,),
    ),
    Mutation(
        "encoding: stored rows of queries and keys stay as llama.cpp rotates them",
        "offload_runtime/weights/gguf.py",
        "blocks = halves.reshape(blocks.shape)",
        "pass",
        (_OF_THE_PACKAGE,),
    ),
    Mutation(
        "encoding: only the first scale of a block must be finite",
        _GGUF_ROWS,
        "for at in form.file_halves]",
        "for at in form.file_halves[:1]]",
        ("tests/test_weights_gguf_rows.py::test_scales_that_are_not_finite_are_refused[nan-cpu]",),
    ),
    Mutation(
        "encoding: decoded weights are not rounded to the dtype of their scales first",
        f"{_KERNELS}/scaled_rows.py",
        "w.to(form.scale).to(out.dtype)",
        "w.to(out.dtype)",
        ("tests/kernels/test_scaled_rows.py::test_reference_is_the_definition[scale0]",),
    ),
    Mutation(
        "encoding: the kernel takes the first of a slice's rows for the first of a matrix",
        f"{_KERNELS}/scaled_rows.py",
        "read = start + tl.minimum(row, num_rows - 1)",
        "read = tl.minimum(row, num_rows - 1)",
        ("tests/kernels/test_scaled_rows.py::test_kernel_has_the_bits_of_the_reference[dtype0-scale0]",),
    ),
    Mutation(
        "encoding: products take the scale of a tile's first group for all of it",
        f"{_KERNELS}/scaled_rows.py",
        "2 * WORD * UNIT // GROUP if GROUP > 0 else 0",
        "0",
        (
            "tests/kernels/test_scaled_linear.py::test_products_are_those_of_the_decoded_matrix"
            "[uint4 of small groups-dtype0]",
        ),
    ),
    Mutation(
        "encoding: zeros of GPTQ are what is stored",
        _QUANTISED,
        'zero=int(version == "gptq")',
        "zero=0",
        (f"{_BY_FORMULA}[GPTQ]",),
    ),
    Mutation(
        "encoding: columns are of groups in their own order",
        _QUANTISED,
        "index in own and _is_ordered",
        "index in () and _is_ordered",
        (f"{_BY_FORMULA}[GPTQ, ordered]",),
    ),
    Mutation(
        "encoding: rows of AWQ stay in the order of its words",
        _QUANTISED,
        "out[..., _AWQ_ORDER] = ",
        "out[:] = ",
        (f"{_BY_FORMULA}[AWQ]",),
    ),
    *(
        Mutation(f"verify: {what}", _TARGET, _POSITIONS, changed, _IDENTITY)
        for what, changed in _OTHER_POSITIONS.items()
    ),
    Mutation(
        "verify: noise that all positions share",
        f"{_KERNELS}/gumbel_argmax.py",
        "c1 = positions.to(torch.int64).bitwise_and(_MASK32).unsqueeze(1)",
        "c1 = torch.zeros_like(positions, dtype=torch.int64).unsqueeze(1)",
        (f"{_SAMPLING}::test_tokens_are_independent_across_positions_noise_ids_and_seeds",),
    ),
    Mutation(
        "verify: noise that all seeds share",
        f"{_KERNELS}/gumbel_argmax.py",
        "seed & _MASK32, seed >> 32, noise_id])",
        "0, 0, noise_id])",
        (f"{_SAMPLING}::test_tokens_are_independent_across_positions_noise_ids_and_seeds",),
    ),
    Mutation(
        "verify: a temperature that is wrong for draft and target alike",
        f"{_KERNELS}/gumbel_argmax.py",
        "inverse_temperature(temperature) if",
        "inverse_temperature(1.2 * temperature) if",
        (f"{_SAMPLING}::test_tokens_follow_the_filtered_softmax[{{}}-0.6]",),
    ),
    Mutation(
        "verify: filters that exclude nothing",
        "offload_runtime/sampling.py",
        "return logits.masked_fill(excluded.logical_and_(~maximum.isnan()), -torch.inf)",
        "return logits",
        (f"{_SAMPLING}::test_allowed_tokens_are_those_of_transformers[{{'top_k': 50}}-0.6]",),
    ),
)
