"""Which dtype, kernels and libraries a run uses, by the platform that it is compiled for."""

import contextlib
import os
from collections.abc import Iterator

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxforge.cluster.mesh import TENSOR_AXES, expert_axes, large_axes, num_nodes_along
from jaxforge.config.derived import experts_are_over_tensor
from jaxforge.config.errors import ConfigError
from jaxforge.config.schema import Config
from jaxforge.models.moe import ExpertsRun
from jaxforge.ops.expert_dispatch import Dispatcher
from jaxforge.ops.linear_cross_entropy import LinearCrossEntropy, vocab_splits
from jaxforge.ops.placement import Placement
from jaxforge.ops.routing import RouterLosses
from pallas_kernels.flash_attention import HeadTooWide


def compute_dtype(config: Config, platform: str) -> jnp.dtype:
    """`train.compute_dtype`, with auto resolved: bfloat16 on GPU, float32 elsewhere."""
    if config.train.compute_dtype == "auto":
        return jnp.dtype(jnp.bfloat16 if platform == "gpu" else jnp.float32)
    return jnp.dtype(config.train.compute_dtype)


def attention_backend(config: Config, platform: str) -> str:
    """`train.attention_backend`, with auto resolved: flash attention on GPU, where rows are packed, else the reference.

    `platform` is that of the devices the program is compiled for, not of the machine that compiles it.
    """
    if config.train.attention_backend == "auto":
        return "flash" if platform == "gpu" else "xla"
    return config.train.attention_backend


def make_fused_loss(config: Config, placement: Placement, platform: str) -> LinearCrossEntropy | None:
    """The loss fused with the decoder's head, if the config asks for it; Pallas kernels on "gpu".

    Raises:
      ConfigError: for a vocabulary split in the environment that is no number.
    """
    loss = config.loss
    if not loss.cross_entropy_loss_fusion:
        return None
    forward, backward = vocab_splits(os.environ)
    return LinearCrossEntropy(
        config.model.decoder.vocab_size,
        placement,
        z_loss_coefficient=loss.z_loss_coefficient,
        backend="triton" if platform == "gpu" else "reference",
        forward_split=loss.lce_fwd_vocab_split_size or forward,
        backward_split=loss.lce_bwd_vocab_split_size or backward,
    )


def make_experts_run(config: Config, mesh: Mesh, platform: str) -> ExpertsRun | None:
    """How the decoder's experts are computed on a mesh; None where it has none."""
    decoder, moe = config.model.decoder, config.moe
    if decoder.num_experts is None:
        return None
    tensor = large_axes(mesh, TENSOR_AXES)
    over_tensor = experts_are_over_tensor(config)
    axes = large_axes(mesh, expert_axes(config))
    losses = RouterLosses(moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff, moe.moe_z_loss_coeff)
    backend = "pallas" if platform == "gpu" else "xla"
    dispatcher = Dispatcher(
        moe.moe_token_dispatcher_type or "alltoall",
        decoder.num_experts,
        axes,
        num_nodes=num_nodes_along(mesh, axes),
        capacity_factor=moe.moe_expert_capacity_factor,
        drop_policy=moe.moe_token_drop_policy,
        buffer_factor=moe.moe_buffer_factor,
        uses_ragged_exchange=platform == "gpu",
        overlap=config.parallel.overlap_moe_expert_parallel_comm,
        backend=backend if moe.moe_permute_fusion else "xla",
    )
    return ExpertsRun(
        dispatcher,
        losses,
        backend=backend,
        sliced_axes=() if over_tensor else tensor,
        token_axes=tensor if over_tensor else (),
    )


@contextlib.contextmanager
def missing_libraries_as_config_errors(backend: str) -> Iterator[None]:
    """What the compiler lacks; and what JAX's cuDNN attention, which checks it while it is traced, can't compute."""
    try:
        yield
    except HeadTooWide as error:
        raise ConfigError(
            f"train.attention_backend is flash on GPU, which can't compute this: {error} (set"
            " train.attention_backend=xla)"
        ) from error
    except NotImplementedError as error:
        if backend != "cudnn":
            raise
        raise ConfigError(
            f"train.attention_backend is cudnn on GPU, which can't compute this: {error}"
            " (set train.attention_backend=xla)"
        ) from error
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        if "No PTX compilation provider" in first_line:
            raise ConfigError(
                "compiling for a GPU needs ptxas, of NVIDIA's CUDA toolkit; run: make setup-gpu-compile"
                " (or pip install --no-deps nvidia-cuda-nvcc-cu12)"
            ) from error
        if "cudnn" in first_line.lower():
            raise ConfigError(
                f"train.attention_backend is cudnn on GPU, and there is no cuDNN to compile for ({first_line}); run:"
                " make setup-gpu-compile (or pip install --no-deps nvidia-cudnn-cu12), or set"
                " train.attention_backend=xla"
            ) from error
        raise
