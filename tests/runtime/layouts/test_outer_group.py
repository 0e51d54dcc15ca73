"""All collectives of an outer group against plain sums; sends, objects, the default group, and freed memory."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from replicas import leaving_nothing, replica_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import BadInputError
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.plan import Role
from holdfast.runtime.groups.communicator import CollectiveLeftError, HaltedError, LocalCommunicator
from holdfast.runtime.layouts.mesh import ReplicaMesh
from holdfast.runtime.layouts.outer_group import OuterGroup
from tests.harness.local_world import Seat, run_world

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
SHAPES = ((), (3,), (4, 5), (40, 300))
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return small whole numbers, so that no sum is rounded."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def expected(op: str, each: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(each)
    if op in ("SUM", "AVG", "PREMUL_SUM"):
        total = stacked.double().sum(0) * {"SUM": 1.0, "AVG": 1 / len(each), "PREMUL_SUM": 0.25}[op]
        return total.to(stacked.dtype)
    result = each[0]
    for one in each[1:]:
        pairwise = {
            "PRODUCT": torch.mul,
            "MIN": torch.minimum,
            "MAX": torch.maximum,
            "BAND": torch.bitwise_and,
            "BOR": torch.bitwise_or,
            "BXOR": torch.bitwise_xor,
        }[op]
        result = pairwise(result, one)
    return result


def fits(op: str, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point if op in ("AVG", "PREMUL_SUM") else not (op[0] == "B" and dtype.is_floating_point)


def torch_op(op: str) -> object:
    return dist.ReduceOp.PREMUL_SUM(0.25) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)


def check_reductions(group: OuterGroup) -> None:
    rank, size = group.rank(), group.size()
    for dtype in DTYPES:
        for shape in SHAPES:
            each = [of_rank(other, shape, dtype) for other in range(size)]
            for op in OPS:
                if not fits(op, dtype):
                    continue
                tensor = each[rank].clone()
                work = dist.all_reduce(tensor, torch_op(op), group=group, async_op=True)
                after = torch.full((3,), float(rank))
                # This runs in between, while the first one may still have an exchange left.
                dist.all_reduce(after, group=group)
                assert work.wait()
                assert torch.equal(tensor, expected(op, each)), (op, dtype, shape)
                assert after.tolist() == [sum(range(size))] * 3
                if shape:
                    parts = [of_rank(other, (size * shape[0], *shape[1:]), dtype) for other in range(size)]
                    output = torch.zeros(shape, dtype=dtype)
                    dist.reduce_scatter_single(output, parts[rank], torch_op(op), group=group)
                    assert torch.equal(output, expected(op, parts).chunk(size)[rank]), (op, dtype, shape)
        for root in range(size):
            tensor, each = of_rank(rank, (4, 5), dtype), [of_rank(other, (4, 5), dtype) for other in range(size)]
            dist.reduce(tensor, group_dst=root, group=group)
            assert torch.equal(tensor, expected("SUM", each) if rank == root else each[rank])


def check_moves(group: OuterGroup) -> None:
    rank, size = group.rank(), group.size()
    for dtype in DTYPES:
        for shape in SHAPES:
            each = [of_rank(other, shape, dtype) for other in range(size)]
            lists = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
            dist.all_gather(lists, each[rank], group=group)
            assert all(torch.equal(a, b) for a, b in zip(lists, each, strict=True))
            for root in range(size):
                tensor = each[rank].clone()
                dist.broadcast(tensor, group_src=root, group=group)
                assert torch.equal(tensor, each[root])
                output = torch.zeros(shape, dtype=dtype)
                parts = [one + one for one in each] if rank == root else None
                dist.scatter(output, parts, group_src=root, group=group)
                assert torch.equal(output, each[rank] + each[rank])
                gathered = [torch.zeros(shape, dtype=dtype) for _ in range(size)] if rank == root else None
                dist.gather(each[rank], gathered, group_dst=root, group=group)
                assert gathered is None or all(torch.equal(a, b) for a, b in zip(gathered, each, strict=True))
            if shape:
                whole = torch.zeros((size * shape[0], *shape[1:]), dtype=dtype)
                dist.all_gather_single(whole, each[rank], group=group)
                assert torch.equal(whole, torch.cat(each))
                own = whole.chunk(size)[rank].fill_(rank + 1)  # In FSDP2, the input is a part of the output as well.
                dist.all_gather_single(whole, own, group=group)
                assert torch.equal(whole, torch.cat([torch.full(shape, r + 1, dtype=dtype) for r in range(size)]))
        # The number of rows for each rank, which may be zero.
        sent = [(rank * 2 + other) % 4 for other in range(size)]
        received = [(other * 2 + rank) % 4 for other in range(size)]
        rows = torch.cat([torch.full((n, 2), 10 * rank + o).to(dtype) for o, n in enumerate(sent)])
        output = torch.zeros((sum(received), 2), dtype=dtype)
        dist.all_to_all_single(output, rows, received, sent, group=group)
        assert output[:, 0].tolist() == [10 * o + rank for o, n in enumerate(received) for _ in range(n)]
        outputs = [torch.zeros(n, dtype=dtype) for n in received]
        dist.all_to_all(outputs, [torch.full((n,), 10 * rank + o).to(dtype) for o, n in enumerate(sent)], group=group)
        assert torch.cat(outputs).tolist() == output[:, 0].tolist()
    column = torch.zeros(6, 2)[:, 0]  # This tensor is not contiguous.
    column.copy_(of_rank(rank, (6,), torch.float32))
    dist.all_reduce(column, group=group)
    assert torch.equal(column, expected("SUM", [of_rank(other, (6,), torch.float32) for other in range(size)]))
    dist.barrier(group=group)


def check_functional(group: OuterGroup) -> None:
    """Call the collectives as DTensor does: through torch's dispatcher, from C++."""
    rank, size = group.rank(), group.size()
    each = [of_rank(other, (size, 3), torch.float64) for other in range(size)]
    mine = each[rank]
    assert torch.equal(funcol.all_gather_single(mine, 0, group).wait(), torch.cat(each))
    assert torch.equal(funcol.all_reduce(mine, "sum", group).wait(), sum(each))
    assert torch.equal(funcol.reduce_scatter_single(mine, "sum", 0, group).wait(), sum(each)[rank : rank + 1])
    assert torch.equal(funcol.broadcast(mine, 0, group).wait(), each[0])
    exchanged = funcol.all_to_all_single(mine, None, None, group)
    assert torch.equal(exchanged.wait(), torch.cat([one[rank : rank + 1] for one in each]))
    several = funcol.all_reduce_coalesced([mine, mine[0]], "avg", group)
    assert [torch.equal(a.wait(), b) for a, b in zip(several, (sum(each) / size, sum(each)[0] / size), strict=True)]
    first, second = funcol.all_gather_single_coalesced([mine, mine[:, 0].contiguous()], group)
    assert torch.equal(second.wait(), torch.cat([one[:, 0] for one in each]))
    assert torch.equal(first.wait(), torch.cat(each))
    (part,) = funcol.reduce_scatter_single_coalesced([mine], "sum", [0], group)
    assert torch.equal(part.wait(), sum(each)[rank : rank + 1])
    with_gradient = mine.clone().requires_grad_()
    funcol.all_gather_single_autograd(with_gradient, 0, group).sum().backward()
    assert torch.equal(with_gradient.grad, torch.full_like(mine, size))
    with dist._coalescing_manager(group=group):
        tensors = [one.clone() for one in (mine, mine[0])]
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    assert torch.equal(tensors[1], sum(each)[0])
    future = dist.all_reduce(tensors[0].fill_(1), group=group, async_op=True).get_future()
    assert torch.equal(future.wait()[0], torch.full_like(mine, size))
    assert torch._C._distributed_c10d._get_work_registry_size() == 0


