"""Language models of transformers: random weights, four layers or more, on the loss that they bring themselves."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shardwise.job import Mean
from zoo.case import Case, by_name, draw, integers

VOCABULARY = 64
FEATURES = 32
LAYERS = 4
TOKENS = 12
GUESSED = 3  # masked tokens of each sample: equally many, so that a mean over them is a mean over samples
PADDING, MASK = 1, 2
IGNORED = -100

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": FEATURES,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 2 * FEATURES,
    "max_position_embeddings": 32,
    "pad_token_id": PADDING,
}
GROUPED_HEADS = {**SIZES, "num_key_value_heads": 2}


def build(
    model: str, config: str, settings: dict[str, Any], dtype: torch.dtype = torch.float64
) -> Callable[[], nn.Module]:
    """A factory of a model of transformers, in training mode with the dropout of its config."""
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**settings)).to(dtype).train()


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def balanced_loss(model: nn.Module, batch: dict[str, Tensor]) -> Mean:
    """The loss of a model whose router adds a loss of its own: no mean over labels, so its weight must be said."""
    tokens = (batch["labels"][:, 1:] != IGNORED).sum()
    return Mean(own_loss(model, batch) * tokens, tokens)


def next_token_sample(seed: int, index: int) -> dict[str, Tensor]:
    ids = integers(draw(seed, index), VOCABULARY, TOKENS)
    return {"input_ids": ids, "labels": ids}


def masked_sample(seed: int, index: int) -> dict[str, Tensor]:
    """8 to 12 tokens and padding that is not seen; some of the tokens are masked, and to be guessed."""
    generator = draw(seed, index)
    length = TOKENS - 4 + int(integers(generator, 5))
    seen = torch.arange(TOKENS) < length
    ids = torch.where(seen, 3 + integers(generator, VOCABULARY - 3, TOKENS), PADDING)
    guessed = torch.zeros(TOKENS, dtype=torch.bool)
    guessed[torch.randperm(length, generator=generator)[:GUESSED]] = True
    return {
        "input_ids": torch.where(guessed, MASK, ids),
        "attention_mask": seen.long(),
        "labels": torch.where(guessed, ids, IGNORED),
    }


def replaced_sample(seed: int, index: int) -> dict[str, Tensor]:
    """Of each token it is to be told whether it was replaced."""
    generator = draw(seed, index)
    return {"input_ids": integers(generator, VOCABULARY, TOKENS), "labels": integers(generator, 2, TOKENS)}


def translation_sample(seed: int, index: int) -> dict[str, Tensor]:
    generator = draw(seed, index)
    return {"input_ids": integers(generator, VOCABULARY, TOKENS), "labels": integers(generator, VOCABULARY, TOKENS - 4)}


def decoder(name: str, prefix: str, *, random: bool = False, **settings: Any) -> Case:
    """A model that guesses the next token; `prefix` is that of its classes."""
    model = build(f"{prefix}ForCausalLM", f"{prefix}Config", settings)
    return Case(name=name, model=model, loss=own_loss, sample=next_token_sample, random=random)


def encoder(name: str, prefix: str, **settings: Any) -> Case:
    """A model that guesses masked tokens."""
    model = build(f"{prefix}ForMaskedLM", f"{prefix}Config", {"pad_token_id": PADDING, **settings})
    return Case(name=name, model=model, loss=own_loss, sample=masked_sample, random=True)


CASES = by_name(
    Case(
        name="gpt2",
        model=build(
            "GPT2LMHeadModel",
            "GPT2Config",
            {"vocab_size": VOCABULARY, "n_embd": FEATURES, "n_layer": LAYERS, "n_head": 4, "n_positions": 32},
        ),
        loss=own_loss,
        sample=next_token_sample,
        random=True,
    ),
    decoder("llama", "Llama", **GROUPED_HEADS),
    decoder("qwen2", "Qwen2", **GROUPED_HEADS),
    decoder("mistral", "Mistral", **GROUPED_HEADS),
    Case(
        name="mixtral",
        model=build(
            "MixtralForCausalLM",
            "MixtralConfig",
            {**GROUPED_HEADS, "num_local_experts": 4, "output_router_logits": True},
            dtype=torch.float32,  # torch._grouped_mm has no float64
        ),
        loss=balanced_loss,
        sample=next_token_sample,
        couple=True,
        notes="the router's loss balances its experts over the tokens of a micro-batch",
    ),
    decoder("gemma2", "Gemma2", **GROUPED_HEADS, head_dim=8),
    decoder("gpt-neox", "GPTNeoX", **SIZES),
    decoder("phi", "Phi", **SIZES),
    decoder("bloom", "Bloom", vocab_size=VOCABULARY, hidden_size=FEATURES, n_layer=LAYERS, n_head=4),
    decoder("falcon", "Falcon", **SIZES),
    decoder("mamba", "Mamba", vocab_size=VOCABULARY, hidden_size=FEATURES, num_hidden_layers=LAYERS, state_size=4),
    decoder(
        "opt",
        "OPT",
        **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
        ffn_dim=2 * FEATURES,
        max_position_embeddings=32,
        word_embed_proj_dim=FEATURES,
        random=True,
    ),
    encoder("bert", "Bert", **SIZES),
    encoder("roberta", "Roberta", **SIZES),
    encoder(
        "distilbert", "DistilBert", vocab_size=VOCABULARY, dim=FEATURES, n_layers=LAYERS, n_heads=4,
        hidden_dim=2 * FEATURES, max_position_embeddings=32,
    ),
    Case(
        name="electra",
        model=build("ElectraForPreTraining", "ElectraConfig", {**SIZES, "embedding_size": FEATURES // 2}),
        loss=own_loss,
        sample=replaced_sample,
        random=True,
    ),
    Case(
        name="t5",
        model=build(
            "T5ForConditionalGeneration",
            "T5Config",
            {
                "vocab_size": VOCABULARY, "d_model": FEATURES, "d_kv": 8, "d_ff": 2 * FEATURES, "num_layers": LAYERS,
                "num_heads": 4, "decoder_start_token_id": 0,
            },
        ),
        loss=own_loss,
        sample=translation_sample,
        random=True,
        notes="encoder and decoder of four layers each; one embedding read at three places",
    ),
)  # fmt: skip
