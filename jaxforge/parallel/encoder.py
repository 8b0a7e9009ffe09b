"""The encoder's layout under the decoder's: hetero tensor parallelism.

The decoder's tensor group is tensor_outer x tensor_inner; the encoder shards over tensor_inner alone and is replicated
over tensor_outer.  Its visual tokens come out replicated over the group, which is how the decoder's embedding reads
them.
"""

from jaxforge.cluster.mesh import TENSOR_AXES
from jaxforge.ops.placement import Placement
from jaxforge.parallel.rules import SHARDED_OVER_TENSOR


def encoder_placement() -> Placement:
    """The encoder's and the projector's view of the mesh.  Islands are manual over both tensor axes."""
    return Placement(tuple((name, ("tensor_inner",)) for name in SHARDED_OVER_TENSOR), TENSOR_AXES)