def check_objects(group: OuterGroup) -> None:
    rank, size = group.rank(), group.size()
    whole: list[object] = [None] * size
    dist.all_gather_object(whole, {"rank": rank}, group=group)
    assert whole == [{"rank": other} for other in range(size)]
    sent: list[object] = [f"from {rank}"]
    dist.broadcast_object_list(sent, group_src=size - 1, group=group)
    assert sent == [f"from {size - 1}"]


def check_sends(group: OuterGroup) -> None:
    """Send around the ring in both directions, then run a pipeline of torch's."""
    rank, size = group.rank(), group.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.bfloat16):
        mine, came = torch.full((5, 7), rank).to(dtype), [torch.zeros(5, 7, dtype=dtype) for _ in range(2)]
        ops = [
            dist.P2POp(dist.irecv, came[0], group_peer=left, group=group),
            dist.P2POp(dist.isend, mine, group_peer=right, group=group),
            dist.P2POp(dist.irecv, came[1], group_peer=right, group=group, tag=3),
            dist.P2POp(dist.isend, mine, group_peer=left, group=group, tag=3),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert [one[0, 0].item() for one in came] == [left, right]
    if rank == 0:
        dist.send_object_list(["hello", 5], group_dst=1, group=group)
    elif rank == 1:
        objects: list[object] = [None, None]
        dist.recv_object_list(objects, group_src=0, group=group)
        assert objects == ["hello", 5]
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).double() for _ in range(size)]
    whole, x = nn.Sequential(*layers), torch.ones(8, 4, dtype=torch.float64)
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"), group=group)
    # A stage's losses are means of micro-batches, and so is their sum.
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=x, losses=losses)
    else:
        schedule.step()
    found = layers[rank].weight.grad.clone()
    layers[rank].weight.grad = None
    nn.functional.mse_loss(whole(x), x).backward()
    torch.testing.assert_close(found, layers[rank].weight.grad, rtol=1e-12, atol=1e-14)


