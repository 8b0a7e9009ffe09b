"""The decoder in the pieces that the phases of a step call."""

import functools

from flax import nnx

from jaxforge.models.decoder import Decoder
from jaxforge.models.multi_token import seen
from jaxforge.ops.embedding import embed, table_rows
from jaxforge.parallel.pipeline.pieces import Parts


def decoder_parts(decoder: Decoder) -> Parts:
    """The pieces of an abstract decoder; `visual` is a table as `EncoderPhase` makes it, or None."""
    placement = decoder.placement
    layer_graphs = {name: nnx.graphdef(decoder.only(name)) for name in ("mlp", "moe") if hasattr(decoder.layers, name)}
    ends_graph = nnx.graphdef(_without(decoder, "layers"))
    layers_graph = nnx.graphdef(_without(decoder, "embedding_VD", "final_norm", "head_VD", "mtp"))
    norm_graph = nnx.graphdef(decoder.final_norm)

    def enter(ends, visual, microbatch):
        merged = nnx.merge(ends_graph, ends)
        tokens = None if visual is None else visual["tokens"]
        x_BSD = merged.embed(microbatch["tokens"], tokens, microbatch.get("visual_index"), table_rows)
        return merged.enter(x_BSD, microbatch.get("dropout_keys"))

    def shared(microbatch):
        segments = decoder.row_segments(microbatch["segment_ids"])
        tokens = decoder.step_tokens(microbatch["segment_ids"], microbatch.get("targets_per_token"))
        return decoder.angles(microbatch["positions"]), segments, microbatch.get("dropout_keys"), tokens

    def layer(weights, x_BSD, shared, number):
        angles_BSR, segments, dropout_keys_B2, tokens = shared
        one = nnx.merge(layer_graphs["moe" if "moe" in weights else "mlp"], weights)
        return one(x_BSD, angles_BSR, segments, number, dropout_keys_B2, tokens)

    def layers(weights, x_BSD, visual, microbatch):
        return nnx.merge(layers_graph, {"layers": weights}).run_layers(
            x_BSD,
            microbatch["positions"],
            microbatch["segment_ids"],
            None if visual is None else visual.get("features"),
            microbatch.get("visual_index"),
            microbatch.get("dropout_keys"),
            table_rows,
            microbatch.get("targets_per_token"),
        )

    def add_feature(visual, x_BSD, microbatch, number):
        return x_BSD + decoder.place(visual["features"][number], microbatch["visual_index"], table_rows)

    def leave(ends, states, microbatch):
        return nnx.merge(ends_graph, ends).loss([decoder.whole(states_BSD) for states_BSD in states], microbatch)

    def score(ends, x_BSD, microbatch):
        merged = nnx.merge(ends_graph, ends)
        return merged.score(merged.leave(x_BSD), microbatch["targets"])

    def look_up(ends, microbatch, first_row):
        # an id outside of these rows gives 0
        return embed(ends["embedding_VD"], microbatch["tokens"] - first_row, placement)

    def fill(x_BSD, visual, microbatch):
        tokens = None if visual is None else visual["tokens"]
        filled_BSD = decoder.fill(x_BSD, tokens, microbatch.get("visual_index"), table_rows)
        return decoder.enter(filled_BSD, microbatch.get("dropout_keys"))

    def normed(ends, x_BSD):
        return nnx.merge(norm_graph, ends["final_norm"])(x_BSD)

    return Parts(
        enter=enter,
        shared=shared,
        layer=layer,
        layers=layers,
        add_feature=add_feature,
        leave=leave,
        score=score,
        look_up=look_up,
        fill=fill,
        normed=normed,
        ahead=decoder.states_ahead,
        seen_ahead=functools.partial(seen, num_depths=decoder.num_depths),
        layers_ahead=decoder.layers_ahead,
        num_depths=decoder.num_depths,
        head=decoder.head_path.split("/")[-1],
        fused=decoder.fused_loss,
    )


def _without(module: nnx.Module, *names: str) -> nnx.Module:
    """A copy that lacks some of its parts."""
    copy = nnx.clone(module)
    for name in names:
        if hasattr(copy, name):
            delattr(copy, name)
    return copy
