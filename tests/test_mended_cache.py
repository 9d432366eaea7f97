"""transformers' offloaded KV cache as the comparison uses it: copies wait for each other, cropped layers are whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offloaded_cache import MendedCache, WholeLayer
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

TINY = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=97, max_position_embeddings=4096,
)  # fmt: skip


def keys(tokens: int) -> torch.Tensor:
    """[1, 2, tokens, 3], all different."""
    return torch.arange(2.0 * tokens * 3).view(1, 2, tokens, 3)


def test_a_cropped_layer_is_fetched_in_one_copy_and_cut_on_the_device() -> None:
    layer = WholeLayer()
    layer.update(keys(10), -keys(10))
    whole_bytes = layer.keys.nbytes
    layer.crop(-2)
    layer.crop(-1)
    layer.crop(0)
    layer.device = torch.device("meta")
    layer.prefetch()
    for fetched in (layer.keys, layer.values):
        assert fetched.device.type == "meta" and fetched.shape == (1, 2, 7, 3)
        assert fetched.untyped_storage().nbytes() == whole_bytes, "all of it, as it lay in page-locked memory"
    # What was cropped once is nothing to the layer's next contents.
    layer = WholeLayer()
    layer.update(keys(10), -keys(10))
    layer.crop(-3)
    layer.update(keys(2), -keys(2))
    assert torch.equal(layer.keys, torch.cat([keys(10)[..., :7, :], keys(2)], -2)) and layer.uncropped is None
    layer.device = torch.device("meta")
    layer.prefetch()
    assert layer.keys.shape == layer.values.shape == (1, 2, 9, 3)


def test_copies_to_the_device_wait_for_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before transformers begins any, whatever it waits for itself."""
    happened: list[str] = []

    class Stream:
        """Of copies, or the default one: it notes who waits for whom."""

        def __init__(self, name: str = "copies") -> None:
            self.name = name

        def wait_stream(self, other: Any) -> None:
            happened.append(f"{self.name} wait for {other.name}")

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: Stream("passes"))
    monkeypatch.setattr(DynamicCache, "update", lambda *_: happened.append("transformers"))
    cache = MendedCache(TINY)
    assert [type(layer) for layer in cache.layers] == [WholeLayer] * 4 and cache.offloading
    for index in (0, 1):
        cache.update(keys(5), keys(5), index)
    assert happened == ["copies wait for passes", "transformers"] * 2


@pytest.mark.gpu
def test_a_host_far_ahead_of_the_device_changes_no_answer() -> None:
    """Every layer takes milliseconds, and all passes are launched within a few: prompts in pieces, and after a crop."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(TINY).to("cuda").eval()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(10_000_000))
    ids = torch.randint(97, (1, 1500), device="cuda")

    def answers(cache: Any) -> list[torch.Tensor]:
        found = []
        for piece in ids.split(400, dim=1):
            found.append(model(piece, past_key_values=cache, use_cache=True).logits)
        cache.crop(-7)
        found.append(model(ids[:, :9], past_key_values=cache, use_cache=True).logits)
        return found

    with torch.no_grad():
        expected, said = answers(DynamicCache(config=TINY)), answers(MendedCache(TINY))
    assert all(torch.equal(one, other) for one, other in zip(expected, said, strict=True))
