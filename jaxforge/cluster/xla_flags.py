"""Which options of XLA's GPU compiler the overlap fields stand for, by version of jaxlib.

They are given to the compiler with the program, not through XLA_FLAGS, where an unknown one would end the process.
"""

from typing import Any

import jaxlib
from jax.sharding import Mesh

from jaxforge.cluster.mesh import axes_crossing_nodes, expert_axes
from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config

_ON = "COLLECTIVE_PIPELINING_MODE_ON"
# The first version that has the options, newest first.  A pipelined collective of one iteration of a loop runs under
# the computation of the one before (gathers) or after it (reductions).  Windowed products are cut from 0 MiB on.
# Without the scheduler that hides latencies, an exchange is waited for where it starts.
_TABLE: tuple[tuple[tuple[int, ...], dict[str, dict[str, Any]]], ...] = (
    (
        (0, 11),
        {
            "overlap_grad_reduce": {"xla_gpu_pipeline_reduce_scatter": _ON, "xla_gpu_pipeline_all_reduce": _ON},
            "overlap_param_gather": {"xla_gpu_pipeline_all_gather": _ON},
            "tp_comm_overlap": {
                "xla_gpu_threshold_for_windowed_einsum_mib": 0,
                "xla_gpu_multi_streamed_windowed_einsum": True,
            },
            "overlap_moe_expert_parallel_comm": {"xla_gpu_enable_latency_hiding_scheduler": True},
        },
    ),
)


def overlap_options(config: Config, platform: str, version: str = jaxlib.__version__) -> dict[str, Any]:
    """For `jax.jit(compiler_options=...)`; none for a CPU, whose devices don't overlap anything.

    Raises:
      ConfigError: for a field that this version's compiler has no options for.
    """
    fields = [name for name in _TABLE[0][1] if getattr(config.parallel, name)]
    if platform != "gpu" or not fields:
        return {}
    installed = tuple(int(part) for part in version.split(".")[:2])
    table = next((options for first, options in _TABLE if installed >= first), {})
    options: dict[str, Any] = {}
    for name in fields:
        if name not in table:
            raise ConfigError(
                f"parallel.{name}=True needs options that the compiler of jaxlib {version} isn't known to have; use"
                f" jaxlib {'.'.join(map(str, _TABLE[-1][0]))} or newer, or set it to false"
            )
        options |= table[name]
    return options


def exchange_options(config: Config, mesh: Mesh, platform: str) -> dict[str, Any]:
    """What the compiler must be told where tokens go to experts on other hosts.

    By default it would gather the hosts' whole buffers, and exchange exact numbers of rows inside a host alone.
    """
    crosses = axes_crossing_nodes(mesh)
    crosses_nodes = any(crosses[axis] for axis in expert_axes(config))
    if platform != "gpu" or config.model.decoder.num_experts is None or not crosses_nodes:
        return {}
    return {"xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer": False}
