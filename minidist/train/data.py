"""Text that every Python ships, cut into batches that do not depend on how many ranks read them.

Comparing strategies needs one thing of the data: *the global batch of a step is the same whatever
the number of ranks*. So a batch is a pure function of ``(seed, step)``, and ranks take rows of it:

    step 7, batch 8:    row 0 1 | 2 3 | 4 5 | 6 7        4 ranks, two rows each
                        row 0 1   2 3 | 4 5   6 7        2 ranks, four rows each

No state is carried from step to step; a run that resumes at step 7 only has to say 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from minidist.comm import collectives as coll


def load_tokens(path: str | Path | None = None) -> Tensor:
    """Bytes of a text as uint8 tokens ``[n]``; the vocabulary is the 256 bytes, no tokenizer.

    Without a path: the language reference behind ``help("yield")``, 450 kB of English and code that
    comes with every Python (``pydoc_data.topics``), so that nothing has to be downloaded.

    Raises FileNotFoundError, or ValueError for an empty file, naming the path.
    """
    if path is None:
        from pydoc_data.topics import topics

        data = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"text file not found: {path}")
        data = path.read_bytes()
        if not data:
            raise ValueError(f"text file is empty: {path}")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


class TextBatches:
    """Random windows of a token stream, as batches for next-token prediction.

    Args:
        tokens: uint8 or int64 ``[n]``.
        seq: tokens per row; a row needs one more, because targets are the inputs moved by one.
        batch: rows of the *global* batch, over all ranks.
        seed: with the step, all that decides which rows are drawn.

    Raises ValueError when the text is shorter than one row, or a size or the seed is out of range.
    """

    def __init__(self, tokens: Tensor, seq: int, batch: int, seed: int = 0):
        if batch < 1 or seq < 1:
            raise ValueError(f"batch and seq must be at least 1, got batch={batch}, seq={seq}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        if tokens.numel() < seq + 1:
            raise ValueError(
                f"the text is shorter than one sequence: {tokens.numel()} tokens, "
                f"and a sequence of {seq} needs {seq + 1}"
            )
        self.tokens, self.seq, self.batch, self.seed = tokens, seq, batch, seed

    def at(self, step: int, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
        """This rank's rows of a step: ``(inputs, targets)``, int64 ``[batch / world_size, seq]``.

        Raises ValueError when the global batch does not divide among the ranks: dropping the rest
        in silence would train on another batch than the single process.
        """
        if self.batch % world_size:
            raise ValueError(
                f"a global batch of {self.batch} does not divide among {world_size} ranks"
            )
        # Every rank draws the starts of *all* rows and keeps its own: a generator seeded by rank
        # would make the global batch depend on the number of ranks.
        generator = np.random.default_rng((self.seed, step))
        starts = generator.integers(0, self.tokens.numel() - self.seq, size=self.batch)
        rows = self.batch // world_size
        starts = starts[rank * rows : (rank + 1) * rows]
        windows = torch.stack([self.tokens[s : s + self.seq + 1] for s in starts.tolist()]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class DistributedSampler(Sampler[int]):
    """Which items this rank visits in an epoch; ranks share every epoch without overlap.

    The order of an epoch is one shuffle that depends on ``(seed, epoch)`` and on nothing else: not
    on the rank, not on the global random stream. Rank r takes positions r, r + W, r + 2W, ..., so
    the items of one global step lie side by side and stay the same when W changes.

    When W does not divide the number of items, either the last round is *padded* with items from
    the front of the order (``mask`` tells which of this rank's items are such repeats, so that an
    evaluation does not count them twice), or with ``drop_last=True`` the incomplete round is left
    out. Every rank always gets the same number of items; a rank with one more would wait for ever
    in its last all-reduce.

    Call ``set_epoch`` before each epoch; without it every epoch repeats the same order.
    ``set_epoch(1, start=640)`` resumes in mid-epoch, after the 640 items that all ranks together
    have consumed, also with another number of ranks than before.

    Args:
        data: the dataset, or just its length.
        rank, world_size: default to this rank's place in ``group``.

    Raises ValueError for a rank outside the world or negative sizes.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        group=None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ):
        self.items = data if isinstance(data, int) else len(data)
        self.world_size = coll.world_size(group) if world_size is None else world_size
        self.rank = coll.rank(group) if rank is None else rank
        if self.items < 0 or seed < 0:
            raise ValueError(f"length and seed must not be negative: {self.items}, {seed}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size}")
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Begin ``epoch``, skipping the first ``start`` items of its order (counted over all ranks,
        as ``consumed`` counts them)."""
        if epoch < 0 or not 0 <= start <= max(self.items, self._rounds(0) * self.world_size):
            raise ValueError(f"no epoch {epoch} from item {start} of {self.items}")
        self.epoch, self.start = epoch, start

    def consumed(self, batches: int, batch: int) -> int:
        """Items all ranks together have taken after ``batches`` batches of ``batch`` items per
        rank: the number to give to ``set_epoch`` when resuming."""
        return self.start + batches * batch * self.world_size

    def _rounds(self, start: int) -> int:
        left = max(self.items - start, 0)
        return left // self.world_size if self.drop_last else -(-left // self.world_size)

    def _positions(self) -> np.ndarray:
        return self.start + self.rank + self.world_size * np.arange(self._rounds(self.start))

    def __len__(self) -> int:
        return self._rounds(self.start)

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.items)
        else:
            order = np.arange(self.items)
        # The remainder wraps to the front of the order, several times if there are more ranks
        # than items.
        return iter(order[self._positions() % max(self.items, 1)].tolist())

    @property
    def mask(self) -> Tensor:
        """bool ``[len(self)]``: False where this rank's item is a repeat that pads the last
        round."""
        return torch.from_numpy(self._positions() < self.items)
