"""What is remembered of clients, and when a client is forgotten."""

from __future__ import annotations

from moestro.core.clients import ClientTable


def test_values_of_the_least_recently_used_clients_are_forgotten():
    table: ClientTable[list[int]] = ClientTable(list, max_clients=3)
    for client in range(3):
        table[client].append(client)
    table[0].append(9)
    table[3].append(3)
    assert len(table) == 3
    assert (table.get(0), table.get(1), table.get(2), table.get(3)) == ([0, 9], None, [2], [3])


def test_a_look_changes_no_order():
    table: ClientTable[int] = ClientTable(int, max_clients=2)
    table["a"] = 1
    table["b"] = 2
    assert table.get("a") == 1
    table["c"] = 3
    assert table.get("a") is None
