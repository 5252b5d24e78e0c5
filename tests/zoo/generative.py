"""Models that draw while they train: VAE, VAE with KL warm-up, diffusion."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate, mse_loss, silu

from zoo.case import Case, by_name, draw, normal

# B batch, D features, L latent features

FEATURES = 12
LATENT = 4
NOISE_LEVELS = 10


class Vae(nn.Module):
    """[B, D] to its reconstruction, and mean and log-variance of its code [B, L]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2 * LATENT)
        )
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, FEATURES)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        code = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


def vector_sample(seed: int, index: int) -> Tensor:
    return normal(draw(seed, index), FEATURES)


def vae_terms(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Reconstruction error and KL divergence from the standard normal, both means over samples."""
    rebuilt, mean, log_variance = model(x)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
    return mse_loss(rebuilt, x), divergence.mean()


def vae_loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    rebuilding, divergence = vae_terms(model, x)
    return rebuilding + divergence, {"divergence": divergence.detach()}


def warm_up() -> tuple[Callable[[nn.Module, Tensor], Tensor], Callable[[int], None]]:
    """A loss that weighs the KL term by a Python float, and what a loop calls before each step to let it grow."""
    weight = 0.1

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        rebuilding, divergence = vae_terms(model, x)
        return rebuilding + weight * divergence

    def before_step(step: int) -> None:
        nonlocal weight
        weight = 0.1 * (step + 1)

    return loss, before_step


class TimedConv(nn.Module):
    """A convolution with a shift per channel that depends on the noise level."""

    def __init__(self, channels_in: int, channels_out: int, time_features: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.shift = nn.Linear(time_features, channels_out)

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        return silu(self.conv(images) + self.shift(time)[:, :, None, None])


class DiffusionUNet(nn.Module):
    """Noisy images [B, 1, 8, 8] and noise levels [B] to the noise; each layer sees the level's embedding."""

    def __init__(self, time_features: int = 8) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.logspace(0, -1, time_features // 2))
        self.time = nn.Sequential(nn.Linear(time_features, time_features), nn.SiLU())
        self.down_1 = TimedConv(1, 8, time_features)
        self.down_2 = TimedConv(8, 8, time_features)
        self.mid_1 = TimedConv(8, 16, time_features)
        self.mid_2 = TimedConv(16, 8, time_features)
        self.up_2 = TimedConv(16, 8, time_features)
        self.up_1 = TimedConv(16, 4, time_features)
        self.out = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, images: Tensor, levels: Tensor) -> Tensor:
        angles = levels[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        skip_1 = self.down_1(images, time)
        skip_2 = self.down_2(skip_1, time)
        x = avg_pool2d(skip_2, 2)
        x = self.mid_2(self.mid_1(x, time), time)
        x = interpolate(x, scale_factor=2.0, mode="nearest")
        x = self.up_2(torch.cat([x, skip_2], dim=1), time)
        x = self.up_1(torch.cat([x, skip_1], dim=1), time)
        return self.out(x)


def clean_sample(seed: int, index: int) -> Tensor:
    return normal(draw(seed, index), 1, 8, 8)


def denoising_loss(model: nn.Module, images: Tensor) -> Tensor:
    """Level and noise are drawn here, on torch's own generator (Ho et al., 2006.11239, algorithm 1)."""
    levels = torch.randint(NOISE_LEVELS, (len(images),))
    signal = (1 - (levels + 1) / (NOISE_LEVELS + 1)).to(images.dtype)[:, None, None, None]
    noise = torch.randn_like(images)
    noisy = signal.sqrt() * images + (1 - signal).sqrt() * noise
    return mse_loss(model(noisy, levels), noise)


def kl_warm_up() -> Case:
    loss, before_step = warm_up()
    return Case(
        name="kl_warm_up",
        model=lambda: Vae().double(),
        loss=loss,
        sample=vector_sample,
        random=True,
        before_step=before_step,
        notes="the weight changes between steps, and nothing in the batch says so",
    )


CASES = by_name(
    Case(name="vae", model=lambda: Vae().double(), loss=vae_loss, sample=vector_sample, random=True),
    Case(name="diffusion", model=lambda: DiffusionUNet().double(), loss=denoising_loss, sample=clean_sample,
         random=True, notes="the embedding of the noise level reaches every layer"),
    kl_warm_up(),
)  # fmt: skip
