"""Speculation by the book, for small models: every level is dense attention over what the level is said to see.

Nothing of the runtime's caches, windows, graphs or rounds is used; what is shared is the published way of choosing
chunks (a `RetrievalPolicy`) and the shared-noise `sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.kv.retrieval import RetrievalPolicy
from offload_runtime.params import SamplingParams
from offload_runtime.speculation import Acceptance
from tests.helpers.sampling import perturbed_logits, sample

# Given a layer and its rotated queries [T, H, D]: which keys [H_kv, T, S] they see.
Seen = Callable[[int, torch.Tensor], torch.Tensor]


class DenseLlama:
    """A transformers Llama without grouped caches: keys and values [L, H_kv, S, D] by absolute position."""

    def __init__(self, hf_model: Any, capacity: int) -> None:
        config = hf_model.config
        self._model = hf_model.eval()
        self.num_layers, self._heads = config.num_hidden_layers, config.num_attention_heads
        self.kv_heads, self._head_dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        self.scale = self._head_dim**-0.5
        self.keys = torch.zeros(self.num_layers, self.kv_heads, capacity, self._head_dim)
        self.values = torch.zeros_like(self.keys)

    @torch.no_grad()
    def feed(self, tokens: Sequence[int], first: int, seen: Seen | None = None) -> torch.Tensor:
        """Logits [T, V] of tokens at positions `first` and on; writes their keys. By default they see all before."""
        model, end = self._model.model, first + len(tokens)
        positions = torch.arange(first, end)
        causal = (torch.arange(end) <= positions[:, None]).expand(self.kv_heads, -1, -1)
        x = model.embed_tokens(torch.tensor(tokens))
        cos, sin = (part[0, :, None] for part in model.rotary_emb(x, positions[None]))  # [T, 1, D]
        for index, layer in enumerate(model.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q = _rotate(attention.q_proj(normed).view(len(tokens), self._heads, -1), cos, sin)
            k = _rotate(attention.k_proj(normed).view(len(tokens), self.kv_heads, -1), cos, sin)
            self.keys[index, :, first:end] = k.transpose(0, 1)
            self.values[index, :, first:end] = attention.v_proj(normed).view_as(k).transpose(0, 1)
            mask = causal if seen is None else seen(index, q)
            mixed = self._attend(q, self.keys[index, :, :end], self.values[index, :, :end], mask)
            x = x + attention.o_proj(mixed.reshape(len(tokens), -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self._model.lm_head(model.norm(x))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[T, H, D] of queries [T, H, D], keys and values [H_kv, S, D], mask [H_kv, T, S]."""
        grouped = q.view(len(q), self.kv_heads, -1, self._head_dim)
        logits = torch.einsum("tgid,gsd->gits", grouped, k) * self.scale
        weights = logits.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
        return torch.einsum("gits,gsd->tgid", weights, v).reshape(q.shape)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def choose(logits: torch.Tensor, params: SamplingParams, first_position: int) -> list[int]:
    """The tokens that rows of logits [T, V] stand for, at `first_position` and on of sequence 0."""
    positions = torch.arange(first_position, first_position + len(logits))
    return sample(logits, params, positions, torch.zeros_like(positions)).tolist()


def decode(model: DenseLlama, prompt: Sequence[int], count: int, params: SamplingParams) -> list[int]:
    """Prompt and `count` new tokens of plain decoding; the model keeps the keys of all but the last."""
    tokens = list(prompt)
    logits = model.feed(tokens, 0)
    while True:
        tokens += choose(logits[-1:], params, len(tokens))
        if len(tokens) == len(prompt) + count:
            return tokens
        logits = model.feed(tokens[-1:], len(tokens) - 1)


class DenseDraft:
    """A small model that sees the whole text."""

    def __init__(self, model: DenseLlama, params: SamplingParams) -> None:
        self._model = model
        self._params = params
        self._fed: list[int] = []

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that it would say behind `tokens`."""
        said = list(tokens)
        for _ in range(count):
            same = count_accepted(self._fed, said[:-1])  # what it knows; the last token goes through again
            logits = self._model.feed(said[same:], same)
            self._fed = list(said)
            said += choose(logits[-1:], self._params, len(said))
        return said[len(tokens) :]

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """What the nodes of a tree behind `tokens` say: of each parent's children the likeliest comes first."""
        paths, said, children = {-1: list(tokens)}, list[int](), dict[int, list[int]]()
        for node, parent in enumerate(parents):
            if parent not in children:
                path = paths[parent]
                same = count_accepted(self._fed, path[:-1])
                logits, self._fed = self._model.feed(path[same:], same)[-1:], list(path)
                position = torch.tensor([len(path)])
                scores = perturbed_logits(logits, self._params, position, torch.zeros_like(position))
                children[parent] = scores.topk(parents.count(parent)).indices[0].tolist()
            said.append(children[parent].pop(0))
            paths[node] = [*paths[parent], said[-1]]
        return said


