"""torch's collectives as rounds of a communicator's operations. Each round waits for the one before.

A collective is a generator. It yields the operations that it started, and is resumed when they have completed. At its
end it has written the results. The caller's tensors are written only then, because the caller may reuse them after an
interrupted collective, and an abandoned operation may still write to its buffers.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from holdfast.runtime.groups.communicator import Communicator, Pending
from holdfast.runtime.layouts.folding import Reduction, fold
from holdfast.runtime.tensors import split_tensor

Rounds = Generator[Sequence[Pending], None, None]

#: Up to this size, an all-reduce between many ranks is one exchange of everything; above, two exchanges of parts.
ONE_ROUND_BYTES = 1 << 15
#: Types that gloo supports; other tensors are sent as bytes.
_MOVED_AS_IT_IS = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as a vector that gloo can send, as bytes if it does not support the dtype; a view if
    the tensor is contiguous, else a copy.
    """
    line = _to_vector(tensor)
    return line if line.dtype in _MOVED_AS_IT_IS else line.view(torch.uint8)


def all_gather_in_place(comm: Communicator, output: torch.Tensor, source: torch.Tensor) -> Rounds:
    """Yield the operations that gather all ranks' `source` directly into `output`, which must be contiguous, in rank
    order. If they are interrupted, the content of `output` is void.

    `source` may be this rank's own part of `output`.

    Raises:
        ValueError: `output` does not have the size of all ranks' `source` together, or has another dtype.
    """
    _check_parts(comm, output, source)
    whole, mine = flatten(output), flatten(source)
    if comm.size != 2:
        yield [comm.start_all_gather(whole, mine)]
        return
    first, second = whole.view(2, -1).unbind()
    own, other = (first, second) if comm.rank == 0 else (second, first)
    if own.data_ptr() != mine.data_ptr():
        own.copy_(mine)
    yield [_exchange(comm, other, own)]


def all_gather(comm: Communicator, output: torch.Tensor, source: torch.Tensor) -> Rounds:
    """Yield the operations that gather all ranks' `source`, of one shape, into `output`, in rank order.

    `output` is written once all have completed. But if it is contiguous and `source` is a part of its memory, they
    write to it directly; it is then void if they are interrupted.

    Raises:
        ValueError: sizes or dtypes do not match.
    """
    if output.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() and output.is_contiguous():
        # The caller allocated the output for this collective (FSDP2). A copy would take as long as the exchange.
        yield from all_gather_in_place(comm, output, source)
        return
    room = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    yield from all_gather_in_place(comm, room, source)
    output.copy_(room)


