"""Makes tests/parity/fixtures/deepseek_v3_mtp: a DeepSeek-V3 of `transformers` with layers for multi-token prediction.

    python3.11 -m venv parity && parity/bin/pip install torch==2.13.0 transformers==5.24.0
    parity/bin/python scripts/make_multi_token_fixture.py

(torch's CPU build is enough.)  `transformers` has such layers for drafting tokens alone (`MtpModel`): it neither trains
nor saves them.  Here its `forward_layer` sees the tokens that a document has.  Otherwise the folder is like those of
make_parity_fixtures.py, which draws its weights and documents.  Its tensors have the names of the published folders,
and the copies of embedding and head that are in each such layer there.

expected.npz has besides, for depths 1 and 2:
  logits_ahead [depths, tokens, vocabulary] fp32, NaN where the document has no token so far ahead; loss_ahead [depths],
  each the mean over the depth's targets of all documents.  Gradients are of loss + MTP_WEIGHT times the mean of these.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from make_parity_fixtures import (
    FIXTURES,
    IGNORE,
    deepseek_v3,
    draw_weights,
    expected_values,
    make_inputs,
    make_model,
    model_arguments,
    save,
)
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

FOLDER = FIXTURES / "deepseek_v3_mtp"
SEED = 14  # with which every expert has tokens
# A dense layer and one with experts, then the layers for multi-token prediction, which have experts.
LAYERS, DEPTHS = 2, 2
MTP_WEIGHT = 0.6
SIZES = dict(
    num_hidden_layers=LAYERS + DEPTHS, hidden_size=24, n_routed_experts=6, n_group=3, num_experts_per_tok=2,
    n_shared_experts=1,
)  # fmt: skip


def make_models() -> tuple[torch.nn.Module, MtpModel]:
    """A model that has layers for multi-token prediction behind those it runs, and what runs them."""
    config = deepseek_v3(is_small=False)
    model = make_model(type(config).from_dict(config.to_dict() | SIZES))
    model.config.num_hidden_layers, model.config.num_mtp_layers = LAYERS, DEPTHS
    ahead = MtpModel(model, DEPTHS).eval()
    for layer, depth in zip(model.model.layers[LAYERS:], ahead.layers, strict=True):
        depth.mtp_block = layer
        # so that the model draws, saves and names them
        layer.enorm, layer.hnorm, layer.eh_proj = depth.enorm, depth.hnorm, depth.eh_proj
        layer.shared_head = torch.nn.ModuleDict({"norm": depth.post_norm})
    return model, ahead


def logits_ahead(model: torch.nn.Module, ahead: MtpModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Of each depth j, for one document [1, S], logits [S - j, vocabulary]: the last j tokens see none so far ahead."""
    states = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    found = []
    for depth in range(1, ahead.num_mtp_layers + 1):
        states = states[:, :-1]
        positions = torch.arange(states.shape[1])[None]
        states = ahead.forward_layer(depth - 1, states, positions, None, input_ids=tokens[:, depth:])
        found.append(model.lm_head(states)[0])
    return found


def expected_ahead(model: torch.nn.Module, ahead: MtpModel, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What expected.npz has of each depth; the losses' gradients are left in the parameters."""
    documents = [arguments for arguments, _ in model_arguments(inputs, model.config.model_type)]
    targets = [[one["labels"][0, depth + 1 :] for one in documents] for depth in range(1, DEPTHS + 1)]
    num_targets = [sum(int((part != IGNORE).sum()) for part in parts) for parts in targets]
    losses = np.zeros(DEPTHS)
    for number, arguments in enumerate(documents):
        total = torch.zeros(())
        for at, logits in enumerate(logits_ahead(model, ahead, arguments["input_ids"])):
            # the last of them has its token ahead, and none after it
            sum_of_losses = torch.nn.functional.cross_entropy(
                logits[:-1], targets[at][number], ignore_index=IGNORE, reduction="sum"
            )
            losses[at] += sum_of_losses.item() / num_targets[at]
            total = total + sum_of_losses * (MTP_WEIGHT / DEPTHS / num_targets[at])
        total.backward()
    return dict(logits_ahead=stored_logits(model, ahead, inputs), loss_ahead=losses)


@torch.no_grad()
def stored_logits(model: torch.nn.Module, ahead: MtpModel, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Those of all documents, [depths, tokens, vocabulary]."""
    parts = []
    for arguments, _ in model_arguments(inputs, model.config.model_type):
        found = logits_ahead(model, ahead, arguments["input_ids"])
        length = arguments["input_ids"].shape[1]
        pad = [((0, length - len(one)), (0, 0)) for one in found]
        parts.append([np.pad(one.numpy(), by, constant_values=np.nan) for one, by in zip(found, pad, strict=True)])
    return np.concatenate(parts, axis=1)


def add_copies(folder: Path) -> None:
    """Embedding and head once more for each depth, as in the published folders."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for number in range(LAYERS, LAYERS + DEPTHS):
        layer = f"model.layers.{number}."
        tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model, ahead = make_models()
    draw_weights(model, SEED)
    inputs = make_inputs(model.config, SEED)
    of_depths = expected_ahead(model, ahead, inputs)
    expected = expected_values(model, inputs) | of_depths
    shutil.rmtree(FOLDER, ignore_errors=True)
    save(model, FOLDER)
    add_copies(FOLDER)
    np.savez_compressed(FOLDER / "inputs.npz", **inputs)
    np.savez_compressed(FOLDER / "expected.npz", **expected)
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    spread = np.nanstd(of_depths["logits_ahead"], axis=(1, 2))
    losses = [expected["loss"], *of_depths["loss_ahead"]]
    print(f"losses {np.round(losses, 4)}, logits of {np.std(expected['logits']):.2f} and {spread}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
