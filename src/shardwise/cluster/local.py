"""The cluster that this machine is."""

import os
from dataclasses import replace

import torch

from shardwise.cluster.catalogue import catalogue, network
from shardwise.cluster.cluster import Cluster, Group
from shardwise.cluster.device import Device
from shardwise.errors import ClusterError


def local_cluster(devices: int | None = None) -> Cluster:
    """CUDA devices where there are any, else CPU processes that share the memory of this host.

    devices:  how many; None takes all CUDA devices, or one CPU process

    raises:  ClusterError where there are fewer CUDA devices
    """
    if devices is not None and devices < 1:
        raise ClusterError(f"{devices} devices were asked for; ask for one or more")
    present = torch.cuda.device_count()
    if not present:
        return _cpu_cluster(devices or 1)
    if devices is not None and devices > present:
        raise ClusterError(
            f"{devices} devices were asked for, but this machine has {present} CUDA devices; ask for at most {present}"
        )
    return _cuda_cluster(devices or present)


def _cpu_cluster(processes: int) -> Cluster:
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = replace(catalogue()["cpu"], memory_bytes=host_bytes // processes)
    return Cluster(f"{processes}x cpu", (Group(1, processes, device),), network())


def _cuda_cluster(devices: int) -> Cluster:
    found = [_cuda_device(number) for number in range(devices)]
    groups: list[Group] = []
    for device in found:
        if groups and groups[-1].device == device:
            groups[-1] = replace(groups[-1], devices_per_node=groups[-1].devices_per_node + 1)
        else:
            groups.append(Group(1, 1, device))
    text = " + ".join(f"{group.devices_per_node}x {group.device.name}" for group in groups)
    return Cluster(text, tuple(groups), network())


def _cuda_device(number: int) -> Device:
    """The entry of the catalogue whose name fits best, with the memory that the driver reports."""
    properties = torch.cuda.get_device_properties(number)
    return replace(_nearest(properties.name, properties.total_memory), memory_bytes=properties.total_memory)


def _nearest(name: str, memory_bytes: int) -> Device:
    """Of the kinds whose first word is in `name`, or of all, the one nearest in memory."""
    words = name.lower().replace(" ", "")
    kinds = [device for kind, device in catalogue().items() if kind != "cpu"]
    named = [device for device in kinds if device.name.split("-")[0] in words]
    return min(named or kinds, key=lambda device: abs(device.memory_bytes - memory_bytes))
