"""Models that nobody adapted for splitting, from `transformers` by configuration, without weights."""

from typing import Any

import pytest
import torch

from adaptsfl.models import profile, split

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

TEXT: dict[str, Any] = {"vocab_size": 50, "max_position_embeddings": 16}
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def make(name: str) -> tuple[Any, torch.Tensor]:
    """Return a small model of that family and three samples."""
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    tokens = torch.randint(0, 50, (3, 12))
    if name == "resnet":
        config = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5
        )
        return transformers.ResNetForImageClassification(config), images
    if name == "vit":
        config = transformers.ViTConfig(
            **SIZES,
            image_size=32,
            patch_size=8,
            num_labels=5,
            hidden_dropout_prob=0.2,
            attention_probs_dropout_prob=0.2,
        )
        return transformers.ViTForImageClassification(config), images
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False, tie_word_embeddings=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config), tokens
    # Eager, because with its fused attention transformers repeats shared keys in another way when it is exported: the
    # gradients then round differently.
    config = transformers.LlamaConfig(
        **TEXT, **SIZES, num_key_value_heads=1, use_cache=False, attn_implementation="eager"
    )
    return transformers.LlamaForCausalLM(config), tokens


EXPECTED = {
    "resnet": 6,  # stem, four residual blocks, classifier
    "vit": 6,  # patches, attention and perceptron of two blocks, classifier
    "gpt2": 6,
    "llama": 6,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_cut(name: str, every_cut: Any) -> None:
    torch.manual_seed(0)
    module, x = make(name)
    model = split(module.double(), x[:1])
    assert model.layers == EXPECTED[name]
    every_cut(model, x)


def test_blocks_are_the_entries_of_module_lists() -> None:
    module, x = make("vit")
    assert split(module, x.float(), granularity="block").names == (
        "vit.embeddings",
        "vit.layers.0",
        "vit.layers.1",
        "classifier",
    )


def test_profile_counts_the_attention_of_an_exported_model() -> None:
    """One block of Llama, d = 16, one key/value head of 8, t = 12 tokens, perceptron 32 wide: FLOPs per sample.

    query and output 2·2·t·16·16, key and value 2·2·t·16·8, scores and mix 2·2·t·t·16: 12288 + 6144 + 9216 = 27648;
    gate, up, down 3·2·t·16·32 = 36864. The head 2·t·16·50 = 19200.
    """
    module, x = make("llama")
    costs = profile(split(module, x), x, batch_size=4)
    work = [float(b - a) for a, b in zip([0.0, *costs.forward_flops], costs.forward_flops, strict=False)]
    assert work == [0, 27648, 36864, 27648, 36864, 19200]
