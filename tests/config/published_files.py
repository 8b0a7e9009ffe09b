"""The config.json files that publishers serve, to read and to change."""

import json
from pathlib import Path

import pytest

from jaxforge.config import ConfigError
from jaxforge.config.hf_config import architecture_of

# As their publishers serve them; the keys are the names in configs/models where there is such a file.
PUBLISHED = {
    file.stem: json.loads(file.read_text()) for file in (Path(__file__).parent / "data" / "published").glob("*.json")
}
# DeepSeek-V3 is published in fp8 alone, which is refused: what follows is of a copy in bfloat16
QUANTIZATION = PUBLISHED["deepseek_v3"].pop("quantization_config")
FAMILIES = {
    "llama3_1_8b": "llama",
    "qwen2_5_0_5b": "qwen2",
    "qwen2_5_7b": "qwen2",
    "qwen3_8b": "qwen3",
    "qwen2_5_vl_7b": "qwen2_5_vl",
    "qwen3_vl_8b": "qwen3_vl",
    "qwen3_30b_a3b": "qwen3_moe",
    "qwen3_vl_30b_a3b": "qwen3_vl_moe",
    "deepseek_v3": "deepseek_v3",
}


def published(name: str) -> dict:
    """A copy to change."""
    return json.loads(json.dumps(PUBLISHED[name]))


def model_of(config_json: dict):
    return architecture_of(config_json, "config.json").model


def refusal(config_json: dict) -> str:
    with pytest.raises(ConfigError) as error:
        architecture_of(config_json, "config.json")
    return str(error.value)


def with_text(name: str, **changes) -> dict:
    """A published file with other fields of its language model."""
    config = published(name)
    config.get("text_config", config).update(changes)
    return config
