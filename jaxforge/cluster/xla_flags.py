"""Which options of XLA's GPU compiler the overlap fields stand for, by version of jaxlib.

They are given to the compiler with the program, not through XLA_FLAGS, where an unknown one would end the process.
"""

from typing import Any

import jaxlib

from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config

_ON = "COLLECTIVE_PIPELINING_MODE_ON"
# The first version that has the options, newest first.  A pipelined collective of one iteration of a loop runs under
# the computation of the one before (gathers) or after it (reductions).  Windowed products are cut from 0 MiB on.
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
        },
    ),
)


def overlap_options(config: Config, platform: str, version: str = jaxlib.__version__) -> dict[str, Any]:
    """For `jax.jit(compiler_options=...)`; none for a CPU, whose devices don't overlap anything.

    Raises:
      ConfigError: for a field that this version's compiler has no options for.
    """
    fields = [name for name in ("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap")
              if getattr(config.parallel, name)]  # fmt: skip
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
