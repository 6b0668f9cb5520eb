"""Sampling after top-k, top-p and min-p in one launch, which never waits for the host.

    argmax(x + gumbel(seed, sequence, position, token)) over the tokens that
    `kernels.filter_logits` keeps, x = logits / temperature; at temperature 0 argmax(logits)

Masks, as in project_sample, make x of the other tokens -inf before.

Bytes: M * V float32 logits, read once for the mass and the largest x of up to 1,024 groups. All
later reads are of the groups that reach a floor, a bound below which no token is kept: few, if the
distribution is peaked. top-k raises the floor by bisection. top-p needs no exact bound: if the best
token from the floor up is kept, it is the answer; otherwise all kept tokens are above it. If a
share s of the floor's mass is kept, that takes 1 - ln(s) reads on average."""

import torch

from kernels import (
    FINITE_MIN,
    NO_ENTRY,
    NO_TOKEN,
    add_noise,
    allowed,
    contiguous,
    filled,
    from_sortable,
    launch,
    load_noise_key,
    pack_entries,
    runs_triton,
    sample_filtered,
    sortable,
    tl,
    triton,
)


@triton.jit
def _load_logits(logits_ptr, masks_ptr, columns, V, temperature):
    """logits / temperature in float32; NaN is -inf, like tokens that the row's mask forbids."""
    mask = columns < V
    if masks_ptr is not None:
        mask = allowed(masks_ptr, tl.full([], 0, tl.int64), columns, V)
    x = tl.load(logits_ptr + columns, mask=mask, other=float("-inf"))
    x /= tl.where(temperature > 0, temperature, 1.0)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _column(entry, V):
    """The column of an entry, or V - 1 for NO_ENTRY, which is all that a row of NaN has."""
    return tl.minimum(entry.to(tl.int32) ^ NO_TOKEN, V - 1)


