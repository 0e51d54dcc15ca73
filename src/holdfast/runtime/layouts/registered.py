"""Registers process groups in torch's internal tables, for which torch has no public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from holdfast.errors import BadInputError
from holdfast.runtime.layouts.default_group import RefusingStore, refuse_new_group

_c10d: Any = dist.distributed_c10d
_native: Any = _distributed_c10d
#: the result of `torch.distributed.get_backend`
BACKEND = "holdfast"


def register_default(group: Any) -> None:
    """Make a group torch's default process group, and enter it into torch's tables. `new_group()` in a script raises
    BadInputError from then on.

    Raises:
        BadInputError: torch already has a default group.
    """
    if dist.is_initialized():
        raise BadInputError(
            f"torch.distributed has a default process group of {dist.get_world_size()} ranks, made before "
            "holdfast.init(layout=...): remove init_process_group(), holdfast creates the groups of a layout"
        )
    # torch would only report an unknown backend to a script that calls new_group()
    _c10d.Backend.register_backend(BACKEND, refuse_new_group, devices=["cpu", "cuda"])
    register(group, range(group.size()))
    _c10d._update_default_pg(group)


def register(group: Any, ranks: Sequence[int]) -> None:
    """Enter a group into torch's tables under its `group_name`, so that meshes and functional collectives find it.
    torch gets a store for it that refuses to create more groups.

    Args:
        ranks: its members' ranks in the default group, in the group's order.
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
    """Remove a group from torch's tables, also as the default group. Do nothing if it is not in them, as after the
    script destroyed all groups.
    """
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
