"""Scaled RoPE: the frequencies that replace those of `model.rope_frequencies`."""

import math

import torch

from model import rope_frequencies


class Frequencies(tuple):
    """GPTConfig.rope_frequencies. scaling: config.json's rope_scaling that they were computed from,
    which `llama_json` writes again."""
    scaling = None


def scale(scaling, theta, size):
    """RoPE settings (None: unscaled), rope_theta and rotated dimensions -> the fields of GPTConfig
    that they change."""
    if scaling is None:
        return {}
    plain = rope_frequencies(theta, size)
    scaled = Frequencies(SCALED[scaling["rope_type"]](plain, scaling, theta).tolist())
    scaled.scaling = scaling
    return dict(rope_frequencies=scaled, rope_factor=scaling.get("attention_factor", 1.0))


def linear(plain, scaling, theta):  # position interpolation (arXiv 2306.15595)
    return plain / scaling["factor"]


def longrope(plain, scaling, theta):  # LongRoPE (arXiv 2402.13753), for short texts
    return plain / torch.tensor(scaling["short_factor"])


def llama3(plain, scaling, theta):
    """Llama 3.1: stretches long wavelengths, keeps short ones, interpolates in between."""
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    stretch = torch.tensor(1 / scaling["factor"])
    return plain * torch.lerp(stretch, torch.tensor(1.0), keep)


def yarn(plain, scaling, theta):
    """YaRN (arXiv 2309.00071, section 3): like `llama3`, but interpolates over dimensions."""
    size = 2 * len(plain)
    context = scaling["original_max_position_embeddings"]
    wave = lambda turns: context / (turns * 2 * math.pi)
    dim = lambda turns: size * math.log(wave(turns)) / (2 * math.log(theta))
    low, high = dim(scaling["beta_fast"]), dim(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    blend = ((torch.arange(len(plain)) - low) / max(high - low, 1e-3)).clamp(0, 1)
    stretch = torch.lerp(torch.tensor(1.0), torch.tensor(1 / scaling["factor"]), blend)
    return plain * stretch


SCALED = dict(linear=linear, longrope=longrope, llama3=llama3, yarn=yarn)  # by rope_type
