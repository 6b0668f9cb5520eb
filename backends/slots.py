"""Steps that run only some of the slots: those that hold sequences, and idle ones up to a size for
which a step was captured."""

import torch

from generate import Decoder, pinned


class SomeSlots(Decoder):
    """A `generate.Decoder` whose steps run the slots that `place` selects."""

    @classmethod
    def for_heads(cls, heads):
        """The class that runs these heads: this one, or another."""
        return cls

    @torch.inference_mode()
    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.slot_ids = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
        # B that a step may have, besides all slots; with graphs those that are captured
        self.batch_sizes = () if self.pool else range(1, self.batch_size)

    def place(self, running):
        B = next((n for n in self.batch_sizes if n >= len(running)), self.batch_size)
        if B == self.batch_size:
            return range(B)
        idle = next(slot for slot in range(self.batch_size) if slot not in running)
        slots = [*running, *[idle] * (B - len(running))]
        with self.inference_mode:
            self.slot_ids[:B].copy_(pinned(slots, self.device), non_blocking=True)
        return slots

    def batch(self, B):
        if B == self.batch_size:
            return super().batch(B)
        return batch_of(self.slots, self.slot_ids[:B])


def batch_of(state, slots):
    """The `generate.Batch` of some slots, int64 [B], of a `generate.Slots`."""
    columns = state.cache.lengths, state.integers, state.floats
    return state.make_batch(slots, *(x.index_select(-1, slots) for x in columns))
