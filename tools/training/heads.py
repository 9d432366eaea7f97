"""MTP and EAGLE-3 heads as torch modules, whose parameters have the names of their public checkpoints.

Row i of a head is about token i + 1, which it reads beside what the target made of token i, and guesses token i + 2. To
guess further it reads at depth d the token d places further on, beside what it made itself of the row at depth d - 1:
`unrolled` computes the rows of all places at once, as they would be if all that is guessed before came true. A row sees
the rows of depth 0 up to its own place, and of its own place those of lower depths, as a head that drafts does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from widening.shapes import WideShape

_STD = 0.02
# Of the logits of an MTP layer, against the target's: what it says first is wrong. Of SmolLM2 the loss of two depths
# after ten steps of 256 tokens is 7.6 in place of 8.6.
_FIRST_CONFIDENCE = 0.3
# Of the stream at depth 0 keys [B, G, T, D] and values, then those of each depth.
Past = list[tuple[Tensor, Tensor]]


class Norm(nn.Module):
    """Root mean square norm in fp32 with Llama's weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H] fp32."""
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def _linear(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=_STD)
    return made


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate channel i of heads [B, heads, T, D] with channel i + D/2 by `angles` [T, D/2], as complex numbers."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * angles.real - b * angles.imag, b * angles.real + a * angles.imag), dim=-1).to(x.dtype)


class Layer(nn.Module):
    """Llama's decoder layer, whose attention reads rows of `inputs` channels."""

    def __init__(self, shape: WideShape, eps: float, inputs: int) -> None:
        super().__init__()
        hidden, keys = shape.hidden_size, shape.num_kv_heads * shape.head_dim
        self.head_dim, queries = shape.head_dim, shape.num_heads * shape.head_dim
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        attention = {"q_proj": (inputs, queries), "k_proj": (inputs, keys), "v_proj": (inputs, keys)}
        attention["o_proj"] = queries, hidden
        inner = shape.intermediate_size
        mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        self.self_attn = nn.ModuleDict({name: _linear(*sizes) for name, sizes in attention.items()})
        self.mlp = nn.ModuleDict({name: _linear(*sizes) for name, sizes in mlp.items()})

    def forward(self, residual: Tensor, x: Tensor, angles: Tensor, past: Past) -> Tensor:
        """Return the residual stream [B, T, H] behind the layer, whose attention reads `x` [B, T, inputs].

        Args:
            angles: [positions, D/2] complex, by position; rows of depth d are at d and further.
            past: Of rows of lower depths; those of these rows are appended.
        """
        depth, length = len(past), x.shape[1]
        projected = (self.self_attn[f"{name}_proj"](x).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
        q, k, v = (heads.transpose(1, 2) for heads in projected)
        q, k = (rotate(heads, angles[depth : depth + length]) for heads in (q, k))
        past.append((k, v))
        group = q.shape[1] // k.shape[1]
        keys, values = (torch.cat(parts, dim=2).repeat_interleave(group, dim=1) for parts in zip(*past, strict=True))
        own = torch.eye(length, dtype=torch.bool, device=x.device)
        mask = torch.cat((torch.ones_like(own).tril_(), own.repeat(1, depth)), dim=1)
        attended = functional.scaled_dot_product_attention(q, keys, values, mask).transpose(1, 2).flatten(2)
        residual = residual + self.self_attn["o_proj"](attended)
        x = self.post_attention_layernorm(residual)
        inner = functional.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)
        return residual + self.mlp["down_proj"](inner)


class FirstLayer(Layer):
    """EAGLE-3's, whose attention reads [norm(embedding), norm(h)]."""

    def __init__(self, shape: WideShape, eps: float) -> None:
        super().__init__(shape, eps, 2 * shape.hidden_size)
        self.hidden_norm = Norm(shape.hidden_size, eps)