def all_gather_lists(comm: Communicator, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> Rounds:
    """Yield the operations that gather all ranks' `source`, of one shape. Once they have completed, `outputs[r]` is
    overwritten by the `source` of rank r.
    """
    room = torch.empty(comm.size * source.numel(), dtype=source.dtype, device=source.device)
    yield from all_gather_in_place(comm, room, source)
    for output, part in zip(outputs, room.view(comm.size, -1).unbind(), strict=True):
        output.copy_(part.view(output.shape))


def reduce_scatter(comm: Communicator, output: torch.Tensor, source: torch.Tensor, reduction: Reduction) -> Rounds:
    """Yield the operation that sends part r of each rank's `source` to rank r. Once it has completed, all ranks' parts
    for this rank are reduced into `output`, in rank order.

    Args:
        source: one part per rank, each with as many elements as `output`.

    Raises:
        ValueError: sizes or dtypes do not match.
    """
    _check_parts(comm, source, output)
    line, mine = _to_vector(source), output.detach()
    arrived = torch.empty(line.numel() // comm.size * (1 if comm.size == 2 else comm.size), dtype=line.dtype)
    if comm.size == 2:
        kept, sent = line.view(2, -1).unbind() if comm.rank == 0 else reversed(line.view(2, -1).unbind())
        yield [_exchange(comm, flatten(arrived), flatten(sent))]
        versions = [kept, arrived] if comm.rank == 0 else [arrived, kept]
    else:
        yield [comm.start_all_to_all(flatten(arrived), flatten(line))]
        versions = list(arrived.view(comm.size, -1).unbind())
    _fold_into(mine, versions, reduction)


def all_reduce(comm: Communicator, tensor: torch.Tensor, reduction: Reduction) -> Rounds:
    """Yield the operations that reduce all ranks' tensors on all ranks, in rank order; the result is written to
    `tensor` once they have completed.

    Small tensors, and those of two ranks, need one exchange of everything; others a reduce-scatter and an all-gather.
    """
    line = _to_vector(tensor)
    if comm.size == 2:
        arrived = torch.empty_like(line)
        yield [_exchange(comm, flatten(arrived), flatten(line))]
        _fold_into(tensor.detach(), [line, arrived] if comm.rank == 0 else [arrived, line], reduction)
        return
    if not needs_two_rounds(comm.size, tensor):
        room = torch.empty(comm.size * line.numel(), dtype=line.dtype)
        yield [comm.start_all_gather(flatten(room), flatten(line))]
        _fold_into(tensor.detach(), room.view(comm.size, -1).unbind(), reduction)
        return
    part = -(-line.numel() // comm.size)
    padded = torch.zeros(part * comm.size, dtype=line.dtype)
    padded[: line.numel()] = line
    whole = torch.empty_like(padded)
    mine = whole.view(comm.size, -1)[comm.rank]
    yield from reduce_scatter(comm, mine, padded, reduction)
    yield [comm.start_all_gather(flatten(whole), flatten(mine))]
    tensor.detach().copy_(whole[: line.numel()].view(tensor.shape))


def needs_two_rounds(size: int, tensor: torch.Tensor) -> bool:
    """Return whether `all_reduce` of this tensor in a group of `size` has a second exchange: only large ones between
    more than two ranks have.
    """
    return size > 2 and tensor.nbytes > ONE_ROUND_BYTES


def all_to_all(
    comm: Communicator,
    output: torch.Tensor,
    source: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
) -> Rounds:
    """Yield the operation that sends consecutive rows of `source` to the ranks, and receives rows from them, both in
    rank order. The received ones are written to `output` once it has completed.

    Args:
        received: rows (first dimension) from each rank; empty for equal parts of `output`.
        sent: rows to each rank; empty for equal parts of `source`.
    """
    room = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    rows = [
        list(received) or [len(output) // comm.size] * comm.size,
        list(sent) or [len(source) // comm.size] * comm.size,
    ]
    (into, incoming), (out_of, outgoing) = (
        (flatten(one), _count_elements(one, split)) for one, split in zip((room, source), rows, strict=True)
    )
    yield [comm.start_all_to_all(into, out_of, incoming, outgoing)]
    output.copy_(room)


def all_to_all_lists(comm: Communicator, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Rounds:
    """Yield the operation that sends `inputs[r]` to rank r, and receives as much as `outputs[r]` holds from it; it is
    written to `outputs` once all has arrived. Both have one tensor per rank, and all tensors have one dtype.
    """
    rooms = [flatten(torch.empty(one.shape, dtype=one.dtype)) for one in outputs]
    lines = [flatten(one) for one in inputs]
    received, sent = [room.numel() for room in rooms], [line.numel() for line in lines]
    room = rooms[0].new_empty(sum(received))
    yield [comm.start_all_to_all(room, torch.cat(lines), received, sent)]
    for output, part in zip(outputs, split_tensor(room, received), strict=True):
        output.copy_(part.view(output.dtype).view(output.shape))


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int) -> Rounds:
    """Yield the operation that sends the tensor of rank `root` to all ranks; the others overwrite their `tensor` by it,
    of the same shape and dtype, once it has arrived.
    """
    if comm.rank == root:
        yield [comm.start_broadcast(flatten(tensor), root)]
        return
    room = torch.empty(tensor.shape, dtype=tensor.dtype)
    yield [comm.start_broadcast(flatten(room), root)]
    tensor.detach().copy_(room)


def scatter(comm: Communicator, output: torch.Tensor, parts: Sequence[torch.Tensor], root: int) -> Rounds:
    """Yield the operation that sends `parts[r]` of rank `root` to rank r, which writes it to `output` once it has
    arrived. `parts` is empty on other ranks; all parts have the size of `output`.
    """
    room = torch.empty(output.shape, dtype=output.dtype)
    into, giving = flatten(room), comm.rank == root
    out_of = torch.cat([flatten(part) for part in parts]) if giving else into.new_empty(0)
    received = [into.numel() * (rank == root) for rank in range(comm.size)]
    yield [comm.start_all_to_all(into, out_of, received, [into.numel() * giving] * comm.size)]
    output.detach().copy_(room)


def gather(comm: Communicator, outputs: Sequence[torch.Tensor], source: torch.Tensor, root: int) -> Rounds:
    """Yield the operation that sends all ranks' `source`, of one size, to rank `root`. Once it has completed, `root`
    overwrites `outputs[r]` by the `source` of rank r; `outputs` is empty on other ranks.
    """
    line, taking = flatten(source), comm.rank == root
    into = line.new_empty(line.numel() * comm.size * taking)
    sent = [line.numel() * (rank == root) for rank in range(comm.size)]
    yield [comm.start_all_to_all(into, line, [line.numel() * taking] * comm.size, sent)]
    for output, part in zip(outputs, split_tensor(into, [line.numel()] * len(outputs)), strict=True):
        output.copy_(part.view(output.dtype).view(output.shape))


def reduce(comm: Communicator, tensor: torch.Tensor, reduction: Reduction, root: int) -> Rounds:
    """Yield the operation that sends all ranks' tensors to rank `root`. Once it has completed, `root` replaces its
    `tensor` by the reduction of all in rank order; the tensors of other ranks stay unchanged.
    """
    room = [torch.empty_like(tensor) for _ in range(comm.size * (comm.rank == root))]
    yield from gather(comm, room, tensor, root)
    if room:
        _fold_into(tensor.detach(), [one.view(-1) for one in room], reduction)


def send(comm: Communicator, tensor: torch.Tensor, to: int, tag: int) -> Rounds:
    """Yield the operation that sends a tensor with this tag to rank `to`."""
    yield [comm.start_send(flatten(tensor), to, tag)]


def receive(comm: Communicator, tensor: torch.Tensor, source: int | None, tag: int) -> Rounds:
    """Yield the operation that receives a tensor with this tag from rank `source`, or from any rank if it is None. Once
    it has arrived, it overwrites `tensor`, which has its shape and dtype.
    """
    room = torch.empty(tensor.shape, dtype=tensor.dtype)
    yield [comm.start_receive(flatten(room), source, tag)]
    tensor.detach().copy_(room)


def run_together(each: Sequence[Rounds]) -> Rounds:
    """Run several collectives at the same time: resume all that have not ended, and yield the operations that these
    started, as one round; repeat this until all have ended. Each thus waits for the slowest of a round.
    """
    under_way = list(each)
    while under_way:
        started = [(rounds, next(rounds, None)) for rounds in under_way]
        under_way = [rounds for rounds, pending in started if pending is not None]
        if under_way:
            yield [one for _, pending in started if pending is not None for one in pending]


def _to_vector(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as a contiguous vector; a view if the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1)


def _check_parts(comm: Communicator, whole: torch.Tensor, part: torch.Tensor) -> None:
    """Refuse sizes and dtypes that the transport would report as a peer's failure.

    Raises:
        ValueError: `whole` does not consist of one `part` for each rank.
    """
    if whole.dtype != part.dtype or whole.numel() != comm.size * part.numel():
        raise ValueError(
            f"{whole.numel()} elements of {whole.dtype} are not {comm.size} parts of {part.numel()} of {part.dtype}"
        )


def _exchange(comm: Communicator, arriving: torch.Tensor, leaving: torch.Tensor) -> Pending:
    """Start to send `leaving` to the other one of two ranks, and to receive `arriving` from it; both are vectors.
    Return the operation without waiting.
    """
    if comm.rank == 0:
        return comm.start_all_to_all(arriving, leaving, [0, arriving.numel()], [0, leaving.numel()])
    return comm.start_all_to_all(arriving, leaving, [arriving.numel(), 0], [leaving.numel(), 0])


def _count_elements(tensor: torch.Tensor, rows: Sequence[int]) -> list[int]:
    """Return, for each of these numbers of rows, how many elements of the `flatten`ed tensor they have; 0 if the tensor
    has no rows.

    They are bytes if `flatten` returns bytes.
    """
    whole = flatten(tensor).numel()
    each = whole // len(tensor) if len(tensor) else 0
    return [number * each for number in rows]


def _fold_into(output: torch.Tensor, versions: Sequence[torch.Tensor], reduction: Reduction) -> None:
    """Reduce flat tensors, of one dtype, into `output` in their order. `output` has as many elements, in any shape and
    with any strides.
    """
    if output.is_contiguous():
        fold(versions, output.view(-1), reduction)
        return
    folded = torch.empty(output.shape, dtype=output.dtype)
    fold(versions, folded.view(-1), reduction)
    output.copy_(folded)