def count_accepted(proposals: Sequence[int], samples: Sequence[int]) -> int:
    """How many leading proposals equal the samples."""
    for index, (proposal, token) in enumerate(zip(proposals, samples, strict=False)):
        if proposal != token:
            return index
    return min(len(proposals), len(samples))


class DenseVerifier:
    """The target over chosen chunks of its full context's keys and its newest blocks.

    Args:
        full: The target over everything; it has gone through the whole text already.
        model: The same model with room for keys of its own.
        policy: Chooses chunks; it is told of all blocks here.
        chunk_size: Tokens of a chunk.
        refresh_steps: How often chunks are chosen.
        params: How tokens are chosen.
    """

    def __init__(
        self, full: DenseLlama, model: DenseLlama, policy: RetrievalPolicy, *, chunk_size: int, refresh_steps: int,
        params: SamplingParams,
    ) -> None:  # fmt: skip
        self._full, self._model, self._policy, self._params = full, model, policy, params
        self._chunk_size, self._refresh_steps = chunk_size, refresh_steps
        self._far = 0  # tokens before the newest blocks
        self._chosen: dict[int, torch.Tensor] = {}  # layer -> [1, H_kv, K]
        self.steps = self.accepted = 0
        blocks = full.keys.shape[2] // BLOCK_TOKENS
        for layer in range(full.num_layers):
            both = torch.stack([full.keys[layer], full.values[layer]])[:, :, : blocks * BLOCK_TOKENS]  # [2, H_kv, S, D]
            data = both.unflatten(2, (blocks, BLOCK_TOKENS)).permute(2, 0, 1, 3, 4)[None].contiguous()
            policy.on_blocks(layer, 0, KVBlocks(data), 0, range(blocks))

    def propose(self, tokens: Sequence[int], count: int, draft: DenseDraft, parents: Sequence[int]) -> list[int]:
        """`count` tokens behind `tokens`, of which the full target knows all but the last, by trees of the draft."""
        committed, said = len(tokens) - 1, list(tokens)
        self._model.keys.copy_(self._full.keys)
        self._model.values.copy_(self._full.values)
        before, self._far = self._far, max(0, committed // BLOCK_TOKENS - 1) * BLOCK_TOKENS
        grown = self._far != before
        while len(said) < len(tokens) + count:
            guesses = draft.grow(said, parents)
            refresh, grown, node = grown or self.steps % self._refresh_steps == 0, False, -1
            self.steps += 1
            while True:
                seen = self._seen(len(said) - 1, refresh=refresh)
                said += choose(self._model.feed(said[-1:], len(said) - 1, seen), self._params, len(said))
                found = [n for n, guess in enumerate(zip(parents, guesses, strict=True)) if guess == (node, said[-1])]
                if not found:
                    break
                (node,), refresh = found, False
                self.accepted += 1
        return said[len(tokens) : len(tokens) + count]

    def _seen(self, first: int, *, refresh: bool) -> Seen:
        def seen(layer: int, q: torch.Tensor) -> torch.Tensor:
            end = first + len(q)
            index, position = torch.arange(end), torch.arange(first, end)
            recent = (index >= self._far) & (index <= position[:, None])  # [T, S]
            mask = recent.repeat(self._model.kv_heads, 1, 1)
            if not self._far:
                return mask
            if refresh:
                available, held = self._far // self._chunk_size, self._chosen.get(layer)
                self._chosen[layer] = self._policy.select(
                    layer, q[None].contiguous(), [available], scale=self._model.scale, held=held
                )
            for head, chunks in enumerate(self._chosen[layer][0].tolist()):
                for chunk in chunks:
                    if chunk >= 0:
                        mask[head, :, chunk * self._chunk_size : (chunk + 1) * self._chunk_size] = True
            return mask

        return seen


def replay(
    truth: Sequence[int], prompt_tokens: int, propose: Callable[[Sequence[int], int], list[int]], *, gamma: int,
    proposed_by: str,
) -> Acceptance:  # fmt: skip
    """What the target decides about proposals when its own words are known: `truth`, prompt included."""
    length, verifications, proposed, accepted = prompt_tokens + 1, 0, 0, 0
    while length < len(truth):
        asked = min(gamma, len(truth) - length - 1)
        guesses = propose(truth[:length], asked) if asked else []
        agreed = count_accepted(guesses, truth[length:])
        verifications, proposed, accepted = verifications + bool(guesses), proposed + len(guesses), accepted + agreed
        length += agreed + 1
    return Acceptance(proposed_by, "target", verifications, proposed, accepted)
