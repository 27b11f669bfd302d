from dataclasses import dataclass, field

from tests.support.kept import kept


@dataclass
class Table:
    rows: dict[int, list[bytes]] = field(default_factory=dict)
    last: object = None


def test_what_is_reached_is_found_once() -> None:
    table, piece = Table(), b"a piece"
    table.rows[1] = [piece, piece]
    table.last = table
    assert kept(table, bytes) == [piece]
    assert sorted(kept(table, Table), key=id) == [table]


def test_what_is_taken_out_is_not_found() -> None:
    table = Table()
    before = len(kept(table))
    table.rows[1] = [b"a"]
    assert len(kept(table)) > before
    del table.rows[1]
    assert len(kept(table)) == before
