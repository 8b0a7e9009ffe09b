"""Rules on the modes in which devices encode different images: each yields a message for each way to break it."""

from collections.abc import Iterator

from jaxforge.config.derived import encoder_devices
from jaxforge.config.schema import Config

_HETERO_DP = ("enable_encoder_hetero_dp", "enable_full_hetero_dp")


def hetero_dp_is_possible(config: Config) -> Iterator[str]:
    """One mode at most, with an encoder that each device holds whole, and several devices that divide the images."""
    parallel, encoder = config.parallel, config.model.encoder
    modes = [name for name in _HETERO_DP if getattr(parallel, name)]
    if not modes:
        return
    if len(modes) > 1:
        yield (
            "parallel.enable_encoder_hetero_dp and parallel.enable_full_hetero_dp are both True; leave one: the tensor"
            " group divides the images in the first, all stages' tensor groups together in the second"
        )
    mode = f"parallel.{modes[0]}=True"
    if encoder is None:
        yield f"{mode} divides images among devices, but model.encoder is None; set it to false"
    elif encoder.tensor_model_parallel_size not in (None, 1):
        yield (
            f"{mode} lets each device encode images of its own, with a whole encoder, but"
            f" model.encoder.tensor_model_parallel_size={encoder.tensor_model_parallel_size}; set that to 1, or"
            f" parallel.{modes[0]} to false"
        )
    if encoder_devices(config) > 1:
        return
    sizes = ["parallel.tensor_model_parallel_size=1"]
    if parallel.enable_full_hetero_dp:
        sizes.append("parallel.pipeline_model_parallel_size=1")
    way_out = "set it to false"
    if parallel.enable_encoder_hetero_dp and parallel.pipeline_model_parallel_size > 1:
        way_out += ", or use parallel.enable_full_hetero_dp, which divides images among the stages too"
    yield f"{mode} would have no effect with {' and '.join(sizes)}; {way_out}"


ENCODER_RULES = (hetero_dp_is_possible,)
