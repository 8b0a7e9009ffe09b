"""Makes tests/models/latent_attention.npz: attention layers of `transformers`' DeepSeek-V3, and what they compute.

    python3.11 -m venv parity && parity/bin/pip install torch==2.13.0 transformers==5.24.0
    parity/bin/python scripts/make_latent_attention_fixture.py

(torch's CPU build is enough.)  It runs in a venv of its own, as scripts/make_parity_fixtures.py does.  The same machine
and versions give the same file, byte for byte.

CASES has the sizes.  Of each case the file has, under its name and a slash: x [tokens, D] of DOCUMENTS one after the
other, y and dy [tokens, D], the layer's output and a random cotangent of it, dx; weight/NAME and gradient/NAME of every
parameter of `DeepseekV3Attention`; frequencies [P / 2] and rotation_scale, which `DeepseekV3RotaryEmbedding` has.
All in fp32.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

FIXTURE = Path(__file__).parent.parent / "tests" / "models" / "latent_attention.npz"
DOCUMENTS = (45, 19)
SIZES = dict(
    hidden_size=24, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=10, qk_nope_head_dim=6,
    qk_rope_head_dim=8, v_head_dim=5, rms_norm_eps=1e-6, max_position_embeddings=256,
)  # fmt: skip
# Of the four frequencies 3 ** -i one turns more than twice in 16 positions, two less than half a time.
YARN = dict(
    rope_type="yarn", rope_theta=81.0, factor=8.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=0.5,
    mscale=0.7, mscale_all_dim=1.2,
)  # fmt: skip
CASES = {
    "yarn": dict(q_lora_rank=12, rope_parameters=YARN),
    "no query compression": dict(q_lora_rank=None, rope_parameters=dict(rope_type="default", rope_theta=100.0)),
}


def case(seed: int, **fields) -> dict[str, np.ndarray]:
    """Both documents through one layer, alone; gradients are summed over them."""
    generator = torch.Generator().manual_seed(seed)
    config = DeepseekV3Config(**SIZES, **fields, attn_implementation="eager")
    layer, rotary = DeepseekV3Attention(config, layer_idx=0), DeepseekV3RotaryEmbedding(config)
    weights = dict(layer.named_parameters())
    with torch.no_grad():
        for name, weight in sorted(weights.items()):
            values = torch.randn(weight.shape, generator=generator)
            # scores of order 1: softmax is neither flat nor a step
            weight.copy_(1 + 0.3 * values if "norm" in name else 1.5 * values / weight.shape[-1] ** 0.5)
    x, dy = (torch.randn((sum(DOCUMENTS), config.hidden_size), generator=generator) for _ in range(2))
    x.requires_grad_()
    ys = []
    for x_of, dy_of in zip(x.split(DOCUMENTS), dy.split(DOCUMENTS), strict=True):
        length = len(x_of)
        hidden = torch.full((length, length), -torch.inf).triu(1)[None, None]
        positions = rotary(x_of, torch.arange(length)[None])
        y = layer(x_of[None], positions, hidden)[0][0]
        y.backward(dy_of, retain_graph=True)
        ys.append(y.detach())
    found = dict(x=x.detach(), y=torch.cat(ys), dy=dy, dx=x.grad, frequencies=rotary.inv_freq)
    found |= {f"weight/{name}": weight.detach() for name, weight in weights.items()}
    found |= {f"gradient/{name}": weight.grad for name, weight in weights.items()}
    return {name: value.numpy() for name, value in found.items()} | dict(rotation_scale=rotary.attention_scaling)


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    arrays = {}
    for seed, (name, fields) in enumerate(CASES.items()):
        found = case(seed, **fields)
        print(f"{name}: y of {found['y'].std():.2f}, frequencies {found['frequencies']}")
        arrays |= {f"{name}/{key}": value for key, value in found.items()}
    np.savez_compressed(FIXTURE, **arrays)
    print(f"{FIXTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
