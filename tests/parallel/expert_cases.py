"""Models with experts at a layout, against one device."""

import dataclasses
import functools

import numpy as np
from one_device import loss_and_gradients
from pipeline_cases import Case as PipelineCase
from pipeline_cases import twelve_rows
from tiny_models import random_parameters

from jaxforge.config.schema import Config, MoeConfig
from jaxforge.models.moe import on_one_device
from jaxforge.ops.routing import RouterLosses

# Qwen3-MoE: all layers alike.  DeepSeek-V3: dense layers first, groups, a selection bias, shared experts.
KINDS = {
    "softmax": dict(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=4),
    "sigmoid": dict(
        num_experts=8, moe_router_topk=3, moe_ffn_hidden_size=4, moe_shared_expert_intermediate_size=6,
        moe_layer_freq=(0, 0, 0, 1, 1, 1, 1, 1), moe_router_score_function="sigmoid", moe_router_num_groups=4,
        moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5, moe_router_enable_expert_bias=True,
    ),
}  # fmt: skip
LOSSES = {
    "softmax": MoeConfig("aux_loss", 0.3, 0.05),
    "sigmoid": MoeConfig("seq_aux_loss", 0.2),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Experts over devices, in a layout of `pipeline_cases`."""

    kind: str
    layout: PipelineCase = PipelineCase(1)
    experts: int = 1
    over_tensor: bool = False
    dispatcher: str | None = None
    overlap: bool = False

    def config(self) -> Config:
        config = self.layout.config(decoder_changes=KINDS[self.kind])
        parallel = dataclasses.replace(
            config.parallel,
            expert_model_parallel_size=self.experts,
            expert_tensor_parallel_size=1 if self.over_tensor else None,
            overlap_moe_expert_parallel_comm=self.overlap,
        )
        moe = dataclasses.replace(LOSSES[self.kind], moe_token_dispatcher_type=self.dispatcher)
        return dataclasses.replace(config, parallel=parallel, moe=moe)


@functools.cache
def expert_problem(kind: str) -> tuple[dict, dict, float, dict]:
    """Parameters, rows, and what one device computes from all rows at once: loss and gradients."""
    config = PipelineCase(1).config(decoder_changes=KINDS[kind])
    parameters, rows = random_parameters(config), twelve_rows(config)
    # of the step before: numbers of tokens
    counts = np.random.default_rng(1).integers(1, 50, parameters["decoder"]["layers"]["moe"]["statistics_5E"].shape)
    parameters["decoder"]["layers"]["moe"]["statistics_5E"] = counts.astype(np.float32)
    moe = LOSSES[kind]
    losses = RouterLosses(moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff, moe.moe_z_loss_coeff)
    run = dataclasses.replace(on_one_device(config.model.decoder), losses=losses)
    # what routers add isn't divided by the target tokens afterwards
    per_token = np.float32(1 / np.sum(rows["segment_ids"] > 0))
    loss, gradients = loss_and_gradients(config, parameters, rows | {"targets_per_token": per_token}, run)
    # a bias is chosen by alone
    gradients["decoder"]["layers"]["moe"].pop("expert_bias_E", None)
    return parameters, rows, loss, gradients
