"""Models of images and sound of transformers: random weights, four layers or more, on the loss that they bring."""

from torch import Tensor, nn

from architectures.language import FEATURES, LAYERS, VOCABULARY, build, own_loss
from zoo.case import Case, by_name, draw, integers, normal

CLASSES = 5
PIXELS = 32
SAMPLES_OF_SOUND = 4400  # 13 frames behind the convolutions of wav2vec2
LETTERS = 4

TRANSFORMER = {
    "hidden_size": FEATURES,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 2 * FEATURES,
}
IMAGES = {"image_size": PIXELS, "patch_size": 8}


def image_sample(seed: int, index: int) -> dict[str, Tensor]:
    generator = draw(seed, index)
    return {"pixel_values": normal(generator, 3, PIXELS, PIXELS), "labels": integers(generator, CLASSES)}


def segmented_sample(seed: int, index: int) -> dict[str, Tensor]:
    """An image, and the class of each of its pixels."""
    generator = draw(seed, index)
    return {
        "pixel_values": normal(generator, 3, 2 * PIXELS, 2 * PIXELS),
        "labels": integers(generator, CLASSES, 2 * PIXELS, 2 * PIXELS),
    }


def captioned_sample(seed: int, index: int) -> dict[str, Tensor]:
    generator = draw(seed, index)
    text = integers(generator, VOCABULARY, 8)
    text[-1] = VOCABULARY
    return {"input_ids": text, "pixel_values": normal(generator, 3, PIXELS, PIXELS)}


def contrastive_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


def spoken_sample(seed: int, index: int) -> dict[str, Tensor]:
    generator = draw(seed, index)
    return {
        "input_values": normal(generator, SAMPLES_OF_SOUND),
        "labels": 1 + integers(generator, 8, LETTERS),
    }


CASES = by_name(
    Case(
        name="vit",
        model=build("ViTForImageClassification", "ViTConfig", {**TRANSFORMER, **IMAGES, "num_labels": CLASSES}),
        loss=own_loss,
        sample=image_sample,
    ),
    Case(
        name="segformer",
        model=build(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            {
                "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4], "mlp_ratios": [2, 2, 2, 2],
                "decoder_hidden_size": 16, "num_labels": CLASSES,
            },
        ),
        loss=own_loss,
        sample=segmented_sample,
        random=True,
        couple=True,
        notes="four resolutions that all go to the head; whole samples are dropped from a block; BatchNorm in the head",
    ),
    Case(
        name="resnet",
        model=build(
            "ResNetForImageClassification",
            "ResNetConfig",
            {
                "embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": [2, 2, 2, 2], "layer_type": "basic",
                "num_labels": CLASSES,
            },
        ),
        loss=own_loss,
        sample=image_sample,
        couple=True,
        notes="BatchNorm throughout, and ops in place",
    ),
    Case(
        name="clip",
        model=build(
            "CLIPModel",
            "CLIPConfig",
            {
                "text_config": {
                    **TRANSFORMER, "vocab_size": VOCABULARY + 1, "max_position_embeddings": 16, "projection_dim": 16,
                    "eos_token_id": VOCABULARY, "bos_token_id": 0, "pad_token_id": 1,
                },
                "vision_config": {**TRANSFORMER, **IMAGES, "projection_dim": 16},
                "projection_dim": 16,
            },
        ),
        loss=contrastive_loss,
        sample=captioned_sample,
        couple=True,
        notes="two towers",
    ),
    Case(
        name="wav2vec2",
        model=build(
            "Wav2Vec2ForCTC",
            "Wav2Vec2Config",
            {
                **TRANSFORMER, "vocab_size": 9, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 8,
                "num_conv_pos_embedding_groups": 2, "mask_time_length": 2, "ctc_loss_reduction": "mean",
            },
        ),
        loss=own_loss,
        sample=spoken_sample,
        random=True,
        notes="drops whole layers and masks frames by numpy's generator, as its config says",
    ),
)  # fmt: skip
