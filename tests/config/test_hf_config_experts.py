"""config.json of families with experts: their fields, read and written, and layers for multi-token prediction."""

import dataclasses

import pytest
from published_files import FAMILIES, model_of, published, refusal, with_text

from jaxforge.config import ConfigError
from jaxforge.config.hf_config import config_json_of
from jaxforge.config.model_schema import ModelConfig


def with_mtp(model: ModelConfig, number: int) -> ModelConfig:
    return dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, mtp_num_layers=number))


def layers_of(config_json: dict) -> tuple[int, ...] | None:
    return model_of(config_json).decoder.moe_layer_freq


def test_layers_with_experts_are_those_that_qwen3s_class_makes():
    four = dict(num_hidden_layers=4)
    for name in ("qwen3_30b_a3b", "qwen3_vl_30b_a3b"):
        assert layers_of(with_text(name, **four)) is None
        # every second layer, from the second on
        assert layers_of(with_text(name, **four, decoder_sparse_step=2)) == (0, 1, 0, 1)
        assert layers_of(with_text(name, **four, mlp_only_layers=[0, 3])) == (0, 1, 1, 0)
        assert layers_of(with_text(name, **four, decoder_sparse_step=2, mlp_only_layers=[3])) == (0, 1, 0, 0)


def test_layers_with_experts_are_those_that_deepseeks_class_makes():
    four = dict(num_hidden_layers=4)
    assert layers_of(with_text("deepseek_v3", **four, first_k_dense_replace=0)) is None
    assert layers_of(with_text("deepseek_v3", **four)) == (0, 0, 0, 1)
    every_second = dict(first_k_dense_replace=1, moe_layer_freq=2, num_nextn_predict_layers=0)
    assert layers_of(with_text("deepseek_v3", **four, **every_second)) == (0, 0, 1, 0)


def test_layers_with_experts_survive_export():
    for name, layers in (("qwen3_30b_a3b", (0, 1, 1, 0)), ("deepseek_v3", (0, 0, 1, 1))):
        decoder = dataclasses.replace(model_of(published(name)).decoder, num_layers=4, moe_layer_freq=layers)
        written = config_json_of(ModelConfig(decoder=decoder), FAMILIES[name])
        assert layers_of(written) == layers
        # all of them, said in either way
        for every in (None, (1, 1, 1, 1)):
            model = ModelConfig(decoder=dataclasses.replace(decoder, moe_layer_freq=every))
            assert layers_of(config_json_of(model, FAMILIES[name])) is None
    later = ModelConfig(decoder=dataclasses.replace(decoder, moe_layer_freq=(0, 1, 0, 1)))
    with pytest.raises(ConfigError, match=r"can't express .*moe_layer_freq is \(0, 1, 0, 1\), there \(0, 1, 1, 1\)"):
        config_json_of(later, "deepseek_v3")


def test_weights_of_experts_are_normalised_where_the_file_says_so():
    assert not model_of(published("qwen3_30b_a3b")).decoder.moe_router_pre_softmax
    plain = model_of(with_text("qwen3_30b_a3b", norm_topk_prob=False))
    assert plain.decoder.moe_router_pre_softmax
    assert config_json_of(plain, "qwen3_moe")["norm_topk_prob"] is False
    # the class of Qwen3-VL normalises in any case
    assert "norm_topk_prob=False isn't built" in refusal(with_text("qwen3_vl_30b_a3b", norm_topk_prob=False))


def test_the_number_of_experts_has_two_names():
    config = published("qwen3_30b_a3b")
    config["num_local_experts"] = config.pop("num_experts")
    assert model_of(config) == model_of(published("qwen3_30b_a3b"))


def test_shared_experts_are_as_wide_as_all_of_them():
    two = model_of(with_text("deepseek_v3", n_shared_experts=2))
    assert two.decoder.moe_shared_expert_intermediate_size == 2 * 2048
    assert config_json_of(two, "deepseek_v3")["n_shared_experts"] == 2
    for width in (None, 3000):
        decoder = dataclasses.replace(two.decoder, moe_shared_expert_intermediate_size=width)
        with pytest.raises(ConfigError, match=f"moe_shared_expert_intermediate_size is {width}, there 2048"):
            config_json_of(ModelConfig(decoder=decoder), "deepseek_v3")


