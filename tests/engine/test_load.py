"""What `load` refuses, with which reason; and what it makes of what it takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from leyline_server.model.load import ModelRefused, digest, load
from tests.engine.harness import Rig, random_ids

CPU = torch.device("cpu")


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    """A checkpoint that a test may spoil."""
    return Path(shutil.copytree(checkpoint("v2-qlora-dense"), tmp_path / "model"))


def _refusal(path) -> ModelRefused:
    with pytest.raises(ModelRefused) as caught:
        load(str(path), torch.float32, CPU)
    return caught.value


def _change_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key, None) if value is None else config.update({key: value})
    (path / "config.json").write_text(json.dumps(config))


def _change_weights(path: Path, change) -> None:
    file = path / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "no-such-owner/no-such-model"])
def test_not_found(name):
    refusal = _refusal(name)
    assert refusal.reason == "NOT_FOUND"
    assert name in str(refusal)


def test_a_file_is_no_checkpoint(copy):
    assert _refusal(copy / "config.json").reason == "NOT_FOUND"


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", "", '"deepseek_v2"', '{"model_type": "deepseek_v2", "kv_lora_rank": "x"}']
)
def test_a_config_that_is_none(copy, text):
    (copy / "config.json").write_text(text)
    refusal = _refusal(copy)
    assert refusal.reason == "CORRUPT_CHECKPOINT"
    assert "config.json" in str(refusal)


def test_no_config(copy):
    (copy / "config.json").unlink()
    assert _refusal(copy).reason == "CORRUPT_CHECKPOINT"


@pytest.mark.parametrize("name", ["kv_lora_rank", "qk_rope_head_dim", "v_head_dim"])
def test_a_config_without_what_mla_needs(copy, name):
    _change_config(copy, **{name: 0})
    refusal = _refusal(copy)
    assert refusal.reason == "CORRUPT_CHECKPOINT"
    assert name in str(refusal)


def test_an_odd_rotary_width(copy):
    _change_config(copy, qk_rope_head_dim=15)
    assert _refusal(copy).reason == "CORRUPT_CHECKPOINT"


def test_no_weights(copy):
    (copy / "model.safetensors").unlink()
    assert _refusal(copy).reason == "CORRUPT_CHECKPOINT"


@pytest.mark.parametrize("keep", [0, 100, 5000])
def test_weights_cut_short(copy, keep):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert _refusal(copy).reason == "CORRUPT_CHECKPOINT"


def test_a_missing_weight_is_named(copy):
    _change_weights(copy, lambda weights: weights.pop("model.layers.1.self_attn.kv_b_proj.weight"))
    refusal = _refusal(copy)
    assert refusal.reason == "CORRUPT_CHECKPOINT"
    assert "model.layers.1.self_attn.kv_b_proj.weight" in str(refusal)


def test_a_weight_of_another_shape(copy):
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    _change_weights(copy, lambda weights: weights.update({name: weights[name][:-1].clone()}))
    assert _refusal(copy).reason == "CORRUPT_CHECKPOINT"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named(copy, value):
    name = "model.layers.2.mlp.up_proj.weight"
    _change_weights(copy, lambda weights: weights[name].__setitem__((3, 4), value))
    refusal = _refusal(copy)
    assert refusal.reason == "CORRUPT_CHECKPOINT"
    assert name in str(refusal)


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v4", "qwen3", "never-heard-of"])
def test_another_architecture(copy, model_type):
    _change_config(copy, model_type=model_type)
    refusal = _refusal(copy)
    assert refusal.reason == "UNSUPPORTED_ARCHITECTURE"
    assert model_type in str(refusal)
    assert "deepseek_v2, deepseek_v3" in str(refusal)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "jamba", "mamba_d_state": 16},
        {"model_type": "nemotron_h", "layers_block_type": ["mamba", "attention"]},
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        {"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1]}},
        {"model_type": "deepseek_v3", "layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_hybrid_layers(copy, changes):
    _change_config(copy, **changes)
    assert _refusal(copy).reason == "HYBRID_LAYERS"


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope"}, "rope_parameters": None},
        {"model_type": "deepseek_v2", "rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}},
        {
            "model_type": "x_vl",
            "text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        },
    ],
)
def test_m_rope(copy, changes):
    _change_config(copy, **changes)
    assert _refusal(copy).reason == "M_ROPE"


def test_dynamic_rope_is_served_without_amortize(copy):
    """The model loads and generates; moving rows is what is refused, with the reason."""
    _change_config(
        copy,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        max_position_embeddings=64,
    )
    rig = Rig(load(str(copy), torch.float32, CPU))
    assert "errs by" in rig.engine.amortize_refused
    assert rig.logits(rig.open(random_ids(30))).isfinite().all()


def test_what_is_taken(checkpoint, variant):
    model = load(checkpoint(variant), torch.bfloat16, CPU)
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")
    assert not model.model.training
    assert model.rotary.inv_freq.dtype is torch.float32
    assert Rig(model).engine.amortize_refused == ""


def test_the_digest_names_the_weights_and_the_config(copy, checkpoint):
    before = digest(copy)
    assert before == digest(Path(checkpoint("v2-qlora-dense")))
    assert len(before) == 32
    _change_weights(copy, lambda weights: weights["model.embed_tokens.weight"].add_(1))
    changed = digest(copy)
    _change_config(copy, rms_norm_eps=1e-5)
    assert len({before, changed, digest(copy)}) == 3
