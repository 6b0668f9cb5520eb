"""The device that a model runs on."""

import torch

from model import InputError


def pick_device(name=None):
    """A torch.device, default CUDA if there is a GPU. Raises InputError if it is not available."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda are supported")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {name!r} is not available here ({reason}); try --device "
                         "cpu") from None
    return device
