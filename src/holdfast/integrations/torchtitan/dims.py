"""torchtitan's parallel dimensions on the places of a job's unit: it sees one replica, and never a default group."""

from __future__ import annotations

from typing import Any

from holdfast import Job
from holdfast.integrations.torchtitan.package import module

_ParallelDims: Any = module("distributed").ParallelDims
#: of torchtitan's ways to say how a tensor is spread, the one that has a mesh of its own for FSDP2
_PARTIAL = "partial_dtensor"


class JobParallelDims(_ParallelDims):
    """`ParallelDims` whose meshes are the job's: data-parallel replicas are holdfast's, shard and tensor the node's."""

    def __init__(self, job: Job, spmd_backend: str) -> None:
        """Take the sizes of the job's mesh.

        Args:
            spmd_backend: torchtitan's `parallelism.spmd_backend`.

        Raises:
            BadInputError: the job has no layout.
        """
        self._job = job
        shard, tensor = job.mesh.shape
        _ParallelDims.__init__(
            self,
            dp_replicate=1,
            dp_shard=shard,
            cp=1,
            tp=tensor,
            pp=1,
            ep=1,
            world_size=shard * tensor,
            spmd_backend=spmd_backend,
        )

    def build_mesh(self) -> Any:
        """Name the places as torchtitan does; where it would make groups, and fake ones, the job's are taken."""
        named = self._job.mesh_as
        loading = named(pp="", batch="shard", cp="", tp="tensor")
        # (as without expert parallelism these are asked for nothing but whether they are there)
        sparse = named(pp="", dp_replicate="", efsdp="", ep="")
        if self.spmd_backend == _PARTIAL:
            axes = ("dp_replicate", "fsdp", "tp")
            dense = named(pp="", dp_replicate="", fsdp="shard", tp="tensor")
        else:
            axes = ("dp_replicate", "dp_shard", "cp", "tp")
            dense = named(pp="", dp_replicate="", dp_shard="shard", cp="", tp="tensor")
        single = {name: loading[name] for name in ("pp", "batch", "cp", "tp")}
        single |= {name: dense[name] for name in axes if name not in single}
        single |= {"loss": named(loss="shard"), "ep": sparse["ep"], "efsdp": sparse["efsdp"]}
        self._world_mesh = dense
        self._global_meshes = {"dataloading": loading, "loss": single["loss"], "dense": dense, "sparse": sparse}
        if self.spmd_backend == "spmd_types":
            axes = ("dp", "cp", "tp")
            forward = named(pp="", dp="shard", cp="", tp="tensor")[axes]
            self._global_meshes["spmd_dense_for_fwdbwd"] = forward
            single["dp"] = forward["dp"]
        self._single_axis_meshes = single
        activated = self.get_activated_mesh(list(axes))
        self._spmd_meshes = [activated] if activated is not None else []
        return dense
