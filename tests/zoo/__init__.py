"""The models that every plan must train exactly as one process does: plain PyTorch, small, in float64."""

from zoo import backward, generative, losses, recurrent, sharing, text, towers, vision
from zoo.case import Case, by_name

CASES: dict[str, Case] = by_name(
    *(
        case
        for kind in (text, vision, recurrent, towers, generative, sharing, losses, backward)
        for case in kind.CASES.values()
    )
)

__all__ = ["CASES", "Case"]
