"""What the backward pass of a layer finds kept, what it computes again, and what it fetches from host memory.

The activations of a layer carry names (`jax.ad_checkpoint.checkpoint_name`), each at the last place before which there
is a product or a kernel; what lies between two names is elementwise, or gathers, and is always computed again.  So a
policy decides by name alone.  Weights that were gathered for a layer have no name, and are gathered again.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, Recompute, Saveable, name_p

from jaxforge.config.activations import LAYER_INPUT, OFFLOAD, RECOMPUTE, SAVE, layer_actions
from jaxforge.config.schema import Config
from jaxforge.ops.placement import SINGLE_DEVICE, Placement

HOST_MEMORY = "pinned_host"
# The logical name of the dimension over which an activation is sharded; the others are whole on each device.
SHARDED_DIM = {
    **dict.fromkeys((LAYER_INPUT, "attn_norm", "mlp_norm_input", "mlp_norm", "dropout"), "residual_sequence"),
    **dict.fromkeys(("query_compressed", "kv_compressed"), "residual_sequence"),
    **dict.fromkeys(("query", "core_attn"), "heads"),
    **dict.fromkeys(("key", "value"), "kv_heads"),
    **dict.fromkeys(("mlp_gate", "mlp_up", "mlp_act", "shared_gate", "shared_up", "shared_act"), "ffn"),
    # by tokens, or where experts are cut over tensor by their width
    **dict.fromkeys(("expert_fc1", "moe_act"), "expert_tokens"),
    **dict.fromkeys(("router", "dispatched_input"), "tensor_experts"),
}
# cuDNN's attention can't name what its backward pass reads: the kernel's output and log-sum-exp
KERNELS = {"dot_product_attention_fwd_wrapper": "core_attn"}

_DECISIONS: dict[str, Any] = {SAVE: Saveable, RECOMPUTE: Recompute, OFFLOAD: Offloadable("device", HOST_MEMORY)}


@dataclasses.dataclass(frozen=True)
class Policies:
    """Policies of `jax.checkpoint`: of layers that keep their activations, and of units that are computed again."""

    kept: Callable[..., Any]
    recomputed: Callable[..., Any]

    def checkpoint(self, f: Callable, *, is_recomputed: bool) -> Callable:
        """`f`, a layer or a group of layers in a loop, with its policy."""
        return jax.checkpoint(f, prevent_cse=False, policy=self.recomputed if is_recomputed else self.kept)


def make_policies(
    actions: Mapping[str, str], *, placement: Placement = SINGLE_DEVICE, smallest_offloaded: int = 0
) -> Policies:
    """Policies that follow `actions`: name -> save, recompute or offload.  Names that aren't in it are saved.

    A unit that is computed again keeps its input alone, on the device or in host memory.

    Args:
      placement: of the layers.
      smallest_offloaded: bytes on one device, of one layer, below which an array is saved instead of offloaded.
    """

    def policy(actions, default):
        def decide(primitive, *arrays, **parameters):
            name = parameters["name"] if primitive is name_p else KERNELS.get(primitive.name)
            if name is None:
                return Recompute
            action = actions.get(name, default)
            # what cuDNN gives is as large as the queries, which are its first argument
            if action == OFFLOAD and _bytes_on_a_device(name, arrays[0], placement) < smallest_offloaded:
                action = SAVE
            return _DECISIONS[action]

        return decide

    only_input = {LAYER_INPUT: actions.get(LAYER_INPUT, SAVE)}
    return Policies(policy(actions, SAVE), policy(only_input, RECOMPUTE))


def _bytes_on_a_device(name: str, array: Any, placement: Placement) -> int:
    """Of an activation while it is traced: in an island it is already what one device holds."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = [axis for axis in placement.axes(SHARDED_DIM.get(name)) if axis not in mesh.manual_axes]
    return array.size * array.dtype.itemsize // math.prod(mesh.shape[axis] for axis in axes)


KEEP_ALL = make_policies({})


def layer_policies(config: Config, part: str, placement: Placement = SINGLE_DEVICE) -> Policies:
    """Those that the config asks for, for the layers of the decoder or the encoder."""
    smallest = config.memory.min_offloaded_tensor_size or 0
    return make_policies(layer_actions(config, part), placement=placement, smallest_offloaded=smallest)
