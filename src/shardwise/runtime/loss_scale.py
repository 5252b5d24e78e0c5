"""fp16: keep small gradients from vanishing, with one scale and one decision to skip for all ranks."""

from dataclasses import dataclass
from typing import final

GROWTH_STEPS = 2000  # after so many steps without overflow the scale doubles, as torch's GradScaler does


@final
@dataclass
class LossScale:
    """The factor on the loss in the backward pass; 1 where it is not enabled."""

    enabled: bool
    value: float = 1.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        if self.enabled and self.value == 1.0:
            self.value = 2.0**16

    def overflowed(self) -> None:
        self.value /= 2
        self.good_steps = 0

    def stepped(self) -> None:
        self.good_steps += 1
        if self.enabled and self.good_steps % GROWTH_STEPS == 0:
            self.value *= 2
