"""torchtitan's parallel dimensions for a job's replica group.

torchtitan sees one replica, and no default process group.
"""

from __future__ import annotations

from typing import Any

from holdfast import Job
from holdfast.integrations.torchtitan.package import import_module

_ParallelDims: Any = import_module("distributed").ParallelDims
#: the SPMD backend of torchtitan with a separate mesh for FSDP2
_PARTIAL = "partial_dtensor"


class JobParallelDims(_ParallelDims):
    """torchtitan's `ParallelDims` with the job's meshes.

    holdfast manages the data-parallel replicas. Shards and tensor parallelism stay within a node.
    """

    def __init__(self, job: Job, spmd_backend: str) -> None:
        """Use the sizes of the job's mesh.

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
        """Store the job's meshes under torchtitan's names, in place of its own process groups; return the dense mesh.

        Axes that a job does not use, such as "pp" and "cp", have size 1.
        """
        named = self._job.mesh_as
        loading = named(pp="", batch="shard", cp="", tp="tensor")
        # Without expert parallelism, torchtitan only checks that these exist.
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