class Head(nn.Module):
    """What both kinds share; what belongs to the target is no parameter and is not among the state that is written.

    Attributes:
        embedding: [V, H], the target's.
        ids: [draft tokens] int64, the target's number of each token that there are logits of.
    """

    embedding: Tensor
    ids: Tensor
    norm: Norm
    fc: nn.Linear

    def __init__(self, embedding: Tensor, ids: Tensor) -> None:
        super().__init__()
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("ids", ids, persistent=False)

    @property
    @abstractmethod
    def layer(self) -> Layer:
        """The only one."""

    @abstractmethod
    def features(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return what is kept of rows of the target, [B, T, H], of its residual stream below each layer, the last
        of which is its normed output."""

    @abstractmethod
    def step(self, embedded: Tensor, hidden: Tensor, angles: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """Return of rows of one depth, [B, T, H] each, what logits are made of, and what the next depth reads."""

    @abstractmethod
    def logits(self, normed: Tensor) -> Tensor:
        """Return the logits of the tokens `ids`, [..., draft tokens]."""

    def all_logits(self, normed: Tensor) -> Tensor:
        """Return the logits of all tokens in fp32, [..., V]: minus infinity of those without."""
        found = self.logits(normed).float()
        every = found.new_full((*found.shape[:-1], len(self.embedding)), -torch.inf)
        return every.index_copy_(-1, self.ids, found)


class MtpHead(Head):
    """MTP of Qwen's layout, `mtp.*` in a checkpoint: x = fc [norm(embedding), norm(h)], one layer, a norm and the
    target's `lm_head`; h is the target's normed output, or the head's own."""

    lm_head: Tensor

    def __init__(self, shape: WideShape, eps: float, embedding: Tensor, lm_head: Tensor) -> None:
        super().__init__(embedding, torch.arange(len(embedding), device=embedding.device))
        self.register_buffer("lm_head", lm_head, persistent=False)
        hidden = shape.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(hidden, eps), Norm(hidden, eps)
        self.fc, self.norm = _linear(2 * hidden, hidden), Norm(hidden, eps)
        self.layers = nn.ModuleList([Layer(shape, eps, hidden)])

    def features(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return the normed output."""
        return hidden_states[-1]

    def step(self, embedded: Tensor, hidden: Tensor, angles: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """Return the normed rows twice."""
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        residual = self.fc(both).float()
        normed = self.norm(self.layer(residual, self.layer.input_layernorm(residual), angles, past))
        return normed, normed

    @property
    def layer(self) -> Layer:
        """The only one."""
        return cast(Layer, self.layers[0])

    def logits(self, normed: Tensor) -> Tensor:
        """Return those of the target's `lm_head`."""
        return functional.linear(normed, self.lm_head)


class Eagle3Head(Head):
    """EAGLE-3: h = fc [taps of the target's residual stream], or the head's own stream; attention reads
    [norm(embedding), norm(h)]; an `lm_head` of its own over `ids`.

    Args:
        taps: Layers of the target, below which its residual stream is read.
    """

    def __init__(self, shape: WideShape, eps: float, embedding: Tensor, ids: Tensor, taps: tuple[int, ...]) -> None:
        super().__init__(embedding, ids)
        hidden = shape.hidden_size
        self.taps, self.fc = taps, _linear(len(taps) * hidden, hidden)
        self.midlayer = FirstLayer(shape, eps)
        self.norm, self.lm_head = Norm(hidden, eps), _linear(hidden, len(ids))

    def features(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return the taps through `fc`."""
        return self.fc(torch.cat([hidden_states[tap] for tap in self.taps], dim=-1)).float()

    def step(self, embedded: Tensor, hidden: Tensor, angles: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """Return normed rows, and the residual stream."""
        both = torch.cat((self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(hidden)), dim=-1)
        residual = self.midlayer(hidden, both, angles, past)
        return self.norm(residual), residual

    @property
    def layer(self) -> Layer:
        """The only one."""
        return self.midlayer

    def logits(self, normed: Tensor) -> Tensor:
        """Return those of its own `lm_head`."""
        return self.lm_head(normed)


def unrolled(
    head: Head, tokens: Tensor, hidden_states: tuple[Tensor, ...], angles: Tensor, depths: int
) -> Iterator[Tensor]:
    """Yield by depth d what logits are made of, [B, L - depths, H]: those of row i guess token i + d + 2.

    Args:
        tokens: [B, L].
        hidden_states: Of the target, as of `Head.features`, [B, L, H] each.
        angles: [at least L, D/2] complex, by position.
    """
    length, past = tokens.shape[1] - depths, Past()
    hidden = head.features(tuple(state[:, :length] for state in hidden_states))
    for depth in range(depths):
        embedded = functional.embedding(tokens[:, depth + 1 : depth + 1 + length], head.embedding)
        normed, hidden = head.step(embedded, hidden, angles, past)
        yield normed


def start_from(head: Head, layer: dict[str, Tensor], norm: Tensor, lm_head: Tensor) -> None:
    """Give a head what it can begin with of the target's: its last layer, its last norm and its `lm_head`. A row begins
    as the target's normed output or the mean of the taps.

    Args:
        layer: Tensors of the last layer by their names in it.
        norm: [H]; lm_head: [V, H].
    """
    hidden = len(norm)
    with torch.no_grad():
        for name, parameter in head.layer.named_parameters():
            if name in layer and parameter.shape == layer[name].shape:
                parameter.copy_(layer[name])
            elif name in layer and parameter.shape[0] == len(layer[name]):  # of [embedding, stream]
                parameter[:, -hidden:].copy_(layer[name])
        head.norm.weight.copy_(norm)
        if isinstance(head, Eagle3Head):
            head.lm_head.weight.copy_(lm_head[head.ids])
            for number in range(len(head.taps)):
                part = head.fc.weight[:, number * hidden : (number + 1) * hidden]
                part.diagonal().add_(1 / len(head.taps))
        else:
            head.fc.weight[:, hidden:].diagonal().add_(1.0)
            head.norm.weight.mul_(_FIRST_CONFIDENCE)