@triton.jit
def _look(row, groups, floor, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The number, the mass and the best entry of the tokens with sortable(x) >= floor; what the
    caller ignores is compiled away. groups: sorted entries of each group's largest x."""
    logits_ptr, masks_ptr, V, temperature, low, high, row_max = row
    column = tl.arange(0, COLUMNS)[None, :]
    number = tl.zeros([ROWS, COLUMNS], tl.int32)
    mass = tl.zeros([ROWS, COLUMNS], tl.float32)
    best = tl.full([ROWS, COLUMNS], NO_ENTRY, tl.int64)
    for start in range(0, tl.sum((groups >> 32 >= floor).to(tl.int32), 0), ROWS):
        group = tl.gather(groups, start + tl.arange(0, ROWS), 0).to(tl.int32) ^ NO_TOKEN
        columns = (column // 8 * groups.shape[0] + group[:, None]) * 8 + column % 8
        x = _load_logits(logits_ptr, masks_ptr, columns, V, temperature)
        scores = add_noise(x, temperature, low, high, columns.to(tl.uint32))
        above = sortable(x) >= floor
        number += above.to(tl.int32)
        mass += tl.where(above, tl.exp(x - row_max), 0.0)
        best = tl.maximum(best, tl.where(above, pack_entries(scores, columns), NO_ENTRY))
    return tl.sum(number), tl.sum(mass), tl.max(best)


@triton.jit
def _look_above(row, groups, entry, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The mass and the best entry of the tokens with a larger x than an entry's."""
    logits_ptr, masks_ptr, V, temperature, low, high, row_max = row
    x = _load_logits(logits_ptr, masks_ptr, _column(entry, V), V, temperature)
    number, mass, best = _look(row, groups, sortable(x).to(tl.int64) + 1, ROWS, COLUMNS)
    return mass, best


@triton.jit(do_not_specialize=["T"])
def _filtered_sample_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, sequence_ptr,
    position_ptr, masks_ptr, tokens_ptr, T, V,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Program m: samples row m. Group g has columns 8 g to 8 g + 7 of every 8 * GROUPS."""
    m = tl.program_id(0).to(tl.int64)
    b = m // T
    logits_ptr += m * V
    if masks_ptr is not None:
        masks_ptr += m * ((V + 31) // 32)
    temperature = tl.load(temperature_ptr + b)
    group = tl.arange(0, GROUPS)
    largest = tl.full([GROUPS], FINITE_MIN, tl.float32)
    mass = tl.zeros([GROUPS], tl.float32)
    for start in range(0, V, 8 * GROUPS):
        columns = start + group[:, None] * 8 + tl.arange(0, 8)[None, :]
        x = _load_logits(logits_ptr, masks_ptr, columns, V, temperature)  # [GROUPS, 8]
        before = largest
        largest = tl.maximum(largest, tl.max(x, 1))
        mass = mass * tl.exp(before - largest) + tl.sum(tl.exp(x - largest[:, None]), 1)
    row_max = tl.max(largest, 0)
    mass = tl.sum(mass * tl.exp(largest - row_max), 0)
    low, high = load_noise_key(seed_ptr, sequence_ptr, position_ptr, b, m)
    row = logits_ptr, masks_ptr, V, temperature, low, high, row_max
    groups = tl.sort(pack_entries(largest, group), descending=True)
    orders = groups >> 32

    floor = tl.full([], -2147483648, tl.int64)
    top_k = tl.load(top_k_ptr + b)
    if (top_k > 0) & (top_k < V):
        # At least top_k tokens reach `floor`, at most top_k reach `end`. The search begins with the
        # top_k-th largest group and ends where they meet, or once exactly top_k reach `floor`.
        end = tl.max(orders, 0) + 1
        middle = tl.max(tl.where(group >= top_k - 1, orders, floor), 0)
        while middle < end:
            number, part, _ = _look(row, groups, middle, ROWS, COLUMNS)
            if number >= top_k:
                floor = middle
                mass = part
            if number <= top_k:
                end = middle
            middle = (floor + end + 1) >> 1

    top_p = tl.load(top_p_ptr + b)
    wanted = tl.maximum(mass * top_p, 1e-37)  # positive even if all are NaN
    wanted = tl.where(top_p < 1, wanted, float("inf"))
    masses = tl.exp(from_sortable(orders.to(tl.int32)) - row_max)
    reached = tl.cumsum(masses, 0) >= wanted  # by the largest of each group alone
    floor = tl.maximum(floor, tl.max(tl.where(reached, orders, floor), 0))
    # noise spans less than 20 = -log(2e-9), so a token further below the largest cannot win
    reach = tl.log(tl.maximum(tl.load(min_p_ptr + b), 2e-9))
    least = row_max + tl.where(temperature > 0, reach, 0.0)
    floor = tl.maximum(floor, sortable(least).to(tl.int64))
    best = _look(row, groups, floor, ROWS, COLUMNS)[2]
    if top_p < 1:
        # All kept tokens reach `floor`, and `best` is the best of those that do. If the tokens
        # with a larger x than `best` have the mass that is wanted, only they are kept.
        mass, following = _look_above(row, groups, best, ROWS, COLUMNS)
        while mass >= wanted:
            best = following
            mass, following = _look_above(row, groups, best, ROWS, COLUMNS)
    tl.store(tokens_ptr + m, _column(best, V).to(tl.int64))


def filtered_sample(logits, *, temperature, top_k, top_p, min_p, seed, sequence, position,
                    masks=None):
    """The model's next token for each row of logits [M, V] -> int64 [M]: a sample of softmax(logits
    / temperature) over the tokens that `filter_logits` keeps, with the noise of `project_sample`;
    argmax at temperature 0. masks: as in `mask_logits`. sequence, position: as in `gumbel`. Others:
    numbers or tensors [B]."""
    parameters = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
                      sequence=sequence, position=position)
    if not runs_triton(logits):
        return sample_filtered(logits, **parameters, masks=masks)
    M, V = logits.shape
    B = len(sequence)
    parameters = [filled(x, logits, B) for x in parameters.values()]
    tokens = logits.new_empty(M, dtype=torch.int64)
    GROUPS = min(max(64, triton.next_power_of_2(V // 32)), 1024)
    COLUMNS = 8 * triton.next_power_of_2(triton.cdiv(V, 8 * GROUPS))
    tile = 2048 if V % 16 else 4096  # loads that are not aligned take more registers
    launch(_filtered_sample_kernel, (M,),
           logits.contiguous(), *parameters, contiguous(masks), tokens, M // B, V, GROUPS=GROUPS,
           ROWS=min(tile // COLUMNS, GROUPS), COLUMNS=COLUMNS, num_warps=16)
    return tokens
