"""Which connections were made to the sockets of a vGPU, by the kernel's tables."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuserver.core.observe.sockets import Socket, accepted, arrived, connections, listeners_of, listening, parse

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 1072 1 000000001805fe91 100 0
   1: 0100007F:1F40 0100007F:D2A4 01 00000000:00000000 00:00000000 00000000  1000        0 0 1 000000001805fe91 20 4 30
   2: 0100007F:1F40 0100007F:D2A6 06 00000000:00000000 03:00000000 00000000     0        0 0 3 000000001805fe91
   3: 0100007F:D2A4 0100007F:1F40 01 00000000:00000000 00:00000000 00000000     0        0 1075 1 000000001805fe91 20 4
 what is this
"""
SNMP = """\
Ip: Forwarding DefaultTTL
Ip: 2 64
Tcp: RtoAlgorithm RtoMin ActiveOpens PassiveOpens
Tcp: 1 200 7 42
TcpExt: PassiveOpens
TcpExt: 9
"""
LOCAL, ANY, ANY6 = "0100007F", "00000000", "0" * 32
addresses = st.sampled_from((LOCAL, ANY, "0200007F", ANY6, "0" * 24 + "01000000"))
sockets = st.builds(
    Socket,
    address=addresses,
    port=st.sampled_from((80, 8000)),
    remote=st.sampled_from(("A:1", "A:2", "B:1")),
    state=st.sampled_from((0x01, 0x03, 0x06, 0x08, 0x0A)),
    inode=st.integers(0, 5),
)
tables = st.lists(sockets, max_size=12)


def listener(address: str, inode: int, port: int = 8000) -> Socket:
    return Socket(address, port, "0:0", 0x0A, inode)


def connection(address: str, remote: str = "A:1", state: int = 0x01) -> Socket:
    return Socket(address, 8000, remote, state, 0)


def test_a_table_is_read() -> None:
    found = parse(TABLE)
    assert found[0] == Socket("00000000", 8000, "00000000:0000", 0x0A, 1072)
    assert len(found) == 4
    assert parse(TABLE, (8000,)) == found[:3]
    assert listening(found, frozenset({1072})) == {8000: 1072}
    assert listening(found, frozenset({1075})) == {}
    assert [one.remote for one in connections(found, (8000,))] == ["0100007F:D2A4"]
    one = arrived(found, (8000,), (), frozenset({1072}))
    assert one is not None
    assert arrived(found, (8000,), (one.mark,), frozenset({1072})) is None


def test_the_number_of_accepted_connections_is_read() -> None:
    assert accepted(SNMP) == 42
    assert accepted("") is None
    assert accepted("Tcp: A B\nTcp: 1 2\n") is None
    assert accepted("Tcp: PassiveOpens\nTcp: many\n") is None


@given(st.text(), st.none() | st.sets(st.integers(1, 65535)))
def test_whatever_stands_there_is_read(text: str, ports: set[int] | None) -> None:
    assert isinstance(parse(text, ports), list)
    accepted(text)


@given(tables, st.sets(st.integers(1, 65535), max_size=3))
def test_the_table_of_some_ports_is_a_part_of_the_whole(table: list[Socket], ports: set[int]) -> None:
    lines = [f"0: {one.address}:{one.port:04X} {one.remote} {one.state:02X} 0 0 0 0 0 {one.inode}" for one in table]
    text = "\n".join(["head", *lines])
    assert parse(text) == table
    assert parse(text, ports) == [one for one in table if one.port in ports]


def test_a_connection_belongs_to_the_most_exact_listener() -> None:
    every, exact = listener(ANY, 1), listener(LOCAL, 2)
    assert listeners_of(connection(LOCAL), [every, exact]) == {2}
    assert listeners_of(connection("0200007F"), [every, exact]) == {1}
    assert listeners_of(connection(LOCAL), [listener(LOCAL, 2), listener(LOCAL, 3)]) == {2, 3}, "they share the port"
    assert listeners_of(connection(LOCAL), [listener(ANY6, 4)]) == frozenset(), "the kernel lists it as IPv6"
    assert listeners_of(connection("0" * 16 + "0000FFFF0100007F"), [listener(ANY6, 4)]) == {4}
    assert listeners_of(connection(LOCAL), [listener(ANY, 1, port=80)]) == frozenset()


@given(tables, st.sets(st.sampled_from((80, 8000))), st.sets(st.integers(0, 5)))
def test_what_arrives_is_new_and_the_vgpus_own(table: list[Socket], ports: set[int], own: set[int]) -> None:
    inodes = frozenset(own)
    found = arrived(table, ports, (), inodes)
    if found is not None:
        assert found in connections(table, ports)
        assert listeners_of(found, table) & inodes
    known = [one.mark for one in connections(table, ports)]
    assert arrived(table, ports, known, inodes) is None
    assert arrived(table, (), (), inodes) is None
    assert arrived(table, ports, (), frozenset()) is None


@given(tables, st.sets(st.sampled_from((80, 8000))), st.sets(st.integers(0, 5)), sockets)
def test_what_others_do_hides_no_connection(
    table: list[Socket], ports: set[int], own: set[int], another: Socket
) -> None:
    """But for a listener, which may be the more exact one."""
    inodes = frozenset(own)
    if another.state != 0x0A and arrived(table, ports, (), inodes) is not None:
        assert arrived([*table, another], ports, (), inodes) is not None
