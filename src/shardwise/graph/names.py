"""What the tensors of a model are called."""

from torch import Tensor, nn


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and then buffers, each under every name that it has: a tied one comes several times."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
