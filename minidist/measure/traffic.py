"""What this rank sent: calls, payload and bytes on the wire, from the ledger of `comm`.

`payload_bytes` is the size of the tensor that an operation is about, `sent_bytes` what this rank
really puts on the wire for it with the algorithm used: an all-reduce of S bytes over N ranks sends
2(N-1)/N x S. An operation belongs to the measurement in which it was issued, also when it is waited
for later (the last gather of a ZeRO step is waited for in the next forward).
"""

from __future__ import annotations

from dataclasses import dataclass

from minidist.comm import ledger


@dataclass
class Total:
    """A sum over operations of this rank."""

    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0

    def add(self, record: ledger.Record) -> None:
        self.calls += 1
        self.payload_bytes += record.payload_bytes
        self.sent_bytes += record.sent_bytes


class Traffic:
    """Sums by operation (`traffic["all_reduce"]`), by caller, by group and altogether.

    `calls`, `payload_bytes`, `sent_bytes` are the totals. An operation that did not occur is zero.
    """

    def __init__(self) -> None:
        self.by_op: dict[str, Total] = {}
        self.by_caller: dict[str, Total] = {}
        self.by_group: dict[str, Total] = {}
        self.total = Total()

    def add(self, record: ledger.Record) -> None:
        self.total.add(record)
        for table, key in (
            (self.by_op, record.op),
            (self.by_caller, record.by or "user"),
            (self.by_group, record.group),
        ):
            table.setdefault(key, Total()).add(record)

    @property
    def calls(self) -> int:
        return self.total.calls

    @property
    def payload_bytes(self) -> int:
        return self.total.payload_bytes

    @property
    def sent_bytes(self) -> int:
        return self.total.sent_bytes

    def __getitem__(self, op: str) -> Total:
        return self.by_op.get(op, Total())

    def as_dict(self) -> dict:
        """Plain numbers, for JSON."""

        def plain(table):
            return {name: vars(total).copy() for name, total in table.items()}

        return {
            "total": vars(self.total).copy(),
            "by_op": plain(self.by_op),
            "by_caller": plain(self.by_caller),
            "by_group": plain(self.by_group),
        }

    def __str__(self) -> str:
        rows = [f"{'operation':<20}{'calls':>8}{'payload bytes':>18}{'sent bytes':>18}"]
        for name, t in [*self.by_op.items(), ("total", self.total)]:
            rows.append(f"{name:<20}{t.calls:>8}{t.payload_bytes:>18,}{t.sent_bytes:>18,}")
        return "\n".join(rows)