def collectives_body(seat: Seat, layout: Layout) -> None:
    with leaving_nothing(seat), replica_of(seat, layout) as (replica, connector):
        group = replica.groups["shard"]
        assert (dist.get_rank(), dist.get_world_size()) == (connector.rank, layout.places)
        assert dist.get_rank(group) == dist.get_group_rank(group, dist.get_rank())
        assert dist.get_process_group_ranks(group) == list(layout.ranks_along(connector.rank, "shard"))
        check_reductions(group)
        check_moves(group)
        check_functional(group)
        check_objects(group)
        check_sends(group)
        # Continue on new connections without waiting for the peers; the old ones stay intact.
        replica.swap(connector.connect(replica), sever=False)
        check_functional(group)
        check_sends(group)
    assert not dist.is_initialized()


@pytest.mark.parametrize("layout", [Layout(shard=4), Layout(shard=2)], ids=str)
def test_every_collective_matches_a_plain_loop(layout):
    run_world(4, collectives_body, layout)


def test_a_replica_of_one_rank_computes_without_connections():
    replica = ReplicaMesh(Layout(), Role(), torch.device("cpu"))
    try:
        assert replica.connected_ranks == {}
        assert replica.mesh.mesh_dim_names == ("shard", "tensor")
        assert replica.mesh.shape == (1, 1)
        for group in replica.groups.values():
            check_reductions(group)
            check_moves(group)
            check_functional(group)
        refused_default_group()
    finally:
        replica.close()
    assert not dist.is_initialized()


def refused_default_group() -> None:
    tensor = torch.zeros(4)
    message = r"on torch's default process group: .*job\.mesh\.get_group\(\"shard\"\)"
    for use in (
        lambda: dist.all_reduce(tensor),
        lambda: dist.barrier(),
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_gather([tensor.clone()], tensor),
        lambda: dist.all_gather_single(tensor.clone(), tensor),
        lambda: dist.reduce_scatter_single(tensor.clone(), tensor),
        lambda: dist.all_to_all_single(tensor.clone(), tensor),
        lambda: dist.all_gather_object([None], 1),
        lambda: funcol.all_reduce(tensor, "sum", dist.group.WORLD),
        lambda: funcol.all_gather_single(tensor, 0, dist.group.WORLD),
        lambda: dist.new_group([0], backend="gloo"),
        lambda: dist.new_group([0]),
        lambda: DistributedDataParallel(nn.Linear(1, 1)),
    ):
        with pytest.raises(BadInputError, match=message):
            use()


