import dataclasses

import pytest

from jaxforge.config import default_config, model_config, resolve
from jaxforge.config.part_flops import attention_flops
from jaxforge.config.schema import (
    AdapterConfig,
    Config,
    DataConfig,
    DecoderConfig,
    EncoderConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ProjectorConfig,
    TrainConfig,
)
from jaxforge.training.flops import forward_flops_per_row, model_flops_per_step

DECODER = DecoderConfig(
    num_layers=2, hidden_size=8, ffn_hidden_size=10, num_attention_heads=4, num_query_groups=2, kv_channels=4,
    vocab_size=30,
)  # fmt: skip
# 16 patches make the full image of 4 x 4; a window is 2 x 2 patches
ENCODER = EncoderConfig(
    num_layers=3, hidden_size=6, ffn_hidden_size=7, num_attention_heads=2, kv_channels=3, in_channels=1,
    patch_size=4, temporal_patch_size=2, spatial_merge_size=2, image_size=(16, 16), window_size=8,
    fullatt_block_indexes=(1,),
)  # fmt: skip
TRAIN = TrainConfig(seq_length=5, global_batch_size=3)
LANGUAGE = Config(model=ModelConfig(decoder=DECODER), train=TRAIN)
VISION = Config(
    model=ModelConfig(DECODER, ENCODER, ProjectorConfig(ffn_hidden_size=9)),
    train=TRAIN,
    data=DataConfig(max_patches_per_row=32),
)

# Multiply-adds of one token, by hand.  A layer: query 8x16, key and value 8x8 each, output 16x8; 3 products of 8x10;
# attention sees half of 5 tokens, in 2 products of 16 each.  The head: 8x30.
DECODER_ROW = 2 * 5 * (2 * (128 + 2 * 64 + 128 + 240 + 2.5 * 2 * 16) + 240)
# One patch of 1 x 2 x 4 x 4 = 32 numbers: 32x6; 3 layers with 4 products of 6x6 and 3 of 6x7; attention in 2 products
# of 6 each, to 16 patches in one layer and to 4 in the two others.
ENCODER_ROW = 2 * 32 * (192 + 3 * (144 + 126) + 2 * 6 * (16 + 4 + 4))
# 8 visual tokens: 24x9, 9x8
PROJECTOR_ROW = 2 * 8 * (216 + 72)


def test_decoder_flops_are_those_counted_by_hand():
    assert forward_flops_per_row(LANGUAGE).decoder == DECODER_ROW
    assert model_flops_per_step(LANGUAGE) == 3 * 3 * DECODER_ROW


def test_flops_of_latent_attention_are_those_counted_by_hand():
    # width 8, 4 heads with 3 + 2 features of queries and keys and 5 of values; 6 compressed, 7 for keys and values
    decoder = dataclasses.replace(
        DECODER, multi_latent_attention=True, q_lora_rank=6, kv_lora_rank=7, qk_head_dim=3, qk_pos_emb_head_dim=2,
        v_head_dim=5,
    )  # fmt: skip
    # query 8x6 and 6x20; key and value 8x9 and 7x32; output 20x8; half of 5 tokens in products of 20 and 20
    attention = 48 + 120 + 72 + 224 + 160 + 2.5 * (20 + 20)
    config = dataclasses.replace(LANGUAGE, model=ModelConfig(decoder=decoder))
    assert forward_flops_per_row(config).decoder == 2 * 5 * (2 * (attention + 240) + 240)
    # without compression the query is 8x20
    plain = dataclasses.replace(decoder, q_lora_rank=None)
    assert attention_flops(decoder, 5) - attention_flops(plain, 5) == 2 * (168 - 160)


def test_encoder_and_projector_flops_are_those_counted_by_hand():
    flops = forward_flops_per_row(VISION)
    assert (flops.encoder, flops.projector, flops.decoder) == (ENCODER_ROW, PROJECTOR_ROW, DECODER_ROW)
    assert model_flops_per_step(VISION) == 3 * 3 * (ENCODER_ROW + PROJECTOR_ROW + DECODER_ROW)


def test_without_windows_every_layer_sees_the_whole_image_and_deepstack_adds_mergers():
    encoder = dataclasses.replace(
        ENCODER, model_type="qwen3_vit", swiglu=False, deepstack_visual_indexes=(0, 2), num_position_embeddings=16
    )
    config = dataclasses.replace(VISION, model=dataclasses.replace(VISION.model, encoder=encoder))
    flops = forward_flops_per_row(config)
    assert flops.encoder == 2 * 32 * (192 + 3 * (144 + 84) + 2 * 6 * 3 * 16)
    assert flops.projector == 3 * PROJECTOR_ROW


def test_llama_8b_needs_six_flops_per_weight_and_token_and_the_attention():
    config = default_config()
    config.model = model_config("llama3_1_8b")
    config.train.seq_length = 8192
    config.train.global_batch_size = 4
    # 8.03e9 parameters (the model card), less the embedding table, which is looked up
    weights = 8.03e9 - 128256 * 4096
    tokens = 4 * 8192
    # 32 layers, 2 products of 4096 per token pair, 2 FLOPs, 3 passes, half of the pairs
    attention = 32 * 2 * 4096 * 2 * 3 * 8192 / 2 * tokens
    assert model_flops_per_step(resolve(config)) == pytest.approx(6 * weights * tokens + attention, rel=0.01)


@pytest.mark.parametrize(
    "freeze, passes",
    [
        ((), (3, 3, 3)),
        (("encoder/**",), (1, 3, 3)),
        (("encoder", "projector/*"), (1, 1, 3)),
        (("decoder/**",), (3, 3, 2)),
        (("projector/**",), (3, 2, 3)),
        (("encoder/layers/mlp/*",), (3, 3, 3)),
    ],
)
def test_a_frozen_module_has_no_weight_gradients_and_none_below_it_if_nothing_trains_there(freeze, passes):
    config = dataclasses.replace(VISION, optimizer=OptimizerConfig(freeze=freeze))
    encoder, projector, decoder = passes
    per_row = encoder * ENCODER_ROW + projector * PROJECTOR_ROW + decoder * DECODER_ROW
    assert model_flops_per_step(config) == 3 * per_row


YES = AdapterConfig(rank=2)


@pytest.mark.parametrize(
    "lora, freeze, passes",
    [
        # adapters need the gradients of what enters and leaves their weights, but none of these
        (LoraConfig(decoder=YES), (), (1, 1, 2)),
        (LoraConfig(encoder=YES), (), (2, 2, 2)),
        (LoraConfig(projector=YES, decoder=YES), (), (1, 2, 2)),
        (LoraConfig(decoder=YES, train_also=("projector/**",)), (), (1, 3, 2)),
        (LoraConfig(decoder=YES, train_also=("encoder/layers/mlp_norm/*",)), (), (2, 2, 2)),
        (LoraConfig(decoder=YES, train_also=("*_norm/scale",)), (), (2, 2, 2)),
        (LoraConfig(decoder=YES, encoder=YES), ("encoder",), (1, 1, 2)),
    ],
)
def test_adapters_have_their_weights_gradients_left_out(lora, freeze, passes):
    config = dataclasses.replace(VISION, lora=lora, optimizer=OptimizerConfig(freeze=freeze))
    per_row = sum(n * row for n, row in zip(passes, (ENCODER_ROW, PROJECTOR_ROW, DECODER_ROW), strict=True))
    assert model_flops_per_step(config) == 3 * per_row
