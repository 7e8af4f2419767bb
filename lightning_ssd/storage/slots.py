"""Slots: the allocated byte ranges of a file or a slab. Pure bookkeeping: no memory, no disk."""

from __future__ import annotations

from bisect import bisect_left, insort

PAGE = 4096
"""Alignment of every slot in bytes: O_DIRECT requires it of addresses, offsets and lengths."""


def align_up(nbytes: int) -> int:
    """Returns `nbytes` rounded up to a multiple of PAGE."""
    return -(-nbytes // PAGE) * PAGE


def align_down(nbytes: int) -> int:
    """Returns `nbytes` rounded down to a multiple of PAGE."""
    return nbytes // PAGE * PAGE


class SlotAllocator:
    """Allocates aligned slots of the byte range ``[0, capacity)``, best fit; freed neighbours are merged.

    Not thread-safe: its owner holds a lock around every call. No method calls back.

    Args:
        nbytes: initial bytes of the range, a multiple of PAGE.

    Attributes:
        capacity: bytes of the whole range.
        used: bytes in allocated slots.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self.capacity = 0
        self.used = 0
        self._live: dict[int, int] = {}  # offset of an allocated slot -> its bytes
        self._free: dict[int, int] = {}  # offset of a hole -> its bytes
        self._hole_ending_at: dict[int, int] = {}  # end of a hole -> its offset
        self._by_size: list[tuple[int, int]] = []  # (bytes, offset) of every hole, sorted
        if nbytes:
            self.grow(nbytes)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest hole: the largest slot that can be allocated without growing."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def tail_free(self) -> int:
        """Bytes of the hole at the end of the range, which growing makes larger."""
        start = self._hole_ending_at.get(self.capacity)
        return 0 if start is None else self._free[start]

    def allocate(self, nbytes: int) -> int | None:
        """Allocates `nbytes` (rounded up to PAGE) in the smallest hole that has room.

        Returns:
            The slot's offset in bytes, or None when no hole is large enough.

        Raises:
            ValueError: `nbytes` is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"a slot needs a positive number of bytes, not {nbytes}")
        need = align_up(nbytes)
        index = bisect_left(self._by_size, (need, 0))
        if index == len(self._by_size):
            return None
        size, offset = self._by_size[index]
        self._remove_hole(offset, size)
        if size > need:
            self._add_hole(offset + need, size - need)
        self._live[offset] = need
        self.used += need
        return offset

    def allocate_at(self, offset: int, nbytes: int) -> None:
        """Allocates the slot of `nbytes` (rounded up to PAGE) at `offset`.

        Raises:
            ValueError: the slot is not entirely free.
        """
        need = align_up(nbytes)
        for start, size in self._free.items():
            if start <= offset and offset + need <= start + size:
                break
        else:
            raise ValueError(f"{need} bytes at offset {offset} are not free")
        self._remove_hole(start, size)
        if start < offset:
            self._add_hole(start, offset - start)
        if offset + need < start + size:
            self._add_hole(offset + need, start + size - offset - need)
        self._live[offset] = need
        self.used += need

    def free(self, offset: int) -> None:
        """Frees the slot at `offset`.

        Raises:
            ValueError: no slot begins there (it was freed before, or never allocated).
        """
        size = self._live.pop(offset, None)
        if size is None:
            raise ValueError(f"no slot begins at offset {offset}: it was freed before, or never allocated")
        self.used -= size
        self._add_hole(offset, size)

    def grow(self, nbytes: int) -> None:
        """Appends `nbytes` to the range.

        Raises:
            ValueError: `nbytes` is not a positive multiple of PAGE.
        """
        if nbytes <= 0 or nbytes % PAGE:
            raise ValueError(f"a range grows by a positive multiple of {PAGE} bytes, not {nbytes}")
        start = self.capacity
        self.capacity += nbytes
        self._add_hole(start, nbytes)

    def _add_hole(self, offset: int, size: int) -> None:
        before = self._hole_ending_at.get(offset)
        if before is not None:
            before_size = self._free[before]
            self._remove_hole(before, before_size)
            offset, size = before, before_size + size
        after_size = self._free.get(offset + size)
        if after_size is not None:
            self._remove_hole(offset + size, after_size)
            size += after_size
        self._free[offset] = size
        self._hole_ending_at[offset + size] = offset
        insort(self._by_size, (size, offset))

    def _remove_hole(self, offset: int, size: int) -> None:
        del self._free[offset]
        del self._hole_ending_at[offset + size]
        del self._by_size[bisect_left(self._by_size, (size, offset))]
