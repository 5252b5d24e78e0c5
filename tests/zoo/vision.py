"""Image models: ViT, ResNet, U-Net, SegFormer, and a convolutional net with dropout."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, max_pool2d, mse_loss
from transformers import SegformerConfig, SegformerForSemanticSegmentation

from zoo.case import Case, by_name, draw, integers, normal
from zoo.transformer import Block

# Images are [B, C, H, W]: batch, channels, height, width.

CLASSES = 5


class Vit(nn.Module):
    """Images [B, 3, 8, 8] to logits [B, CLASSES], by way of four patches and one class token."""

    def __init__(self, features: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, features, kernel_size=4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, features))
        self.position = nn.Parameter(torch.randn(5, features))
        self.blocks = nn.ModuleList(Block(features) for _ in range(4))
        self.head = nn.Linear(features, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def image_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    generator = draw(seed, index)
    return normal(generator, 3, 8, 8), integers(generator, CLASSES)


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


class ResidualBlock(nn.Module):
    """Two convolutions and the way around them, written as torchvision writes it: in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm_1(self.conv_1(x)))
        out = self.norm_2(self.conv_2(out))
        out += x
        return self.relu(out)


class ResNet(nn.Sequential):
    def __init__(self, channels: int = 8) -> None:
        super().__init__(
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            *(ResidualBlock(channels) for _ in range(4)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, CLASSES),
        )


class TwoConvs(nn.Sequential):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """Images [B, 1, 16, 16] to images, with two skips, one inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.enc_1 = TwoConvs(1, 4)
        self.enc_2 = TwoConvs(4, 8)
        self.mid = TwoConvs(8, 8)
        self.dec_2 = TwoConvs(16, 4)
        self.dec_1 = TwoConvs(8, 4)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        skip_1 = self.enc_1(images)
        skip_2 = self.enc_2(max_pool2d(skip_1, 2))
        x = self.mid(max_pool2d(skip_2, 2))
        x = self.dec_2(torch.cat([double_size(x), skip_2], dim=1))
        return self.out(self.dec_1(torch.cat([double_size(x), skip_1], dim=1)))


def double_size(images: Tensor) -> Tensor:
    return interpolate(images, scale_factor=2.0, mode="nearest")


def image_pair_sample(seed: int, index: int) -> tuple[Tensor, Tensor]:
    generator = draw(seed, index)
    return normal(generator, 1, 16, 16), normal(generator, 1, 16, 16)


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, targets = batch
    return mse_loss(model(images), targets)


def segformer() -> nn.Module:
    """Four resolutions that all reach the head, which has a BatchNorm; nothing is dropped."""
    config = SegformerConfig(
        num_labels=CLASSES, depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 32], num_attention_heads=[1, 1, 2, 2],
        sr_ratios=[4, 2, 1, 1], mlp_ratios=[2, 2, 2, 2], decoder_hidden_size=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    return SegformerForSemanticSegmentation(config).train().double()


def segmentation_sample(seed: int, index: int) -> dict[str, Tensor]:
    generator = draw(seed, index)
    return {"pixel_values": normal(generator, 3, 64, 64), "labels": integers(generator, CLASSES, 16, 16)}


def segmentation_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Labels [B, 16, 16] have a quarter of the image's resolution, as the logits have."""
    return cross_entropy(model(batch["pixel_values"]).logits, batch["labels"])


# Softmax takes away what a key's bias adds, and BatchNorm what the biases before it add.
SEGFORMER_IDLE = frozenset(
    ["segformer.stages.3.layer_norm.bias"]
    + [f"segformer.stages.{stage}.blocks.0.attention.k_proj.bias" for stage in range(4)]
    + [f"decode_head.linear_projections.{stage}.proj.bias" for stage in range(4)]
)


class ConvNet(nn.Sequential):
    """Channels dropped after each convolution, features before the head."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__(
            nn.Conv2d(3, channels, 3, padding=1),
            *(nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.2))
              for _ in range(4)),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(16 * channels, CLASSES),
        )  # fmt: skip


CASES = by_name(
    Case(name="vit", model=lambda: Vit().double(), loss=class_loss, sample=image_sample),
    Case(name="resnet", model=lambda: ResNet().double(), loss=class_loss, sample=image_sample, couple=True,
         notes="BatchNorm; in-place ReLU and addition"),
    Case(name="unet", model=lambda: UNet().double(), loss=image_loss, sample=image_pair_sample),
    Case(name="segformer", model=segformer, loss=segmentation_loss, sample=segmentation_sample, couple=True,
         idle=SEGFORMER_IDLE, notes="BatchNorm in the head"),
    Case(name="convnet_dropout", model=lambda: ConvNet().double(), loss=class_loss, sample=image_sample, random=True),
)  # fmt: skip
