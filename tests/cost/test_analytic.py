import pytest

from shardwise.cluster import catalogue
from shardwise.cost import Analytic
from shardwise.graph import Segment

H100 = catalogue()["h100-80gb"]


def segment(*, flops_forward: int = 0, flops_backward: int = 0, bytes_written: int = 0) -> Segment:
    return Segment(
        ops=range(1),
        name="block",
        kind=0,
        flops_forward=flops_forward,
        flops_backward=flops_backward,
        work=flops_forward + flops_backward + 8 * bytes_written,
        bytes_in=0,
        saved_bytes=0,
        kept_bytes=0,
        working_bytes=0,
        parameters=(),
        buffers=(),
    )


def test_products_take_flops_by_half_the_peak_of_the_precision():
    products = segment(flops_forward=989 * 10**9, flops_backward=2 * 989 * 10**9)
    cost = Analytic("bf16")
    assert cost.forward_seconds(products, H100, 1.0) == pytest.approx(2e-3)
    assert cost.backward_seconds(products, H100, 0.5) == pytest.approx(2e-3)
    assert Analytic("fp32").forward_seconds(products, H100, 1.0) == pytest.approx(2e-3 * 989 / 67)


def test_what_only_moves_values_takes_bytes_by_bandwidth():
    moves = segment(bytes_written=3350 * 10**6)
    assert Analytic("bf16").forward_seconds(moves, H100, 1.0) == pytest.approx(2 * 1e-3 / 0.8)
    assert Analytic("bf16").backward_seconds(moves, H100, 1.0) == pytest.approx(4 * 1e-3 / 0.8)


def test_a_message_takes_latency_and_size_over_speed():
    assert Analytic("bf16").transfer_seconds(360 * 10**6, H100.link) == pytest.approx(8e-6 + 1e-3)


def test_a_ring_of_many_takes_about_twice_the_time_of_one_message_and_of_one_rank_none():
    cost, size = Analytic("bf16"), 3600 * 10**6
    assert cost.reduction_seconds(size, 1, H100.link) == 0
    assert cost.reduction_seconds(size, 8, H100.link) == pytest.approx(14 * (8e-6 + 10e-3 / 8))
