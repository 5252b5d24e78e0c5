import os
from textwrap import dedent

import pytest

from shardwise.cluster import Group, catalogue, local_cluster, parse_cluster
from shardwise.cluster.local import _nearest
from shardwise.errors import ClusterError


def fault(text: str) -> str:
    with pytest.raises(ClusterError) as error:
        parse_cluster(text)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("h200", [(1, 1, "h200")]),
        ("2x cpu", [(1, 2, "cpu")]),
        ("16x 8x h100-80gb", [(16, 8, "h100-80gb")]),
        ("8X A100-40GB + 4x v100-32gb", [(1, 8, "a100-40gb"), (1, 4, "v100-32gb")]),
    ],
)
def test_text_is_nodes_then_devices_then_kind(text, shape):
    groups = parse_cluster(text).groups
    assert [(group.nodes, group.devices_per_node, group.device.name) for group in groups] == shape


def test_ranks_go_through_the_nodes_in_the_order_of_the_text():
    cluster = parse_cluster("2x 2x h200 + l4")
    assert [device.name for device in cluster.devices] == ["h200", "h200", "h200", "h200", "l4"]
    assert cluster.nodes == (0, 0, 1, 1, 2)


def test_the_slowest_wire_counts():
    cluster = parse_cluster("2x 2x h200")
    assert cluster.link((0, 1)) == catalogue()["h200"].link
    assert cluster.link(range(4)) == cluster.network


def test_a_kind_without_its_memory_names_the_kinds_that_have_one():
    assert fault("16x 8x h100") == dedent("""\
        cannot read the cluster: "h100" is not known; did you mean h100-80gb?
          16x 8x h100
                 ^
        write [NODESx] [DEVICESx] KIND, parts joined by +, such as "16x 8x h100-80gb" or "2x cpu\"""")


@pytest.mark.parametrize(
    ("text", "words", "column"),
    [
        ("8x a100", "did you mean a100-40gb or a100-80gb?", 3),
        ("8x h10080gb", "did you mean h100-80gb", 3),
        ("toaster", '"toaster" is not known; there are v100-16gb', 0),
        ("8 h200", '"8" is no number of nodes or devices, such as 8x', 0),
        ("0x h200", '"0x" is less than one', 0),
        ("2x 3x 4x h200", "more than two numbers", 6),
        ("8x", "the kind of device is missing", 2),
        ("8x h200 + ", "a part is empty", 9),
        ("+ h200", "a part is empty", 0),
        ("", "a part is empty", 0),
        ("8x h200 4x l4", '"h200" is no number', 3),
    ],
)
def test_a_fault_is_shown_with_a_caret_below_it(text, words, column):
    first, shown, caret, how = fault(text).splitlines()
    assert words in first
    assert (shown[2:], caret) == (text, "  " + " " * column + "^")
    assert how.startswith("write [NODESx]")


def test_every_device_of_the_catalogue_has_sensible_numbers():
    for device in catalogue().values():
        assert device.flops_per_second["fp32"] > device.bytes_per_second > device.link.bytes_per_second, device.name


def test_cpu_processes_share_the_memory_of_this_host():
    one, four = (local_cluster(count) for count in (1, 4))
    assert one.devices[0].memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert four.devices[0].memory_bytes == one.devices[0].memory_bytes // 4
    assert (four.text, len(four.devices)) == ("4x cpu", 4)
    assert isinstance(four.groups[0], Group)


def test_fewer_than_one_device_is_refused():
    with pytest.raises(ClusterError, match="0 devices were asked for; ask for one or more"):
        local_cluster(0)


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 79, "h100-80gb"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("A thing of tomorrow", 180, "b200"),
    ],
)
def test_a_device_at_hand_is_taken_for_the_nearest_kind(name, gib, kind):
    assert _nearest(name, int(gib * 2**30)).name == kind
