"""What `gather_cast` needs in memory: the list of live slots and the 16-bit rows.

The list belongs to one backend and is rewritten once per step. The rows are shared by all layers,
and by all backends that run on one stream one after another; they are allocated when the first of
those backends is built and never grow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar
from weakref import WeakValueDictionary

import torch

from .errors import IncompatibleEnvironment
from .kernels.gather_cast import gather_cast, list_live_slots, make_scratch, make_tickets


class LiveSlots:
    """The distinct slots that the planned batch references, on the device."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._scratch = make_scratch(num_slots, device)
        # the cast loads slots before it knows how many there are
        self.slots = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.tickets = make_tickets(device)
        self.bound: int | None = None

    def update(
        self,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        bs: int,
        bound: int | None = None,
        *,
        q_rows: int = 1,
        in_place: bool = False,
    ) -> torch.Tensor:
        """List the slots of a batch; arguments as `list_live_slots` and `gather_cast` take them.

        Args:
            in_place: overwrite `kv_indices`, for a captured kernel that reads that very buffer.

        Returns:
            kv_rows, the indices of the batch into `Workspace.fill`'s rows: like `kv_indices`, a
            new tensor that is 0 past kv_indptr[bs], or `kv_indices` itself.
        """
        self.bound = bound
        # an index past the end that some kernel prefetches must stay inside the rows
        kv_rows = kv_indices if in_place else torch.zeros_like(kv_indices)
        list_live_slots(
            kv_indices, kv_indptr, bs, self._scratch, self.slots, self.count, kv_rows, q_rows=q_rows
        )
        return kv_rows


class Workspace:
    """One layer's live rows in 16 bits, packed; `[num_slots, 1, dim]`, since all may be live."""

    _shared: ClassVar[WeakValueDictionary[tuple[object, ...], Workspace]] = WeakValueDictionary()

    def __init__(self, num_slots: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.empty((num_slots, 1, dim), dtype=dtype, device=device)

    @staticmethod
    def bytes_for(num_slots: int, dim: int, dtype: torch.dtype) -> int:
        return num_slots * dim * dtype.itemsize

    @classmethod
    def get(
        cls,
        num_slots: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        exclusive: bool = False,
        region: AbstractContextManager[object] | None = None,
    ) -> Workspace:
        """The workspace of this shape: the shared one, or a new one.

        Args:
            num_slots: rows of the pool, padding slots included.
            dim: columns of a row.
            dtype: the dtype of q.
            device: where the pool lies.
            exclusive: allocate a workspace of the caller's own (backends on concurrent streams).
            region: entered around the allocation (SGLang's memory saver, so that the rows are
                given back with the pool while the engine sleeps).

        Raises:
            IncompatibleEnvironment: the device has less free memory than the rows take.
        """
        key = (num_slots, dim, dtype, device)
        found = None if exclusive else cls._shared.get(key)
        if found is not None:
            return found
        require_memory(cls.bytes_for(num_slots, dim, dtype), device)
        with region or nullcontext():
            made = cls(num_slots, dim, dtype, device)
        if not exclusive:
            cls._shared[key] = made
        return made

    def fill(self, pool: torch.Tensor, live: LiveSlots) -> torch.Tensor:
        """Cast the live rows of one layer's `pool`; `LiveSlots.update`'s result indexes them."""
        return gather_cast(pool, live.slots, live.count, live.tickets, self.rows, bound=live.bound)


def require_memory(wanted_bytes: int, device: torch.device) -> None:
    """Refuse, with the numbers and the flags that help, an allocation that cannot fit.

    Raises:
        IncompatibleEnvironment: fewer than `wanted_bytes` are free on `device`.
    """
    if device.type != "cuda":
        return
    free_bytes, _ = torch.cuda.mem_get_info(device)
    # what torch has reserved and not handed out counts as free
    free_bytes += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if wanted_bytes > free_bytes:
        raise IncompatibleEnvironment(
            f"workspace: the gather_cast rows must have {wanted_bytes / 2**30:.2f} GiB, got "
            f"{free_bytes / 2**30:.2f} GiB free on {device}; lower --max-total-tokens or "
            "--mem-fraction-static (stock `flashinfer` needs the same amount in every step)"
        )
