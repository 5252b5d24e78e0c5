"""Read a cluster from text.

    [NODESx] [DEVICESx] KIND, parts joined by +      16x 8x h100-80gb
                                                     8x a100-40gb + 4x v100-32gb

One number counts the devices of one node; of two, the first counts nodes.
"""

import difflib
import re
from typing import NoReturn

from shardwise.cluster.catalogue import catalogue, network
from shardwise.cluster.cluster import Cluster, Group
from shardwise.errors import ClusterError

_WORD = re.compile(r"\S+")
_COUNT = re.compile(r"(\d+)x", re.IGNORECASE)
_HOW = 'write [NODESx] [DEVICESx] KIND, parts joined by +, such as "16x 8x h100-80gb" or "2x cpu"'


def parse_cluster(text: str) -> Cluster:
    """The cluster that `text` describes.

    raises:  ClusterError with a caret under the fault and the way to write it
    """
    groups = []
    start = 0
    for part in text.split("+"):
        groups.append(_group(text, start, part))
        start += len(part) + 1
    return Cluster(" ".join(text.split()), tuple(groups), network())


def _group(text: str, start: int, part: str) -> Group:
    words = [(start + match.start(), match.group()) for match in _WORD.finditer(part)]
    if not words:
        # Point at the + that has nothing behind it, or in front of it.
        _fail(text, max(0, min(start + len(part), len(text) - 1)), "a part is empty")
    counts = [_count(text, at, word) for at, word in words[:-1]]
    at, kind = words[-1]
    if _COUNT.fullmatch(kind):
        _fail(text, at + len(kind), "the kind of device is missing")
    if len(counts) > 2:
        _fail(text, words[2][0], "there are more than two numbers: nodes, and devices of each")
    devices = catalogue()
    if kind.lower() not in devices:
        _fail(text, at, _unknown(kind))
    nodes, per_node = [1, 1, *counts][-2:]
    return Group(nodes, per_node, devices[kind.lower()])


def _count(text: str, at: int, word: str) -> int:
    match = _COUNT.fullmatch(word)
    if match is None:
        _fail(text, at, f'"{word}" is no number of nodes or devices, such as 8x')
    number = int(match.group(1))
    if number < 1:
        _fail(text, at, f'"{word}" is less than one')
    return number


def _unknown(kind: str) -> str:
    kinds = list(catalogue())
    lowered = kind.lower()
    near = [name for name in kinds if name.startswith(lowered)] or difflib.get_close_matches(lowered, kinds, n=2)
    if near:
        return f'"{kind}" is not known; did you mean {" or ".join(near)}?'
    return f'"{kind}" is not known; there are {", ".join(kinds)}'


def _fail(text: str, at: int, fault: str) -> NoReturn:
    # One character for one, so that the caret stands right below tabs and line breaks, too.
    shown = re.sub(r"\s", " ", text)
    raise ClusterError(f"cannot read the cluster: {fault}\n  {shown}\n  {' ' * at}^\n{_HOW}")
