"""What machines we have: devices, nodes and links, from a line of text or from this machine."""

from shardwise.cluster.catalogue import catalogue
from shardwise.cluster.cluster import Cluster, Group
from shardwise.cluster.device import Device, Link
from shardwise.cluster.local import local_cluster
from shardwise.cluster.text import parse_cluster

__all__ = ["Cluster", "Device", "Group", "Link", "catalogue", "local_cluster", "parse_cluster"]
