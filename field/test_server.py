"""The server that the tests of this folder work on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server import Server


def test_a_lock_is_taken_and_given_back(server: Server) -> None:
    with server.connect("field") as conn:
        assert conn.execute("SELECT named_lock('field', '1 s')").fetchone() == (True,)
        assert conn.execute("SELECT name FROM lock_holders").fetchall() == [("field",)]
        assert conn.execute("SELECT named_unlock('field')").fetchone() == (0,)
