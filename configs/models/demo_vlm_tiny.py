"""The demo: Qwen2.5-VL's architecture at a little over a million parameters, for small grey images."""

from ml_collections import ConfigDict

from jaxforge.config import default_config, encoder_defaults


def get_config() -> ConfigDict:
    """The architecture, for `config.model`."""
    model = default_config().model
    model.decoder.update(
        num_layers=4,
        hidden_size=128,
        ffn_hidden_size=384,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=32,
        vocab_size=261,
        rotary_base=1e4,
        add_qkv_bias=True,
        mrope_section=(4, 6, 6),
        untie_embeddings_and_output_weights=False,
    )
    model.encoder = encoder_defaults("qwen2_5_vit")
    model.encoder.update(
        num_layers=3,
        hidden_size=96,
        ffn_hidden_size=256,
        num_attention_heads=4,
        kv_channels=24,
        in_channels=1,
        patch_size=8,
        temporal_patch_size=1,
        spatial_merge_size=2,
        image_size=(128, 128),
        window_size=32,
        fullatt_block_indexes=(2,),
    )
    return model
