"""Rules on pipeline parallelism: each yields a message for each way in which the config breaks it.

Whether the layers can be placed as asked is found where they are placed (`jaxforge.parallel.pipeline.choice`), before
anything is written or compiled.
"""

import math
from collections.abc import Iterator

from jaxforge.config.derived import BALANCED
from jaxforge.config.schema import Config

_OUTER = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
# Each says something of which stage holds which layers.
_PLACING = (
    "pipeline_model_parallel_layout",
    "num_layers_per_virtual_pipeline_stage",
    "virtual_pipeline_model_parallel_size",
    *_OUTER,
)


def pipeline_fields_have_an_effect(config: Config) -> Iterator[str]:
    """Nothing is set that a pipeline of this size and layout doesn't look at."""
    parallel = config.parallel
    size, layout = parallel.pipeline_model_parallel_size, parallel.pipeline_model_parallel_layout
    given = {name: getattr(parallel, name) for name in _PLACING if getattr(parallel, name) is not None}
    if size == 1:
        for name, value in given.items():
            yield (
                f"parallel.{name}={value} would have no effect with parallel.pipeline_model_parallel_size=1;"
                " leave it at None, or use more ranks"
            )
        return
    if "virtual_pipeline_model_parallel_size" in given and layout != BALANCED:
        yield _virtual_size_without_balance(config)
    if layout is not None:
        for name in ("num_layers_per_virtual_pipeline_stage", *_OUTER):
            if name in given:
                yield (
                    f"parallel.{name}={given[name]} would have no effect, because"
                    f" parallel.pipeline_model_parallel_layout={layout} places the layers; set one of the two to None"
                )
        return
    for name in _OUTER:
        if name in given and "num_layers_per_virtual_pipeline_stage" in given:
            yield (
                f"parallel.num_layers_per_virtual_pipeline_stage={parallel.num_layers_per_virtual_pipeline_stage} would"
                f" have no effect, because parallel.{name}={given[name]} gives each rank one stage; set one of the two"
                " to None, or write a parallel.pipeline_model_parallel_layout"
            )


def _virtual_size_without_balance(config: Config) -> str:
    parallel = config.parallel
    size, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    layout = parallel.pipeline_model_parallel_layout
    message = (
        f"parallel.virtual_pipeline_model_parallel_size={virtual} would have no effect with"
        f" parallel.pipeline_model_parallel_layout={layout}"
    )
    if layout is not None:
        return f"{message}, whose stages are those that it says; leave it at None, or set the layout to balanced"
    if any(getattr(parallel, name) is not None for name in _OUTER):
        return f"{message} and a number of layers of an outer stage, which gives each rank one stage; leave it at None"
    per_stage, rest = divmod(config.model.decoder.num_layers, size * (virtual or 1))
    if rest or not per_stage:
        return f"{message}; set the layout to balanced"
    return f"{message}; set the layout to balanced, or num_layers_per_virtual_pipeline_stage={per_stage} instead"


def vocabulary_divides_over_stages(config: Config) -> Iterator[str]:
    """There are stages to shard embedding and head over, and each device gets the same number of rows."""
    parallel = config.parallel
    if not parallel.vocabulary_parallel_over_pipeline:
        return
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    multiple = config.model.decoder.make_vocab_size_divisible_by
    if stages == 1:
        yield (
            "parallel.vocabulary_parallel_over_pipeline=True would have no effect with"
            " parallel.pipeline_model_parallel_size=1; set it to false, or use more ranks"
        )
    elif multiple % (tensor * stages):
        yield (
            f"parallel.vocabulary_parallel_over_pipeline=True shards the vocabulary over"
            f" parallel.tensor_model_parallel_size={tensor} x parallel.pipeline_model_parallel_size={stages} devices,"
            f" which doesn't divide model.decoder.make_vocab_size_divisible_by={multiple}; use"
            f" {math.lcm(multiple, tensor * stages)} there, or set the former to false"
        )


PIPELINE_RULES = (pipeline_fields_have_an_effect, vocabulary_divides_over_stages)
