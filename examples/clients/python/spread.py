"""Names spread over several clusters: each name has one home, which every client works out by itself.

    with psycopg.connect(clusters[home("import:orders", clusters)]) as conn, session_lock(conn, "import:orders"): ...

For more locks than one server grants, or so that the failure of one cluster stops a part of the names only. `clusters` are
labels with connection strings, the same for all clients; the labels never change, the strings may. For sets of names and
for trees, which are within one cluster, give `home` the names' domain instead of a name.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

# For whoever owns the extension, at the new home of names, with the old one's `SELECT last_value FROM _lease_token`: the next
# tokens are above all that the old home has given.
RAISE_TOKENS = """
    SELECT setval('_lease_token', greatest(last_value, ((%(old)s::bigint >> 42) + 1) << 42)) FROM _lease_token
"""


def home(name: str, clusters: Collection[str]) -> str:
    """The label of the cluster where a name is locked.

    The one with the highest hash of label and name: one that is added takes its share from all the others, and nothing
    else moves.
    """
    return max(clusters, key=lambda label: hashlib.sha256(f"{label}\0{name}".encode()).digest())


def homes(name: str, before: Collection[str], after: Collection[str]) -> list[str]:
    """Where to lock a name, in this order, while clients learn that `after` takes the place of `before`.

    Those who know only one of the two meet those who lock at both. When all know `after`, `home` is enough again. Leases are
    acquired at both as well, and the new home's token is the one to write by: raise its tokens first.
    """
    return list(dict.fromkeys([home(name, before), home(name, after)]))
