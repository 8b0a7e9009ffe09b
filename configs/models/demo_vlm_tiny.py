"""The demo: Qwen2.5-VL's architecture at half a million parameters, for small grey images.

mRoPE is interleaved as in Qwen3-VL: with 12 frequencies in blocks, width would get none that tells neighbours apart.
For the same reason the rotary bases suit positions of a few tens.
"""

from ml_collections import ConfigDict

from jaxforge.config import default_config, encoder_defaults


def get_config() -> ConfigDict:
    """The architecture, for `config.model`."""
    model = default_config().model
    model.decoder.update(
        num_layers=3,
        hidden_size=96,
        ffn_hidden_size=256,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=24,
        vocab_size=261,
        rotary_base=100.0,
        add_qkv_bias=True,
        mrope_section=(4, 4, 4),
        mrope_interleaved=True,
        init_method_std=0.1,
        untie_embeddings_and_output_weights=False,
    )
    model.encoder = encoder_defaults("qwen2_5_vit")
    model.encoder.update(
        num_layers=3,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=2,
        kv_channels=32,
        in_channels=1,
        patch_size=8,
        temporal_patch_size=1,
        spatial_merge_size=2,
        image_size=(48, 48),
        window_size=16,
        fullatt_block_indexes=(2,),
        rotary_base=100.0,
        init_method_std=0.1,
    )
    return model