def test_a_default_group_created_by_the_script_is_refused():
    replica = ReplicaMesh(Layout(), Role(), torch.device("cpu"))
    with pytest.raises(BadInputError, match=r"remove init_process_group\(\)"):
        ReplicaMesh(Layout(), Role(), torch.device("cpu"))
    dist.destroy_process_group()  # Scripts do this at their end.
    replica.close()
    assert not dist.is_initialized()


def test_unconnected_groups_and_wrong_communicators_are_refused():
    replica = ReplicaMesh(Layout(shard=2), Role(place=1), torch.device("cpu"))
    group = replica.groups["shard"]
    try:
        assert replica.connected_ranks == {"shard": (0, 1)}
        with pytest.raises(HaltedError, match="group holdfast-shard has no connections yet"):
            dist.all_reduce(torch.zeros(1), group=group)
        with pytest.raises(ValueError, match="rank 0 of 1 cannot serve rank 1 of 2"):
            replica.swap({"shard": LocalCommunicator()})
        with pytest.raises(ValueError, match=r"got communicators for \[\], expected \['shard'\]"):
            replica.swap({})
        replica.retire_communicators()
        assert isinstance(replica.left_error, HaltedError)
        with pytest.raises(CollectiveLeftError, match="has no connections now"):
            dist.all_reduce(torch.zeros(1), group=group)
    finally:
        replica.close()


class Halting(threading.Thread):
    """Halts after a short delay, and records the time."""

    def __init__(self, halt: threading.Event) -> None:
        super().__init__(daemon=True)
        self.halt, self.at = halt, 0.0

    def run(self) -> None:
        time.sleep(0.01)
        self.at = time.monotonic()
        self.halt.set()


def abandon_body(seat: Seat, layout: Layout) -> list[float]:
    """Rank 0 takes no part; the others wait in each kind of collective, and only their halt frees them."""
    took: list[float] = []
    with leaving_nothing(seat), replica_of(seat, layout) as (replica, connector):
        group, joins = replica.groups["shard"], connector.rank != 0
        large = torch.ones(3 << 15)
        each = {
            "all_reduce": lambda: dist.all_reduce(large, group=group),
            "all_gather": lambda: dist.all_gather_single(large.repeat(group.size()), large, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_single(large[: 1 << 15].clone(), large, group=group),
            "functional": lambda: funcol.all_gather_single(large, 0, group).wait(),
            "receive": lambda: dist.recv(large, group_src=0, group=group),
            "broadcast": lambda: dist.broadcast(large, group_src=0, group=group),
        }
        for collective in each.values():
            halt = threading.Event()
            replica.swap(connector.connect(replica, halt.is_set))
            if joins:
                # Other operations in flight are abandoned with it, and hold no references.
                other = dist.all_reduce(torch.ones(5), group=group, async_op=True)
                unused = funcol.all_reduce(torch.ones(5), "sum", group)
                tensor = torch.ones(3)
                gone = weakref.ref(tensor)
                receiving = dist.irecv(tensor, group_src=0, group=group, tag=9)
                del tensor
                halting = Halting(halt)
                halting.start()
                with pytest.raises(HaltedError, match="was halted in"):
                    collective()
                took.append(time.monotonic() - halting.at)
                halting.join()
                for work in (other, receiving):
                    with pytest.raises(HaltedError):
                        work.wait()
                    with group.discarding_left_work():
                        assert not work.wait()
                    assert isinstance(work.exception(), HaltedError)
                with pytest.raises(HaltedError, match="was halted in"):
                    collective()
                replica.retire_communicators()
                assert isinstance(unused, funcol.AsyncCollectiveTensor)
                assert torch._C._distributed_c10d._get_work_registry_size() == 0
                gc.collect()
                assert gone() is None
            seat.meet()
        replica.swap(connector.connect(replica))
        check_functional_after(group)
    return took


def check_functional_after(group: OuterGroup) -> None:
    mine = torch.ones(3) * group.rank()
    assert torch.equal(funcol.all_reduce(mine, "sum", group).wait(), torch.full((3,), float(sum(range(group.size())))))


def test_a_halt_ends_the_wait_in_any_collective():
    took = [seconds for each in run_world(3, abandon_body, Layout(shard=3)) for seconds in each]
    assert len(took) == 12
    assert max(took) < 5.0  # This takes about 0.01 s if the machine is not busy.