def test_one_group_of_experts_is_none():
    one = model_of(with_text("deepseek_v3", n_group=1, topk_group=1))
    assert one.decoder.moe_router_num_groups is None and one.decoder.moe_router_group_topk is None
    decoder = dataclasses.replace(one.decoder, moe_router_num_groups=1, moe_router_group_topk=1)
    for model in (one, ModelConfig(decoder=decoder)):
        written = config_json_of(model, "deepseek_v3")
        assert (written["n_group"], written["topk_group"]) == (1, 1)


def test_queries_are_compressed_unless_the_file_says_null():
    assert model_of(with_text("deepseek_v3", q_lora_rank=None)).decoder.q_lora_rank is None
    config = published("deepseek_v3")
    del config["q_lora_rank"]
    assert "config.json has no q_lora_rank" in refusal(config)


def test_yarn_grows_by_both_of_its_numbers_or_by_its_own_rule():
    def scaling(**changes):
        return published("deepseek_v3")["rope_scaling"] | changes

    for numbers in ((0.7, 1.2), (1.0, 1.0)):
        two = dict(zip(("mscale", "mscale_all_dim"), numbers, strict=True))
        model = model_of(with_text("deepseek_v3", rope_scaling=scaling(**two)))
        assert (model.decoder.mscale, model.decoder.mscale_all_dim) == numbers
    neither = {key: value for key, value in scaling().items() if "mscale" not in key}
    model = model_of(with_text("deepseek_v3", rope_scaling=neither))
    assert (model.decoder.mscale, model.decoder.mscale_all_dim) == (1, 0)
    assert model_of(config_json_of(model, "deepseek_v3")) == model
    one = refusal(with_text("deepseek_v3", rope_scaling=neither | {"mscale": 1.0}))
    assert "has one of mscale and mscale_all_dim; give both, or neither" in one


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_layers_for_multi_token_prediction_are_read_and_written(name):
    base = published("deepseek_v3")
    assert model_of(base).decoder.mtp_num_layers == 1
    del base["num_nextn_predict_layers"]
    assert model_of(base).decoder.mtp_num_layers == 0
    assert model_of(base | {name: 2}).decoder.mtp_num_layers == 2
    for number in (0, 1, 3):
        model = with_mtp(model_of(base), number)
        written = config_json_of(model, "deepseek_v3", base | {name: 2})
        # in any case under the released name: its class has one by default
        assert written[name] == written["num_nextn_predict_layers"] == number
        assert model_of(written) == model
        assert config_json_of(model, "deepseek_v3")["num_nextn_predict_layers"] == number


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek_v3"])
def test_other_families_have_no_layers_for_multi_token_prediction(name):
    model = with_mtp(model_of(published(name)), 2)
    message = (
        f"the {FAMILIES[name]} family can't express this model: model.decoder.mtp_num_layers is 2, and only deepseek_v3"
        " has layers for multi-token prediction; train with 0, or without exports"
    )
    for base in (None, published(name)):
        with pytest.raises(ConfigError) as error:
            config_json_of(model, FAMILIES[name], base)
        assert str(error.value) == message


def test_layers_for_multi_token_prediction_must_be_like_the_last_decoder_layer():
    # of five layers, 2 and 4 have experts
    fields = dict(num_hidden_layers=4, first_k_dense_replace=1, moe_layer_freq=2)
    message = refusal(with_text("deepseek_v3", **fields))
    assert "num_nextn_predict_layers=1: by first_k_dense_replace=1 and moe_layer_freq=2 such a layer" in message
    assert "set num_nextn_predict_layers to 0 there" in message
    # the first three are dense, and the fourth isn't
    assert "such a layer has experts" in refusal(with_text("deepseek_v3", num_hidden_layers=3))


def test_settings_of_a_training_stay_as_they_are():
    base = with_text("qwen3_30b_a3b", router_aux_loss_coef=0.02)
    assert config_json_of(model_of(base), "qwen3_moe", base)["router_aux_loss_coef"] == 0.02
