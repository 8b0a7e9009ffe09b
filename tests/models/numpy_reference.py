"""The models a second time, for comparison: float64 NumPy, one row, loops over tokens, heads, patches and layers.

Written from the papers and the released models' descriptions.  Parameters are the model's own: nested dicts of arrays.
"""

import math

import numpy as np


def layer_of(stacked, index):
    """The parameters of one layer of a stack."""
    if isinstance(stacked, dict):
        return {name: layer_of(child, index) for name, child in stacked.items()}
    return stacked[index]


def norm(x, p, epsilon):
    """LayerNorm if it has a bias, else RMSNorm."""
    out = np.zeros_like(x)
    for index in np.ndindex(x.shape[:-1]):
        v = x[index] - x[index].mean() if "bias" in p else x[index]
        out[index] = v / math.sqrt((v**2).mean() + epsilon) * p["scale"] + p.get("bias", 0)
    return out


def activation(name, x):
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    assert name == "gelu_tanh"
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp(x, p, act):
    up = x @ p["up_DF"] + p.get("up_bias_F", 0)
    if "gate_DF" in p:
        hidden = activation(act, x @ p["gate_DF"] + p.get("gate_bias_F", 0)) * up
    else:
        hidden = activation(act, up)
    return hidden @ p["down_FE"] + p.get("down_bias_E", 0)


