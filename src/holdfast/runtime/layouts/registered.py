"""Which process groups torch knows in this process: tables of its own, which no public function fills with ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from holdfast.errors import BadInputError
from holdfast.runtime.layouts.default_group import RefusingStore, refuse_new_group

_c10d: Any = dist.distributed_c10d
_native: Any = _distributed_c10d
#: what `torch.distributed.get_backend` says
BACKEND = "holdfast"


def register_default(group: Any) -> None:
    """Make a group torch's default one.

    Raises:
        BadInputError: there is one.
    """
    if dist.is_initialized():
        raise BadInputError(
            f"torch.distributed has a default process group of {dist.get_world_size()} ranks, made before "
            "holdfast.init(layout=...): leave init_process_group() out, the layout's groups are made for the script"
        )
    # (of a backend that torch does not know it would say just that to a script that calls new_group())
    _c10d.Backend.register_backend(BACKEND, refuse_new_group, devices=["cpu", "cuda"])
    register(group, range(group.size()))
    _c10d._update_default_pg(group)


def register(group: Any, ranks: Sequence[int]) -> None:
    """Make a group known to torch, by its name.

    Args:
        ranks: its members' in the default group, in the group's order.
    """
    world, name = _c10d._world, group.group_name
    tag = f"ptd:{name}"
    world.pg_map[group] = (BACKEND, RefusingStore())
    world.pg_names[group] = name
    world.pg_backend_config[group] = BACKEND
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    world.pg_to_tag[group] = tag
    world.tags_to_pg.setdefault("", []).append(group)
    world.tags_to_pg.setdefault(tag, []).append(group)
    _native._register_process_group(name, group)


def unregister(group: Any) -> None:
    """Let torch forget a group; no harm where the script has had all groups destroyed."""
    world = _c10d._world
    if group not in world.pg_map:
        return
    if world.default_pg is group:
        _c10d._update_default_pg(None)
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_group_ranks, world.pg_coalesce_state):
        table.pop(group, None)
    tag = world.pg_to_tag.pop(group)
    world.tags_to_pg[""].remove(group)
    del world.tags_to_pg[tag]
    _native._unregister_process_group(group.group_name)
