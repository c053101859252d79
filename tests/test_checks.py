"""Ranks with collective checks: messages do not count, real mismatches are still found."""

import pytest
import torch
import torch.distributed as dist

from minidist.comm import collectives as coll
from minidist.comm.launch import RankFailure, Ranks


@pytest.fixture
def checked_ranks():
    with Ranks(3, timeout=20, debug=True) as ranks:
        yield ranks


def messages_then_sum() -> list[float]:
    """Rank 1 sends and receives more than the others; then all of them do the same."""
    rank, sums = coll.rank(), []
    for group in (None, dist.new_group([0, 1, 2])):
        if rank == 0:
            coll.send(torch.ones(3), 1, group=group)
        elif rank == 1:
            coll.recv(torch.zeros(3), 0, group=group)
            dist.send(torch.ones(3), 2, group=group)
        else:
            received = torch.zeros(3)
            dist.recv(received, group=group)  # from anyone
            sums.append(received.sum().item())
        sums.append(coll.all_reduce(torch.ones(3), group=group).sum().item())
    return sums


def test_messages_do_not_make_collectives_look_different(checked_ranks):
    assert checked_ranks.run(messages_then_sum) == [[9.0, 9.0], [9.0, 9.0], [3.0, 9.0, 3.0, 9.0]]


def test_carriers_of_destroyed_groups_go_with_them(checked_ranks):
    def many_groups() -> int:
        from minidist.comm import checks

        for _ in range(5):
            group = dist.new_group([0, 1, 2])
            dist.barrier(group)
            dist.destroy_process_group(group)
        return len(checks._carriers)

    assert max(checked_ranks.run(many_groups)) <= 2  # the world, and the last one at most


def test_a_mismatch_after_messages_is_found(checked_ranks):
    def sum_or_wait():
        messages_then_sum()
        if coll.rank() == 0:
            dist.barrier()
        else:
            coll.all_reduce(torch.ones(3))

    with pytest.raises(RankFailure, match="the ranks call different collectives"):
        checked_ranks.run(sum_or_wait)


def test_a_message_that_nobody_sends_is_not_received(checked_ranks):
    def wait_for_nothing():
        if coll.rank() == 0:
            coll.recv(torch.ones(3), 1)
        coll.barrier()

    with pytest.raises(RankFailure) as failure:
        checked_ranks.run(wait_for_nothing)
    assert "deadlock" in str(failure.value) and "waiting in recv" in failure.value.states[0]
