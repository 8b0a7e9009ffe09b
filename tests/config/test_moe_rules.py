"""Rules on experts: each is broken alone."""

import dataclasses

import pytest

from jaxforge.config import ConfigError, default_config, resolve, validate

EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
TENSOR = {"tensor_model_parallel_size": 2}


def config_of(decoder=None, moe=None, parallel=None, train=None):
    config = default_config()
    config.model.decoder.update(decoder or {})
    config.moe.update(moe or {})
    config.parallel.update(parallel or {})
    config.train.update({"global_batch_size": 8} | (train or {}))
    return resolve(config)


@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(parallel={"expert_model_parallel_size": 8}),
        dict(parallel=TENSOR | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2}),
        dict(parallel=TENSOR | {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}),
        dict(moe={"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}),
        dict(moe={"moe_expert_capacity_factor": 1.5, "moe_token_drop_policy": "position"}),
    ],
)
def test_what_can_be_is_accepted(fields):
    validate(config_of(EXPERTS, **fields), 8)


@pytest.mark.parametrize(
    "decoder, others, message",
    [
        ({"moe_router_topk": 4}, {}, "model.decoder.moe_router_topk=4 would have no effect with"
         " model.decoder.num_experts=None; leave it at 2"),
        ({}, {"moe": {"moe_z_loss_coeff": 0.1}}, "moe.moe_z_loss_coeff=0.1 would have no effect with"),
        ({}, {"parallel": {"expert_model_parallel_size": 2}}, "parallel.expert_model_parallel_size=2 would have no"
         " effect with model.decoder.num_experts=None; leave it at 1"),
        (EXPERTS | {"moe_layer_freq": (0, 1, 1)}, {}, "model.decoder.moe_layer_freq of 3 entries must have one for each"
         " of model.decoder.num_layers=2"),
        (EXPERTS | {"moe_layer_freq": (0, 2)}, {}, "model.decoder.moe_layer_freq of 2 entries has 2; an entry is 1"),
        (EXPERTS | {"moe_layer_freq": (0, 0)}, {}, "model.decoder.moe_layer_freq of 2 entries gives no layer experts"),
        (EXPERTS | {"moe_router_topk": 9}, {}, "model.decoder.moe_router_topk=9 is above model.decoder.num_experts=8"),
        (EXPERTS | {"moe_router_num_groups": 4}, {}, "model.decoder.moe_router_num_groups=4 and"
         " model.decoder.moe_router_group_topk=None go together"),
        (EXPERTS | {"moe_router_num_groups": 8, "moe_router_group_topk": 1}, {}, "model.decoder.moe_router_num_groups=8"
         " doesn't divide model.decoder.num_experts=8 into groups of at least 2; use 1, 2 or 4"),
        (EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 5}, {},
         "model.decoder.moe_router_group_topk=5 exceeds moe_router_num_groups=4"),
        (EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 1, "moe_router_topk": 3}, {},
         "model.decoder.moe_router_topk=3 is more than the 2 experts of moe_router_group_topk=1 groups"),
        (EXPERTS, {"moe": {"moe_aux_loss_coeff": 0.1}}, "moe.moe_router_load_balancing_type=none and"
         " moe.moe_aux_loss_coeff=0.1 contradict each other"),
        (EXPERTS, {"moe": {"moe_router_load_balancing_type": "aux_loss"}}, "moe.moe_router_load_balancing_type=aux_loss"
         " and moe.moe_aux_loss_coeff=0.0 contradict"),
        (EXPERTS, {"moe": {"moe_router_bias_update_rate": 0.1}}, "moe.moe_router_bias_update_rate=0.1 would have no"
         " effect with model.decoder.moe_router_enable_expert_bias=False"),
        (EXPERTS, {"moe": {"moe_token_drop_policy": "position"}}, "moe.moe_token_drop_policy=position would have no"
         " effect with moe.moe_expert_capacity_factor=None"),
        (EXPERTS, {"moe": {"moe_token_dispatcher_type": "flex"}}, "moe.moe_token_dispatcher_type=flex would have no"
         " effect with parallel.expert_model_parallel_size=1"),
        (EXPERTS, {"parallel": {"overlap_moe_expert_parallel_comm": True}}, "parallel.overlap_moe_expert_parallel_comm="
         "True would have no effect with parallel.expert_model_parallel_size=1"),
        (EXPERTS, {"parallel": {"expert_model_parallel_size": 3}}, "parallel.expert_model_parallel_size=3 does not"
         " divide model.decoder.num_experts=8; use 1, 2, 4 or 8"),
        (EXPERTS, {"parallel": {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 2}},
         "parallel.expert_tensor_parallel_size=2 is neither 1 nor parallel.tensor_model_parallel_size=4"),
        (EXPERTS, {"parallel": {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1,
                                "expert_model_parallel_size": 2}},
         "parallel.expert_model_parallel_size=2 is no multiple of parallel.tensor_model_parallel_size=4"),
        (EXPERTS | {"moe_ffn_hidden_size": 33}, {"parallel": {"tensor_model_parallel_size": 2}},
         "parallel.tensor_model_parallel_size=2 does not divide model.decoder.moe_ffn_hidden_size=33; use 1, 3, 11 or"),
        (EXPERTS, {"parallel": {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}},
         "parallel.expert_model_parallel_size=4 doesn't divide over 2 data parallel ranks (8 devices); use 1 or 2"),
        (EXPERTS, {"parallel": {"tensor_model_parallel_size": 2}, "train": {"seq_length": 127}},
         "train.seq_length=127 is not a multiple of parallel.tensor_model_parallel_size=2, over which the tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_or_has_no_effect_is_refused(decoder, others, message):
    with pytest.raises(ConfigError) as error:
        validate(config_of(decoder, **others), 8)
    assert str(error.value).startswith(message)


def test_every_field_of_the_group_needs_experts():
    # what is added to the group must have an effect, or be refused
    config = config_of()
    for field in dataclasses.fields(config.moe):
        other = {bool: not field.default, float: 0.5, str: "allgather"}.get(type(field.default), 1.5)
        other = {"moe_router_load_balancing_type": "aux_loss", "moe_token_drop_policy": "position",
                 "moe_token_dispatcher_type": "flex", "moe_deepep_num_sms": 8}.get(field.name, other)  # fmt: skip
        with pytest.raises(ConfigError, match=field.name):
            validate(config_of(moe={field.name: other}), 8)
