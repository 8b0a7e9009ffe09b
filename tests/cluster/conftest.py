import jax

# The tests of this folder are about the CPU and described GPUs, also on a machine that has a GPU or half of CUDA.
if not jax.config.jax_platforms:
    jax.config.update("jax_platforms", "cpu")