def rotate(x, angles):
    """Feature i and feature i + K / 2 are a complex number, turned by angle i.  x [S, H, K], angles [S, K / 2]."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(x, p, angles, sees, epsilon):
    """sees(s, t): whether token s may look at token t; nothing comes out for a token that sees nothing."""
    q = np.einsum("sd,dhk->shk", x, p["query_DHK"]) + p.get("query_bias_HK", 0)
    k = np.einsum("sd,dgk->sgk", x, p["key_DGK"]) + p.get("key_bias_GK", 0)
    v = np.einsum("sd,dgk->sgk", x, p["value_DGK"]) + p.get("value_bias_GK", 0)
    if "query_norm" in p:
        q, k = norm(q, p["query_norm"], epsilon), norm(k, p["key_norm"], epsilon)
    q, k = rotate(q, angles), rotate(k, angles)
    length, heads, width = q.shape
    mixed = np.zeros(q.shape)
    for s in range(length):
        visible = [t for t in range(length) if sees(s, t)]
        for h in range(heads if visible else 0):
            group = h // (heads // k.shape[1])
            weights = np.exp(k[visible, group] @ q[s, h] / math.sqrt(width))
            mixed[s, h] = weights / weights.sum() @ v[visible, group]
    return np.einsum("shk,hkd->sd", mixed, p["out_HKD"]) + p.get("out_bias_D", 0)


def mrope_axis(index, config):
    """Which position (0 time, 1 height, 2 width) turns frequency `index`."""
    section = config.mrope_section
    if section is None:
        return 0
    if config.mrope_interleaved:
        for axis in (1, 2):
            if index % 3 == axis and index < 3 * section[axis]:
                return axis
        return 0
    return 0 if index < section[0] else 1 if index < section[0] + section[1] else 2


def decoder_angles(positions, config):
    half = config.kv_channels // 2
    angles = np.zeros((positions.shape[1], half))
    for s, j in np.ndindex(angles.shape):
        angles[s, j] = positions[mrope_axis(j, config), s] / config.rotary_base ** (2 * j / config.kv_channels)
    return angles


def decoder_hidden(row, p, config, visual=None, features=()):
    """What the head reads [S, D].  `visual` [N, D] replaces embeddings; features[j] [N, D] is added after layer j."""
    segments = row["segment_ids"]
    is_visual = row["visual_index"] >= 0 if visual is not None else np.zeros(len(segments), bool)
    x = p["embedding_VD"][row["tokens"]].astype(float)
    if visual is not None:
        x[is_visual] = visual[row["visual_index"][is_visual]]
    angles = decoder_angles(row["positions"], config)
    for number in range(config.num_layers):
        x = decoder_layer(x, layer_of(p["layers"], number), angles, segments, config)
        if number < len(features):
            x[is_visual] += features[number][row["visual_index"][is_visual]]
    return norm(x, p["final_norm"], config.norm_epsilon)


def decoder_layer(x, layer, angles, segments, config):
    x = x + attention(
        norm(x, layer["attention_norm"], config.norm_epsilon), layer["attention"], angles,
        lambda s, t: t <= s and segments[s] == segments[t] != 0, config.norm_epsilon,
    )  # fmt: skip
    return x + mlp(norm(x, layer["mlp_norm"], config.norm_epsilon), layer["mlp"], "silu")


def states_ahead(row, p, config, states, visual=None):
    """For each depth of multi-token prediction the states [S, D], and the targets [S] that they predict.

    `states` are those of `decoder_hidden`.  Past the end of a document an embedding is 0 and a target -100.
    """
    segments, length = row["segment_ids"], len(row["segment_ids"])
    angles, found = decoder_angles(row["positions"], config), []
    for depth in range(1, config.mtp_num_layers + 1):
        own = layer_of(p["mtp"], depth - 1)
        embedded, targets = np.zeros(states.shape), np.full(length, -100)
        for s in range(length - depth):
            if segments[s] == segments[s + depth] != 0:
                embedded[s] = p["embedding_VD"][row["tokens"][s + depth]]
                if visual is not None and row["visual_index"][s + depth] >= 0:
                    embedded[s] = visual[row["visual_index"][s + depth]]
                targets[s] = row["targets"][s + depth]
        of_embedding, of_states = own["projection_2DE"]
        x = norm(embedded, own["embedding_norm"], config.norm_epsilon) @ of_embedding
        x = x + norm(states, own["states_norm"], config.norm_epsilon) @ of_states
        layer = layer_of(p["layers"], config.num_layers + depth - 1)
        states = norm(decoder_layer(x, layer, angles, segments, config), own["final_norm"], config.norm_epsilon)
        found.append((states, targets))
    return found


def learned_positions(table, position, grid):
    """The square table laid over the image corner to corner, read bilinearly at the patch."""
    side = math.isqrt(len(table))
    place = [i * (side - 1) / (n - 1) if n > 1 else 0.0 for i, n in zip(position, grid, strict=True)]
    total = np.zeros(table.shape[1])
    for i in range(side):
        for j in range(side):
            # the tent of knot (i, j): 1 there, 0 at its neighbours
            weight = max(0, 1 - abs(place[0] - i)) * max(0, 1 - abs(place[1] - j))
            total += weight * table[i * side + j]
    return total


def encoder_features(row, p, config):
    """Features of all layers, each [P, D]."""
    positions, frames = row["patch_positions"], row["patch_segments"]
    x = row["patches"].astype(float) @ p["patch_CD"]
    if config.model_type == "qwen3_vit":
        for i in range(len(x)):
            x[i] += p["patch_bias_D"] + learned_positions(p["position_ND"], positions[i], row["patch_grids"][i])
    quarter = config.kv_channels // 4
    turn = config.rotary_base ** (-np.arange(quarter) / quarter)
    angles = np.array([[*(row * turn), *(column * turn)] for row, column in positions])
    window_side = config.window_size // config.patch_size

    def same_image(s, t):
        return frames[s] == frames[t] != 0

    def same_window(s, t):
        return same_image(s, t) and np.array_equal(positions[s] // window_side, positions[t] // window_side)

    outputs = []
    for number in range(config.num_layers):
        layer = layer_of(p["layers"], number)
        is_windowed = config.model_type == "qwen2_5_vit" and number not in config.fullatt_block_indexes
        normed = norm(x, layer["attention_norm"], config.norm_epsilon)
        x = x + attention(normed, layer["attention"], angles, same_window if is_windowed else same_image, None)
        x = x + mlp(norm(x, layer["mlp_norm"], config.norm_epsilon), layer["mlp"], config.activation_func)
        outputs.append(x)
    return outputs


def merge_squares(x, p, config, norm_after):
    """Visual tokens [N, E] from features [P, D], 4 consecutive patches each."""
    if not norm_after:
        x = norm(x, p["norm"], config.norm_epsilon)
    squares = np.array([np.concatenate(x[i : i + 4]) for i in range(0, len(x), 4)])
    return mlp(norm(squares, p["norm"], config.norm_epsilon) if norm_after else squares, p["mlp"],
               config.activation_func)  # fmt: skip


def hidden(row, p, model):
    """What the head of the whole model reads, [S, D]."""
    return decoder_hidden(row, p["decoder"], model.decoder, *visual_tokens(row, p, model))


def visual_tokens(row, p, model):
    """Visual tokens [N, D] and those of each of DeepStack's features; None and () without an encoder."""
    if model.encoder is None:
        return None, ()
    outputs = encoder_features(row, p["encoder"], model.encoder)
    visual = merge_squares(outputs[-1], p["projector"]["merger"], model.projector, norm_after=False)
    features = [
        merge_squares(outputs[layer], layer_of(p["projector"]["deepstack"], j), model.projector, norm_after=True)
        for j, layer in enumerate(model.encoder.deepstack_visual_indexes)
    ]
    return visual, features


def logits(row, p, model):
    """[S, V], true vocabulary alone."""
    decoder = p["decoder"]
    head = decoder["head_VD"] if "head_VD" in decoder else decoder["embedding_VD"]
    return hidden(row, p, model) @ head[: model.decoder.vocab_size].T


def loss_sum(row, p, model):
    """Sum of -log softmax at the targets that aren't -100."""
    total = 0.0
    for scores, target in zip(logits(row, p, model), row["targets"], strict=True):
        if target != -100:
            total += math.log(np.exp(scores).sum()) - scores[target]
    return total
